"""Words: the package's texts are in plain English (STYLE.md, "English")."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from support.sources import FILES, SOURCE, last_name, nodes_of

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


def texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings, messages of errors, and hints."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from said(node.value)
        elif isinstance(node, ast.Call):
            if last_name(node.func).endswith(("Error", "Warning")):
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
        for line, text in texts(nodes_of(path))
        for pattern, better in WRONG.items()
        for match in re.finditer(pattern, " ".join(text.split()))
    }
    assert sorted(wrong) == []
