"""Connections as httpcore2's pool asks for them, checked: to which address, how much, how long.

The pool opens connections through a network backend. `CheckedBackend` resolves a name itself,
checks every address (rule R2), and connects to the address that it checked, so that a name can't
resolve to something else a moment later (DNS rebinding). A kept-alive connection is checked again
before each request. httpcore2 passes nothing of a request down to its connection, so the
`RequestContext` is kept for the thread that makes the request and reads its reply.

h11 takes bytes behind the end of a reply for the next one, and chunks of any length (RFC 9112
sections 9.2 and 7.1). So a connection counts the bytes behind the head: `Reply.close` keeps it only
if they are exactly the Content-Length; after chunks it is closed. A chunk of 2⁶³ bytes or more,
whose length wraps around elsewhere, is refused.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from blobstore.errors import RemoteError, UsageError, from_os_error
from blobstore.io.budget import RequestLimits
from blobstore.io.http.web_addresses import RequestTarget, WebAddress, is_link_local

if TYPE_CHECKING:
    import httpcore2

_HEAD_END = re.compile(rb"\n\r?\n")
"""As h11 finds it."""
_CHUNK_LENGTH = re.compile(rb"[0-9A-Fa-f]*")
_CHUNK_LIMIT = 2**63
_LONGEST_LINE = 2**14
_BODY_READ = 2**19
"""Bytes of a body that are read at once. httpcore2 asks for 64 KiB, and h11 takes any number:
1 GB costs 2.5 s of processor time with 64 KiB, 0.8 s with these."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A connection's view of the request that is made on it."""

    target: RequestTarget
    limits: RequestLimits
    has_credentials: bool

    @property
    def address(self) -> WebAddress:
        """The address of the request."""
        return self.target.address

    def seconds(self, timeout: float | None) -> float:
        """Return how long to wait for the next byte: ``timeout``, or less."""
        left = self.limits.seconds_left(self.address)
        return left if timeout is None else min(timeout, left)

    def check(self, *, public: bool, link_local: bool) -> None:
        """Raise RemoteError (rule R2) if the request may not go to such an IP address."""
        if self.target.public_only and not public:
            raise self.address.refuse(
                "is in a private network, and a public server redirected to it"
            )
        if self.target.from_server and link_local:
            raise self.address.refuse("has a link-local address, and a server redirected to it")


class CheckedBackend:
    """An ``httpcore2.NetworkBackend``.

    ``ca_file`` names certificates (PEM) to trust beside the system's. Raises: StorageError,
    NotFoundError if it can't be read.
    """

    def __init__(self, is_public: Callable[[str], bool], ca_file: str | None) -> None:
        self._is_public = is_public
        self._local = threading.local()
        self._ca_file = ca_file
        if ca_file is not None:
            _tls_context(ca_file)

    @property
    def context(self) -> RequestContext:
        """The request of the current thread."""
        context: RequestContext = self._local.context
        return context

    @property
    def tls(self) -> ssl.SSLContext:
        """What TLS connections trust."""
        return _tls_context(self._ca_file)

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
    ) -> CheckedConnection:
        """Connect to the first of the allowed addresses of ``host`` that answers."""
        import httpcore2

        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in _resolve(host, port):
            public, link_local = self._is_public(address), is_link_local(address)
            try:
                self.context.check(public=public, link_local=link_local)
                stream = httpcore2.SyncBackend().connect_tcp(
                    address, port, self.context.seconds(timeout), None, socket_options or ()
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout, RemoteError) as error:
                failure = error
            else:
                return CheckedConnection(self, stream, public=public, link_local=link_local)
        raise failure

    def sleep(self, seconds: float) -> None:
        """Wait. Part of the interface; not called, because retries are ours."""
        self.context.limits.sleep(seconds)


