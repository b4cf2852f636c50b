"""Faults of web servers, injected into the answers of correct ones."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from support.servers import KEEP_ALIVE, Answer, Asked, head, part, reply


@dataclass(frozen=True, slots=True)
class Whole:
    """One correct answer, taken apart."""

    status: int
    lines: tuple[str, ...]
    body: bytes

    @classmethod
    def of(cls, answer: Iterable[bytes]) -> Whole:
        data = b"".join(chunk for chunk in answer if chunk is not KEEP_ALIVE)
        top, _, body = data.partition(b"\r\n\r\n")
        first, *lines = top.decode("latin-1").split("\r\n")
        return cls(int(first.split(" ")[1]), tuple(lines), body)

    @property
    def data(self) -> bytes:
        return head(self.status, *self.lines) + self.body

    def field(self, name: str) -> str:
        """Return the value of a field; it is empty for one that is absent."""
        values = dict(line.split(": ", 1) for line in self.lines)
        return values.get(name, "")

    def but(self, body: bytes | None = None, **fields: str) -> list[bytes]:
        """Return the answer with other values of fields, and another body of that length."""
        names = {name.replace("_", "-"): value for name, value in fields.items()}
        names["Content-Length"] = str(len(self.body if body is None else body))
        kept = [line for line in self.lines if line.partition(":")[0] not in names]
        lines = (*kept, *[f"{name}: {value}" for name, value in names.items() if value])
        other = replace(self, lines=lines, body=self.body if body is None else body)
        return [other.data, KEEP_ALIVE]

    def range(self, by: int, length: int) -> str:
        """Return another Content-Range: ``length`` bytes, ``by`` further on."""
        place, _, total = self.field("Content-Range").removeprefix("bytes ").partition("/")
        begin = int(place.partition("-")[0]) + by
        return f"bytes {begin}-{begin + length - 1}/{total}"


Fault = Callable[[Whole, Random], list[bytes]]


def _short(whole: Whole, random: Random) -> list[bytes]:
    """Send fewer bytes than were requested, and say so, as a server may."""
    if whole.status != 206 or len(whole.body) < 2:
        return whole.but()
    length = random.randrange(1, len(whole.body))
    return whole.but(whole.body[:length], Content_Range=whole.range(0, length))


def _shifted(whole: Whole, _: Random) -> list[bytes]:
    return (
        whole.but(Content_Range=whole.range(4096, len(whole.body))) if whole.status == 206 else []
    )


def _wrong_byte(whole: Whole, random: Random) -> list[bytes]:
    at = random.randrange(len(whole.body))
    other = bytes([whole.body[at] ^ random.randint(1, 255)])
    return whole.but(whole.body[:at] + other + whole.body[at + 1 :])


def _other_version(whole: Whole, _: Random) -> list[bytes]:
    return whole.but(bytes(byte ^ 1 for byte in whole.body), ETag='"other"')


PASSING: dict[str, Fault] = {
    "cut": lambda whole, random: [whole.data[: random.randrange(len(whole.data))]],
    "dropped": lambda *_: [],
    "500": lambda *_: reply(500, body=b"a fault"),
    "429": lambda *_: reply(429, "Retry-After: 1", body=b"a fault"),
    "short": _short,
}
"""Faults that an import survives if they happen once."""
FAULTS: dict[str, Fault] = {
    **PASSING,
    "wrong byte": _wrong_byte,
    "404": lambda *_: reply(404, body=b"a fault"),
    "whole file": lambda whole, _: replace(whole, status=200).but(Content_Range=""),
    "shifted": _shifted,
    "longer": lambda whole, random: [whole.data + random.randbytes(5000), KEEP_ALIVE],
    "coded": lambda whole, _: whole.but(gzip.compress(whole.body, 1), Content_Encoding="gzip"),
    "other version": _other_version,
}
"""Those that are not `PASSING` may end an import."""
_OF_FILES = frozenset({"wrong byte", "other version"})
UNSEEN = frozenset({"wrong byte", "404"})
"""Faults that a plain web server does not show: it declares no digests, and lists no files."""


class Faults:
    """One fault, at the request ``moment`` from 0 that it can befall. Several servers share it."""

    def __init__(self, name: str, moment: int, random: Random) -> None:
        self._name = name
        self._moment = moment
        self._random = random
        self._seen = 0
        self.struck: str | None = None
        """The path that it befell."""
        self._lock = threading.Lock()

    def around(self, answer: Answer) -> Answer:
        def faulty(asked: Asked) -> Iterable[bytes]:
            whole = Whole.of(answer(asked))
            if self._strikes(asked, whole):
                return FAULTS[self._name](whole, self._random)
            return [whole.data, KEEP_ALIVE]

        return faulty

    def _strikes(self, asked: Asked, whole: Whole) -> bool:
        path = asked.target.partition("?")[0]
        is_file = whole.status in (200, 206) and whole.body and not path.startswith("/api/models/")
        if self._name in _OF_FILES and not is_file:
            return False
        with self._lock:
            number, self._seen = self._seen, self._seen + 1
            if number == self._moment:
                self.struck = path
                return True
            return self._name == "other version" and path == self.struck


def versioned(table: Mapping[str, bytes]) -> Answer:
    """Return the answers of a correct server for files by their targets, each with a validator."""
    etags = {name: hashlib.sha256(data).hexdigest() for name, data in table.items()}

    def answer(asked: Asked) -> list[bytes]:
        name = asked.target.removeprefix("/").partition("?")[0]
        if name not in table:
            return reply(404, body=b"no such file")
        return part(asked, table[name], f'ETag: "{etags[name]}"')

    return answer


def alarm(after: int, call: Callable[[], object]) -> Callable[[Answer], Answer]:
    """Return a change of several servers' answers that calls when ``after`` bytes were sent."""
    begin, lock = 0, threading.Lock()

    def around(answer: Answer) -> Answer:
        def counting(asked: Asked) -> Iterator[bytes]:
            nonlocal begin
            for chunk in answer(asked):
                with lock:
                    left, begin = after - begin, begin + len(chunk)
                if 0 <= left < len(chunk):
                    yield chunk[:left]
                    call()
                    yield chunk[left:]
                else:
                    yield chunk

        return counting

    return around
