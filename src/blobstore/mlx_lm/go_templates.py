"""Ollama's templates: the part of Go's text/template that prompts are written in. Pure.

Understood are fields and variables, ``if``, ``else if``, ``with``, ``range``, ``break``,
``continue``, assignments, comments, trimmed spaces, and the functions ``and or not eq ne lt le gt
ge len index slice print json``. Everything else (``define``, ``printf``, methods, tools' functions)
is an error that names it, never a wrong prompt.

A template without ``.Messages`` is applied to one exchange after the other, and ends before the
last answer. Source: ollama/ollama@0097ef5f template/template.go `Execute`, `collate`, `Parse`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blobstore.errors import UnsupportedSourceError
from blobstore.mlx_lm.go_syntax import (
    Assign,
    Call,
    Condition,
    Field,
    Jump,
    Loop,
    Node,
    Printed,
    Value,
    Variable,
    parse_template,
    template_error,
)

_MAX_STEPS = 1_000_000
_MAX_LENGTH = 16 * 2**20


class _Jumped(Exception):  # noqa: N818  # not an error: break and continue of a range
    def __init__(self, word: str) -> None:
        self.word = word


def render_ollama(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt for the next answer to ``messages`` (role and content).

    Raises: UnsupportedSourceError for a template that is invalid, uses more of Go's language than
    the module's docstring lists, or is too large.
    """
    parsed = parse_template(template)
    merged = _merged(messages)
    if "messages" in parsed.names:
        system = "\n\n".join(one["content"] for one in messages if one["role"] == "system")
        listed = [_message(role, content) for role, content in merged]
        return _run(parsed.nodes, {"System": system, "Messages": listed, "Response": ""})
    nodes = parsed.nodes
    if "response" not in parsed.names:
        nodes = (*nodes, Printed(Field(None, ("Response",))))
    *before, last = _exchanges(merged)
    ended, _ = _before_response(nodes)
    return "".join([*(_run(nodes, one) for one in before), _run(ended, last)])


def _message(role: str, content: str) -> dict[str, Any]:
    return {"Role": role, "Content": content, "Thinking": "", "ToolCalls": [], "Images": []}


def _merged(messages: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return roles and texts, consecutive ones of a role as one."""
    merged: list[tuple[str, str]] = []
    for one in messages:
        if merged and merged[-1][0] == one["role"]:
            merged[-1] = (one["role"], f"{merged[-1][1]}\n\n{one['content']}")
        else:
            merged.append((one["role"], one["content"]))
    return merged


def _exchanges(messages: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the values of each use of a template that knows one exchange."""
    order = {"system": ("System", ("Prompt", "Response")), "user": ("Prompt", ("Response",))}
    empty = {"System": "", "Prompt": "", "Response": ""}
    exchanges = [dict(empty)]
    for role, content in messages:
        name, later = order.get(role, ("Response", ()))
        if any(exchanges[-1][other] for other in later):
            exchanges.append(dict(empty))
        exchanges[-1][name] = content
    return exchanges


def _before_response(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], bool]:
    """Return the nodes up to the first output of ``.Response``, and whether there is one."""
    kept: list[Node] = []
    for node in nodes:
        if isinstance(node, Printed) and isinstance(node.value, Field):
            kept.append(node)
            if node.value.path[-1:] == ("Response",):
                return tuple(kept), True
        elif isinstance(node, Condition | Loop):
            body, is_cut = _before_response(node.body)
            other, is_cut = ((), True) if is_cut else _before_response(node.other)
            kept.append(node.with_parts(body, other))
            if is_cut:
                return tuple(kept), True
        else:
            kept.append(node)
    return tuple(kept), False


@dataclass(slots=True)
class _Run:
    """The output of a template, and how much of the limits is used."""

    root: Mapping[str, Any]
    parts: list[str]
    steps: int = 0
    length: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > _MAX_STEPS or self.length > _MAX_LENGTH:
            raise template_error("it takes too long, or makes too long a prompt")

    def write(self, text: str) -> None:
        self.made(text)
        self.parts.append(text)

    def made(self, value: Any) -> None:
        """Count a text: forty times ``{{ $x = print $x $x }}`` would take all memory."""
        if isinstance(value, str):
            self.length += len(value)


def _run(nodes: Sequence[Node], root: Mapping[str, Any]) -> str:
    run = _Run(root, [])
    try:
        _nodes(run, nodes, root, [{"$": root}])
    except _Jumped as jumped:
        raise template_error(f"{jumped.word} outside a range") from None
    run.step()
    return "".join(run.parts)


