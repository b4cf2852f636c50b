"""Modelfile: a model's texts and settings, from a Modelfile or from options. Pure.

Source: ollama/ollama@0265d512 x/create/client/create.go `ConfigFromModelfile`, `newManifestWriter`,
`resolveParserName` and `createModelfileLayers`, unless a function says otherwise.

The grammar: a command is a word, spaces, and a value to the end of the line. A value that begins
with one or three double quotes ends with the first line that ends with as many, which may be its
own; nothing in it is escaped. ``#`` begins a comment where a command could begin, and nowhere else.
PARAMETER and MESSAGE have one more word before the value. A line ends with LF, CR or both.
Characters that do not print are left out. Source: ollama/ollama@00dc3af8 parser/parser.go
`ParseFile`, read as a grammar. It differs on purpose: bytes that are not text in the file's
encoding are refused (Ollama puts U+FFFD into the prompt), several spaces may stand before the
second word (Ollama reads an empty word), and characters that do not print may stand in a command.
"""

from __future__ import annotations

import math
import os
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from blobstore.errors import DocumentError, UsageError, quoted
from blobstore.formats.documents import (
    LICENSE_MEDIA_TYPE,
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    REQUIRED_OLLAMA,
    SYSTEM_MEDIA_TYPE,
    TEMPLATE_MEDIA_TYPE,
    ModelConfig,
)
from blobstore.formats.strictjson import (
    Document,
    check_limit,
    encode,
    text_of,
)

RULE = "T1"
MAX_MODELFILE = 4 * 2**20
"""Bytes of a Modelfile, and of each text of an option: the longest licences have some 100 KB."""
MAX_LICENSES = 1000
ROLES = ("system", "user", "assistant")

ParameterValue = int | float | bool | tuple[str, ...]

# The syntax of Go's ParseInt, ParseFloat and ParseBool without hexadecimal floats, underscores, NaN
# and infinities: JSON can't hold the last two, and Ollama fails on them later. `\d` would match the
# digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BOOLEANS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


def _text(text: str) -> tuple[str, ...] | None:
    # An argument of the command line that is not UTF-8 contains half surrogates.
    return (text,) if text.encode(errors="ignore").decode() == text else None


def _integer(text: str) -> int | None:
    value = int(text) if _INTEGER.fullmatch(text) else None
    return value if value is not None and -(2**63) <= value < 2**63 else None


def _number(text: str) -> float | None:
    """Return the 32-bit float nearest to ``text``, or None if it is out of range.

    Rounded to 64 bits first, which differs from Go in one of about 2^29 texts.
    """
    value = float(text) if _NUMBER.fullmatch(text) else math.inf
    with suppress(OverflowError):
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
        return rounded if math.isfinite(rounded) else None
    return None


