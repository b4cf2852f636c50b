"""Servers on loopback that ask for logins: a token server, and a registry's API behind it.

The token server follows distribution's documents (docs/content/spec/auth/token.md, oauth.md). With
a key its tokens are JWTs that Debian's docker-registry accepts; without, they are opaque, and only
`GuardedApi` knows them.
"""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support.servers import Asked, Server, reply, server

SERVICE = "the lab"
ISSUER = "the lab's token server"
USER, PASSWORD = "alice", "swordfish-7c1d"
IDENTITY = "identity-5f0c9a"


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One request: ``fields`` are of the query, or of the body's form."""

    method: str
    path: str
    authorization: str | None
    fields: dict[str, list[str]]

    @classmethod
    def of(cls, asked: Asked) -> TokenRequest:
        parts = urlsplit(asked.target)
        query = asked.body.decode() if asked.method == "POST" else parts.query
        return cls(asked.method, parts.path, asked.fields.get("authorization"), parse_qs(query))

    @property
    def scopes(self) -> list[str]:
        return " ".join(self.fields.get("scope", [])).split()


@dataclass
class TokenServer:
    """A token server. Tests change what it does, and read what it was asked.

    ``change`` may replace the document of a reply. Users have ``rights``; others, if it is
    ``public``, may pull.
    """

    server: Server
    asked: list[TokenRequest] = field(default_factory=list)
    expires_in: int | None = 300
    public: bool = True
    rights: Collection[str] = ("pull", "push", "delete", "*")
    keys: Path | None = None
    """A folder with key.pem and certificate.pem."""
    change: Callable[[dict[str, Any]], Any] = lambda document: document
    granted: dict[str, frozenset[str]] = field(default_factory=dict)
    """The actions of each opaque token: ``repository:name:action``."""

    @property
    def realm(self) -> str:
        return self.server.at("token")

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def challenge(self) -> str:
        return f'Bearer realm="{self.realm}",service="{SERVICE}",scope="repository:a/b:pull"'

    def answer(self, request: Asked) -> list[bytes]:
        asked = TokenRequest.of(request)
        self.asked.append(asked)
        user = self._user(asked)
        if user == "wrong" or (user is None and not self.public):
            return reply(401, body=b'{"details":"incorrect username or password"}')
        rights = frozenset(
            f"{kind}:{name}:{action}"
            for kind, name, actions in (scope.rsplit(":", 2) for scope in asked.scopes)
            for action in actions.split(",")
            if action in (self.rights if user is not None else {"pull"})
        )
        token = secrets.token_urlsafe(24) if self.keys is None else self._jwt(rights, self.keys)
        self.granted[token] = rights
        document: dict[str, Any] = {"token": token}
        if self.expires_in is not None:
            document["expires_in"] = self.expires_in
        data = self.change(document)
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        return reply(200, "Content-Type: application/json", body=body)

    def allows(self, authorization: str | None, right: str) -> bool:
        """Return True if an opaque token gives a right: ``repository:name:action``."""
        scheme, _, token = (authorization or "").partition(" ")
        return scheme == "Bearer" and right in self.granted.get(token, ())

    def knows(self, authorization: str | None) -> bool:
        return (authorization or "").removeprefix("Bearer ") in self.granted

    @staticmethod
    def _user(asked: TokenRequest) -> str | None:
        if asked.method == "POST":
            good = asked.fields.get("refresh_token") == [IDENTITY]
            return USER if good and asked.fields["grant_type"] == ["refresh_token"] else "wrong"
        if asked.authorization is None:
            return None
        return USER if asked.authorization == basic(USER, PASSWORD) else "wrong"

    def _jwt(self, rights: frozenset[str], keys: Path) -> str:
        """Return a token of RS256, with the certificate of its key (distribution's jwt.md)."""
        access = []
        for right in sorted(rights):
            kind, name, action = right.rsplit(":", 2)
            access.append({"type": kind, "name": name, "actions": [action]})
        pem = (keys / "certificate.pem").read_text().splitlines()
        header = {"typ": "JWT", "alg": "RS256", "x5c": ["".join(pem[1:-1])]}
        until = int(time.time()) + 3600
        claims = {"iss": ISSUER, "aud": SERVICE, "sub": "", "exp": until, "access": access}
        signed = ".".join(_url64(json.dumps(part).encode()) for part in (header, claims))
        line = ["openssl", "dgst", "-sha256", "-sign", str(keys / "key.pem")]
        done = subprocess.run(line, input=signed.encode(), capture_output=True, check=True)
        return f"{signed}.{_url64(done.stdout)}"


@contextmanager
def token_server(keys: Path | None = None) -> Iterator[TokenServer]:
    """Run a token server; with ``keys``, where its key and certificate are made, of JWTs."""
    with server() as running:
        tokens = TokenServer(running, keys=keys)
        if keys is not None:
            keys.mkdir(parents=True)
            line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=lab"
            made = ["-keyout", "key.pem", "-out", "certificate.pem"]
            subprocess.run([*line.split(), *made], check=True, capture_output=True, cwd=keys)
        running.play(tokens.answer)
        yield tokens


@dataclass
class GuardedApi:
    """A registry's API: 200 for ``/v2/…`` if ``allows`` (Authorization, path), else a challenge."""

    server: Server
    challenges: list[str]
    allows: Callable[[str | None, str], bool]
    asked: list[TokenRequest] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def answer(self, request: Asked) -> list[bytes]:
        asked = TokenRequest.of(request)
        self.asked.append(asked)
        if self.allows(asked.authorization, asked.path.removeprefix("/v2/")):
            return reply(200, "Content-Type: application/json", body=b"{}")
        return reply(401, *(f"WWW-Authenticate: {one}" for one in self.challenges), body=b"{}")


@contextmanager
def guarded_api(
    allows: Callable[[str | None, str], bool], *challenges: str
) -> Iterator[GuardedApi]:
    with server() as running:
        api = GuardedApi(running, list(challenges), allows)
        running.play(api.answer)
        yield api


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
