"""The package's own source files, for tests of names, words and layers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from support import ROOT

SOURCE = ROOT / "src" / "blobstore"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once."""
    return ast.parse(path.read_text())