_INTEGERS = (_integer, "a whole number of 64 bits")
_NUMBERS = (_number, "a number that a 32-bit float can hold")
_Kind = tuple[Callable[[str], ParameterValue | None], str]
# The type of each parameter: what reads its value, and its name in a message. Source: the JSON
# tags of `Options` and `Runner` in Ollama's api/types.go of 2026 (``draft_num_predict`` is the
# newest).
_PARAMETERS: Mapping[str, _Kind] = {
    "draft_num_predict": _INTEGERS,
    "frequency_penalty": _NUMBERS,
    "main_gpu": _INTEGERS,
    "min_p": _NUMBERS,
    "num_batch": _INTEGERS,
    "num_ctx": _INTEGERS,
    "num_gpu": _INTEGERS,
    "num_keep": _INTEGERS,
    "num_predict": _INTEGERS,
    "num_thread": _INTEGERS,
    "presence_penalty": _NUMBERS,
    "repeat_last_n": _INTEGERS,
    "repeat_penalty": _NUMBERS,
    "seed": _INTEGERS,
    "stop": (_text, "text in UTF-8"),
    "temperature": _NUMBERS,
    "top_k": _INTEGERS,
    "top_p": _NUMBERS,
    "typical_p": _NUMBERS,
    "use_mmap": (_BOOLEANS.get, "true or false"),
}
DEPRECATED = frozenset(
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
"""Keys of old Modelfiles that Ollama reads and drops (`ignoredModelfileParameters`)."""


def add_parameter(parameters: dict[str, ParameterValue], key: str, text: str) -> None:
    """Add a parameter: a number rounded to a 32-bit float, or a text; texts are collected.

    Source: ollama/ollama@b8761ab0 api/types.go `FormatParams`. Raises: UsageError for an unknown
    key (keys are in lower case), a text that is not a value of its type, and one that UTF-8 can't
    encode.
    """
    if key not in _PARAMETERS:
        raise UsageError(
            f"unknown parameter {quoted(key)}", hint=f"Use one of: {', '.join(_PARAMETERS)}."
        )
    parse, kind = _PARAMETERS[key]
    value = parse(text)
    if value is None:
        raise UsageError(f"{key} is {kind}, not {quoted(text)}")
    before = parameters.get(key)
    if isinstance(before, tuple) and isinstance(value, tuple):
        value = (*before, *value)
    parameters[key] = value


def parse_parameters(options: Iterable[str]) -> dict[str, ParameterValue]:
    """Return the parameters of ``KEY=VALUE`` options; a value may contain ``=``.

    Raises: UsageError for an option without ``=`` and a key that Ollama has dropped; as
    `add_parameter`.
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
            raise UsageError(f"the parameter {key} no longer has an effect in Ollama")
        add_parameter(parameters, key, text)
    return parameters


def encode_parameters(parameters: Mapping[str, ParameterValue]) -> bytes:
    """Return the JSON of the params layer, a line with sorted keys and Go's 32-bit floats.

    Source: ollama/ollama@0265d512 x/create/client/create.go `createModelfileLayers`:
    json.NewEncoder over a Go map.
    """
    items = (
        f'"{key}":{_float_text(value) if isinstance(value, float) else text_of(value)}'
        for key, value in sorted(parameters.items())
    )
    return f"{{{','.join(items)}}}\n".encode()


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


_COMMANDS = (
    *("from", "template", "system", "license", "parameter", "parser", "renderer", "requires"),
    *("draft", "adapter", "message"),
)
_SECOND_WORD = {"parameter": "a name and a value", "message": "a role and a text"}
_BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+")
_BREAK = re.compile(r"\r\n?|\n")
_WORD = re.compile(r"(?P<word>[^ \t\r\n]*+)(?P<spaces>[ \t]*+)")
_KEY = re.compile(r"(?P<key>[A-Za-z0-9_]++)[ \t]++")
_VALUE = re.compile(
    r"""(?P<quotes>\"{3}|"(?!""))(?P<quoted>.*?)(?P=quotes)[ \t]*+(?=[\r\n]|\Z)"""
    r"""|(?!")(?P<line>[^\r\n]*+)""",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name in lower case, the name of a parameter or role, the value, the line.

    ``key`` is "" for other commands than PARAMETER and MESSAGE; ``text`` has no quotes around it.
    """

    name: str
    key: str
    text: str
    line: int


def read_script(raw: bytes, what: str) -> tuple[list[Command], int]:
    """Return the commands in ``raw``, in UTF-8, or UTF-16 with a byte order mark.

    Also how many non-printing characters were left out. The time is linear in the size.

    Raises: LimitExceededError over 4 MiB; DocumentError (rule T1) with the line for an unknown
    command, a command without a value, quotes that are never closed, and for bytes that are not
    text.
    """
    check_limit(what, len(raw), "bytes", MAX_MODELFILE, RULE)
    encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        decoded = raw.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise DocumentError(
            f"{what} is not {name} text at byte {error.start} (rule {RULE})", rule=RULE
        ) from None
    # What Go's strconv.IsPrint refuses. Characters that Python's Unicode tables lack are kept: Go's
    # are newer, and the bytes of an import must not depend on the version of Python.
    odd = [char for char in set(decoded) if not (char.isprintable() or char in "\t\r\n")]
    text = decoded.translate({ord(one): None for one in odd if unicodedata.category(one) != "Cn"})
    commands, at, counted, line = [], 0, 0, 1
    while (blank := _BLANK.match(text, at)) and (start := blank.end()) < len(text):
        line += len(_BREAK.findall(text, counted, start))
        counted = start
        command, at = _command(text, start, line, what)
        commands.append(command)
    return commands, len(decoded) - len(text)


def _command(text: str, start: int, line: int, what: str) -> tuple[Command, int]:
    word = _WORD.match(text, start)
    name = word["word"].lower() if word else ""
    if word is None or name not in _COMMANDS:
        message = f"unknown command {quoted(word and word['word'])}"
        raise _error(what, line, message, f"Use one of: {', '.join(_COMMANDS).upper()}.")
    if not word["spaces"]:
        raise _error(what, line, f"{name.upper()} has no value")
    key, at = "", word.end()
    if name in _SECOND_WORD:
        second = _KEY.match(text, at)
        if second is None:
            raise _error(what, line, f"{name.upper()} needs {_SECOND_WORD[name]}")
        key, at = second["key"], second.end()
    value = _VALUE.match(text, at)
    if value is None:
        quotes = '"""' if text.startswith('"""', at) else '"'
        raise _error(what, line, f"{name.upper()}: the quotes {quotes} are never closed")
    said = value["quoted"] if value["quotes"] else value["line"].rstrip(" \t")
    return Command(name, key, said, line), value.end()


def _error(what: str, line: int, message: str, hint: str | None = None) -> DocumentError:
    return DocumentError(f"{what}: line {line}: {message} (rule {RULE})", rule=RULE, hint=hint)


_PRE = "(?:0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_VERSION = re.compile(
    r"(0|[1-9][0-9]*)(?:\.(0|[1-9][0-9]*)(?:\.(0|[1-9][0-9]*)"
    rf"(?P<pre>-{_PRE}(?:\.{_PRE})*)?(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?)?)?"
)
_MAX_VERSION = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelfile(Document):
    """The content of a Modelfile. A field that it does not set is None or empty; "" is set.

    ``source``, ``draft`` and ``adapter`` are paths as written (`resolve_path`), ``messages`` pairs
    of role and text, ``notes`` sentences about commands and characters that Ollama ignores, and we
    do too.
    """

    source: str | None = None
    template: str | None = None
    system: str | None = None
    licenses: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    parser: str | None = None
    renderer: str | None = None
    requires: str | None = None
    draft: str | None = None
    adapter: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, raw: bytes, what: str = "Modelfile") -> Modelfile:
        """Return the Modelfile in ``raw``.

        The last of equal commands counts, but all licences, stop texts and messages are kept
        (Ollama's import of safetensors keeps the last licence and drops messages).

        Raises: as `read_script`; DocumentError (rule T1) with the line and the command for a
        missing or second FROM, a second DRAFT or ADAPTER, an unknown parameter or role, a value of
        the wrong type, an invalid version; LimitExceededError over 1000 licences.
        """
        commands, dropped = read_script(raw, what)
        parameters: dict[str, ParameterValue] = {}
        lines: dict[str, int] = {}
        texts: dict[str, str] = {}
        notes = []
        for command in commands:
            first = lines.setdefault(command.name, command.line)
            try:
                _check_command(command, first, what)
                is_version = command.name == "requires"
                texts[command.name] = check_requires(command.text) if is_version else command.text
                if command.key in DEPRECATED:
                    unused = f"{command.key} no longer has an effect in Ollama and was left out"
                    notes.append(f"{what}: line {command.line}: {unused}")
                elif command.name == "parameter":
                    add_parameter(parameters, command.key, command.text)
            except UsageError as error:
                message = f"{command.name.upper()}: {error.message}"
                raise _error(what, command.line, message, error.hint) from None
        if "from" not in texts:
            hint = "Begin with FROM and the folder of the checkpoint."
            raise _error(what, 1, "the FROM command is missing", hint)
        if dropped:
            notes.append(f"{what}: {dropped:,} non-printing characters were left out")
        return cls(
            source=texts["from"],
            template=texts.get("template"),
            system=texts.get("system"),
            licenses=_licenses(command.text for command in commands if command.name == "license"),
            parameters=parameters,
            parser=texts.get("parser"),
            renderer=texts.get("renderer"),
            requires=texts.get("requires"),
            draft=texts.get("draft") or None,
            adapter=texts.get("adapter") or None,
            messages=tuple(
                (command.key, command.text) for command in commands if command.name == "message"
            ),
            notes=tuple(notes),
        )

    def with_options(
        self,
        template: str | None,
        system: str | None,
        licenses: Sequence[str],
        parameters: Mapping[str, ParameterValue],
    ) -> Modelfile:
        """Return the Modelfile with options in place of its own texts and parameters.

        Licences are added after its own. A parameter of an option replaces the Modelfile's, all
        its stop texts too. None keeps a text, "" removes it. Raises: UsageError for a text that
        UTF-8 can't encode; LimitExceededError over 4 MiB.
        """
        given = (
            ("template", template),
            ("system", system),
            *(("license", one) for one in licenses),
        )
        for name, text in given:
            try:
                size = len((text or "").encode())
            except UnicodeEncodeError:
                raise UsageError(f"the {name} can't be encoded in UTF-8") from None
            check_limit(f"the {name}", size, "bytes", MAX_MODELFILE, RULE)
        return replace(
            self,
            template=self.template if template is None else template,
            system=self.system if system is None else system,
            licenses=_licenses((*self.licenses, *licenses)),
            parameters={**self.parameters, **parameters},
        )

    def layers(self) -> tuple[tuple[str, bytes], ...]:
        """Return the layers that follow a manifest's JSON layers: media types and bytes.

        In Ollama's order: template, system text, a layer for each licence, parameters, messages;
        empty ones are left out. Texts are stored unchanged; parameters and messages are a line of
        JSON and a newline. Several licences, and messages: ollama/ollama@1d7605bf
        x/create/manifest.go `ApplyModelfileLayers`.
        """
        messages = [{"role": role, "content": content} for role, content in self.messages]
        layers = (
            (TEMPLATE_MEDIA_TYPE, (self.template or "").encode()),
            (SYSTEM_MEDIA_TYPE, (self.system or "").encode()),
            *((LICENSE_MEDIA_TYPE, text.encode()) for text in self.licenses),
            (PARAMS_MEDIA_TYPE, self.parameters and encode_parameters(self.parameters)),
            (MESSAGES_MEDIA_TYPE, messages and encode(messages) + b"\n"),
        )
        return tuple((media_type, data) for media_type, data in layers if data)

    def configure(self, config: ModelConfig) -> ModelConfig:
        """Return the config blob with this parser, renderer and version for the architecture's.

        "" keeps the architecture's, as in Ollama (`resolveParserName`). The caller sets the
        capabilities: Ollama asks the resulting parser for its tools and thinking.
        """
        return replace(
            config,
            parser=self.parser or config.parser,
            renderer=self.renderer or config.renderer,
            requires=self.requires or config.requires,
        )


def check_requires(text: str) -> str:
    """Return the version of Ollama that a model requires, without a leading ``v``.

    ``MAJOR[.MINOR[.PATCH[-PRERELEASE][+BUILD]]]`` as golang.org/x/mod/semver reads it, and at least
    0.19.0, which every model of safetensors needs; 0.19.0-rc1 is below it. Source: Ollama's
    `ConfigFromModelfile` of 2026, which refuses the same (later versions raise it to 0.19.0, or
    accept it). Raises: UsageError.
    """
    version = text.removeprefix("v")
    match = _VERSION.fullmatch(version) if len(version) <= _MAX_VERSION else None
    if match is None:
        raise UsageError(
            f"{quoted(text)} is not a version of Ollama", hint=f"Write it as {REQUIRED_OLLAMA}."
        )
    numbers = [int(part or 0) for part in match.group(1, 2, 3)]
    # A version with a prerelease comes before the one without.
    least = [int(part) for part in REQUIRED_OLLAMA.split(".")]
    if (*numbers, match["pre"] is None) < (*least, True):
        raise UsageError(
            f"{version} is below {REQUIRED_OLLAMA}, the first Ollama that reads such models"
        )
    return version


def resolve_path(text: str, folder: Path) -> str:
    """Return the path that FROM or DRAFT means in a Modelfile of ``folder``.

    Source: ollama/ollama@00dc3af8 parser/parser.go `expandPath`. Ollama then tries the current
    folder and the models of its store; this does not.
    """
    home = os.path.expanduser(text)  # noqa: PTH111  # keeps the ~name of an unknown user
    return text if "://" in text else str(folder / home)


def _check_command(command: Command, first: int, what: str) -> None:
    if command.name in ("from", "draft", "adapter") and command.line != first:
        message = f"a second {command.name.upper()}; the first is on line {first}"
        raise _error(what, command.line, message)

    if command.name == "message" and command.key not in ROLES:
        raise UsageError(
            f"unknown role {quoted(command.key)}", hint=f"Use one of: {', '.join(ROLES)}."
        )


def _licenses(texts: Iterable[str]) -> tuple[str, ...]:
    licenses = tuple(text for text in texts if text)
    check_limit("the model", len(licenses), "licenses", MAX_LICENSES, RULE)
    return licenses
