"""Connections to checked addresses, over which `http.client` speaks HTTP/1.1.

A name is resolved here, every address is checked (rule R2), and the checked address is connected
to, so that a name can't resolve to something else a moment later (DNS rebinding). A kept-alive
connection is checked again before each request. Bytes and seconds are counted at the socket.
Through a proxy, https goes in a tunnel (CONNECT, RFC 9110 section 9.3.6), and http as requests for
whole addresses (RFC 9112 section 3.2.2); both are for the address that was judged.

`http.client` is lax where a server could hide something, so a `Connection` gives it checked lines
only, and `Reply` checks the lengths that it made of them. Of interim replies it knows
100 alone; others are skipped here. A connection is used again only after exactly Content-Length
bytes, and if neither a byte nor the end followed them. After chunks it is closed.
"""

from __future__ import annotations

import io
import math
import os
import re
import socket
import ssl
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Self, cast

from blobstore.errors import RemoteError, UsageError, from_os_error
from blobstore.io.budget import RequestLimits
from blobstore.io.http.web_addresses import (
    Proxy,
    RequestTarget,
    WebAddress,
    is_link_local,
    is_public_name,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LINE = re.compile(
    rb"(?:HTTP/1\.[01] [1-9][0-9]{2}(?: [^\0\r\n]*)?"  # a status (RFC 9112 section 4)
    rb"|(?!(?i:content-type):[^!-~]*(?i:multipart/))"  # into whose parts `email` would look
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\0\r\n]*"  # a field (5): not folded
    rb"|[0-9A-Fa-f]{1,15}[ \t]*(?:;[^\0\r\n]*)?"  # the length of a chunk (7.1)
    rb"|)\r?\n"
)
MAX_HEAD = 100 * 2**10
"""Bytes of a reply's head, and those of interim replies before it."""
_BUFFER = 2**16
KEEP_ALIVE_S = 30
# Connections that are kept: redirects can lead to any number of servers.
_MOST_IDLE = 256

_OK, _SERVER_ERROR = 200, 500
# Where Linux distributions have certificates, for a Python that was built elsewhere.
_CA_FILES = (
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)


class _Received(io.RawIOBase):
    """What a server sends, counted for the request that waits for it.

    ``has_ended``: the server has closed the connection. ``is_broken``: without the end that TCP and
    TLS have for that, so there may have been more.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.request: tuple[WebAddress, RequestLimits] | None = None
        self.has_ended = self.is_broken = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Receive bytes, within the request's limits. Between requests it does not wait."""
        view = memoryview(buffer)
        self.wait_at_most()
        if self.request is None:
            return self.socket.recv_into(view)
        address, limits = self.request
        if limits.left <= 0:
            raise address.refuse(
                f"sends more than was asked for ({limits.taken:,} bytes, headers included)", "R1"
            )
        try:
            count = self.socket.recv_into(view[: limits.left])
        except (ConnectionResetError, ssl.SSLEOFError):
            count, self.is_broken = 0, True  # earlier bytes count
        limits.take(count)
        self.has_ended = count == 0
        return count

    def wait_at_most(self) -> None:
        seconds = 0.0
        if self.request is not None:
            address, limits = self.request
            seconds = min(limits.policy.silence_s, limits.seconds_left(address))
        self.socket.settimeout(seconds)

    def close(self) -> None:
        super().close()
        self.socket.close()


