"""Faults of web servers, injected into the answers of correct ones."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from support.servers import KEEP_ALIVE, WAIT, Answer, Asked, head, part, reply

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
    def head(self) -> bytes:
        """The head as it is sent."""
        return head(self.status, *self.lines)

    @property
    def has_file(self) -> bool:
        """True if the body is a file's, or a part of it."""
        is_api = self.asked.target.startswith("/api/models/")
        return self.status in (200, 206) and not is_api and self.body != b""

    def set(self, name: str, value: str | None) -> Whole:
        """Return the answer with another value of a field; None removes it."""
        kept = [line for line in self.lines if not line.lower().startswith(f"{name.lower()}:")]
        return replace(self, lines=(*kept, *([f"{name}: {value}"] if value is not None else [])))

    def sent(self) -> list[bytes]:
        """Return the answer again."""
        return [self.head + self.body, KEEP_ALIVE]


Fault = Callable[[Whole, Random], Iterable[bytes]]


def _cut(whole: Whole, random: Random) -> Iterable[bytes]:
    return [(whole.head + whole.body)[: random.randrange(len(whole.head) + len(whole.body))]]


def _cut_late(whole: Whole, random: Random) -> Iterable[bytes]:
    missing = random.randint(1, max(1, min(100, len(whole.body))))
    return [whole.head + whole.body[:-missing]]


def _dropped(whole: Whole, random: Random) -> Iterable[bytes]:
    return []


def _failure(status: int, *lines: str) -> Fault:
    return lambda *_: reply(status, *lines, body=b"a fault")


