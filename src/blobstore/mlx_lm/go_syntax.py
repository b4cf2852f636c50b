"""The syntax of Ollama's templates: a text of Go's text/template as a tree. Pure.

Source: https://pkg.go.dev/text/template (Actions, Arguments, Pipelines, Variables).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from blobstore.errors import UnsupportedSourceError, quoted

FUNCTIONS: Final = frozenset(
    (
        "and",
        "or",
        "not",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "len",
        "index",
        "slice",
        "print",
        "json",
    )
)
_MAX_DEPTH = 100
_SPACE = " \t\r\n"
_TOKEN = re.compile(
    r"""[ \t\r\n]+
    |(?P<end>(?:(?<=[ \t\r\n])-)?\}\})
    |(?P<comment>/\*(?s:.)*?\*/)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|`[^`]*`)
    |(?P<number>-?[0-9]+)(?![.\w])
    |(?P<variable>\$\w*)
    |(?P<field>\.\w*)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<sign>:=|[=|(),])""",
    re.VERBOSE,
)
_OPEN = re.compile(r"\{\{(?:-(?=[ \t\r\n]))?")


@dataclass(frozen=True, slots=True)
class Literal:
    """A text, a number, true, false or nil."""

    value: Any


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable; ``$`` is what the template was given."""

    name: str


@dataclass(frozen=True, slots=True)
class Field:
    """Fields of a value, one of the other; ``of`` is None for the dot. ``.`` has no path."""

    of: Value | None
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments."""

    name: str
    arguments: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Printed:
    """An action that prints a value."""

    value: Value


@dataclass(frozen=True, slots=True)
class Assign:
    """``$name := value``, or without ``is_new`` ``$name = value``."""

    variable: str
    value: Value
    is_new: bool


@dataclass(frozen=True, slots=True)
class Jump:
    """``break`` or ``continue``."""

    word: str


@dataclass(frozen=True, slots=True)
class Condition:
    """``if`` or ``with``, with its ``else``."""

    word: str
    variable: str | None
    value: Value
    body: tuple[Node, ...]
    other: tuple[Node, ...] = ()

    def with_parts(self, body: tuple[Node, ...], other: tuple[Node, ...]) -> Self:
        """Return it with other parts."""
        return replace(self, body=body, other=other)


@dataclass(frozen=True, slots=True)
class Loop:
    """``range``, with at most two variables, and its ``else``."""

    variables: tuple[str, ...]
    value: Value
    body: tuple[Node, ...]
    other: tuple[Node, ...] = ()

    def with_parts(self, body: tuple[Node, ...], other: tuple[Node, ...]) -> Self:
        """Return it with other parts."""
        return replace(self, body=body, other=other)


Value = Literal | Variable | Field | Call
Node = str | Printed | Assign | Jump | Condition | Loop


@dataclass(frozen=True, slots=True)
class Parsed:
    """A template's nodes, and the lower-case names of all fields that it uses."""

    nodes: tuple[Node, ...]
    names: frozenset[str]


def template_error(reason: str) -> UnsupportedSourceError:
    """Return the error for a template that can't be applied."""
    return UnsupportedSourceError(
        f"Ollama's template can't be applied: {reason}",
        hint="Use --raw to continue the text without a template.",
    )


def parse_template(text: str) -> Parsed:
    """Return a template as a tree. Raises: UnsupportedSourceError."""
    parser = _Parser(_parts(text))
    nodes, end = parser.nodes(())
    assert end is None  # noqa: S101  # without words to end at, nodes go on to the end
    return Parsed(nodes, frozenset(parser.names))


_Token = tuple[str, str]
_Action = list[_Token]


def _parts(text: str) -> Iterator[str | _Action]:
    """Yield the texts between actions, trimmed as the actions say, and the tokens of actions."""
    at, trims = 0, False
    while opened := _OPEN.search(text, at):
        before = text[at : opened.start()]
        before = before.lstrip(_SPACE) if trims else before
        yield before.rstrip(_SPACE) if opened[0].endswith("-") else before
        action, at, trims = _action(text, opened.end())
        if action != []:
            yield action
    rest = text[at:]
    yield rest.lstrip(_SPACE) if trims else rest


def _action(text: str, at: int) -> tuple[_Action, int, bool]:
    """Return the tokens of an action, its end, and whether the text after it is trimmed."""
    tokens: _Action = []
    while match := _TOKEN.match(text, at):
        at = match.end()
        kind = match.lastgroup
        if kind == "end":
            return tokens, at, match[0].startswith("-")
        if kind is not None and kind != "comment":
            # A field that follows a name or a bracket at once is a field of that.
            is_glued = kind == "field" and text[match.start() - 1] not in " \t\r\n(|{,=-"
            tokens.append(("of" if is_glued else kind, match[0]))
    line = text.count("\n", 0, at) + 1
    raise template_error(f"line {line}: it can't be read from {quoted(text[at : at + 20])}")


class _Parser:
    def __init__(self, parts: Iterator[str | _Action]) -> None:
        self._parts = parts
        self._tokens: _Action = []
        self._depth = 0
        self.names: set[str] = set()

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise template_error(f"it is nested deeper than {_MAX_DEPTH} levels")
        yield
        self._depth -= 1

    def nodes(self, ends: tuple[str, ...]) -> tuple[tuple[Node, ...], str | None]:
        """Return the nodes up to an action that begins with a word of ``ends``, and that word."""
        found: list[Node] = []
        for part in self._parts:
            if isinstance(part, str):
                found.append(part)
                continue
            self._tokens = part[::-1]
            word = self._peek("word")
            if word in ("else", "end"):
                if word not in ends:
                    raise template_error(f"{word} without if, with or range")
                self._tokens.pop()
                return tuple(found), word
            found.append(self._node(word))
        if ends:
            raise template_error("an if, a with or a range is never ended")
        return tuple(found), None

    def _node(self, word: str | None) -> Node:
        if word in ("if", "with", "range"):
            self._tokens.pop()
            return self._block(word)
        if word in ("break", "continue"):
            self._tokens.pop()
            self._done()
            return Jump(word)
        if self._peek("variable") and len(self._tokens) > 1:
            sign = self._tokens[-2][1]
            if sign in (":=", "="):
                variable = self._tokens.pop()[1]
                self._tokens.pop()
                return Assign(variable, self._whole(), is_new=sign == ":=")
        return Printed(self._whole())

    def _block(self, word: str) -> Condition | Loop:
        with self._deeper():
            variables = self._variables()
            value = self._whole()
            body, end = self.nodes(("else", "end"))
            other: tuple[Node, ...] = ()
            if end == "else":
                inner = self._peek("word")
                if inner is None:
                    self._done()
                    other, _ = self.nodes(("end",))
                elif inner == word != "range":
                    self._tokens.pop()
                    other = (self._block(word),)  # its end is the end of this one
                else:
                    raise template_error(f"else {inner} in {word}")
            else:
                self._done()
        if word == "range":
            return Loop(variables, value, body, other)
        if len(variables) > 1:
            raise template_error(f"{word} with several variables")
        return Condition(word, variables[0] if variables else None, value, body, other)

    def _variables(self) -> tuple[str, ...]:
        """Return the variables before ``:=``, if there are any."""
        if (":=" not in {token for _, token in self._tokens}) or not self._peek("variable"):
            return ()
        found = [self._tokens.pop()[1]]
        if self._peek("sign") == ",":
            self._tokens.pop()
            found.append(self._take("variable"))
        if self._take("sign") != ":=":
            raise template_error("variables without :=")
        return tuple(found)

    def _whole(self) -> Value:
        value = self._pipeline()
        self._done()
        return value

    def _pipeline(self) -> Value:
        with self._deeper():
            value = self._command(())
            while self._peek("sign") == "|":
                self._tokens.pop()
                value = self._command((value,))
        return value

    def _command(self, last: tuple[Value, ...]) -> Value:
        name = self._peek("word")
        if name is None or name in ("true", "false", "nil"):
            if last:
                raise template_error("a value is piped into something other than a function")
            return self._operand()
        self._tokens.pop()
        if name not in FUNCTIONS:
            raise template_error(f"it uses {quoted(name)}")
        arguments = []
        while self._tokens and self._tokens[-1] not in (("sign", ")"), ("sign", "|")):
            arguments.append(self._operand())
        return Call(name, (*arguments, *last))

    def _operand(self) -> Value:
        kind, token = self._tokens.pop() if self._tokens else ("", "the end of the action")
        value: Value
        if kind == "text":
            value = Literal(_unquoted(token))
        elif kind == "number":
            value = Literal(int(token[:20]))
        elif kind == "word" and token in _WORDS:
            value = Literal(_WORDS[token])
        elif kind == "word" and token in FUNCTIONS:
            value = Call(token, ())
        elif kind == "variable":
            value = Variable(token)
        elif kind == "field":
            self.names.add(token[1:].lower())
            value = Field(None, (token[1:],) if len(token) > 1 else ())
        elif (kind, token) == ("sign", "("):
            value = self._pipeline()
            if self._take("sign") != ")":
                raise template_error("a bracket is never closed")
        else:
            raise template_error(f"{quoted(token)} is not a value")
        while self._peek("of"):
            token = self._tokens.pop()[1]
            self.names.add(token[1:].lower())
            value = Field(value, (token[1:],))
        return value

    def _peek(self, kind: str) -> str | None:
        return self._tokens[-1][1] if self._tokens and self._tokens[-1][0] == kind else None

    def _take(self, kind: str) -> str:
        token = self._peek(kind)
        if token is None:
            raise template_error("an action ends too early")
        self._tokens.pop()
        return token

    def _done(self) -> None:
        if self._tokens:
            raise template_error(f"{quoted(self._tokens[-1][1])} is not expected")


_WORDS: Final = {"true": True, "false": False, "nil": None}


def _unquoted(token: str) -> str:
    if token.startswith("`"):
        return token[1:-1]
    try:
        text: str = json.loads(token)
    except ValueError:
        raise template_error(f"{quoted(token)} is not a text that is understood") from None
    return text
