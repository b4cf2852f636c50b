"""Mutants: seeded mistakes by symbol, and the tests that must see each (``mutants.toml``).

The symbol is the qualified name of a function, a class or a module's variable, wherever it stands
in the package: moving a file changes no mutant. Of several with one name it is the one in which the
change is possible. ``module:name`` where that is not enough; ``module`` is the end of the module's
dotted name.

The change ``return TEXT`` replaces the body of a function. ``PATTERN => TEXT`` replaces the
outermost expressions in it that match the pattern:

- ``...`` in the pattern matches any expression, or all arguments of a call; each ``...`` in the
  text is what the one of the same place matched;
- after ``c++`` the symbol is the name of a C++ function or class, and the pattern is a token, or
  several, whatever the white space between them.
"""

import ast
import copy
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from operator import add
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = Path("src/blobstore")
_CPP, _RETURN = "c++ ", "return "


class FaultError(Exception):
    """A mutant that can't be made, and why."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A file, relative to the checkout, and its text with the mistake."""

    file: Path
    text: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake, which one of ``tests`` must see."""

    name: str
    symbol: str
    change: str
    tests: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        """True when the mistake is in C++, and is only seen when that is built."""
        return self.symbol.startswith(_CPP)

    def edit(self) -> Edit:
        """Return the mistake.

        Raises:
            FaultError: The symbol, the expression or a test is missing, or nothing would change.
        """
        edit = self._native_edit() if self.is_native else self._edit()
        if edit.text == (ROOT / edit.file).read_text():
            raise FaultError("it changes nothing")
        self._check_tests()
        return edit

    def _replacement(self) -> tuple[str, str]:
        old, arrow, new = self.change.partition(" => ")
        if not arrow:
            raise FaultError(f"{self.change!r} has no =>")
        return old, new

    def _edit(self) -> Edit:
        places = _found(self.symbol)
        edits = [edit for file, node in places if (edit := self._edit_of(file, node)) is not None]
        if len(edits) != 1:
            files = ", ".join(str(file) for file, _ in places) or "no file"
            raise FaultError(f"{len(edits)} of {self.symbol} can be changed so, in {files}")
        return edits[0]

    def _edit_of(self, file: Path, node: ast.stmt) -> Edit | None:
        changed = copy.deepcopy(node)
        if not self.change.startswith(_RETURN):
            changed = _Replacing(*map(_expression, self._replacement())).visit(changed)
        elif isinstance(changed, ast.FunctionDef):
            changed.body = ast.parse(f"def f():\n {self.change}").body[0].body  # type: ignore[attr-defined]
        if ast.dump(changed) == ast.dump(node):
            return None
        lines = (ROOT / file).read_text().splitlines()
        begin = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
        text = textwrap.indent(ast.unparse(changed), " " * node.col_offset)
        return Edit(file, "\n".join([*lines[: begin - 1], text, *lines[node.end_lineno :], ""]))

    def _native_edit(self) -> Edit:
        old, new = self._replacement()
        token = re.compile(r"\s*".join(re.escape(word) for word in old.split()))
        for file, text in _native_texts():
            for begin, end in _bodies(text, self.symbol.removeprefix(_CPP)):
                body, count = token.subn(lambda _: new, text[begin:end])
                if count:
                    return Edit(file, text[:begin] + body + text[end:])
        raise FaultError(f"no {self.symbol} has {old}")

    def _check_tests(self) -> None:
        if not self.tests:
            raise FaultError("no test is named that must see it")
        for test in self.tests:
            file, *names = test.split("::")
            if not (ROOT / file).is_file():
                raise FaultError(f"{file} is missing")
            text = (ROOT / file).read_text()
            if "StoreTests" in text:  # whose tests every home inherits
                text += "".join(one.read_text() for one in (ROOT / _PACKAGE).rglob("testing/*.py"))
            for name in (name.partition("[")[0] for name in names):
                if f"def {name}(" not in text and f"class {name}" not in text:
                    raise FaultError(f"{file} has no {name}")


def mutants(*globs: str) -> list[Mutant]:
    """Return the mutants whose name or symbol matches one of ``globs``; all without one."""
    sections = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())
    every = [
        Mutant(name, symbol, change, tuple(f"tests/{test}" for test in tests))
        for rows in sections.values()
        for name, (symbol, change, *tests) in rows.items()
    ]
    return [
        mutant
        for mutant in every
        if not globs
        or any(fnmatchcase(text, glob) for glob in globs for text in (mutant.name, mutant.symbol))
    ]


@cache
def _texts() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / _PACKAGE).rglob("*.py"))}


@cache
def _symbols(path: Path) -> dict[str, ast.stmt]:
    """Return what each qualified name of a file is; of several the last, behind overloads."""
    return dict(_named(ast.parse(_texts()[path]), ""))


def _named(parent: ast.AST, before: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield before + node.name, node
            yield from _named(node, f"{before}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not before:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((part.id, node) for part in targets if isinstance(part, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _named(node, before)


@cache
def _defined(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"(?m)(?:def |class |^)(\w+)", _texts()[path]))


def _found(symbol: str) -> list[tuple[Path, ast.stmt]]:
    """Return where a symbol is defined; only the files that may define it are parsed."""
    module, _, name = symbol.rpartition(":")
    return [
        (file, node)
        for path in _texts()
        if not module or f".{'.'.join(path.with_suffix('').parts)}".endswith(f".{module}")
        if _defined(path).issuperset(name.split("."))
        if (node := _symbols(path).get(name)) is not None
        for file in [path.relative_to(ROOT)]
    ]


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _is_any(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


class _Replacing(ast.NodeTransformer):
    """Replaces the outermost expressions that match a pattern."""

    def __init__(self, pattern: ast.expr, new: ast.expr) -> None:
        self._pattern, self._new = pattern, new

    def visit(self, node: ast.AST) -> Any:
        captures: list[str] = []
        is_read = isinstance(getattr(node, "ctx", None), ast.Load | None)
        if isinstance(node, ast.expr) and is_read and _equal(self._pattern, node, captures):
            return _expression(_filled(self._new, captures))
        return self.generic_visit(node)


def _equal(pattern: object, node: object, captures: list[str]) -> bool:
    if _is_any(pattern) and isinstance(node, ast.expr):
        captures.append(ast.unparse(node))
        return True
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        is_open = len(pattern.args) == 1 and _is_any(pattern.args[0]) and not pattern.keywords
        if is_open and _equal(pattern.func, node.func, captures):
            captures.append(ast.unparse(node).removeprefix(ast.unparse(node.func))[1:-1])
            return True
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(
            _equal(one, other, captures) for one, other in zip(pattern, node, strict=True)
        )
    if isinstance(pattern, ast.AST) and isinstance(node, ast.AST):
        return type(pattern) is type(node) and all(
            _equal(value, getattr(node, field), captures)
            for field, value in ast.iter_fields(pattern)
            if field not in {"ctx", "kind"}
        )
    return type(pattern) is type(node) and pattern == node


def _filled(new: ast.expr, captures: list[str]) -> str:
    """Return the text with what each ``...`` of its pattern was."""
    text = ast.unparse(new)
    if text.count("...") > len(captures):
        raise FaultError("its text has more ... than its pattern")
    first, *parts = text.split("...")
    return first + "".join(map(add, captures, parts))


@cache
def _native_texts() -> list[tuple[Path, str]]:
    return [
        (path.relative_to(ROOT), path.read_text())
        for path in sorted((ROOT / _PACKAGE).rglob("*"))
        if path.suffix in {".cpp", ".h"}
    ]


def _bodies(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield where the bodies of C++ functions, classes and structures of a name are.

    What stands between the name and its brace has neither a semicolon nor another brace.
    """
    for match in re.finditer(rf"\b{re.escape(name)}\b[^;{{}}]*{{", text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield match.start(), end