Scopes = list[dict[str, Any]]


def _nodes(run: _Run, nodes: Sequence[Node], dot: Any, scopes: Scopes) -> None:
    for node in nodes:
        run.step()
        if isinstance(node, str):
            run.write(node)
        elif isinstance(node, Printed):
            run.write(_printed(_evaluate(run, node.value, dot, scopes)))
        elif isinstance(node, Assign):
            _assign(node, _evaluate(run, node.value, dot, scopes), scopes)
        elif isinstance(node, Jump):
            raise _Jumped(node.word)
        elif isinstance(node, Loop):
            _loop(run, node, dot, scopes)
        else:
            _branch(run, node, dot, scopes)


def _branch(run: _Run, node: Condition, dot: Any, scopes: Scopes) -> None:
    value = _evaluate(run, node.value, dot, scopes)
    scope = {node.variable: value} if node.variable else {}
    inner = value if node.word == "with" and value else dot
    _nodes(run, node.body if value else node.other, inner, [*scopes, scope])


def _loop(run: _Run, node: Loop, dot: Any, scopes: Scopes) -> None:
    value = _evaluate(run, node.value, dot, scopes)
    items = list(_items(value))
    if not items:
        _nodes(run, node.other, dot, scopes)
    for index, item in items:
        values = [index, item] if len(node.variables) > 1 else [item]
        scope = dict(zip(node.variables, values, strict=False))
        try:
            _nodes(run, node.body, item, [*scopes, scope])
        except _Jumped as jumped:
            if jumped.word == "break":
                break


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from sorted(value.items())
    elif isinstance(value, list):
        yield from enumerate(value)
    elif value:
        raise template_error("range over a text or a number")


def _assign(node: Assign, value: Any, scopes: Scopes) -> None:
    if node.is_new:
        scopes[-1][node.variable] = value
        return
    for scope in reversed(scopes):
        if node.variable in scope:
            scope[node.variable] = value
            return
    raise template_error(f"the variable {node.variable} is not defined")


def _evaluate(run: _Run, value: Value, dot: Any, scopes: Scopes) -> Any:
    run.step()
    if isinstance(value, Field):
        of = dot if value.of is None else _evaluate(run, value.of, dot, scopes)
        for name in value.path:
            of = _field(of, name)
        return of
    if isinstance(value, Variable):
        for scope in reversed(scopes):
            if value.name in scope:
                return scope[value.name]
        raise template_error(f"the variable {value.name} is not defined")
    if isinstance(value, Call):
        return _call(run, value, dot, scopes)
    return value.value


def _field(value: Any, name: str) -> Any:
    """Return a value of a map; a missing one is empty, as those that only tools or images have."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise template_error(f"it asks for .{name} of a value without fields")
    return value.get(name)


def _call(run: _Run, call: Call, dot: Any, scopes: Scopes) -> Any:
    if call.name in ("and", "or"):
        result: Any = None
        for argument in call.arguments:
            result = _evaluate(run, argument, dot, scopes)
            if bool(result) is (call.name == "or"):
                break
        return result
    arguments = [_evaluate(run, argument, dot, scopes) for argument in call.arguments]
    try:
        result = _FUNCTIONS[call.name](*arguments)
    except UnsupportedSourceError:
        raise
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        raise template_error(f"{call.name} fails: {error}") from None
    run.made(result)
    return result


def _index(value: Any, *places: Any) -> Any:
    for place in places:
        if isinstance(value, Mapping):
            value = value.get(place)
        elif type(place) is int and place >= 0:
            value = value[place]
        else:
            raise TypeError("an index is not a whole number")
    return value


def _slice(value: Any, begin: int = 0, end: int | None = None) -> Any:
    stop = len(value) if end is None else end
    if not 0 <= begin <= stop <= len(value):
        raise IndexError("out of range")
    return value[begin:stop]


def _printed(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise template_error("it prints a list")


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "not": lambda value: not value,
    "eq": lambda value, *others: any(value == other for other in others),
    "ne": lambda value, other: value != other,
    "lt": lambda value, other: value < other,
    "le": lambda value, other: value <= other,
    "gt": lambda value, other: value > other,
    "ge": lambda value, other: value >= other,
    "len": len,
    "index": _index,
    "slice": _slice,
    "print": lambda *values: "".join(map(_printed, values)),
    "json": lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
}
