"""Inputs for headers.py: valid files from a grammar, mutated as tokens and as bytes.

Everything follows from a seed. Valid files are made anew all the time, so that no run ends with a
fixed set of templates; a mutated file that was accepted may become a template itself, so that
mutations add up.
"""

import math
import random
import re
import struct
from collections.abc import Sequence
from typing import TypeVar

from blobstore.formats.dtypes import DType

T = TypeVar("T")

MOST_DATA = 4096
DATA = random.Random(0).randbytes(MOST_DATA)
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|\s+|.', re.DOTALL)
MOST_TOKENS = 400
BITS = {dtype.value.encode(): dtype.bits for dtype in DType}
DTYPES = tuple(BITS)

# Strings, with their quotes. Some are equal after unescaping, some are no UTF-8, some no JSON.
NAMES = (
    b'"a"', b'"b"', b'""', b'"w"', b'"model.layers.0.mlp.up_proj.weight"', b'"lm_head.weight"',
    b'"x.scale"', b'" "', '"é"'.encode(), '"😀"'.encode(), '"\u2028"'.encode(), b'"<&>"', b'"\x7f"',
    b'"dtype"', b'"shape"',
)  # fmt: skip
ODD_STRINGS = (
    rb'"\u0061"', rb'"\u00e9"', rb'"\ud83d\ude00"', rb'"\ud83d"', rb'"\ude00\ud83d"', rb'"\u0000"',
    rb'"\"\\\/\b\f\n\r\t"', rb'"\x"', rb'"\u12"', rb'"\u 061"', rb'"\u005f_metadata__"',
    rb'"\u0064type"', b'"__metadata__"', b'"__metadata__\x00"', b'"\x00"', b'"\n"', b'"\x1f"',
    b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xe2\x80"', b"'a'",
    b'"data_offsets"', b'"Dtype"', b'"f32"', b'"F32 "', b'"F8"', b'"F8_E4M3FN"', b'"F4"',
    b'"F6_E2M3"', b'"C64"', b'"C128"', b'"' + b"n" * 300 + b'"', b'"\\', b'"',
)  # fmt: skip
NUMBERS = (
    b"0", b"1", b"2", b"3", b"4", b"7", b"8", b"9", b"16", b"64", b"-0", b"-1", b"0.0", b"1.0",
    b"1e0", b"1E+2", b"1e-1", b"01", b"00", b"+1", b"1.", b".5", b"1e", b"-", b"0x1", b"1_0",
    b"\xd9\xa1", b"NaN", b"Infinity", b"-Infinity", b"1e309", b"-1e999", b"2147483647",
    b"2147483648", b"4294967295", b"4294967296", b"9007199254740993", b"1152921504606846976",
    b"2305843009213693951", b"2305843009213693952", b"4611686018427387904", b"9223372036854775807",
    b"9223372036854775808", b"18446744073709551615", b"18446744073709551616",
    b"-9223372036854775809", b"340282366920938463463374607431768211456", b"0e999", b"1e-999",
    b"1.7976931348623157e308", b"1.7976931348623158e308", b"-1.79e308", b"1e308", b"1" + b"0" * 308,
    b"1" + b"0" * 309, b"9" * 400,
)  # fmt: skip
VALUES = (
    b"null", b"true", b"false", b"[]", b"{}", b"[0]", b"[1,2]", b"[0,0,0]", b"[[0,1]]", b'{"a":1}',
    b'{"a":1,"a":1}', b'{"F32":null}', b'{"U8":{}}', b'["U8",[1],[0,1]]', b'["F32",[0],[0,0]]',
    b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', b"[" * 63 + b"]" * 63,
    b"[" * 66 + b"]" * 66, b'{"a":' * 70 + b"1" + b"}" * 70, b"[" * 130 + b"]" * 130, b"[" * 200,
    b"nul", b"undefined", b"/**/1", b"1,", b",",
)  # fmt: skip
SPACES = (
    b" ", b"\n", b"\t", b"\r", b"  \r\n\t", b"\x0b", b"\x0c", b"\x00", b"\xc2\xa0", b"\xef\xbb\xbf",
    b"\xe2\x80\x83", b"//", b"\x1a",
)  # fmt: skip
MARKS = (b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"-", b".", b"e")
POOLS = (NAMES, ODD_STRINGS, NUMBERS, NUMBERS, VALUES, SPACES, MARKS)
LENGTHS = (0, 1, 7, 8, 2**31, 2**32, 2**63, 2**64 - 1, 99_999_999, 100_000_000, 100_000_001)
ENTRY = (
    b"{", b'"dtype"', b":", b'"U8"', b",", b'"shape"', b":", b"[", b"]", b",", b'"data_offsets"',
    b":", b"[", b"0", b",", b"1", b"]", b"}",
)  # fmt: skip


