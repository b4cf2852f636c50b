"""Size of the package: ``python tests/bench/size.py [FOLDER]``.

Statements are `ast.stmt` nodes of the Python files, docstrings and imports among them; of C++,
semicolons.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parents[2] / "src" / "blobstore"


def main() -> None:
    """Print the figures."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    rooms: Counter[str] = Counter()
    lengths: list[int] = []
    files = sorted(root.rglob("*.py"))
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            rooms[file.relative_to(root).parts[0].removesuffix(".py")] += isinstance(node, ast.stmt)
            if isinstance(node, ast.FunctionDef):
                lengths.append((node.end_lineno or 0) - node.lineno + 1)
    native = sum(
        path.read_text().count(";") for path in root.rglob("*") if path.suffix in {".cpp", ".h"}
    )
    modules = sum(1 for path in root.glob("*.py"))
    for room, count in rooms.most_common():
        print(f"{count:7,}  {room}")
    print(
        f"{rooms.total():7,}  statements in {len(files)} Python files, {modules} of them at "
        f"the root; {native:,} in C++"
    )
    print(
        f"{statistics.median(lengths):7g}  lines in the median function, {max(lengths)} in "
        "the longest"
    )


if __name__ == "__main__":
    main()
