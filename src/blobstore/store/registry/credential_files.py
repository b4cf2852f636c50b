"""Files with logins, as docker, podman and skopeo keep them.

docker's config.json and podman's auth.json have one grammar: ``auths`` keeps logins by registry,
``credHelpers`` names a credential helper for a registry, and ``credsStore`` one for all of them
(docker/cli@28f75608 cli/config/configfile/file.go; containers/image@df7e80d2
docs/containers-auth.json.5.md, pkg/docker/config/config.go `findCredentialsInFile`).

A key of ``auths`` is a host, ``host:5000``; with podman also a part of a repository's path,
``host/namespace``, and the longest one wins. docker once wrote addresses, ``https://host/v1/``, and
still does for Docker Hub. Here a key with a scheme or a final slash is an address, and only its
host counts. An entry without ``auth`` and ``identitytoken`` is ignored: docker writes such entries
beside a credential helper.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.errors import DocumentError, LimitExceededError, MissingFileError, UsageError, quoted
from blobstore.formats import strictjson
from blobstore.io.durable import os_errors, replace_file, sync_folder
from blobstore.io.ranges import FileReader, real_path
from blobstore.store.registry.credential_helpers import CredentialHelper
from blobstore.store.registry.hosts import HUB_HOSTS
from blobstore.store.registry.login import Login, Secret

MAX_FILE = 2**20
RULE = "K1"
HUB_KEY = "https://index.docker.io/v1/"
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


def host_key(host: str) -> str:
    """Return the key that docker has for a registry: the host, or the address of Docker Hub."""
    return HUB_KEY if host.lower() in HUB_HOSTS else host.lower()


@dataclass(frozen=True, slots=True)
class CredentialFile:
    """One file with logins, which may be missing. Its contents are not kept in memory."""

    path: Path

    def find(self, host: str, repository: str = "") -> Login | None:
        """Return the login for a repository of a registry, None if it is not in the file.

        A helper for this registry is asked first, then the helper for all, then ``auths``.

        Raises: DocumentError (rule K1) for a damaged file or entry; LimitExceededError for a file
        over 1 MiB; StorageError; as `CredentialHelper.get`.
        """
        content = self._read()
        helper = self._helper(content, host)
        if helper is not None and (login := helper.get(host_key(host))) is not None:
            return login
        auths = self._object(content, "auths")
        for key in _keys(auths, host, repository):
            if (login := self._login(key, auths[key])) is not None:
                return login
        return None

    def keep(self, host: str, login: Login) -> str:
        """Keep the login for a registry; return where: this file, or a helper that it names.

        Other keys of the file stay as they are; other spellings of the registry's key go. Readers
        see the old file or the new one. Of two programs that write at once, as with docker, one
        may lose its change.

        Raises: as `find`.
        """
        content = self._read()
        key = host_key(host)
        others = self._without(content, host)
        helper = self._helper(content, host)
        if helper is not None:
            helper.keep(key, login)
        entry = _entry_of(login) if helper is None else {}
        self._write(content | {"auths": others | {key: entry}})
        return str(self.path if helper is None else helper)

    def drop(self, host: str) -> bool:
        """Forget the login for a registry; return False if it is missing. Raises: as `find`."""
        content = self._read()
        helper = self._helper(content, host)
        dropped = helper is not None and helper.drop(host_key(host))
        others = self._without(content, host)
        if len(others) < len(self._object(content, "auths")):
            self._write(content | {"auths": others})
            dropped = True
        return dropped

    def _read(self) -> dict[str, Any]:
        try:
            with FileReader(self.path) as reader:
                if reader.size > MAX_FILE:
                    message = f"{self.path} has {reader.size:,} bytes, at most {MAX_FILE:,}"
                    raise LimitExceededError(f"limit exceeded: {message}", path=str(self.path))
                raw = reader.read(0, reader.size)
        except MissingFileError:
            return {}
        if not raw.strip():
            return {}  # docker reads an empty file so
        return strictjson.parse_object(raw, str(self.path), rule=RULE)

    def _helper(self, content: Mapping[str, Any], host: str) -> CredentialHelper | None:
        """Return the helper that the file names for a registry, None without one."""
        helpers = self._object(content, "credHelpers")
        keys = [*_keys(helpers, host)]
        place, name = "credsStore", content.get("credsStore")
        if keys:
            place, name = f"credHelpers[{keys[0]}]", helpers[keys[0]]
        if name is None or name == "":
            return None
        try:
            return CredentialHelper(name, f"{place} of {self.path}")
        except (UsageError, TypeError):
            raise self._error(place, "is not the name of a credential helper") from None

    def _without(self, content: Mapping[str, Any], host: str) -> dict[str, Any]:
        """Return the entries of ``auths`` that are not the registry's."""
        auths = self._object(content, "auths")
        gone = set(_keys(auths, host))
        return {key: entry for key, entry in auths.items() if key not in gone}

    def _object(self, content: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = content.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._error(key, "is not an object")
        return value

    def _login(self, key: str, entry: Any) -> Login | None:
        """Return the login of an entry of ``auths``, None for an empty one."""
        place = f"auths[{key}]"
        if not isinstance(entry, dict):
            raise self._error(place, "is not an object")
        auth, token = entry.get("auth") or "", entry.get("identitytoken") or ""
        if not isinstance(auth, str) or not isinstance(token, str):
            raise self._error(place, "has a value that is not a text")
        if token:
            return Login(None, Secret(token), str(self.path))
        if not auth:
            return None
        try:
            pair = base64.b64decode(auth, validate=True).decode()
        except (binascii.Error, ValueError):
            raise self._error(place, "has an auth that is not base64 of a text") from None
        user, colon, password = pair.partition(":")
        if not colon or not user:
            raise self._error(place, "has an auth that is not base64 of USER:PASSWORD")
        return Login(user, Secret(password.strip("\0")), str(self.path))

    def _write(self, content: Mapping[str, Any]) -> None:
        """Replace the file, durably and private to its owner; a symbolic link to it stays."""
        path = Path(real_path(self.path))
        data = json.dumps(content, indent="\t", ensure_ascii=False).encode()
        with os_errors("write", self.path):
            path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            replace_file(path, data, mode=_FILE_MODE, syncs=True)
            sync_folder(path.parent)

    def _error(self, place: str, what: str) -> DocumentError:
        """Return the error of a damaged place, without its value, which may be a secret."""
        return DocumentError(
            f"{self.path}: {quoted(place)} {what} (rule {RULE})", rule=RULE, path=str(self.path)
        )


def _keys(entries: Mapping[str, Any], host: str, repository: str = "") -> Iterator[str]:
    """Yield the keys that stand for a repository: the longest path first, then addresses."""
    hosts = set(HUB_HOSTS) if host.lower() in HUB_HOSTS else {host.lower()}
    parts = repository.split("/") if repository else []
    found: dict[int, list[str]] = {}
    for key in entries:
        named, _, path = _without_scheme(key).partition("/")
        segments = [] if _is_address(key) else path.split("/") if path else []
        if named.lower() in hosts and segments == parts[: len(segments)]:
            found.setdefault(len(segments), []).append(key)
    for length in sorted(found, reverse=True):
        yield from sorted(found[length], key=lambda key: (_is_address(key), key))


def _entry_of(login: Login) -> dict[str, str]:
    secret = login.secret.reveal()
    if login.user is None:
        return {"identitytoken": secret}
    return {"auth": base64.b64encode(f"{login.user}:{secret}".encode()).decode()}


def _is_address(key: str) -> bool:
    return key.endswith("/") or _without_scheme(key) != key


def _without_scheme(key: str) -> str:
    return key.removeprefix("https://").removeprefix("http://")
