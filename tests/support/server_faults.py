"""Faults of web servers, injected into the answers of correct ones."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from support.servers import KEEP_ALIVE, Answer, Asked, head, part, reply

_PIECE = 2**16


@dataclass(frozen=True, slots=True)
class Whole:
    """One correct answer, taken apart."""

    asked: Asked
    status: int
    lines: tuple[str, ...]
    body: bytes

    @classmethod
    def of(cls, asked: Asked, answer: Iterable[bytes]) -> Whole:
        """Return the parts of an answer that has a length."""
        data = b"".join(chunk for chunk in answer if chunk is not KEEP_ALIVE)
        top, _, body = data.partition(b"\r\n\r\n")
        first, *lines = top.decode("latin-1").split("\r\n")
        return cls(asked, int(first.split(" ")[1]), tuple(lines), body)

    @property
    def data(self) -> bytes:
        """All of it, as it is sent."""
        return head(self.status, *self.lines) + self.body

    @property
    def has_file(self) -> bool:
        """True if the body is a file's, or a part of it."""
        is_api = self.asked.target.startswith("/api/models/")
        return self.status in (200, 206) and not is_api and self.body != b""

    def set(self, name: str, value: str | None) -> Whole:
        """Return the answer with another value of a field; None removes it."""
        kept = [line for line in self.lines if not line.lower().startswith(f"{name.lower()}:")]
        return replace(self, lines=(*kept, *([f"{name}: {value}"] if value is not None else [])))

    def moved(self, by: int, length: int) -> Whole:
        """Return the answer with another Content-Range: ``length`` bytes, ``by`` further on."""
        if self.status != 206:
            return self
        said = next(line for line in self.lines if line.lower().startswith("content-range:"))
        place, _, total = said.partition("bytes ")[2].partition("/")
        begin = max(0, int(place.partition("-")[0]) + by)
        return self.set("Content-Range", f"bytes {begin}-{begin + length - 1}/{total}")

    def sent(self) -> list[bytes]:
        """Return the answer again."""
        return [self.data, KEEP_ALIVE]


Fault = Callable[[Whole, Random], Iterable[bytes]]


def _failure(status: int, *lines: str) -> Fault:
    return lambda *_: reply(status, *lines, body=b"a fault")


def _cut(whole: Whole, random: Random) -> Iterable[bytes]:
    return [whole.data[: random.randrange(len(whole.data))]]