class CheckedConnection:
    """An ``httpcore2.NetworkStream``, plain or TLS; it counts what is read."""

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
        self._head: bytes | None = None
        self._body_nbytes = 0
        self._chunks: _ChunkLengths | None = None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send the first or the next bytes of a request. Raises: as `RequestContext.check`."""
        context = self._backend.context
        context.check(public=self._public, link_local=self._link_local)
        if context.has_credentials and self._public and context.address.scheme == "http":
            raise UsageError(
                f"{context.address}: a token is not sent over the public internet without TLS",
                path=str(context.address),
                hint="Use https, or no token.",
            )
        context.limits.use(self._stream.get_extra_info("socket"))
        self._head, self._body_nbytes, self._chunks = b"", 0, None
        self._stream.write(buffer, context.seconds(timeout))

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes, within the request's limits; none at the end."""
        import httpcore2

        context = self._backend.context
        if context.limits.left <= 0:
            what = f"sends more than was asked for ({context.limits.taken:,} bytes with heads)"
            raise context.address.refuse(what, "R1")
        longest = max_bytes if self._head is not None else _BODY_READ
        length = min(longest, context.limits.left)
        data = self._stream.read(length, context.seconds(timeout))
        if not data and self._head is not None and b"HTTP/".startswith(self._head[:5]):
            raise httpcore2.ReadError("it closed the connection before the end of an answer's head")
        context.limits.take(len(data))
        self._count(data)
        return data

    def _count(self, data: bytes) -> None:
        """Count the bytes behind the head, and check the lengths of chunks."""
        while self._head is not None:
            head = self._head + data
            end = _HEAD_END.search(head)
            if end is None:
                self._head = head
                return
            data = head[end.end() :]
            is_interim = head[8:10] == b" 1"  # another head follows (RFC 9110 section 15.2)
            self._head = b"" if is_interim else None
            if not is_interim and b"\ntransfer-encoding" in head[: end.end()].lower():
                self._chunks = _ChunkLengths()
        self._body_nbytes += len(data)
        if self._chunks is not None and not self._chunks.are_possible(data):
            raise self._backend.context.address.refuse(
                "answers with a chunk of 2⁶³ bytes or more", "R1"
            )

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,  # noqa: ARG002  # the pool's, which trusts nothing
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> CheckedConnection:
        """Return the connection with TLS, which trusts what the backend does."""
        import httpcore2

        try:
            stream = self._stream.start_tls(
                self._backend.tls, server_hostname, self._backend.context.seconds(timeout)
            )
        except (ValueError, OSError) as error:  # a name that TLS can't send; broken certificates
            self.close()
            raise httpcore2.ConnectError(error) from error
        return CheckedConnection(
            self._backend, stream, public=self._public, link_local=self._link_local
        )

    def close(self) -> None:
        """Close the socket."""
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        """Return a property of the connection.

        ``public``: whether the peer's address is. ``body_nbytes``: the bytes behind the head of the
        current reply, with their framing.
        """
        if info == "public":
            return self._public
        if info == "body_nbytes":
            return self._body_nbytes
        return self._stream.get_extra_info(info)


class _ChunkLengths:
    """Follows the bytes of a chunked body from chunk to chunk."""

    def __init__(self) -> None:
        self._skip = 0
        self._line = b""

    def are_possible(self, data: bytes) -> bool:
        """Take the next bytes; return False if the length of a chunk is 2⁶³ or more."""
        while data:
            if self._skip:
                passed, data = min(self._skip, len(data)), data[self._skip :]
                self._skip -= passed
                continue
            line, newline, data = data.partition(b"\n")
            self._line = (self._line + line)[:_LONGEST_LINE]
            if newline:
                digits = _CHUNK_LENGTH.match(self._line)
                self._skip = int(digits[0] or b"0", 16) if digits else 0
                self._line = b""
            if self._skip >= _CHUNK_LIMIT:
                return False
        return True


def _resolve(host: str, port: int) -> list[str]:
    import httpcore2

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore2.ConnectError(error) from error
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


@cache
def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return the context of connections that trust the system and ``ca_file``, for HTTP/1.1.

    Reading the system's certificates takes 28 ms, so it is done when the first connection needs it.
    """
    import httpx2

    context = httpx2.create_ssl_context(trust_env=False)
    context.set_alpn_protocols(["http/1.1"])
    try:
        if ca_file is not None:
            context.load_verify_locations(ca_file)
    except OSError as error:
        raise from_os_error(error, "read certificates from", ca_file) from error
    return context
