"""Logins of registries, in the files and programs where docker, podman and skopeo keep them.

Files: docker's config.json and podman's auth.json have one grammar: ``auths`` keeps logins by
registry, ``credHelpers`` names a credential helper for a registry, and ``credsStore`` one for all
of them (docker/cli@28f75608 cli/config/configfile/file.go; containers/image@df7e80d2
docs/containers-auth.json.5.md, pkg/docker/config/config.go `findCredentialsInFile`). A key of
``auths`` is a host, ``host:5000``; with podman also a part of a repository's path,
``host/namespace``, and the longest one wins. docker once wrote addresses, ``https://host/v1/``, and
still does for Docker Hub. Here a key with a scheme or a final slash is an address, and only its
host counts. An entry without ``auth`` and ``identitytoken`` is ignored: docker writes such entries
with a credential helper.

Programs: ``docker-credential-NAME`` has an action as its only argument, a text on stdin, a text on
stdout, and an exit code (docker/docker-credential-helpers@594c0235 credentials/credentials.go,
client/client.go). ``get`` and ``erase`` take the registry's key; ``store`` takes and ``get`` gives
a JSON object with ServerURL, Username and Secret. The user name ``<token>`` means that the secret
is an identity token. A program's stdout is never shown, because it may contain a secret. Its stderr
is ours.
"""

import base64
import binascii
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

from blobstore.errors import (
    AuthenticationError,
    DocumentError,
    MissingFileError,
    NotFoundError,
    UsageError,
    from_os_error,
    quoted,
)
from blobstore.formats.strictjson import Document, Key, parse_document, parse_object
from blobstore.io.durable import os_errors, read_own, replace_file, sync_folder
from blobstore.io.ranges import real_path

HUB_HOSTS = ("docker.io", "index.docker.io", "registry-1.docker.io")
"""The names of Docker Hub; the last one has its API."""
HIDDEN = "***"