def _short(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send fewer bytes than were requested, and say so, as a server may."""
    if whole.status != 206 or len(whole.body) < 2:
        return whole.sent()
    length = random.randrange(1, len(whole.body))
    shorter = whole.moved(0, length).set("Content-Length", str(length))
    return replace(shorter, body=whole.body[:length]).sent()


def _coded(whole: Whole, _: Random) -> Iterable[bytes]:
    """Compress what has to be sent as it is."""
    packed = gzip.compress(whole.body, 1)
    coded = whole.set("Content-Encoding", "gzip").set("Content-Length", str(len(packed)))
    return replace(coded, body=packed).sent()


def _wrong_byte(whole: Whole, random: Random) -> Iterable[bytes]:
    at = random.randrange(len(whole.body))
    other = bytes([whole.body[at] ^ random.randint(1, 255)])
    return replace(whole, body=whole.body[:at] + other + whole.body[at + 1 :]).sent()


def _other_bytes(whole: Whole, _: Random) -> Iterable[bytes]:
    """Send another version of the file under the same validator."""
    return replace(whole, body=whole.body.translate(_XOR)).sent()


_XOR = bytes(value ^ 1 for value in range(256))

PASSING: dict[str, Fault] = {
    "cut": _cut,
    "dropped": lambda *_: [],
    "500": _failure(500),
    "429": _failure(429, "Retry-After: 1"),
    "429 of the Hub": _failure(
        429,
        'RateLimit: "resolvers";r=0;t=1',
        'RateLimit-Policy: "fixed window";"resolvers";q=9;w=9',
    ),
    "short": _short,
}
"""Faults that an import survives if they happen once."""
UNDECLARED: dict[str, Fault] = {"wrong byte": _wrong_byte, "other bytes": _other_bytes}
"""Faults that only a declared digest shows."""
FAULTS: dict[str, Fault] = {
    **PASSING,
    **UNDECLARED,
    "403": _failure(403),
    "404": _failure(404),
    "whole file": lambda whole, _: replace(whole.set("Content-Range", None), status=200).sent(),
    "shifted": lambda whole, _: whole.moved(4096, len(whole.body)).sent(),
    "longer": lambda whole, random: [whole.data + random.randbytes(5000), KEEP_ALIVE],
    "coded": _coded,
    "garbage": lambda _, random: [random.randbytes(3000)],
    "other version": lambda whole, random: _other_bytes(whole.set("ETag", '"other"'), random),
}
"""Those that are not `PASSING` may end an import."""
LASTING = frozenset({"other version", "other bytes"})
"""A file that changed stays changed."""
UNSEEN = frozenset({*UNDECLARED, "404"})
"""Faults that a plain web server does not show: it declares no digests, and lists no files."""


class Faults:
    """One fault, at the request ``moment`` of those that it can befall, counted from 0.

    ``lasts``: at all later ones too. Files that changed stay changed, other files do not change.
    Several servers share it. ``seen`` counts the requests, ``struck`` those that it befell.
    """

    def __init__(self, name: str, moment: int, random: Random, *, lasts: bool = False) -> None:
        self._name = name
        self._moment = moment
        self._random = random
        self._lasts = lasts or name in LASTING
        self.seen = self.struck = 0
        self._path: str | None = None
        self._lock = threading.Lock()

    def around(self, answer: Answer) -> Answer:
        """Return the answers of a server with the fault."""

        def faulty(asked: Asked) -> Iterable[bytes]:
            whole = Whole.of(asked, answer(asked))
            if self._strikes(whole):
                return FAULTS[self._name](whole, self._random)
            return whole.sent()

        return faulty

    def _strikes(self, whole: Whole) -> bool:
        of_file = self._name in UNDECLARED or self._name in LASTING
        if of_file and not whole.has_file:
            return False
        path = whole.asked.target.partition("?")[0]
        with self._lock:
            number, self.seen = self.seen, self.seen + 1
            is_due = number == self._moment or (self._lasts and number > self._moment)
            if not is_due:
                return False
            self._path = self._path or path
            if of_file and path != self._path:
                return False
            self.struck += 1
            return True


def versioned(table: Mapping[str, bytes]) -> Answer:
    """Return the answers of a correct server for files by their targets, each with a validator."""
    etags = {name: f'"{hashlib.sha1(data).hexdigest()}"' for name, data in table.items()}  # noqa: S324  # a validator

    def answer(asked: Asked) -> list[bytes]:
        name = asked.target.removeprefix("/").partition("?")[0]
        data = table.get(name)
        if data is None:
            return reply(404, body=b"no such file")
        return part(asked, data, f"ETag: {etags[name]}", "Accept-Ranges: bytes")

    return answer


class Alarm:
    """Calls once when ``after`` bytes are on their way. Several servers share it."""

    def __init__(self, after: int, call: Callable[[], object]) -> None:
        self._left = after
        self._call = call
        self._lock = threading.Lock()

    def around(self, answer: Answer) -> Answer:
        """Return the answers of a server whose bytes count."""

        def counting(asked: Asked) -> Iterator[bytes]:
            for chunk in answer(asked):
                if chunk is KEEP_ALIVE:
                    yield chunk
                else:
                    yield from self._counted(chunk)

        return counting

    def _counted(self, data: bytes) -> Iterator[bytes]:
        for begin in range(0, len(data), _PIECE):
            piece = data[begin : begin + _PIECE]
            with self._lock:
                is_due = 0 <= self._left < len(piece)
                self._left -= len(piece)
            if is_due:
                self._call()
            yield piece