class Inputs:
    """An endless sequence of files, mostly one to three mutations away from a valid one."""

    def __init__(self, seed: str, files: Sequence[bytes]) -> None:
        self.random = random.Random(seed)
        self.templates = [self.valid() for _ in range(64)] + [tokens_of(file) for file in files]
        self.last: tuple[list[bytes], int] = self.templates[0]

    def next(self) -> bytes:
        tokens, data_size = self.choose(self.templates)
        tokens = tokens.copy()
        for _ in range(self.choose((0, 1, 1, 1, 1, 2, 3))):
            self.mutate(tokens)
        if self.random.random() < 0.03:
            data_size += self.choose((-8, -1, 1, 8))
        self.last = (tokens, min(max(data_size, 0), MOST_DATA))
        return self.file(b"".join(tokens), self.last[1])

    def keep(self) -> None:
        """Take the last file as a template, in the place of another."""
        if len(self.last[0]) <= MOST_TOKENS:
            self.templates[self.below(len(self.templates))] = self.last

    def renew(self) -> None:
        """Replace a template by a new valid file."""
        self.templates[self.below(len(self.templates))] = self.valid()

    def below(self, stop: int) -> int:
        return int(self.random.random() * stop)

    def choose(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def file(self, text: bytes, data_size: int) -> bytes:
        """Return the file of a text, a few with wrong bytes, cut, or with a wrong length."""
        kind = self.below(100)
        if kind < 6:
            changed = bytearray(text)
            for _ in range(self.choose((1, 1, 2, 4))):
                place = self.below(len(changed) + 1)
                wrong = self.choose((b"", bytes((self.below(256),))))
                changed[place : place + self.choose((0, 1, 1, 16))] = wrong
            text = bytes(changed)
        length = len(text)
        if kind == 98:
            length = self.choose((*LENGTHS, max(length + self.choose((-8, -1, 1, 8)), 0)))
        raw = struct.pack("<Q", length) + text + DATA[:data_size]
        return raw[: self.below(len(raw) + 1)] if kind == 99 else raw

    def mutate(self, tokens: list[bytes]) -> None:
        """Change a token, mostly; or insert, remove, swap, double, or take a few from a file."""
        if not tokens:
            tokens.append(b"{")
        place, kind = self.below(len(tokens)), self.below(28)
        if kind < 15:
            while tokens[place] in MARKS and self.below(4):  # without marks all is lost
                place = self.below(len(tokens))
            tokens[place] = self.alike(tokens[place])
        elif kind < 21:
            self.add_field(tokens, place)
        elif kind < 24:
            new = self.choose(self.choose((*POOLS, SPACES[:5])))
            tokens[place : place + self.below(2)] = [new]
        elif kind == 24:
            del tokens[place : place + self.choose((1, 2, 3, 4, 20))]
        elif kind == 25:
            other = self.below(len(tokens))
            tokens[place], tokens[other] = tokens[other], tokens[place]
        else:
            others = tokens if kind == 26 else self.choose(self.templates)[0]
            start = self.below(len(others) + 1)
            tokens[place:place] = others[start : start + self.choose((1, 2, 4, 20))]

    def alike(self, token: bytes) -> bytes:
        """Return another token for a place: mostly one of the same kind, such as another number."""
        kind = self.random.random()
        if kind < 0.08:
            return self.choose(VALUES)
        if token.isdigit() and len(token) < 30 and kind < 0.6:
            return b"%d" % (int(token) + self.choose((-8, -1, -1, 1, 1, 8)))
        if token[:1] == b'"':
            if kind > 0.5:
                return b'"%b"' % self.choose(DTYPES)
            return self.choose(NAMES if kind < 0.3 else ODD_STRINGS)
        return self.choose(MARKS if token in MARKS else NUMBERS)

    def add_field(self, tokens: list[bytes], place: int) -> None:
        """Put a member before the next closing brace: an unknown field, a tensor, metadata."""
        while place < len(tokens) and tokens[place] != b"}":
            place += 1
        comma = (b",",) if place and tokens[place - 1] != b"{" else ()
        kind = self.below(4)
        value = (self.choose((VALUES, NUMBERS, NAMES)[kind - 1]),) if kind else ENTRY
        name = self.choose(NAMES if kind else ODD_STRINGS)
        tokens[place:place] = (*comma, name, b":", *value)

    def valid(self) -> tuple[list[bytes], int]:
        members: list[list[bytes]] = []
        offset = 0
        for name in self.random.sample(NAMES, self.choose((0, 1, 1, 2, 2, 3, 5))):
            entry, end = self.entry(offset)
            if end <= MOST_DATA:
                members.append([name, b":", *entry])
                offset = end
        if self.random.random() < 0.3:
            self.random.shuffle(members)
        if self.random.random() < 0.3:
            names = self.random.sample(NAMES, self.below(4))
            pairs = joined([[name, b":", self.choose(NAMES)] for name in names])
            metadata = [b'"__metadata__"', b":", b"{", *pairs, b"}"]
            members.insert(self.below(len(members) + 1), metadata)
        spaces = [b" "] * self.choose((0, 0, 0, 1, 6))
        return [b"{", *joined(members), b"}", *spaces], offset

    def entry(self, begin: int) -> tuple[list[bytes], int]:
        dtype = self.choose(DTYPES)
        rank = self.choose((0, 1, 1, 2, 2, 3))
        shape = [self.choose((0, 1, 1, 2, 2, 3, 4, 8)) for _ in range(rank)]
        if BITS[dtype] * math.prod(shape) % 8:
            shape.append(4)
        end = begin + BITS[dtype] * math.prod(shape) // 8
        fields = [
            [b'"dtype"', b":", b'"%b"' % dtype],
            [b'"shape"', b":", b"[", *joined([[b"%d" % dim] for dim in shape]), b"]"],
            [b'"data_offsets"', b":", b"[", b"%d" % begin, b",", b"%d" % end, b"]"],
        ]
        if self.random.random() < 0.3:
            self.random.shuffle(fields)
        return [b"{", *joined(fields), b"}"], end


def joined(parts: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return the tokens of all parts, with commas between them."""
    return [token for part in parts for token in (b",", *part)][1:]


def tokens_of(raw: bytes) -> tuple[list[bytes], int]:
    """Return the tokens of any file's header, valid or not, and the bytes of its data."""
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + min(length, len(raw))]
    return TOKEN.findall(text), min(max(len(raw) - 8 - len(text), 0), MOST_DATA)
