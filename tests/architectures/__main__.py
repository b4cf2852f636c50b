"""Writes docs/reference/architectures.md: ``python tests/architectures``.

With ``--converted`` it writes docs/reference/architectures-converted.md.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from architectures.converted import ROWS
from architectures.rows import architectures, made_apart
from architectures.table import converted_table, good, table

PAGES = Path(__file__).parents[2] / "docs" / "reference"


def main() -> int:
    """Make rows, and write the page of all rows; return 1 if one is neither right nor refused."""
    parser = argparse.ArgumentParser(prog="python tests/architectures", description=__doc__)
    parser.add_argument("--only", default="*", metavar="GLOB", help="these; no page is written")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time (2)")
    parser.add_argument("--converted", action="store_true", help="architectures-converted.md")
    options = parser.parse_args()
    names = ROWS if options.converted else tuple(architectures())
    make = partial(made_apart, converted=options.converted)
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(make, (name for name in names if fnmatchcase(name, options.only))))
    for row in rows:
        words = [f"{quant}: {outcome['verdict']}" for quant, outcome in row["types"].items()]
        print(f"{row['architecture']:28} {' '.join(words)}; mlx-lm: {row['mlx_lm']}"[:200])  # noqa: T201
    if options.only == "*":
        page = "architectures-converted.md" if options.converted else "architectures.md"
        written = converted_table if options.converted else table
        (PAGES / page).write_text(written(rows, f"{datetime.now(UTC):%Y-%m-%d}"))
    return 0 if all(map(good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
