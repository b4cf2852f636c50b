"""``login`` and ``logout``, and where logins are found."""

from __future__ import annotations

import os
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.output import emit, note, printable
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.store.registry.logins import Credentials, Login

Host = Annotated[str, typer.Argument(metavar="HOST", help="A registry: HOST or HOST:PORT.")]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Allow http for registries on other machines."),
]
CaFileOption = Annotated[
    str | None,
    typer.Option(
        "--ca-file", metavar="FILE", help="Certificates (PEM) to trust beside the system's."
    ),
]
RealmsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--realm",
        metavar="HOST",
        help="A token server that belongs to the registry; repeatable "
        "[default: $BLOBSTORE_REALMS].",
    ),
]
_LONGEST_SECRET = 16 * 2**10


def login(
    host: Host,
    user: Annotated[
        str | None, typer.Option("--username", "-u", metavar="USER", help="The user's name.")
    ] = None,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the password from stdin.")
    ] = False,
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Read an identity token from stdin instead.")
    ] = False,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    realm: RealmsOption = None,
) -> None:
    """Log in to a registry, which checks the password."""
    from blobstore.io.http.client import HttpClient
    from blobstore.store.registry.authorization import check_login
    from blobstore.store.registry.names import registry_address

    scheme, host = _split(host)
    address = registry_address(host, insecure=insecure, scheme=scheme)
    given = _given_login(user, password_stdin=password_stdin, token_stdin=token_stdin)
    with HttpClient(ca_file=ca_file) as client:
        asked = check_login(client, address, given, realms=realms_of(realm))
    place = credentials().keep(host, given)
    if not asked:
        note(f"{host} did not ask for a login, so the login was not checked.")
    emit(printable(f"Logged in to {host}; the login is kept in {place}"))


def logout(host: Host) -> None:
    """Forget the login for a registry."""
    from blobstore.store.registry.names import check_host

    _, host = _split(host)
    check_host(host)
    found = credentials()
    if not found.drop(host):
        note(f"Not logged in to {host}.")
    else:
        emit(printable(f"Logged out of {host}"))
    if (other := found.find(host)) is not None:
        note(f"{other.place} still has a login for {host}.")


def credentials() -> Credentials:
    """Return the logins in the files that the environment names."""
    from blobstore.store.registry.logins import Credentials, login_files

    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # Path.home raises without a home
    return Credentials(login_files(os.environ, home, os.getuid()))


def realms_of(given: list[str] | None) -> list[str]:
    """Return the token servers that ``--realm`` or the environment names."""
    named = given or os.environ.get("BLOBSTORE_REALMS", "").split(",")
    return [realm.strip().lower() for realm in named if realm.strip()]


def _split(host: str) -> tuple[str | None, str]:
    """Return the scheme of a HOST, None without one, and the rest."""
    scheme, separator, rest = host.rpartition("://")
    return (scheme if separator else None), rest


def _given_login(user: str | None, *, password_stdin: bool, token_stdin: bool) -> Login:
    """Return the login that the options and stdin, or a prompt, give. Raises: UsageError."""
    from blobstore.store.registry.logins import Login, Secret

    if token_stdin:
        if user is not None or password_stdin:
            raise UsageError("--token-stdin excludes --username and --password-stdin")
        return Login(None, Secret(_piped("token")))
    if password_stdin:
        if user is None:
            raise UsageError("--password-stdin needs --username USER")
        secret = _piped("password")
    else:
        user, secret = _asked(user)
    if not user or ":" in user:
        raise UsageError("the user name is empty, or contains a colon")
    return Login(user, Secret(secret))


def _piped(what: str) -> str:
    """Return a secret from stdin, without the end of its line. Raises: UsageError."""
    raw = sys.stdin.buffer.read(_LONGEST_SECRET + 1)
    if len(raw) > _LONGEST_SECRET:
        raise UsageError(f"the {what} on stdin is longer than {_LONGEST_SECRET:,} bytes")
    return _checked(raw.removesuffix(b"\n").removesuffix(b"\r"), what)


def _asked(user: str | None) -> tuple[str, str]:
    """Ask for the missing parts; the password is not shown. Raises: UsageError."""
    import getpass

    if not sys.stdin.isatty():
        raise UsageError(
            "the password can't be asked for: standard input is not a terminal",
            hint="Use --password-stdin: blobstore login HOST -u USER --password-stdin < FILE",
        )
    try:
        named = user or input("User: ")
        return named, _checked(getpass.getpass("Password: ").encode(), "password")
    except EOFError:
        raise UsageError("the input ended before the password") from None


def _checked(raw: bytes, what: str) -> str:
    try:
        secret = raw.decode()
    except UnicodeDecodeError:
        raise UsageError(f"the {what} is not UTF-8") from None
    if not secret or any(unicodedata.category(character) == "Cc" for character in secret):
        raise UsageError(f"the {what} is empty, or contains a line break or a control character")
    return secret