def _slow(whole: Whole, random: Random) -> Iterator[bytes]:
    yield from [WAIT] * random.randrange(10)
    data = whole.head + whole.body
    step = max(1, len(data) // 8)
    for begin in range(0, len(data), step):
        yield data[begin : begin + step]
        yield WAIT
    yield KEEP_ALIVE


def _short(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send fewer bytes than were requested, and say so, as a server may."""
    if whole.status != 206 or len(whole.body) < 2:
        return whole.sent()
    begin, _, total = _place(whole)
    length = random.randrange(1, len(whole.body))
    said = f"bytes {begin}-{begin + length - 1}/{total}"
    shorter = whole.set("Content-Range", said).set("Content-Length", str(length))
    return replace(shorter, body=whole.body[:length]).sent()


def _whole_file(whole: Whole, random: Random) -> Iterable[bytes]:
    """Ignore the range."""
    return replace(whole.set("Content-Range", None), status=200).sent()


def _shifted(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send other bytes than were requested."""
    if whole.status != 206:
        return whole.sent()
    begin, end, total = _place(whole)
    by = random.choice([-1, 1, 4096])
    said = f"bytes {max(0, begin + by)}-{max(0, end - 1 + by)}/{total}"
    return whole.set("Content-Range", said).sent()


def _longer(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send more bytes than the length says."""
    return [whole.head + whole.body + random.randbytes(random.randint(1, 5000)), KEEP_ALIVE]


def _other_total(whole: Whole, random: Random) -> Iterable[bytes]:
    if whole.status != 206:
        return whole.set("Content-Length", str(len(whole.body) + 1)).sent()
    begin, end, total = _place(whole)
    said = f"bytes {begin}-{end - 1}/{max(end, total + random.choice([-1, 1, 10**9]))}"
    return whole.set("Content-Range", said).sent()


def _cut_chunks(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send chunks, and stop before the last one."""
    body = whole.body[: random.randrange(len(whole.body) + 1)]
    return [whole.set("Content-Length", None).set("Transfer-Encoding", "chunked").head] + (
        [b"%x\r\n%s\r\n" % (len(body), body)] if body else []
    )


def _coded(whole: Whole, random: Random) -> Iterable[bytes]:
    """Compress what has to be sent as it is."""
    packed = gzip.compress(whole.body, 1)
    coded = whole.set("Content-Encoding", "gzip").set("Content-Length", str(len(packed)))
    return replace(coded, body=packed).sent()


def _loop(whole: Whole, random: Random) -> Iterable[bytes]:
    return reply(302, f"Location: {whole.asked.target}")


def _nowhere(whole: Whole, random: Random) -> Iterable[bytes]:
    return reply(302, "Location: http://127.0.0.1:1/")


def _garbage(whole: Whole, random: Random) -> Iterable[bytes]:
    return [random.randbytes(random.randint(1, 3000))]


def _wrong_byte(whole: Whole, random: Random) -> Iterable[bytes]:
    if not whole.body:
        return whole.sent()
    at = random.randrange(len(whole.body))
    other = bytes([whole.body[at] ^ random.randint(1, 255)])
    return replace(whole, body=whole.body[:at] + other + whole.body[at + 1 :]).sent()


def _zeros(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send zeros for the end of the body, as a server with a damaged disk does."""
    if not any(whole.body):
        return whole.sent()
    begin = random.randrange(len(whole.body))
    return replace(whole, body=whole.body[:begin] + bytes(len(whole.body) - begin)).sent()


def _other_version(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send another version of the file, which has a validator of its own."""
    if "if-match" in whole.asked.fields:
        return reply(412)
    return _other_bytes(whole.set("ETag", '"another"'), random)


def _other_bytes(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send another version of the file under the same validator."""
    return replace(whole, body=whole.body.translate(_XOR)).sent()


def _other_etag(whole: Whole, random: Random) -> Iterable[bytes]:
    """Send another validator for the same bytes, as one of several servers may."""
    return whole.set("ETag", random.choice(['"x"', 'W/"x"', None])).sent()


_XOR = bytes(value ^ 1 for value in range(256))

PASSING: dict[str, Fault] = {
    "cut": _cut,
    "cut late": _cut_late,
    "dropped": _dropped,
    "cut chunks": _cut_chunks,
    "500": _failure(500),
    "502": _failure(502),
    "503, come again": _failure(503, "Retry-After: 1"),
    "429": _failure(429, "Retry-After: 1"),
    "429 of the Hub": _failure(
        429,
        'RateLimit: "resolvers";r=0;t=1',
        'RateLimit-Policy: "fixed window";"resolvers";q=9;w=9',
    ),
    "slow": _slow,
    "short": _short,
}
"""Faults that an import survives if they happen once."""
REFUSED: dict[str, Fault] = {
    "403": _failure(403),
    "404": _failure(404),
    "412": _failure(412),
    "416": _failure(416),
    "whole file": _whole_file,
    "shifted": _shifted,
    "longer": _longer,
    "other total": _other_total,
    "coded": _coded,
    "loop": _loop,
    "nowhere": _nowhere,
    "garbage": _garbage,
    "other ETag": _other_etag,
    "other version": _other_version,
}
"""Faults that may end an import."""
UNDECLARED: dict[str, Fault] = {
    "wrong byte": _wrong_byte,
    "zeros": _zeros,
    "other bytes": _other_bytes,
}
"""Faults that only a declared digest shows."""
LASTING = frozenset({"other version", "other bytes"})
"""A file that changed stays changed."""
UNSEEN = frozenset({*UNDECLARED, "404"})
"""Faults that a plain web server does not show: it declares no digests, and lists no files."""
FAULTS = PASSING | REFUSED | UNDECLARED


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
        if asked.fields.get("if-match", etags[name]) not in (etags[name], "*"):
            return reply(412)
        return part(asked, data, f"ETag: {etags[name]}", "Accept-Ranges: bytes")

    return answer


class Alarm:
    """Calls when ``after`` bytes are on their way, once or each time. Several servers share it."""

    def __init__(self, after: int, call: Callable[[], object], *, repeats: bool = False) -> None:
        self._again = after if repeats else None
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
                if is_due and self._again is not None:
                    self._left = self._again
            if is_due:
                self._call()
            yield piece


def _place(whole: Whole) -> tuple[int, int, int]:
    """Return begin, end and total of a partial answer."""
    said = next(line for line in whole.lines if line.lower().startswith("content-range:"))
    place, _, total = said.partition("bytes ")[2].partition("/")
    begin, _, last = place.partition("-")
    return int(begin), int(last) + 1, int(total)
