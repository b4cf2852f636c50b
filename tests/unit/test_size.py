"""No room is larger than its limit in ``tests/size.toml``.

``python tests/unit/test_size.py`` prints the sizes beside limits and goals; ``--write`` lowers the
limits to today's sizes.
"""

import ast
import re
import sys
import token
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "blobstore"
TABLE = ROOT / "tests" / "size.toml"
QUOTED = "|".join(rf"{quote}(?:\\.|[^\\])*?{quote}" for quote in ("'''", '"""', "'", '"'))
OPERATORS = map(re.escape, sorted(token.EXACT_TOKEN_TYPES, key=len, reverse=True))
TOKEN = re.compile(
    rf"#[^\n]*|([a-zA-Z]{{,2}}(?:{QUOTED})|\.?\d(?:[eE][-+]|[\w.])*|\w+|{'|'.join(OPERATORS)})",
    re.DOTALL,
)
"""A comment, or in its group a string, a number, a name, or an operator: as `tokenize`, faster."""

Rows = dict[str, dict[str, Any]]


@cache
def table() -> dict[str, Rows]:
    return tomllib.loads(TABLE.read_text())


def sizes() -> dict[str, dict[str, int]]:
    rooms = Counter(dict.fromkeys(table()["rooms"], 0))
    tokens = 0
    files = sorted(SOURCE.rglob("*.py"))
    for path in files:
        text = path.read_text()
        rooms[room_of(path)] += statements(ast.parse(text))
        tokens += sum(map(bool, TOKEN.findall(text)))
    package = {
        "statements": rooms.total(),
        "tokens": tokens,
        "lines": lines(SOURCE, ".py"),
        "files": len(files),
        "native_lines": lines(SOURCE, ".cpp", ".h"),
        "page_lines": lines(SOURCE, ".js", ".css", ".html"),
        "test_lines": lines(ROOT / "tests", ".py", ".cpp", ".js"),
        "bench_lines": lines(ROOT / "tests" / "bench", ".py"),
    }
    return {"package": package, "rooms": dict(rooms)}


def statements(node: ast.AST) -> int:
    parts = (getattr(node, key, ()) for key in ("body", "handlers", "orelse", "finalbody", "cases"))
    inner = sum(statements(part) for group in parts for part in group)
    return isinstance(node, ast.stmt) + inner


@cache
def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    places = {Path(place): room for room, row in table()["rooms"].items() for place in row["paths"]}
    return next(places[place] for place in (relative, *relative.parents) if place in places)


def lines(folder: Path, *suffixes: str) -> int:
    """Return the lines of files, without those of others: Vega and its interpreter are bundled."""
    found = (path for path in folder.rglob("*") if path.suffix in suffixes)
    files = (path for path in found if path.parent.name != "vendor")
    return sum(len(path.read_bytes().splitlines()) for path in files)


def rows() -> Iterator[tuple[str, str, int, int, int]]:
    limits = table()
    for kind, named in sizes().items():
        for name, size in named.items():
            yield kind, name, size, limits[kind][name]["limit"], limits[kind][name]["goal"]


def test_nothing_is_larger_than_its_limit() -> None:
    assert [row for row in rows() if row[2] > row[3]] == []  # kind, name, size, limit, goal


def test_every_folder_is_in_a_room() -> None:
    inside = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    named = {Path(p).parts[0] for r in table()["rooms"].values() for p in r["paths"] if p != "."}
    assert inside - named == set()


def main() -> None:
    """Print the table, and lower its limits with ``--write``."""
    text = TABLE.read_text()
    for kind, name, size, limit, goal in rows():
        print(f"{kind:8}{name:14}{size:9,}{limit:9,}{goal:9,}{'  above' if size > limit else ''}")  # noqa: T201
        head = rf"(?m)^({name} = {{limit = )\d+"  # no name is in both tables
        text = re.sub(head, rf"\g<1>{min(size, limit)}", text)
    if "--write" in sys.argv[1:]:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