class Connection(io.BufferedReader):
    """A connection to a checked address, for one request at a time.

    For `http.client` it is a socket, and the file of what the server sends. That library would take
    folded fields, lone CRs as ends of lines, the end of the connection as the end of a head, and
    ``-5`` or ``1_0`` as the length of a chunk, so `readline` checks each line. The parameters of a
    multipart type can keep `email`, its parser of heads, busy for half a minute, or make it fail.

    ``public`` and ``link_local`` are of the peer's IP address. ``proxy``: the peer, unless it only
    passes bytes on.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        public: bool,
        link_local: bool,
        proxy: Proxy | None = None,
    ) -> None:
        self.received = _Received(connected)
        self._proxy = proxy
        self._proxy_fields = proxy.fields if proxy is not None else {}

        super().__init__(self.received, _BUFFER)
        self.public = public
        self.link_local = link_local
        self._allowed: float = 0
        self._idle_since = 0.0

    def exchange(
        self,
        address: WebAddress,
        limits: RequestLimits,
        method: str,
        fields: Callable[[], Mapping[str, str]],
        body: Iterable[bytes] | None,
    ) -> HTTPResponse:
        """Send a request, and return the reply when its head has come.

        ``fields`` gives them when they are sent, so that no frame of ours holds a secret.

        Raises: HTTPException, OSError; RemoteError, LimitExceededError as ``limits``.
        """
        self.received.request = address, limits
        self._allowed = MAX_HEAD
        limits.cancellation.add(self.received.socket)
        client = HTTPConnection(address.host, address.port)
        client.sock = self
        target = address.target
        if self._proxy is not None:
            target = address.place if method == "CONNECT" else address.text
        with suppress(BrokenPipeError, ConnectionResetError):  # the answer may say why
            client.request(method, target, body, {**fields(), **self._proxy_fields})
        while True:
            response = HTTPResponse(cast("socket.socket", self), method=method)
            response.begin()
            if response.status not in range(102, 200):
                self._allowed = math.inf  # of chunks
                return response

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self.received.wait_at_most()
            left = left[self.received.socket.send(left) :]

    def makefile(self, _mode: str) -> Self:
        return self

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self._allowed -= len(line)
        if self._allowed < 0:
            raise HTTPException(f"a head of more than {MAX_HEAD:,} bytes")
        if _LINE.fullmatch(line) is None:
            raise HTTPException(f"an invalid or unfinished line in a head: {line[:40]!r}")
        return line

    def close(self) -> None:
        """Do nothing: `http.client` calls it at the end of a reply."""

    def finish(self) -> None:
        if self.received.request is not None:
            self.received.request[1].cancellation.discard(self.received.socket)
        self.received.request = None
        self._idle_since = time.monotonic()

    def is_usable(self) -> bool:
        """Return True if neither a byte nor the end followed the last reply."""
        if time.monotonic() - self._idle_since > KEEP_ALIVE_S:
            return False
        try:
            self.peek()
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def disconnect(self) -> None:
        self.finish()
        self.received.close()


class Connections:
    """The connections of a client: new ones, and those kept alive. Safe to share between threads.

    ``is_public`` says which IP addresses are public. ``ca_file`` names certificates (PEM) to trust
    besides the system's: files and folders of them, with colons between. ``proxies``: as for
    `Proxy.of`. Raises: StorageError, NotFoundError if certificates can't be read.
    """

    def __init__(
        self, is_public: Callable[[str], bool], ca_file: str | None, proxies: Mapping[str, str]
    ) -> None:
        self._is_public = is_public
        self._ca_file = ca_file
        self._proxies = proxies
        self._idle: defaultdict[tuple[str, str, int], list[Connection]] = defaultdict(list)
        self._is_closed = False
        if ca_file is not None:
            _tls_context(ca_file)

    def take(
        self, target: RequestTarget, limits: RequestLimits, *, has_credentials: bool
    ) -> Connection:
        """Return a connection for a request, which may go there.

        Raises: RemoteError (rule R2); UsageError for credentials in the clear on the internet;
        OSError, UnicodeError.
        """
        connection = self._idle_connection(target.address)
        if connection is None:
            proxy = Proxy.of(target.address, self._proxies)
            connection = (
                self._connect(target, limits)
                if proxy is None
                else self._connect_through(proxy, target, limits)
            )
        try:
            target.check(public=connection.public, link_local=connection.link_local)
            if has_credentials and connection.public and target.address.scheme == "http":
                raise UsageError(  # noqa: TRY301  # the connection is closed then
                    f"{target.address}: a token is not sent over the public internet without TLS",
                    path=str(target.address),
                    hint="Use https, or no token.",
                )
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def give_back(self, address: WebAddress, connection: Connection, *, keep: bool) -> None:
        if keep:
            connection.finish()
            self._idle[address.origin].append(connection)
            if self._is_closed or sum(map(len, list(self._idle.values()))) > _MOST_IDLE:
                self.disconnect_idle()
        else:
            connection.disconnect()

    def close(self) -> None:
        """Close what is idle, and what replies that outlive the client give back."""
        self._is_closed = True
        self.disconnect_idle()

    def disconnect_idle(self) -> None:
        for connections in list(self._idle.values()):
            with suppress(IndexError):  # it is empty, perhaps by another thread
                while True:
                    connections.pop().disconnect()

    def _idle_connection(self, address: WebAddress) -> Connection | None:
        connections = self._idle[address.origin]
        while True:
            try:
                connection = connections.pop()
            except IndexError:
                return None
            if connection.is_usable():
                return connection
            connection.disconnect()

    def _connect(self, target: RequestTarget, limits: RequestLimits) -> Connection:
        address = target.address
        failure: Exception = OSError("it has no address")
        for ip in _resolve(address.host, address.port):
            public, link_local = self._judge(ip)
            try:
                target.check(public=public, link_local=link_local)
                seconds = min(limits.policy.connect_s, limits.seconds_left(address))
                connected = socket.create_connection((ip, address.port), seconds)
            except TimeoutError as error:
                failure = OSError("the server could not be reached")
                failure.__cause__ = error
            except (OSError, RemoteError) as error:
                failure = error
            else:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if address.scheme == "https":
                    connected = self._secure(connected, address)
                return Connection(connected, public=public, link_local=link_local)
        raise failure

    def _connect_through(
        self, proxy: Proxy, target: RequestTarget, limits: RequestLimits
    ) -> Connection:
        """Return a connection to a proxy: for https one to the server, through its tunnel.

        Raises: RemoteError when the proxy can't be reached or refuses; as `take`.
        """
        address = target.address
        public, link_local = self._judge(address.host)
        target.check(public=public, link_local=link_local)
        seconds = min(limits.policy.connect_s, limits.seconds_left(address))
        try:
            connected = socket.create_connection((proxy.address.host, proxy.address.port), seconds)
        except OSError as error:
            raise _proxy_error(
                proxy, address, f"can't be reached: {error.strerror or error}", temporary=True
            ) from error
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(connected, public=public, link_local=link_local, proxy=proxy)
        if address.scheme == "http":
            return connection
        with ExitStack() as failing:
            failing.callback(connection.disconnect)
            reply = connection.exchange(
                address, limits, "CONNECT", lambda: {"Host": address.place}, None
            )
            if reply.status != _OK:
                raise _proxy_error(
                    proxy,
                    address,
                    f"answers {reply.status}",
                    temporary=reply.status >= _SERVER_ERROR,
                )
            connection.finish()
            secured = self._secure(connected, address)
            failing.pop_all()
        return Connection(secured, public=public, link_local=link_local)

    def _judge(self, host: str) -> tuple[bool, bool]:
        """Return whether a host is public, and whether link-local. Names are not resolved."""
        try:
            ip, *_ = _resolve(host, 0, socket.AI_NUMERICHOST)
        except socket.gaierror:
            return is_public_name(host), False
        return self._is_public(ip), is_link_local(ip)

    def _secure(self, connected: socket.socket, address: WebAddress) -> socket.socket:
        return _tls_context(self._ca_file).wrap_socket(
            connected, server_hostname=address.host, suppress_ragged_eofs=False
        )


def _proxy_error(proxy: Proxy, address: WebAddress, what: str, *, temporary: bool) -> RemoteError:
    return RemoteError(
        f"{address}: the proxy {proxy.address.place} {what}",
        path=str(address),
        temporary=temporary,
        hint="Check HTTPS_PROXY and HTTP_PROXY (http://[USER:PASSWORD@]HOST:PORT). NO_PROXY has the"
        " hosts that need none.",
    )


def _resolve(host: str, port: int, flags: int = 0) -> list[str]:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in entries))


@cache
def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return the context of connections that trust the system and ``ca_file``.

    Reading the system's certificates takes 28 ms, so it is done when the first connection needs it.
    OpenSSL's own default paths would be those of the environment: only commands read that.
    """
    if sys.platform == "darwin":
        import truststore

        context: ssl.SSLContext = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        paths = ssl.get_default_verify_paths()
        files = filter(os.path.isfile, (paths.openssl_cafile, *_CA_FILES))
        context.load_verify_locations(next(files, None), paths.openssl_capath)
    context.set_alpn_protocols(["http/1.1"])
    for place in ca_file.split(os.pathsep) if ca_file is not None else ():
        try:
            if os.path.isdir(place):  # noqa: PTH112
                context.load_verify_locations(capath=place)
            else:
                context.load_verify_locations(place)
        except OSError as error:
            raise from_os_error(error, "read certificates from", place) from error
    return context


