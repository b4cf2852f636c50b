"""The commands of a Modelfile and its parameters. Pure; linear in the size of the text.

A command is a word, spaces, and a value to the end of the line. A value that begins with one or
three double quotes ends with the first line that ends with as many, which may be its own; nothing
in it is escaped. ``#`` begins a comment where a command could begin, and nowhere else. PARAMETER
and MESSAGE have one more word before the value. A line ends with LF, CR or both. Source:
ollama/ollama@00dc3af8 parser/parser.go `ParseFile`, read as a grammar.

It differs on purpose: bytes that are not text in the file's encoding are refused (Ollama puts
U+FFFD into the prompt), as is an invisible character before a command; several spaces may stand
before the second word (Ollama reads an empty word).

Parameters have a type each, and a JSON form that Ollama stores.

Source of the table: the JSON tags of `Options` and `Runner` in Ollama's api/types.go of 2026
(``draft_num_predict`` is the newest), and ollama/ollama@0265d512 x/create/client/create.go
`ignoredModelfileParameters`.
"""

from __future__ import annotations

import enum
import math
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from blobstore.errors import DocumentError, UsageError, quoted
from blobstore.formats import strictjson

ParameterValue = int | float | bool | tuple[str, ...]


class Kind(enum.Enum):
    """The type of a parameter's value, in the words of a message."""

    INTEGER = "a whole number of 64 bits"
    NUMBER = "a number that a 32-bit float can hold"
    BOOLEAN = "true or false"
    TEXTS = "text in UTF-8"


PARAMETERS: Final[Mapping[str, Kind]] = {
    "draft_num_predict": Kind.INTEGER,
    "frequency_penalty": Kind.NUMBER,
    "main_gpu": Kind.INTEGER,
    "min_p": Kind.NUMBER,
    "num_batch": Kind.INTEGER,
    "num_ctx": Kind.INTEGER,
    "num_gpu": Kind.INTEGER,
    "num_keep": Kind.INTEGER,
    "num_predict": Kind.INTEGER,
    "num_thread": Kind.INTEGER,
    "presence_penalty": Kind.NUMBER,
    "repeat_last_n": Kind.INTEGER,
    "repeat_penalty": Kind.NUMBER,
    "seed": Kind.INTEGER,
    "stop": Kind.TEXTS,
    "temperature": Kind.NUMBER,
    "top_k": Kind.INTEGER,
    "top_p": Kind.NUMBER,
    "typical_p": Kind.NUMBER,
    "use_mmap": Kind.BOOLEAN,
}
DEPRECATED: Final = frozenset(
    (
        "f16_kv",
        "logits_all",
        "low_vram",
        "mirostat",
        "mirostat_eta",
        "mirostat_tau",
        "penalize_newline",
        "use_mlock",
        "vocab_only",
    )
)
"""Keys of old Modelfiles that Ollama reads and drops."""

# The syntax of Go's ParseInt, ParseFloat and ParseBool without hexadecimal floats, underscores, NaN
# and infinities: JSON can't hold the last two, and Ollama fails on them later. `\d` would match the
# digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_DIGITS = 1000
_BOOLEANS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


def parse_parameter(key: str, text: str) -> ParameterValue:
    """Return a parameter's value: a number rounded to a 32-bit float, a text as a tuple of one.

    Source: ollama/ollama@b8761ab0 api/types.go `FormatParams`. Raises: UsageError for an unknown
    key (keys are in lower case), a text that is not a value of its type, and one that UTF-8 can't
    encode.
    """
    kind = PARAMETERS.get(key)
    if kind is None:
        raise UsageError(
            f"unknown parameter {quoted(key)}", hint=f"Use one of: {', '.join(PARAMETERS)}."
        )
    value = _PARSERS[kind](text)
    if value is None:
        raise UsageError(f"{key} is {kind.value}, not {quoted(text)}")
    return value


def add_parameter(parameters: dict[str, ParameterValue], key: str, text: str) -> None:
    """Add a parameter; texts are collected, other values replace the one before.

    Raises: as `parse_parameter`.
    """
    value = parse_parameter(key, text)
    before = parameters.get(key)
    if isinstance(before, tuple) and isinstance(value, tuple):
        value = (*before, *value)
    parameters[key] = value


def parse_parameters(options: Iterable[str]) -> dict[str, ParameterValue]:
    """Return the parameters of ``KEY=VALUE`` options; a value may contain ``=``.

    Raises: UsageError for an option without ``=`` and a key that Ollama has dropped; as
    `parse_parameter`.
    """
    parameters: dict[str, ParameterValue] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise UsageError(
                f"{quoted(option)} is not a parameter",
                hint="Write KEY=VALUE, for example temperature=0.7.",
            )
        if key in DEPRECATED:
            raise UsageError(f"the parameter {key} has no effect in Ollama any more")
        add_parameter(parameters, key, text)
    return parameters


def encode_parameters(parameters: Mapping[str, ParameterValue]) -> bytes:
    """Return the JSON of the params layer, a line with sorted keys and Go's 32-bit floats.

    Source: ollama/ollama@0265d512 x/create/client/create.go `createModelfileLayers`:
    json.NewEncoder over a Go map.
    """
    items = (f'"{key}":{_encode_value(value)}' for key, value in sorted(parameters.items()))
    return f"{{{','.join(items)}}}\n".encode()


