"""Writes docs/reference/architectures.md: ``python tests/architectures``.

With ``--converted`` it writes docs/reference/architectures-converted.md.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from architectures.converted import ROWS
from architectures.row import Apart, make_converted_row, make_row
from architectures.rows import Architecture, architectures
from architectures.table import converted_table, counted, good, table

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
_CONVERTED_PAGE = _PAGE.with_stem("architectures-converted")


def main() -> int:
    """Make rows, and write the page of all rows.

    Return 1 if a row is neither right nor refused.
    """
    options = _options()
    wanted = [row for row in architectures().values() if _is_wanted(row, options)]
    if not wanted:
        sys.exit(f"no architecture is called {' or '.join(options.only)}")
    make = Apart(make_converted_row if options.converted else make_row)
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda row: _told(row, make), wanted))
    if not options.only:
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        if options.converted:
            _CONVERTED_PAGE.write_text(converted_table(rows, date))
        else:
            _PAGE.write_text(table(rows, date))
    bad = [row["architecture"] for row in rows if not good(row)]
    print(  # noqa: T201
        f"{len(rows)} rows, {sum(counted(row) for row in rows)} counted, {len(bad)} bad: "
        f"{' '.join(bad)}"
    )
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/architectures", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="GLOB", help="only these; no page is written"
    )
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time (2)")
    parser.add_argument(
        "--converted",
        action="store_true",
        help="compare what mlx-lm converted: architectures-converted.md",
    )
    return parser.parse_args()


def _is_wanted(row: Architecture, options: argparse.Namespace) -> bool:
    if options.only:
        return any(fnmatchcase(row.name, glob) for glob in options.only)
    return not options.converted or row.name in ROWS


def _told(row: Architecture, make: Apart) -> dict[str, Any]:
    result = make(row)
    words = [f"{quant}: {outcome['verdict']}" for quant, outcome in result["types"].items()]
    print(  # noqa: T201
        f"{row.name:28} {' '.join(words) if counted(result) else 'mlx-lm: ' + result['mlx_lm']}"[
            :200
        ],
        flush=True,
    )
    return result


if __name__ == "__main__":
    sys.exit(main())