class Secret:
    """A text that is not shown: ``repr``, ``str`` and f-strings give ``***``.

    It can't be pickled or copied, and JSON refuses it. `reveal` returns the text.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return HIDDEN

    def __format__(self, specification: str) -> str:
        return format(HIDDEN, specification)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret can't be pickled or copied")


@dataclass(frozen=True, slots=True)
class Login:
    """A user of a registry, and the secret that proves it.

    ``user``: None if the secret is an identity token. A token server gives access tokens for an
    identity token (docker/cli@28f75608 cli/config/types/authconfig.go). ``place`` is the file or
    program that keeps it, for messages.
    """

    user: str | None
    secret: Secret
    place: str = field(default="", compare=False)

    @property
    def pair(self) -> str | None:
        """USER:PASSWORD in base64, as files and Basic (RFC 7617) have it; None for a token."""
        if self.user is None:
            return None
        return base64.b64encode(f"{self.user}:{self.secret.reveal()}".encode()).decode()

    @property
    def basic(self) -> str | None:
        """The Authorization field of Basic; None for an identity token."""
        return self.pair and f"Basic {self.pair}"

    def __str__(self) -> str:
        name = "an identity token" if self.user is None else f"user {self.user!r}"
        return f"{name} (from {self.place})" if self.place else name


AnyLogin = Login | Callable[[], Login | None] | None
"""A login, or a function that finds it, or None. The function is called when a login is needed."""


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
            document = parse_document(
                _Kept, parse_object(output, str(self), rule=RULE), str(self), RULE
            )
        except DocumentError:
            raise self._error(f"answers for {key} with an invalid JSON object") from None
        if not document.secret:
            return None
        user = None if document.user == _IDENTITY else document.user
        return Login(user, Secret(document.secret), str(self))

    def keep(self, key: str, login: Login) -> None:
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
        command = [self._path(), action]
        try:
            done = subprocess.run(  # noqa: S603  # no shell; the name is a plain one
                command,
                input=given.encode(),
                stdout=subprocess.PIPE,
                timeout=self.timeout_s,
                check=False,
            )
        except OSError as error:
            raise from_os_error(error, "run", self) from error
        except subprocess.TimeoutExpired:
            raise self._error(f"takes longer than {self.timeout_s:g} seconds") from None
        if len(done.stdout) > MAX_OUTPUT:
            raise self._error(f"prints more than {MAX_OUTPUT:,} bytes")
        return done.returncode, done.stdout

    def _path(self) -> str:
        path = shutil.which(str(self))
        if path is None or not Path(path).is_absolute():  # never a program of the current folder
            raise NotFoundError(
                f"the credential helper {self}{self._shown_place} is not installed",
                path=str(self),
                hint="Install it, or remove its name from that file.",
            )
        return path

    @property
    def _shown_place(self) -> str:
        return f" ({self.place})" if self.place else ""

    def _error(self, what: str) -> AuthenticationError:
        return AuthenticationError(
            f"the credential helper {self}{self._shown_place} {what}", path=str(self)
        )


@dataclass(frozen=True, slots=True)
class _Kept(Document):
    user: Annotated[str, Key("Username")]
    secret: Annotated[str, Key("Secret")]


MAX_FILE = 2**20
RULE = "K1"
HUB_KEY = "https://index.docker.io/v1/"
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


def host_key(host: str) -> str:
    """Return the key that docker has for a registry: the host, or the address of Docker Hub."""
    return HUB_KEY if host.lower() in HUB_HOSTS else host.lower()


class Credentials:
    """The logins in a file, which may be missing, and in ``others``, which are only read.

    Contents of files are not kept in memory.
    """

    def __init__(self, path: Path, *others: Path) -> None:
        self.path = path
        self._others = others

    def find(self, host: str, repository: str = "") -> Login | None:
        """Return the login for ``repository`` at the registry ``host[:port]``, None if unknown.

        The first file that has one decides. In a file a helper for this registry is asked first,
        then the helper for all, then ``auths``.

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
        return Credentials(*self._others).find(host, repository) if self._others else None

    def keep(self, host: str, login: Login) -> str:
        """Keep the login for a registry; return where: the first file, or a helper that it names.

        Other keys of the file stay as they are; other spellings of the registry's key go. Readers
        see the old file or the new one. Of two programs that write at once, as with docker, one
        may lose its change.

        Raises: as `find`.
        """
        content = self._read()
        key = host_key(host)
        others = self._without(content, host)
        helper = self._helper(content, host)
        entry = {}
        if helper is not None:
            helper.keep(key, login)
        elif login.pair is None:
            entry = {"identitytoken": login.secret.reveal()}
        else:
            entry = {"auth": login.pair}
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
            raw = read_own(self.path, MAX_FILE, follow=True)
        except MissingFileError:
            return {}
        if not raw.strip():
            return {}  # docker reads an empty file so
        return parse_object(raw, str(self.path), rule=RULE)

    def _helper(self, content: Mapping[str, Any], host: str) -> CredentialHelper | None:
        helpers = self._object(content, "credHelpers")
        keys = _keys(helpers, host)
        place, name = "credsStore", content.get("credsStore")
        if keys:
            place, name = f"credHelpers[{keys[0]}]", helpers[keys[0]]
        if name in (None, ""):
            return None
        try:
            return CredentialHelper(name, f"{place} of {self.path}")
        except (UsageError, TypeError):
            raise self._error(place, "is not the name of a credential helper") from None

    def _without(self, content: Mapping[str, Any], host: str) -> dict[str, Any]:
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


def _keys(entries: Mapping[str, Any], host: str, repository: str = "") -> list[str]:
    """Return the keys that stand for a repository: the longest path first, then addresses."""
    hosts = set(HUB_HOSTS) if host.lower() in HUB_HOSTS else {host.lower()}
    parts = repository.split("/") if repository else []
    keys = []
    for key in entries:
        place = key.removeprefix("https://").removeprefix("http://")
        is_address = place != key or key.endswith("/")
        named, _, path = place.partition("/")
        segments = path.split("/") if path and not is_address else []
        if named.lower() in hosts and segments == parts[: len(segments)]:
            keys.append((-len(segments), is_address, key))
    return [key for *_, key in sorted(keys)]


def login_files(variables: Mapping[str, str], home: Path, user_id: int) -> list[Path]:
    """Return the files with logins, in the order in which they are read.

    ``variables``: of the environment. ``REGISTRY_AUTH_FILE`` is the only file if it is set, as for
    skopeo. Otherwise docker's file is first, because it is the one that logins are written to;
    ``DOCKER_CONFIG`` replaces its folder. podman's files follow (containers/image@df7e80d2
    pkg/docker/config/config.go `getAuthFilePaths`, which has docker's file last).
    """
    if only := variables.get("REGISTRY_AUTH_FILE"):
        return [Path(only)]
    docker = Path(variables.get("DOCKER_CONFIG") or home / ".docker")
    run = variables.get("XDG_RUNTIME_DIR")
    config = Path(variables.get("XDG_CONFIG_HOME") or home / ".config")
    return [
        docker / "config.json",
        Path(run or "/run", "containers", "" if run else str(user_id), "auth.json"),
        config / "containers" / "auth.json",
    ]
