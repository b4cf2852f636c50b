"""Words: a public name means one thing in the package, and its texts are in plain English.

STYLE.md, "English", has the rules of the texts.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import typer
from support.sources import FILES, SOURCE, tree_of

from blobstore.cli.main import app

# Names that may be defined in several modules, with the reason. An unused entry fails.
SHARED_NAMES = {
    "import_model": "distributed has the same on a cluster",
    "verdict": "one for each runtime, in on_mlx_lm and on_ollama",
}
SHARED_FILES = {
    "blobs": "testing/ is cut as the ports of a store are",
    "session": "each home has one",
    "store": "each home has one",
    "models": "cli/ has the commands of models; testing/, as blobs",
}

# What plain English says otherwise: a pattern, and what to write instead.
WRONG = {
    r"\b(is|are|was|were) none\b": "missing, empty, unknown, None",
    r"(?<!there )\b(is|are|was|were) no\b(?! (longer|more|less))": "is not a …",
    r"\b([Nn]o|[Ss]ome|[Aa]ny|[Ee]very)body\b": "the actor: the caller, another process, …",
    r"(^|[.:;(] ?)[Ww]ho\b": "the actor: the caller, another process, …",
    r"\b[Ll]ook(s|ed|ing)? at\b": "check, read, stat, list",
    r"\bthat (it|they) may not\b": "invalid …",
    r"\b(has|have|had) in (it|them)\b": "contains",
}


def shown(places: Iterable[str]) -> list[str]:
    return sorted(set(places))


def commands() -> set[tuple[str, str]]:
    """Return the functions of the command line's commands, which are named for their words."""
    found = set()
    groups = [typer.main.get_group(app)]
    for group in groups:
        for command in group.commands.values():
            if isinstance(command, typer.core.TyperGroup):
                groups.append(command)
            if command.callback is not None:
                found.add((command.callback.__module__, command.callback.__name__))
    return found


def test_a_public_name_is_defined_once() -> None:
    places = defaultdict(list)
    are_commands = commands()
    for path in FILES:
        tree = tree_of(path)
        module = ".".join(("blobstore", *path.relative_to(SOURCE).with_suffix("").parts))
        for node in tree.body:
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef)
                and not node.name.startswith("_")
                and (module, node.name) not in are_commands
            ):
                places[node.name].append(module)
    several = {name: shown(found) for name, found in places.items() if len(set(found)) > 1}
    assert {name: several[name] for name in sorted(several.keys() - SHARED_NAMES.keys())} == {}
    assert SHARED_NAMES.keys() <= several.keys()


def test_a_file_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in FILES:
        if path.stem not in {"__init__", "__main__"}:
            places[path.stem].append(str(path.relative_to(SOURCE)))
    several = {name: shown(found) for name, found in places.items() if len(found) > 1}
    assert {name: several[name] for name in sorted(several.keys() - SHARED_FILES.keys())} == {}
    assert SHARED_FILES.keys() <= several.keys()


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings, the messages of errors and the hints of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from said(node.value)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name.endswith(("Error", "Warning")):
                for argument in node.args:
                    yield from said(argument)
            for keyword in node.keywords:
                if keyword.arg == "hint":
                    yield from said(keyword.value)


def said(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings in an expression, an f-string as one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield node.lineno, "".join(map(str, parts))
    else:
        for child in ast.iter_child_nodes(node):
            yield from said(child)


def test_messages_and_docstrings_are_in_plain_english() -> None:
    wrong = {
        f"{path.relative_to(SOURCE)}:{line}: {match[0].strip()!r}, better {better!r}"
        for path in FILES
        for line, text in texts(tree_of(path))
        for pattern, better in WRONG.items()
        for match in re.finditer(pattern, " ".join(text.split()))
    }
    assert sorted(wrong) == []
