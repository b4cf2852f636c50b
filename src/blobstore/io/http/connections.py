"""Connections as httpcore2 asks for them, checked: to whom, how many bytes, for how long.

httpcore2 (the lower half of httpx2: connections, their pool, HTTP/1.1 by h11) opens connections
through a network backend. `CheckedBackend` resolves a name itself, checks every address, and
connects to the address that it checked, so that a name can't resolve to something else a moment
later (DNS rebinding). A kept-alive connection is checked again before each request.

httpcore2 passes nothing of a request down to its connection, so the `RequestContext` is kept for
the thread that makes the request and reads its reply.

`Framing` finds the end of a reply and the lengths of its chunks where h11 is too lax. h11 takes 20
hexadecimal digits for a chunk's length. A length of 2⁶³ and more wraps around elsewhere (RFC 9112
section 7.1: a recipient has to prevent overflow), so such a reply is refused. And bytes behind the
end of a reply would be taken for the next one (section 9.2), so such a connection is not kept.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blobstore.errors import RemoteError, UsageError
from blobstore.io.budget import RequestLimits
from blobstore.io.http.certificates import Certificates
from blobstore.io.http.direct import MAX_HEAD, Came, DirectBody, head_end, without_body
from blobstore.io.http.web_addresses import WebAddress, is_link_local

if TYPE_CHECKING:
    import ssl

    import httpcore2


_LENGTH = re.compile(rb"[0-9A-Fa-f]{1,20}")
_LIMIT = 2**63
_HEAD, _CHUNKS, _BODY = range(3)


class Framing:
    """Follows one reply through its bytes; ``overrun``: some came after its Content-Length."""

    def __init__(self) -> None:
        self.overrun = False
        self._state = _HEAD
        self._line = b""
        self._lines: list[bytes] = []
        self._skip = 0
        self._left: int | None = None

    @property
    def in_head(self) -> bool:
        """True until the head has come to its end."""
        return self._state == _HEAD

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; return False when the length of a chunk is 2⁶³ or more."""
        at = 0
        while at < len(data) and self._state != _BODY:
            if self._skip:
                passed = min(self._skip, len(data) - at)
                self._skip -= passed
                at += passed
                continue
            end = data.find(b"\n", at)
            self._line += data[at : end if end >= 0 else len(data)]
            if end < 0:
                return True
            at = end + 1
            line, self._line = self._line.rstrip(b"\r"), b""
            if self._state == _HEAD:
                self._read_head_line(line)
            elif line and not self._read_length(line):
                return False
        if self._left is not None:
            self._left -= len(data) - at
            self.overrun = self._left < 0
        return True

    def _read_head_line(self, line: bytes) -> None:
        if line:
            self._lines.append(line.lower())
            return
        status, *lines = self._lines or [b""]
        self._lines = []
        if status.partition(b" ")[2].startswith(b"1"):
            return  # an interim reply: another head follows (RFC 9110 section 15.2)
        fields = dict(line.partition(b":")[::2] for line in lines)
        self._state = _CHUNKS if b"transfer-encoding" in fields else _BODY
        length = fields.get(b"content-length", b"").strip()
        if self._state == _BODY and length.isdigit():
            self._left = int(length)

    def _read_length(self, line: bytes) -> bool:
        digits = _LENGTH.match(line)
        length = int(digits[0], 16) if digits else 0  # h11 refuses an invalid length
        self._skip = length
        if length == 0:
            self._state = _BODY
        return length < _LIMIT


_HEAD_READ = 4096
_UNCHECKED_S = 1.0
"""How long a connection that brought weights is checked only when it is used. The library checks
all idle connections for each request, and each check gives the interpreter's lock away."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A connection's view of the request that is made on it.

    ``public_only``: a public server redirected here, so only public addresses are allowed.
    """

    address: WebAddress
    limits: RequestLimits
    public_only: bool
    from_server: bool
    has_credentials: bool
    direct: bool = False


