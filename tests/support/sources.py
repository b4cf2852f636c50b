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
    return ast.parse(path.read_bytes())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's tree."""
    return tuple(ast.walk(tree_of(path)))


def last_name(function: ast.expr) -> str:
    """Return the name that a call ends in; it is empty for what is not a name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