@contextmanager
def remote_errors(
    address: WebAddress, limits: RequestLimits, connection: Connection | None = None
) -> Iterator[None]:
    """Turn the errors of connections and `http.client` into ours, within the block.

    They are temporary if a retry may succeed: when time is left, and the server closed or broke the
    connection instead of answering in broken HTTP.
    """
    try:
        yield
    except TimeoutError as error:
        limits.seconds_left(address)  # raises when the request's time is over
        raise RemoteError(
            f"{address}: the server sent nothing for {limits.policy.silence_s:g} seconds",
            path=str(address),
            temporary=True,
        ) from error
    except HTTPException as error:
        limits.seconds_left(address)
        failure = address.refuse(f"answers with invalid HTTP: {str(error)[:200]}", "R1")
        failure.temporary = connection is not None and connection.received.has_ended
        raise failure from error
    except (OSError, UnicodeError) as error:
        limits.seconds_left(address)
        raise _unreachable(address, error) from error


def _unreachable(address: WebAddress, error: OSError | UnicodeError) -> RemoteError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return RemoteError(
            f"{address}: its certificate is not trusted: {error.verify_message}",
            path=str(address),
            hint="Check the address. For a private authority, name its certificates: SSL_CERT_FILE"
            " for commands, ca_file in Python.",
        )
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, ssl.SSLEOFError | ssl.SSLZeroReturnError
    ):
        return RemoteError(
            f"{address}: the TLS handshake failed: {error.reason or error}", path=str(address)
        )
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        return RemoteError(
            f"{address}: its host is unknown",
            path=str(address),
            hint="Check the host name. If only a proxy reaches it, set HTTPS_PROXY.",
        )
    why = (isinstance(error, OSError) and error.strerror) or str(error)
    return RemoteError(
        f"{address}: {why.lower() or 'the connection broke'}",
        path=str(address),
        temporary=isinstance(error, OSError),
    )