class CheckedBackend:
    """An ``httpcore2.NetworkBackend``. TLS connections trust ``certificates``."""

    def __init__(self, is_public: Callable[[str], bool], certificates: Certificates) -> None:
        self._is_public = is_public
        self.certificates = certificates
        self._local = threading.local()

    @property
    def context(self) -> RequestContext:
        """The request of the current thread."""
        context: RequestContext = self._local.context
        return context

    @contextmanager
    def on(self, context: RequestContext) -> Iterator[None]:
        """Count the bytes that this thread takes within the block for ``context``."""
        self._local.context = context
        try:
            yield
        finally:
            del self._local.context

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002  # the interface's
        socket_options: Iterable[Any] | None = None,
    ) -> _Connection:
        """Connect to the first of the allowed addresses of ``host`` that answers."""
        import httpcore2

        failure: Exception | None = None
        for address in self._allowed(_resolve(host, port)):
            try:
                stream = httpcore2.SyncBackend().connect_tcp(
                    address, port, self.seconds(timeout), None, socket_options or ()
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
            else:
                return _Connection(
                    self,
                    stream,
                    public=self._is_public(address),
                    link_local=is_link_local(address),
                )
        raise failure or httpcore2.ConnectError(f"{host} has no address")

    def sleep(self, seconds: float) -> None:
        """Wait. Part of the interface; not called, because retries are ours."""
        self.context.limits.sleep(seconds)

    def _allowed(self, addresses: list[str]) -> list[str]:
        if self.context.public_only:
            addresses = [address for address in addresses if self._is_public(address)]
            if not addresses:
                raise not_public(self.context.address)
        if self.context.from_server:
            addresses = [address for address in addresses if not is_link_local(address)]
            if not addresses:
                raise link_local(self.context.address)
        return addresses

    def seconds(self, timeout: float | None) -> float:
        """Return how long to wait for the next byte: ``timeout``, or less."""
        left = self.context.limits.seconds_left(self.context.address)
        return left if timeout is None else min(timeout, left)


class _Connection:
    """An ``httpcore2.NetworkStream``: one connection, plain or TLS, that counts what is read."""

    def __init__(
        self,
        backend: CheckedBackend,
        stream: httpcore2.NetworkStream,
        *,
        public: bool,
        link_local: bool,
    ) -> None:
        self._backend = backend
        self._stream = stream
        self._public = public
        self._link_local = link_local
        self._framing: Framing | None = None
        self._body: DirectBody | None = None
        self._is_begun = False
        self._is_http = False
        self._unchecked_until = 0.0

    @property
    def _is_unchecked(self) -> bool:
        return time.monotonic() < self._unchecked_until

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        import httpcore2

        context = self._backend.context
        if context.public_only and not self._public:
            raise not_public(context.address)
        if context.from_server and self._link_local:
            raise link_local(context.address)
        if context.has_credentials and self._public and context.address.scheme == "http":
            raise UsageError(
                f"{context.address}: a token is not sent over the public internet without TLS",
                path=str(context.address),
                hint="Use https, or no token.",
            )
        if self._is_unchecked and self._stream.get_extra_info("is_readable"):
            raise httpcore2.ReadError("it closed the connection, or sent bytes behind a reply")
        self._unchecked_until = 0.0
        context.limits.use(self._stream.get_extra_info("socket"))
        self._framing = self._body = None
        self._is_begun = False
        self._stream.write(buffer, self._backend.seconds(timeout))

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return up to ``max_bytes`` bytes, within the request's limits; none at the end.

        Of a request that is ``direct`` the first are a whole head, and the body may be missing.
        """
        data = self._receive(max_bytes, timeout)
        if not self._backend.context.direct or self._framing is None or self._is_begun:
            return self._checked(data)
        while data and head_end(data) is None and len(data) < MAX_HEAD:
            more = self._receive(max_bytes, timeout)
            data += more
            if not more:
                break
        self._is_begun = True
        if (parted := without_body(data)) is not None:
            data, self._body = parted
        return self._checked(data)

    def _receive(self, max_bytes: int, timeout: float | None) -> bytes:
        import httpcore2

        context = self._backend.context
        if context.limits.left <= 0:
            raise RemoteError(
                f"{context.address} sends more than was asked for"
                f" ({context.limits.taken:,} bytes with its reply's head)",
                rule="R1",
                path=str(context.address),
            )
        # A head may come with a part of a body that will not be read.
        longest = _HEAD_READ if self._framing is None or self._framing.in_head else max_bytes
        data = self._stream.read(min(longest, context.limits.left), self._backend.seconds(timeout))
        if self._framing is None:
            if not data:
                raise httpcore2.ReadError("it closed the connection without an answer")
            self._framing = Framing()
            self._is_http = b"HTTP/".startswith(data[:5])  # which may have come in part
        if not data and self._is_http and self._framing.in_head:
            raise httpcore2.ReadError("it closed the connection within the head of an answer")
        context.limits.take(len(data))
        return data

    def _checked(self, data: bytes) -> bytes:
        if self._framing is not None and not self._framing.feed(data):
            raise self._backend.context.address.refuse(
                "answers with a chunk of 2⁶³ bytes or more", "R1"
            )
        return data

    def readinto(self, buffer: memoryview, timeout: float, came: Came, report: int) -> None:
        """Fill ``buffer`` with the next bytes of a body that the library does not see.

        Raises: as `DirectBody.into`, in httpcore2's words.
        """
        import httpcore2

        body = self._body
        if body is None or len(buffer) > body.left:
            raise ValueError("these bytes are not of this connection's body")
        connection = self._stream.get_extra_info("socket")
        try:
            body.into(
                buffer,
                connection,
                self._backend.context.limits,
                lambda: self._backend.seconds(timeout),
                came,
                report,
            )
        except TimeoutError as error:
            raise httpcore2.ReadTimeout(error) from error
        except OSError as error:
            raise httpcore2.ReadError(error) from error
        self._unchecked_until = time.monotonic() + _UNCHECKED_S

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,  # noqa: ARG002  # the pool's, which trusts nothing
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> _Connection:
        import httpcore2

        try:
            context = self._backend.certificates.context
            stream = self._stream.start_tls(
                context, server_hostname, self._backend.seconds(timeout)
            )
        except (ValueError, OSError) as error:  # a name that TLS can't send; broken certificates
            self.close()
            raise httpcore2.ConnectError(error) from error
        return _Connection(self._backend, stream, public=self._public, link_local=self._link_local)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        """Return a property of the connection; ``public``: whether the peer's address is public.

        ``body``: the `DirectBody` of its last reply, or None.

        A connection whose last reply went beyond its end is ``is_readable``, like one with unread
        bytes: neither is used again.
        """
        if info == "public":
            return self._public
        if info == "body":
            return self._body
        if info == "is_readable" and self._framing is not None and self._framing.overrun:
            return True
        if info == "is_readable" and self._is_unchecked:
            return False
        return self._stream.get_extra_info(info)


def link_local(address: WebAddress) -> RemoteError:
    """Return the error of a redirect to a link-local address."""
    return address.refuse("has a link-local address, and a server redirected to it")


def not_public(address: WebAddress) -> RemoteError:
    """Return the error of a redirect that leads from a public server into a private network."""
    return address.refuse("is in a private network, and a public server redirected to it")


def _resolve(host: str, port: int) -> list[str]:
    import httpcore2

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore2.ConnectError(error) from error
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
