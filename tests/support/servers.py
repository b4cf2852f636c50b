"""A web server on loopback that sends exactly a test's bytes, and records requests."""

import re
import select
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader

_RANGE = re.compile(r"bytes=(\d+)-(\d+)", re.ASCII)
_SMALLEST_BUFFER = 4096
_TLS_HANDSHAKE = b"\x16"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: ``number`` counts from 0 for each script; field names are in lower case."""

    number: int
    method: str
    target: str
    fields: dict[str, str]
    body: bytes
    connection: int

    @property
    def range(self) -> tuple[int, int] | None:
        """The asked bytes, half-open; None where the whole file was asked for."""
        match = _RANGE.fullmatch(self.fields.get("range", ""))
        return (int(match[1]), int(match[2]) + 1) if match else None


Answer = Callable[[Asked], Iterable[bytes]]


@dataclass
class Script:
    """What a server does until the next script: ``answer`` yields the bytes of each reply.

    Where a reply has no length of its own, the connection is closed behind it. ``asked`` fills as
    requests come; ``sent`` counts the bytes that went out, framing included, and ``sent_to`` those
    to each request.
    """

    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    sent: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ranges(self) -> list[tuple[int, int] | None]:
        return [asked.range for asked in self.asked]

    @property
    def connections(self) -> int:
        return len({asked.connection for asked in self.asked})


class Server:
    """A server on one port of a loopback address.

    Connections are served by threads that end with them.

    With ``counting`` it has the smallest send buffer, so that what it sent is what the client's
    machine took, but for a few kilobytes. That is slow: 2 MB/s.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        context: ssl.SSLContext | None = None,
        *,
        counting: bool = False,
    ) -> None:
        self._listener = socket.create_server((host, 0))
        if counting:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALLEST_BUFFER)
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self._scheme = "http" if context is None else "https"
        self._context = context
        self._script = Script(lambda _: [])
        self._count = 0
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def url(self) -> str:
        return self.at("model.safetensors")

    def at(self, target: str) -> str:
        return f"{self._scheme}://{self.host}:{self.port}/{target}"

    def play(self, answer: Answer | list[bytes]) -> Script:
        """Answer by ``answer`` from now on, or with the same bytes always."""
        self._script = Script(answer if callable(answer) else lambda _: answer)
        return self._script

    def close(self) -> None:
        """Stop listening.

        The thread that accepts ends first: else it could accept a connection of the next server,
        whose listener gets the same file descriptor.
        """
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(300)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self._count += 1
                threading.Thread(
                    target=self._serve, args=(connection, self._count), daemon=True
                ).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError), connection:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as stream:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while request := _request(stream):
                    script = self._script
                    with script.lock:
                        asked = Asked(len(script.asked), *request, number)
                        script.asked.append(asked)
                    if not _reply(connection, script, asked):
                        break


KEEP_ALIVE = b"keep-alive"
"""The last of an answer's chunks, behind a reply with a length: more requests may come."""
WAIT = b"wait"
"""A chunk for 20 ms in which nothing is sent."""


def head(status: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Whatever", *lines, "", ""]).encode("latin-1")


def reply(status: int, *lines: str, body: bytes = b"") -> list[bytes]:
    """Return a whole reply with its length, behind which the connection stays."""
    return [head(status, f"Content-Length: {len(body)}", *lines) + body, KEEP_ALIVE]


def redirect(location: str, status: int = 302) -> list[bytes]:
    return reply(status, f"Location: {location}")


def part(asked: Asked, data: bytes, *lines: str, longest: int | None = None) -> list[bytes]:
    """Return a correct server's answer for ``data``: at most ``longest`` bytes at once."""
    if asked.range is None:
        return reply(200, *lines, body=data)
    begin, end = asked.range
    if begin >= len(data):
        return reply(416, f"Content-Range: bytes */{len(data)}", *lines)
    end = min(end, len(data), end if longest is None else begin + longest)
    return reply(
        206, f"Content-Range: bytes {begin}-{end - 1}/{len(data)}", *lines, body=data[begin:end]
    )


def files(table: dict[str, bytes], *lines: str) -> Answer:
    """Return the answers of a correct server for several files, by their targets."""

    def answer(asked: Asked) -> list[bytes]:
        data = table.get(asked.target.removeprefix("/"))
        return reply(404, body=b"no such file") if data is None else part(asked, data, *lines)

    return answer


def one_after_another(*answers: list[bytes] | Answer) -> Answer:
    """Return an answer that is the first for the first request, and so on; the last is repeated."""

    def answer(asked: Asked) -> Iterable[bytes]:
        one = answers[min(asked.number, len(answers) - 1)]
        return one(asked) if callable(one) else one

    return answer


@contextmanager
def server(
    host: str = "127.0.0.1", context: ssl.SSLContext | None = None, *, counting: bool = False
) -> Iterator[Server]:
    running = Server(host, context, counting=counting)
    try:
        yield running
    finally:
        running.close()


def _request(stream: BufferedReader) -> tuple[str, str, dict[str, str], bytes] | None:
    """Return method, target, fields and body of the next request; None if there is none."""
    head, line = b"", b""
    while line != b"\r\n":
        if head == b"" and stream.peek(1)[:1] == _TLS_HANDSHAKE:
            return None
        line = stream.readline()
        if not line:
            return None
        head += line
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.split(": ", 1) for line in lines if line)
    fields = {name.lower(): value for name, value in pairs}
    length = int(fields.get("content-length", "0"))
    body = stream.read(length)
    return (method, target, fields, body) if len(body) == length else None


def _reply(connection: socket.socket, script: Script, asked: Asked) -> bool:
    """Send an answer; return True if more requests may come."""
    for chunk in script.answer(asked):
        if chunk is KEEP_ALIVE:
            return True
        if chunk is WAIT:
            if select.select([connection], [], [], 0.02)[0]:
                return False  # the client left
            continue
        view = memoryview(chunk)
        while view:
            count = connection.send(view)
            script.sent += count
            script.sent_to[asked.number] += count
            view = view[count:]
    return False
