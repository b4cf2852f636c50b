"""``push`` and ``pull``, ``login`` and ``logout``, and where logins are found."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.output import (
    Jobs,
    JsonOption,
    Model,
    counted,
    emit,
    note,
    parse_size,
    printable,
    progress_bar,
    show_replaced,
    show_result,
    size,
)
from blobstore.cli.signing import KeyOption, PolicyOption, policy_of
from blobstore.cli.stores import StoreOption, WaitOption, store_at
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.io.workers import Progress
    from blobstore.store.ports import Readable
    from blobstore.store.registry.logins import Credentials, Login
    from blobstore.store.registry.push_pull import RegistryAccess
    from blobstore.store.transfer import Transferred


def push(
    name: Model,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="NAME",
            help="Where to: HOST/NAMESPACE/MODEL:TAG [default: as the model is named].",
        ),
    ] = None,
    artifact: Annotated[
        str | None,
        typer.Option(
            "--artifact",
            metavar="modelpack|image|oci",
            help="Send another form: a ModelPack artifact or an image of exported files, "
            "or the same blobs under an OCI manifest. Needs --to.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="safetensors|mlx",
            help="Files of --artifact: mlx is for mlx_lm.load [default: safetensors].",
        ),
    ] = None,
    dequantize: Annotated[
        str | None,
        typer.Option(
            "--dequantize",
            metavar="bfloat16|float16|float32",
            help="Dequantize the weights in files of --artifact to this type.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest file of --artifact, such as 5GB, or source [default: 5GB].",
        ),
    ] = None,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    realm: RealmsOption = None,
    jobs: Jobs = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a model to a registry. Only blobs that the registry lacks are sent."""
    from blobstore.store.registry.push_pull import push

    access = _access(insecure=insecure, ca_file=ca_file, realm=realm)
    source = store_at(store)
    files = {"format": form, "dequantize": dequantize, "max_shard_size": max_shard_size}
    given = {key: value for key, value in files.items() if value is not None}
    _check_artifact(artifact, to, given)
    with progress_bar() as progress, ExitStack() as opened:
        model: Readable = source
        if artifact is not None:
            model = opened.enter_context(
                _opened_artifact(name, source, artifact, given, jobs=jobs, progress=progress)
            )
        done = push(
            name, model, to=to, neighbours=source, access=access, jobs=jobs, progress=progress
        )
    show_result(done, partial(_show, "Pushed", "sent"), as_json=as_json)


def _check_artifact(kind: str | None, to: str | None, given: Mapping[str, str]) -> None:
    """Raise UsageError for options of an artifact without one, or an artifact without its name."""
    if kind is None and given:
        flag = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{flag} is for --artifact modelpack or image")
    if kind == "oci" and given:
        raise UsageError("--artifact oci has the blobs of the model, not the files of an export")
    if kind is not None and to is None:
        raise UsageError(
            "--artifact needs --to", hint="Under the model's own name it would replace the model."
        )


@contextmanager
def _opened_artifact(
    name: str,
    store: Readable,
    kind: str,
    given: Mapping[str, str],
    *,
    jobs: int | None,
    progress: Progress | None,
) -> Iterator[Readable]:
    from blobstore.artifacts.artifact import open_artifact
    from blobstore.export.planned_files import AS_SOURCE
    from blobstore.model.mlx_lm_package import delay_package

    options: dict[str, Any] = dict(given)
    if options.get("format") == "mlx":
        delay_package("mlx_lm")
    shard = options.get("max_shard_size", AS_SOURCE)
    if shard != AS_SOURCE:
        options["max_shard_size"] = parse_size(shard)
    with open_artifact(name, store, kind, **options, jobs=jobs, progress=progress) as made:
        for text in made.notes:
            note(text)
        yield made


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A model: [HOST/][NAMESPACE/]MODEL[:TAG][@sha256:DIGEST]."
        ),
    ],
    new_name: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Its name in the store [default: NAME]."),
    ] = None,
    key: KeyOption = None,
    policy: PolicyOption = None,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    realm: RealmsOption = None,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model from a registry. A pull that was interrupted continues where it stopped."""
    from blobstore.store.registry.push_pull import pull

    access = _access(insecure=insecure, ca_file=ca_file, realm=realm)
    required = policy_of(key, policy) if key is not None or policy is not None else None
    target = store_at(store, wait, may_be_new=True)
    with progress_bar() as progress:
        done = pull(
            name,
            target,
            name=new_name,
            access=access,
            policy=required,
            jobs=jobs,
            progress=progress,
        )
    show_result(done, partial(_show, "Pulled", "fetched"), as_json=as_json)


def _access(*, insecure: bool, ca_file: str | None, realm: list[str] | None) -> RegistryAccess:
    from blobstore.store.registry.push_pull import RegistryAccess

    return RegistryAccess(
        insecure=insecure, credentials=credentials(), realms=realms_of(realm), ca_file=ca_file
    )


def _show(verb: str, moved: str, done: Transferred) -> None:
    ways = [
        f"{way.blobs:,} {how} ({size(way.nbytes)})"
        for how, way in (("were there", done.there), (moved, done.moved))
        if way
    ]
    renamed = f" as {done.name}" if done.name != done.source else ""
    emit(f"{verb} {done.source}{renamed}: {', '.join(ways) or 'no blobs'}")
    if done.signatures:
        emit(f"{verb} {counted(done.signatures, 'signature')}")
    emit(f"Digest: {done.digest}")
    show_replaced(done.replaced)


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
    from blobstore.store.registry.api import check_login
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
    return Credentials(*login_files(os.environ, home, os.getuid()))


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
