"""A web proxy on loopback: tunnels, and requests for whole addresses."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit


class WebProxy(ThreadingHTTPServer):
    """Leads requests by ``names`` to ports; ``asked``: their targets; ``login``: what it wants."""

    daemon_threads = True

    def __init__(self, names: Mapping[str, int], login: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.names, self.login = names, login
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: WebProxy

    def _port(self, place: str) -> int:
        """Return where a request leads; 0 if it was answered."""
        self.server.asked.append(f"{self.command} {self.path}")
        if self.headers["Proxy-Authorization"] != self.server.login:
            self.send_error(407)
        elif place not in self.server.names:
            self.send_error(403)
        else:
            return self.server.names[place]
        return 0

    def do_CONNECT(self) -> None:
        self.close_connection = True
        if port := self._port(self.path):
            with socket.create_connection(("127.0.0.1", port)) as there:
                self.send_response(200)
                self.end_headers()
                back = Thread(target=_pass_on, args=(there, self.connection), daemon=True)
                back.start()
                _pass_on(self.connection, there)
                back.join()

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        if port := self._port(place.netloc):
            fields = {k: v for k, v in self.headers.items() if not k.startswith("Proxy-")}
            target = self.path.partition(place.netloc)[2]
            with closing(HTTPConnection("127.0.0.1", port)) as client:
                client.request("GET", target, headers=fields)
                reply = client.getresponse()
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.read())

    def log_message(self, *_: object) -> None:
        pass


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(2**16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@contextmanager
def web_proxy(names: Mapping[str, int], login: str | None = None) -> Iterator[WebProxy]:
    with WebProxy(names, login) as proxy:
        Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        yield proxy
        proxy.shutdown()
