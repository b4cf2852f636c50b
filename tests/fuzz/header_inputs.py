"""Inputs for headers.py: valid files from a grammar, mutated as tokens and as bytes.

Everything follows from a seed. Valid files are made anew all the time, so that no run ends with a
fixed set of templates; a mutated file that was accepted may become a template itself, so that
mutations add up.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_DATA = 4096
_DATA = random.Random(0).randbytes(MOST_DATA)
_PREFIX = struct.Struct("<Q")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|\s+|.', re.DOTALL)
_TEMPLATES = 64
_MOST_TOKENS = 400

BITS = {
    b"F32": 32, b"BF16": 16, b"F16": 16, b"U8": 8, b"I8": 8, b"BOOL": 8, b"U32": 32, b"I32": 32,
    b"I64": 64, b"U64": 64,
    b"F64": 64, b"C64": 64, b"I16": 16, b"U16": 16, b"F8_E4M3": 8, b"F8_E5M2": 8, b"F8_E8M0": 8,
    b"F8_E4M3FNUZ": 8,
    b"F8_E5M2FNUZ": 8, b"F4": 4, b"F6_E2M3": 6, b"F6_E3M2": 6,
}  # fmt: skip
DTYPES = tuple(BITS)

# Strings, with their quotes. Some are equal after unescaping, some are no UTF-8, some no JSON.
NAMES = (
    b'"a"', b'"b"', b'""', b'"w"', b'"model.layers.0.mlp.up_proj.weight"', b'"lm_head.weight"',
    b'"x.scale"', b'" "',
    '"é"'.encode(), '"😀"'.encode(), '"\u2028"'.encode(), b'"<&>"', b'"\x7f"', b'"dtype"',
    b'"shape"',
)  # fmt: skip
ODD_STRINGS = (
    rb'"\u0061"', rb'"\u00e9"', rb'"\ud83d\ude00"', rb'"\ud83d"', rb'"\ude00\ud83d"', rb'"\u0000"',
    rb'"\"\\\/\b\f\n\r\t"',
    rb'"\x"', rb'"\u12"', rb'"\u 061"', rb'"\u005f_metadata__"', rb'"\u0064type"',
    b'"__metadata__"', b'"__metadata__\x00"',
    b'"\x00"', b'"\n"', b'"\x1f"', b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"',
    b'"\xf4\x90\x80\x80"', b'"\xe2\x80"', b"'a'",
    b'"data_offsets"', b'"Dtype"', b'"f32"', b'"F32 "', b'"F8"', b'"F8_E4M3FN"', b'"F4"',
    b'"F6_E2M3"', b'"C64"', b'"C128"',
    b'"' + b"n" * 300 + b'"', b'"\\', b'"',
)  # fmt: skip
NUMBERS = (
    b"0", b"1", b"2", b"3", b"4", b"7", b"8", b"9", b"16", b"64", b"-0", b"-1", b"0.0", b"1.0",
    b"1e0", b"1E+2", b"1e-1",
    b"01", b"00", b"+1", b"1.", b".5", b"1e", b"-", b"0x1", b"1_0", b"\xd9\xa1", b"NaN",
    b"Infinity", b"-Infinity", b"1e309",
    b"-1e999", b"2147483647", b"2147483648", b"4294967295", b"4294967296", b"9007199254740993",
    b"1152921504606846976",
    b"2305843009213693951", b"2305843009213693952", b"4611686018427387904", b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551615", b"18446744073709551616", b"-9223372036854775809",
    b"340282366920938463463374607431768211456",
    b"0e999", b"1e-999", b"1.7976931348623157e308", b"1.7976931348623158e308", b"-1.79e308",
    b"1e308", b"1" + b"0" * 308,
    b"1" + b"0" * 309, b"9" * 400,
)  # fmt: skip
VALUES = (
    b"null", b"true", b"false", b"[]", b"{}", b"[0]", b"[1,2]", b"[0,0,0]", b"[[0,1]]", b'{"a":1}',
    b'{"a":1,"a":1}',
    b'{"F32":null}', b'{"U8":{}}', b'["U8",[1],[0,1]]', b'["F32",[0],[0,0]]',
    b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
    b"[" * 63 + b"]" * 63, b"[" * 66 + b"]" * 66, b'{"a":' * 70 + b"1" + b"}" * 70,
    b"[" * 130 + b"]" * 130, b"[" * 200,
    b"nul", b"undefined", b"/**/1", b"1,", b",",
)  # fmt: skip
SPACES = (
    b" ", b"\n", b"\t", b"\r", b"  \r\n\t", b"\x0b", b"\x0c", b"\x00", b"\xc2\xa0", b"\xef\xbb\xbf",
    b"\xe2\x80\x83", b"//",
    b"\x1a",
)  # fmt: skip
MARKS = (b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"-", b".", b"e")
POOLS = (NAMES, ODD_STRINGS, NUMBERS, NUMBERS, VALUES, SPACES, MARKS)
LENGTHS = (
    0,
    1,
    2,
    7,
    8,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
    99_999_999,
    100_000_000,
    100_000_001,
)
ENTRY = (
    b"{", b'"dtype"', b":", b'"U8"', b",", b'"shape"', b":", b"[", b"]", b",", b'"data_offsets"',
    b":", b"[", b"0", b",",
    b"1", b"]", b"}",
)  # fmt: skip


class Inputs:
    """An endless sequence of files, mostly one to three mutations away from a valid one."""

    def __init__(
        self, seed: int | str, files: Sequence[bytes] = (), fresh: int = _TEMPLATES
    ) -> None:
        self._random = random.Random(seed)
        self._templates = [self._valid() for _ in range(fresh)] + [_tokens(file) for file in files]
        self._last: tuple[list[bytes], int] = self._templates[0]

    def next(self) -> bytes:
        """Return the next file."""
        tokens, data_size = self._choose(self._templates)
        tokens = tokens.copy()
        for _ in range(self._choose((0, 1, 1, 1, 2, 2, 3))):
            self._mutate(tokens)
        if self._random.random() < 0.03:
            data_size += self._choose((-8, -1, 1, 8))
        self._last = (tokens, min(max(data_size, 0), MOST_DATA))
        return self._file(b"".join(tokens), self._last[1])

    def keep(self) -> None:
        """Take the last file as a template, in the place of another."""
        if len(self._last[0]) <= _MOST_TOKENS:
            self._templates[self._below(len(self._templates))] = self._last

    def renew(self) -> None:
        """Replace a template by a new valid file."""
        self._templates[self._below(len(self._templates))] = self._valid()

    def _below(self, stop: int) -> int:
        return int(self._random.random() * stop)

    def _choose(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def _file(self, text: bytes, data_size: int) -> bytes:
        kind = self._random.random()
        if kind < 0.06:  # bytes, as no grammar has them
            text = self._with_wrong_bytes(text)
        raw = _PREFIX.pack(len(text)) + text + _DATA[:data_size]
        if kind < 0.98:
            return raw
        if kind < 0.99:
            return raw[: self._below(len(raw) + 1)]
        length = (
            self._choose(LENGTHS)
            if kind < 0.995
            else max(len(text) + self._choose((-1, 1, -8, 8)), 0)
        )
        return _PREFIX.pack(length) + raw[8:]

    def _with_wrong_bytes(self, text: bytes) -> bytes:
        changed = bytearray(text)
        for _ in range(self._choose((1, 1, 2, 4))):
            place = self._below(len(changed) + 1)
            kind = self._below(4)
            if kind == 0:
                changed[place : place + 1] = bytes((self._below(256),))
            elif kind == 1:
                changed[place:place] = bytes((self._below(256),))
            elif kind == 2:
                del changed[place : place + self._choose((1, 1, 2, 16))]
            elif place < len(changed):
                changed[place] ^= 1 << self._below(8)
        return bytes(changed)

    def _mutate(self, tokens: list[bytes]) -> None:
        place = self._place(tokens, 0)
        kind = self._below(28)
        if kind < 15:
            place = self._place(tokens, 3)
            tokens[place] = self._alike(tokens[place])
        elif kind < 21:
            self._add_field(tokens, place)
        elif kind == 21:
            tokens[place] = self._choose(self._choose(POOLS))
        elif kind == 22:
            tokens.insert(place, self._choose(self._choose(POOLS)))
        elif kind == 23:
            tokens.insert(place, self._choose(SPACES[:5]))
        else:
            self._mutate_range(tokens, place, kind)

    def _mutate_range(self, tokens: list[bytes], place: int, kind: int) -> None:
        """Remove, swap, double or take from another file a few tokens."""
        if kind == 24:
            del tokens[place : place + self._choose((1, 2, 3, 4, 20))]
        elif kind == 25:
            other = self._below(len(tokens))
            tokens[place], tokens[other] = tokens[other], tokens[place]
        elif kind == 26:
            tokens[place:place] = tokens[place : place + self._choose((2, 4, 20))]
        else:
            others = self._choose(self._templates)[0]
            start = self._below(len(others) + 1)
            tokens[place:place] = others[start : start + self._choose((1, 4, 20))]

    def _place(self, tokens: list[bytes], tries: int) -> int:
        """Return the place of a token.

        Look so many times for one that is no mark, because without marks all is lost.
        """
        if not tokens:
            tokens.append(b"{")
        place = self._below(len(tokens))
        for _ in range(tries):
            if tokens[place] not in MARKS:
                break
            place = self._below(len(tokens))
        return place

    def _alike(self, token: bytes) -> bytes:
        """Return another token for a place: mostly one of the same kind, such as another number."""
        kind = self._random.random()
        if kind < 0.05:
            return self._choose(VALUES)
        if token.isdigit() and len(token) < 30:
            return (
                b"%d" % (int(token) + self._choose((-8, -1, -1, 1, 1, 8)))
                if kind < 0.6
                else self._choose(NUMBERS)
            )
        if token[:1] == b'"':
            return (
                self._choose(NAMES if kind < 0.3 else ODD_STRINGS)
                if kind < 0.5
                else b'"%b"' % self._choose(DTYPES)
            )
        return self._choose(MARKS if token in MARKS else NUMBERS)

    def _add_field(self, tokens: list[bytes], place: int) -> None:
        """Put a member before the next closing brace: an unknown field, a tensor, metadata."""
        while place < len(tokens) and tokens[place] != b"}":
            place += 1
        comma = (b",",) if place and tokens[place - 1] != b"{" else ()
        kind = self._below(4)
        if kind == 0:
            value: Sequence[bytes] = ENTRY
        else:
            value = (self._choose(VALUES if kind == 1 else NUMBERS if kind == 2 else NAMES),)
        tokens[place:place] = (*comma, self._choose(NAMES if kind else ODD_STRINGS), b":", *value)

    def _valid(self) -> tuple[list[bytes], int]:
        """Return the tokens of a valid header and the bytes of its data."""
        members: list[list[bytes]] = []
        offset = 0
        names = self._random.sample(NAMES, self._choose((0, 1, 1, 2, 2, 3, 5)))
        for name in names:
            entry, end = self._entry(offset)
            if end <= MOST_DATA:
                members.append([name, b":", *entry])
                offset = end
        if self._random.random() < 0.3:
            self._random.shuffle(members)
        if self._random.random() < 0.3:
            pairs = [
                [name, b":", self._choose(NAMES)]
                for name in self._random.sample(NAMES, self._below(4))
            ]
            members.insert(
                self._below(len(members) + 1),
                [b'"__metadata__"', b":", b"{", *_joined(pairs), b"}"],
            )
        spaces = [b" "] * self._choose((0, 0, 0, 1, 6))
        return [b"{", *_joined(members), b"}", *spaces], offset

    def _entry(self, begin: int) -> tuple[list[bytes], int]:
        dtype = self._choose(DTYPES)
        shape = [
            self._choose((0, 1, 1, 2, 2, 3, 4, 8)) for _ in range(self._choose((0, 1, 1, 2, 2, 3)))
        ]
        bits = BITS[dtype]
        for dim in shape:
            bits *= dim
        if bits % 8:
            shape.append(4)
            bits *= 4
        end = begin + bits // 8
        fields = [
            [b'"dtype"', b":", b'"%b"' % dtype],
            [b'"shape"', b":", b"[", *_joined([[b"%d" % dim] for dim in shape]), b"]"],
            [b'"data_offsets"', b":", b"[", b"%d" % begin, b",", b"%d" % end, b"]"],
        ]
        if self._random.random() < 0.3:
            self._random.shuffle(fields)
        return [b"{", *_joined(fields), b"}"], end


def _joined(parts: Sequence[Sequence[bytes]]) -> list[bytes]:
    tokens: list[bytes] = []
    for part in parts:
        if tokens:
            tokens.append(b",")
        tokens.extend(part)
    return tokens


def _tokens(raw: bytes) -> tuple[list[bytes], int]:
    """Return the tokens of any file's header, valid or not, and the bytes of its data."""
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + min(length, len(raw))]
    return _TOKEN.findall(text), min(len(raw) - 8 - len(text), MOST_DATA) if len(raw) >= 8 else 0
