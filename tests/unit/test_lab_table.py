"""tests/lab.toml names tests that exist."""

from __future__ import annotations

import ast
import tomllib

from support import ROOT

TESTS = ROOT / "tests"
ROWS = tomllib.loads((TESTS / "lab.toml").read_text())


def test_every_row_names_a_test() -> None:
    wrong = []
    for file, functions in ROWS.items():
        tree = ast.parse((TESTS / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        wrong += [f"{file}::{function}" for function in functions.keys() - defined]
    assert wrong == []
