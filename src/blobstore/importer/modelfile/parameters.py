"""Parameters: the keys of a Modelfile's PARAMETER lines, the type of each, and the JSON that Ollama stores. Pure.

Source of the table: the JSON tags of `Options` and `Runner` in Ollama's api/types.go of 2026 (``draft_num_predict`` is the
newest), and ollama/ollama@0265d512 x/create/client/create.go `ignoredModelfileParameters`.
"""

from __future__ import annotations

import enum
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Final

import numpy as np

from blobstore import strictjson
from blobstore.errors import UsageError, quoted

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

# What Go's ParseInt, ParseFloat and ParseBool read, but for hexadecimal floats, underscores, NaN and infinities: JSON can't
# hold the last two, and Ollama fails on them later. `[0-9]` and not `\d`, which takes the digits of every script.
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_DIGITS = 1000
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})


def parse_parameter(key: str, text: str) -> ParameterValue:
    """Return the value of a parameter: a number rounded to a 32-bit float, a text as a tuple of one.

    Source: ollama/ollama@b8761ab0 api/types.go `FormatParams`.
    Raises: UsageError for an unknown key (keys are in lower case), a text that is not a value of its type, and one that
    UTF-8 can't hold.
    """
    kind = PARAMETERS.get(key)
    if kind is None:
        raise UsageError(f"unknown parameter {quoted(key)}", hint=f"Use one of: {', '.join(PARAMETERS)}.")
    value = _PARSERS[kind](text)
    if value is None:
        raise UsageError(f"{key} is {kind.value}, not {quoted(text)}")
    return value


def add_parameter(parameters: dict[str, ParameterValue], key: str, text: str) -> None:
    """Add a parameter: texts are collected, of anything else the last one counts. Raises: as `parse_parameter`."""
    value = parse_parameter(key, text)
    before = parameters.get(key)
    parameters[key] = (*before, *value) if isinstance(before, tuple) and isinstance(value, tuple) else value


def parse_parameters(options: Iterable[str]) -> dict[str, ParameterValue]:
    """Return the parameters of ``KEY=VALUE`` options; a value may hold ``=``, and is taken as it is.

    Raises: UsageError for an option without ``=``, for a key that Ollama has dropped; as `parse_parameter`.
    """
    parameters: dict[str, ParameterValue] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise UsageError(f"{quoted(option)} is not a parameter", hint="Write KEY=VALUE, for example temperature=0.7.")
        if key in DEPRECATED:
            raise UsageError(f"the parameter {key} has no effect in Ollama any more")
        add_parameter(parameters, key, text)
    return parameters


def encode_parameters(parameters: Mapping[str, ParameterValue]) -> bytes:
    """Return the JSON of the params layer: one line and a newline, keys sorted, numbers as Go prints 32-bit floats.

    Source: ollama/ollama@0265d512 x/create/client/create.go `createModelfileLayers`: json.NewEncoder over a Go map.
    """
    items = (f'"{key}":{_encode_value(value)}' for key, value in sorted(parameters.items()))
    return f"{{{','.join(items)}}}\n".encode()


def _encode_value(value: ParameterValue) -> str:
    if isinstance(value, float):
        return _float_text(value)
    return strictjson.encode(list(value) if isinstance(value, tuple) else value).decode()


def _text(text: str) -> tuple[str, ...] | None:
    # An argument of the command line that is no UTF-8 arrives with half surrogates, which no layer can hold.
    return (text,) if text.isascii() or text.encode(errors="ignore").decode() == text else None


def _boolean(text: str) -> bool | None:
    return True if text in _TRUE else False if text in _FALSE else None


def _integer(text: str) -> int | None:
    value = int(text) if _INTEGER.fullmatch(text) else None
    return value if value is not None and -(2**63) <= value < 2**63 else None


def _number(text: str) -> float | None:
    """Return the 32-bit float nearest to the decimal ``text`` (ties to even), or None if it is out of range.

    Rounding to 64 bits first and then to 32 rounds twice, and differs from Go in one of some 2^29 texts. It does not
    when the first rounding goes to the odd neighbour.
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
    Kind.BOOLEAN: _boolean,
    Kind.TEXTS: _text,
}


def _float_text(value: float) -> str:
    """Return the shortest decimal that rounds to the 32-bit float, as Go's encoding/json writes it.

    Source: go/src/encoding/json/encode.go `floatEncoder`: an exponent below 1e-6 and from 1e21 on.
    """
    number = np.float32(value)
    if number == 0 or np.float32(1e-6) <= abs(number) < np.float32(1e21):
        return np.format_float_positional(number, unique=True, trim="-")
    mantissa, _, exponent = np.format_float_scientific(number, unique=True, trim="-").partition("e")
    return f"{mantissa}e{int(exponent):+d}"