def _encode_value(value: ParameterValue) -> str:
    if isinstance(value, float):
        return _float_text(value)
    return strictjson.encode(list(value) if isinstance(value, tuple) else value).decode()


def _text(text: str) -> tuple[str, ...] | None:
    # An argument of the command line that is not UTF-8 contains half surrogates.
    return (text,) if text.encode(errors="ignore").decode() == text else None


def _integer(text: str) -> int | None:
    value = int(text) if _INTEGER.fullmatch(text) else None
    return value if value is not None and -(2**63) <= value < 2**63 else None


def _number(text: str) -> float | None:
    """Return the 32-bit float nearest to ``text`` (ties to even), or None if it is out of range.

    Rounding to 64 bits and then to 32 differs from Go in one of about 2^29 texts. It does not if
    the first rounding goes to the odd neighbour.
    """
    if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    if value and math.isfinite(value) and (exact := Decimal(text)) != Decimal(value):
        (bits,) = struct.unpack("<q", struct.pack("<d", value))
        if not bits & 1:
            value = math.nextafter(value, math.inf if exact > Decimal(value) else -math.inf)
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return None
    return float(rounded) if math.isfinite(rounded) else None


_PARSERS: Final[Mapping[Kind, Callable[[str], ParameterValue | None]]] = {
    Kind.INTEGER: _integer,
    Kind.NUMBER: _number,
    Kind.BOOLEAN: _BOOLEANS.get,
    Kind.TEXTS: _text,
}


def _float_text(value: float) -> str:
    """Return the shortest decimal that rounds to the 32-bit float, as Go's encoding/json writes it.

    Source: go/src/encoding/json/encode.go `floatEncoder`: an exponent below 1e-6 and from 1e21 on.
    """
    import numpy as np

    number = np.float32(value)
    if number == 0 or np.float32(1e-6) <= abs(number) < np.float32(1e21):
        return np.format_float_positional(number, unique=True, trim="-")
    mantissa, _, exponent = np.format_float_scientific(number, unique=True, trim="-").partition("e")
    return f"{mantissa}e{int(exponent):+d}"


RULE: Final = "T1"
MAX_MODELFILE: Final = 4 * 2**20
"""Bytes of a Modelfile, and of each text of an option: the longest licences have some 100 KB."""
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
_SECOND_WORD: Final = {
    "parameter": re.compile(r"[A-Za-z0-9_]+"),
    "message": re.compile(r"[A-Za-z]+"),
}
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
    """A command: its name in lower case, the name of a parameter or role, the value, the line.

    ``key`` is "" for other commands than PARAMETER and MESSAGE; ``text`` has no quotes around it.
    """

    name: str
    key: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Script:
    """A Modelfile's commands in order, and how many unprintable characters their values lost."""

    commands: tuple[Command, ...]
    dropped: int


def read_script(raw: bytes, what: str) -> Script:
    """Return the commands in ``raw``: UTF-8, or UTF-16 with a byte order mark.

    Raises: LimitExceededError over 4 MiB; DocumentError (rule T1) with the line for an unknown
    command, a command without a value, quotes that are never closed, and for bytes that are not
    text.
    """
    strictjson.check_limit(what, len(raw), "bytes", MAX_MODELFILE, RULE)
    reader = _Reader(_decode(raw, what), what)
    commands = tuple(iter(reader.next_command, None))
    return Script(commands, reader.dropped)


def _decode(raw: bytes, what: str) -> str:
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise DocumentError(
            f"{what} is not {name} text at byte {error.start} (rule {RULE})", rule=RULE
        ) from None


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
            raise self._error(
                f"unknown command {quoted(word)}", f"Use one of: {', '.join(COMMANDS).upper()}."
            )
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
        # The opening quotes can't be the closing ones too.
        closed = first[len(quotes) :].rstrip(_SPACE).endswith(quotes)
        while not closed:
            line = self._take(_LINE)
            if not line:
                raise self._error(f"{name.upper()}: the quotes {quotes} are never closed")
            parts.append(self._printable(line))
            closed = parts[-1].rstrip(_SPACE).endswith(quotes)
        return "".join(parts).rstrip(_SPACE)[len(quotes) : -len(quotes)]

    def _printable(self, text: str) -> str:
        """Return the text without the characters that Go's strconv.IsPrint refuses, as Ollama does.

        Characters that Python's Unicode tables lack are kept: Go's are newer, and the bytes of an
        import must not depend on the version of Python.
        """
        if text.isprintable():
            return text
        kept = "".join(
            char
            for char in text
            if char.isprintable() or char in "\t\r\n" or unicodedata.category(char) == "Cn"
        )
        self.dropped += len(text) - len(kept)
        return kept

    def _error(self, message: str, hint: str | None = None) -> DocumentError:
        return error_at(self.what, self.line, message, hint)


def error_at(what: str, line: int, message: str, hint: str | None = None) -> DocumentError:
    """Return the error for a line of a Modelfile."""
    return DocumentError(f"{what}: line {line}: {message} (rule {RULE})", rule=RULE, hint=hint)
