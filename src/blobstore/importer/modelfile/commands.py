"""Commands: the text of a Modelfile, split into its commands. Pure, linear in the size of the text.

A command is a word, spaces, and a value to the end of the line. A value that begins with three double quotes or one goes on
to the first line that ends with as many, which may be its own; nothing in it is escaped. ``#`` begins a comment where a
command could begin, and nowhere else. PARAMETER and MESSAGE have one more word before the value. A line ends with LF, CR
or both. Source: ollama/ollama@00dc3af8 parser/parser.go `ParseFile`, read as a grammar.

What differs, on purpose: bytes that are not text in the file's encoding are refused (Ollama puts U+FFFD into the prompt), as
is an invisible character before a command; several spaces may stand before the second word (Ollama takes it for empty).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

from blobstore.errors import DocumentError, LimitExceededError, quoted

RULE: Final = "T1"
MAX_MODELFILE: Final = 4 * 2**20
"""Bytes of a Modelfile, and of each text that an option gives: the longest licences have some 100 KB."""
COMMANDS: Final = (
    "from",
    "template",
    "system",
    "license",
    "parameter",
    "parser",
    "renderer",
    "requires",
    "draft",
    "adapter",
    "message",
)
_SECOND_WORD: Final = {"parameter": re.compile(r"[A-Za-z0-9_]+"), "message": re.compile(r"[A-Za-z]+")}
_WANTED: Final = {"parameter": "a name and a value", "message": "a role and a text"}

_BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+")
_WORD = re.compile(r"[^ \t\r\n]*")
_SPACES = re.compile(r"[ \t]+")
_REST = re.compile(r"[^\r\n]*")
_LINE = re.compile(r"[\r\n][^\r\n]*")
_BREAK = re.compile(r"\r\n?|\n")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its name in lower case, the parameter's or role's name or "", the value without quotes, its line."""

    name: str
    key: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Script:
    """The commands of a Modelfile in order, and how many characters that do not print were left out of their values."""

    commands: tuple[Command, ...]
    dropped: int


def read_script(raw: bytes, what: str) -> Script:
    """Return the commands in ``raw``: UTF-8, or UTF-16 with a byte order mark.

    Raises: LimitExceededError over 4 MiB; DocumentError (rule T1) with the line for an unknown command, a command
    without a value, quotes that are never closed, and for bytes that are not text.
    """
    if len(raw) > MAX_MODELFILE:
        raise LimitExceededError(f"limit exceeded: {what} has {len(raw):,} bytes, at most {MAX_MODELFILE:,}", rule=RULE)
    reader = _Reader(_decode(raw, what), what)
    commands = tuple(iter(reader.next_command, None))
    return Script(commands, reader.dropped)


def _decode(raw: bytes, what: str) -> str:
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise DocumentError(f"{what} is not {name} text at byte {error.start} (rule {RULE})", rule=RULE) from None


class _Reader:
    def __init__(self, text: str, what: str) -> None:
        self.text = text
        self.what = what
        self.at = 0
        self.dropped = 0
        self.line = 1
        self._line_at = 0

    def next_command(self) -> Command | None:
        start = self._skip(_BLANK)
        if start == len(self.text):
            return None
        self.line += len(_BREAK.findall(self.text, self._line_at, start))
        self._line_at = start
        word = self._take(_WORD)
        name = word.lower()
        if name not in COMMANDS:
            raise self._error(f"unknown command {quoted(word)}", f"Use one of: {', '.join(COMMANDS).upper()}.")
        self._spaces(f"{name.upper()} has no value")
        key = ""
        if name in _SECOND_WORD:
            key = self._take(_SECOND_WORD[name])
            self._spaces(f"{name.upper()} needs {_WANTED[name]}")
        return Command(name, key, self._value(name), self.line)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.at

    def _take(self, pattern: re.Pattern[str]) -> str:
        start = self.at
        return self.text[start : self._skip(pattern)]

    def _spaces(self, otherwise: str) -> None:
        if not self._take(_SPACES):
            raise self._error(otherwise)

    def _value(self, name: str) -> str:
        first = self._printable(self._take(_REST)).lstrip(_SPACE)
        quotes = '"""' if first.startswith('"""') else '"' if first.startswith('"') else ""
        if not quotes:
            return first.rstrip(_SPACE)
        parts = [first]
        # Opening quotes can't be the closing ones too; from the second line on they are not in the way.
        closed = len(first.rstrip(_SPACE)) >= 2 * len(quotes) and first.rstrip(_SPACE).endswith(quotes)
        while not closed:
            line = self._take(_LINE)
            if not line:
                raise self._error(f"{name.upper()}: the quotes {quotes} are never closed")
            parts.append(self._printable(line))
            closed = parts[-1].rstrip(_SPACE).endswith(quotes)
        return "".join(parts).rstrip(_SPACE)[len(quotes) : -len(quotes)]

    def _printable(self, text: str) -> str:
        """Return the text without the characters that Go's strconv.IsPrint refuses; Ollama drops them from values.

        What Python's Unicode tables do not know yet is kept: Go's are newer, and the bytes of an import must not depend
        on the version of Python.
        """
        if text.isprintable():
            return text
        kept = "".join(char for char in text if char.isprintable() or char in "\t\r\n" or unicodedata.category(char) == "Cn")
        self.dropped += len(text) - len(kept)
        return kept

    def _error(self, message: str, hint: str | None = None) -> DocumentError:
        return error_at(self.what, self.line, message, hint)


def error_at(what: str, line: int, message: str, hint: str | None = None) -> DocumentError:
    """Return the error for a line of a Modelfile."""
    return DocumentError(f"{what}: line {line}: {message} (rule {RULE})", rule=RULE, hint=hint)
