"""Credential helpers: programs that keep logins, ``docker-credential-NAME``.

The protocol: an action as the only argument, a text on stdin, a text on stdout, and an exit code
(docker/docker-credential-helpers@594c0235 credentials/credentials.go, client/client.go). ``get``
and ``erase`` take the registry's key; ``store`` takes and ``get`` gives a JSON object with
ServerURL, Username and Secret. The user name ``<token>`` means that the secret is an identity
token. A program's stdout is never shown, because it may contain a secret. Its stderr is ours.
"""

from __future__ import annotations

import json
import os
import re
import select
import selectors
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from blobstore.errors import AuthenticationError, NotFoundError, UsageError, from_os_error, quoted
from blobstore.formats import strictjson
from blobstore.formats.strictdocument import Document, InvalidError, Key
from blobstore.store.registry.login import Login, Secret

TIMEOUT_S = 120
"""A program may ask the user for the password of a keychain."""
MAX_OUTPUT = 64 * 2**10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NOT_FOUND = b"credentials not found in native keychain"
_IDENTITY = "<token>"


@dataclass(frozen=True, slots=True)
class CredentialHelper:
    """The program ``docker-credential-NAME``; ``place`` says where it is named, for messages.

    Raises: UsageError for a name that is not a plain one.
    """

    name: str
    place: str = ""
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise UsageError(f"not the name of a credential helper: {quoted(self.name)}")

    def __str__(self) -> str:
        return f"docker-credential-{self.name}"

    def get(self, key: str) -> Login | None:
        """Return the login for a registry's key; None if the program does not have it.

        Raises: NotFoundError if the program is missing; AuthenticationError if it fails, takes too
        long, or breaks the protocol; StorageError if it can't be run.
        """
        code, output = self._run("get", key)
        if output.strip() == _NOT_FOUND:
            return None
        if code != 0:
            raise self._error(f"fails for {key} (exit code {code})")
        try:
            found = _Kept.checked(strictjson.parse(output))
        except (strictjson.StrictJsonError, InvalidError):
            raise self._error(f"answers for {key} with an invalid JSON object") from None
        if not found.secret:
            return None
        user = None if found.user == _IDENTITY else found.user
        return Login(user, Secret(found.secret), str(self))

    def keep(self, key: str, login: Login) -> None:
        """Store a login in the program. Raises: as `get`."""
        kept = {
            "ServerURL": key,
            "Username": _IDENTITY if login.user is None else login.user,
            "Secret": login.secret.reveal(),
        }
        code, _ = self._run("store", json.dumps(kept))
        if code != 0:
            raise self._error(f"does not keep the login for {key} (exit code {code})")

    def drop(self, key: str) -> bool:
        """Make the program forget a login; return False if the program does not have it.

        Raises: as `get`.
        """
        code, output = self._run("erase", key)
        if code != 0 and output.strip() != _NOT_FOUND:
            raise self._error(f"does not forget the login for {key} (exit code {code})")
        return code == 0

    def _run(self, action: str, given: str) -> tuple[int, bytes]:
        """Run the program; return its exit code and what it printed."""
        command = [self._path(), action]
        try:
            running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603  # no shell; the name is a plain one
        except OSError as error:
            raise from_os_error(error, "run", self) from error
        until = time.monotonic() + self.timeout_s
        with running:
            try:
                output = self._talk(running, given.encode(), until)
                return running.wait(max(0, until - time.monotonic())), output
            except subprocess.TimeoutExpired:
                raise self._error(f"takes longer than {self.timeout_s:g} seconds") from None
            finally:
                running.kill()

    def _talk(self, running: subprocess.Popen[bytes], given: bytes, until: float) -> bytes:
        """Write to the program, and read what it prints until it closes its stdout."""
        output = b""
        with selectors.DefaultSelector() as selector:
            selector.register(_pipe(running.stdout), selectors.EVENT_READ)
            selector.register(_pipe(running.stdin), selectors.EVENT_WRITE)
            while True:
                ready = selector.select(max(0, until - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(str(self), self.timeout_s)
                for key, _ in ready:
                    if key.fileobj is running.stdin:
                        given = given[_written(key.fd, given) :]
                        if not given:
                            selector.unregister(key.fileobj)
                            running.stdin.close()
                    elif chunk := os.read(key.fd, MAX_OUTPUT):
                        output += chunk
                    else:
                        return output
                if len(output) > MAX_OUTPUT:
                    raise self._error(f"prints more than {MAX_OUTPUT:,} bytes")

    def _path(self) -> str:
        found = shutil.which(str(self))
        if found is None or not Path(found).is_absolute():  # never a program of the current folder
            raise NotFoundError(
                f"the credential helper {self}{self._shown_place} is not installed",
                path=str(self),
                hint="Install it, or remove its name from that file.",
            )
        return found

    @property
    def _shown_place(self) -> str:
        return f" ({self.place})" if self.place else ""

    def _error(self, what: str) -> AuthenticationError:
        return AuthenticationError(
            f"the credential helper {self}{self._shown_place} {what}", path=str(self)
        )


def _written(fd: int, data: bytes) -> int:
    """Write as much as a ready pipe takes without waiting; all counts as written at its end."""
    try:
        return os.write(fd, data[: select.PIPE_BUF])
    except BrokenPipeError:
        return len(data)  # the program does not read it


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """Return a pipe of a program that was started with pipes."""
    if stream is None:
        raise AssertionError("Popen was given PIPE")
    return stream


@dataclass(frozen=True, slots=True)
class _Kept(Document):
    user: Annotated[str, Key("Username")]
    secret: Annotated[str, Key("Secret")]
