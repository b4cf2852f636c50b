"""``push`` and ``pull``, ``login`` and ``logout``, ``sign``, and the check of signatures."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Mapping
from contextlib import ExitStack
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import blobstore
from blobstore.cli.files import export_options
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    Model,
    amounts,
    counted,
    emit,
    emit_lines,
    note,
    printable,
    progress_bar,
    replaced_line,
    show_lines,
    with_bar,
)
from blobstore.cli.stores import (
    CaFileOption,
    InsecureOption,
    RealmsOption,
    StoreOption,
    WaitOption,
    credentials,
    network,
    realms_of,
    registry_access,
    store_at,
)
from blobstore.errors import UsageError
from blobstore.io.durable import os_errors, read_own, write_new_file

if TYPE_CHECKING:
    from blobstore.formats.oci import DockerReference
    from blobstore.store.registry.logins import Login
    from blobstore.store.signing.signed_models import CheckedModel
    from blobstore.store.transfer import TransferResult


KeyOption = Annotated[
    str | None,
    Option(
        "--key", metavar="FILE", help="Require a signature for the repository by this public key."
    ),
]
PolicyOption = Annotated[
    str | None,
    Option("--policy", metavar="FILE", help="Require what this containers-policy.json asks for."),
]


def push(
    name: Model,
    reference: Annotated[
        str | None,
        Argument(
            metavar="REF",
            help="Destination: HOST/NAMESPACE/MODEL[:TAG] [default: the model's name].",
        ),
    ] = None,
    to: Annotated[
        str | None,
        Option(metavar="NAME", help="The same as REF."),
    ] = None,
    artifact: Annotated[
        str | None,
        Option(
            metavar="modelpack|image|oci",
            help="Send a different form: a ModelPack artifact or an image of exported files, "
            "or the same blobs under an OCI manifest. Needs a REF.",
        ),
    ] = None,
    oci: Annotated[
        bool,
        Option(
            "--oci",
            help="Also write an OCI manifest of the same blobs, under TAG-oci, for skopeo and"
            " docker; Ollama reads TAG only.",
        ),
    ] = False,
    form: Annotated[
        str | None,
        Option(
            "--format",
            metavar="safetensors|mlx",
            help="Files of --artifact: mlx is for mlx_lm.load [default: safetensors].",
        ),
    ] = None,
    dequantize: Annotated[
        str | None,
        Option(
            metavar="bfloat16|float16|float32",
            help="Dequantize the weights in files of --artifact to this type.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        Option(
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
    access = registry_access(insecure, ca_file, realm)
    source = store_at(store, ca_file=ca_file)
    if reference is not None and to is not None:
        raise UsageError("push takes a REF or --to, not both")
    to = reference or to
    files = {"format": form, "dequantize": dequantize, "max_shard_size": max_shard_size}
    given = {key: value for key, value in files.items() if value is not None}
    if oci and artifact is not None:
        raise UsageError("--oci is for the model itself, --artifact sends another form")
    _check_artifact(artifact, to, given)
    with progress_bar() as progress, ExitStack() as opened:
        model: Any = source
        if artifact is not None:
            options = export_options(**given)
            model = opened.enter_context(
                blobstore.open_artifact(
                    name, source, artifact, **options, jobs=jobs, progress=progress
                )
            )
            note(*model.notes)
        done = blobstore.push(
            name, model, to=to, neighbours=source, access=access, jobs=jobs, progress=progress
        )
        if oci:
            scheme, mark, _ = (to or name).rpartition("://")
            second = opened.enter_context(blobstore.open_artifact(name, source, "oci"))
            place = f"{scheme}{mark}{done.name}-oci"
            blobstore.push(name, second, to=place, neighbours=source, access=access, jobs=jobs)
    _show(done, as_json, "Pushed", "sent")
    if oci and not as_json:
        emit(f"OCI manifest: {done.name}-oci")


def _check_artifact(kind: str | None, to: str | None, given: Mapping[str, str]) -> None:
    if kind is None and given:
        flag = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{flag} is for --artifact modelpack or image")
    if kind == "oci" and given:
        raise UsageError("--artifact oci has the blobs of the model, not the files of an export")
    if kind is not None and to is None:
        raise UsageError(
            "--artifact needs a REF", hint="Under the model's own name it would replace the model."
        )


def pull(
    name: Annotated[
        str,
        Argument(metavar="NAME", help="A model: [HOST/][NAMESPACE/]MODEL[:TAG][@sha256:DIGEST]."),
    ],
    new_name: Annotated[
        str | None,
        Option("--as", metavar="NAME", help="Its name in the store [default: NAME]."),
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
    access = registry_access(insecure, ca_file, realm)
    required = policy_of(key, policy) if key is not None or policy is not None else None
    target = store_at(store, wait, may_be_new=True, ca_file=ca_file)
    done = with_bar(
        blobstore.pull, name, target, name=new_name, access=access, policy=required, jobs=jobs
    )
    _show(done, as_json, "Pulled", "fetched")


def _show(done: TransferResult, as_json: bool, verb: str, moved: str) -> None:
    ways = amounts({"reused": done.there, moved: done.moved})
    renamed = f" as {done.name}" if done.name != done.source else ""
    show_lines(
        done,
        as_json,
        f"{verb} {done.source}{renamed}: {ways}",
        f"{verb} {counted(done.signatures, 'signature')}" if done.signatures else "",
        f"Digest: {done.digest}",
        replaced_line(done.replaced),
    )


Host = Annotated[str, Argument(metavar="HOST", help="A registry: HOST or HOST:PORT.")]
_LONGEST_SECRET = 16 * 2**10


def login(
    host: Host,
    user: Annotated[
        str | None, Option("--username", "-u", metavar="USER", help="The user's name.")
    ] = None,
    password_stdin: Annotated[
        bool, Option("--password-stdin", help="Read the password from stdin.")
    ] = False,
    token_stdin: Annotated[
        bool, Option("--token-stdin", help="Read an identity token from stdin instead.")
    ] = False,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    realm: RealmsOption = None,
) -> None:
    """Log in to a registry, which checks the password."""
    from blobstore.io.http.client import HttpClient
    from blobstore.store.registry.api import check_login, registry_address

    scheme, host = _split(host)
    address = registry_address(host, insecure=insecure, scheme=scheme)
    given = _given_login(user, password_stdin, token_stdin)
    with HttpClient(**network(ca_file)) as client:
        asked = check_login(client, address, given, realms=realms_of(realm))
    place = credentials().keep(host, given)
    if not asked:
        note(f"{host} did not ask for a login, so the login was not checked.")
    emit_lines(f"Logged in to {host}; the login is stored in {place}")


def logout(host: Host) -> None:
    """Forget the login for a registry."""
    from blobstore.store.registry.api import check_host

    _, host = _split(host)
    check_host(host)
    keyring = credentials()
    if not keyring.drop(host):
        note(f"Not logged in to {host}.")
    else:
        emit_lines(f"Logged out of {host}")
    if (other := keyring.find(host)) is not None:
        note(f"{other.place} still has a login for {host}.")


def _split(host: str) -> tuple[str | None, str]:
    scheme, separator, rest = host.rpartition("://")
    return (scheme if separator else None), rest


def _given_login(user: str | None, password_stdin: bool, token_stdin: bool) -> Login:
    from blobstore.store.registry.logins import Login, Secret

    if token_stdin:
        if user is not None or password_stdin:
            raise UsageError("--token-stdin can't be used with --username or --password-stdin")
        return Login(None, Secret(_read_secret("token")))
    if password_stdin:
        if user is None:
            raise UsageError("--password-stdin needs --username USER")
        secret = _read_secret("password")
    else:
        user, secret = _ask_login(user)
    if not user or ":" in user:
        raise UsageError("the user name is empty, or contains a colon")
    return Login(user, Secret(secret))


def _read_secret(what: str) -> str:
    raw = sys.stdin.buffer.read(_LONGEST_SECRET + 1)
    if len(raw) > _LONGEST_SECRET:
        raise UsageError(f"the {what} on stdin is longer than {_LONGEST_SECRET:,} bytes")
    return _check_secret(raw.removesuffix(b"\n").removesuffix(b"\r"), what)


def _ask_login(user: str | None) -> tuple[str, str]:
    if not sys.stdin.isatty():
        raise UsageError(
            "can't ask for the password: standard input is not a terminal",
            hint="Use --password-stdin: blobstore login HOST -u USER --password-stdin < FILE",
        )
    try:
        named = user or input("User: ")
        return named, _check_secret(getpass("Password: ").encode(), "password")
    except EOFError:
        raise UsageError("the input ended before the password") from None


def _check_secret(raw: bytes, what: str) -> str:
    try:
        secret = raw.decode()
    except UnicodeDecodeError:
        raise UsageError(f"the {what} is not UTF-8") from None
    if not secret or any(unicodedata.category(character) == "Cc" for character in secret):
        raise UsageError(f"the {what} is empty, or contains a line break or a control character")
    return secret


def verify_signatures(
    store: Any,
    names: list[str] | None,
    key: str | None,
    policy: str | None,
    identity: str | None,
    as_json: bool,
) -> bool:
    """Check and show the signatures of models; return whether all are signed as required."""
    checked = blobstore.check_signatures(names or (), store, policy_of(key, policy, identity))
    refused = sum(not model.is_accepted for model in checked)
    show_lines(
        checked,
        as_json,
        *(line for model in checked for line in _check_lines(model)),
        f"Checked the signatures of {counted(len(checked), 'model')}: "
        f"{f'{refused} refused' if refused else 'all accepted'}",
    )
    return not refused


def policy_of(
    key: str | None, policy: str | None, identity: str | None = None
) -> blobstore.SignaturePolicy:
    """Return what --key or --policy requires. Raises: UsageError unless one of them is given."""
    if (key is None) == (policy is None):
        raise UsageError("a check of signatures needs either --key or --policy")
    if policy is not None:
        if identity is not None:
            raise UsageError("--identity needs --key; a policy has signedIdentity instead")
        return blobstore.SignaturePolicy.read(Path(policy))
    path = key or ""
    public = blobstore.PublicKey.parse(_read_key(path), path)
    return blobstore.SignaturePolicy.of_key(public, identity_of(identity))


def _read_key(path: str) -> bytes:
    from blobstore.store.signing.key_pairs import MAX_KEY_FILE

    return read_own(Path(path), MAX_KEY_FILE, follow=True)


def _check_lines(model: CheckedModel) -> list[str]:
    named = f"{model.name} ({model.digest.short})"
    if model.error is not None:
        return [model.error.message]
    signed = [f"{named} is signed by {one.key.name} for {one.identity}" for one in model.accepted]
    return signed or [f"{named} needs no signature"]


def identity_of(text: str | None) -> DockerReference | None:
    """Return the identity in ``--identity``, None without one. Raises: InvalidNameError."""
    from blobstore.formats.oci import DockerReference

    return None if text is None else DockerReference.parse(text)


_PASSWORD = "COSIGN_PASSWORD"  # noqa: S105  # the name of a variable


def sign(
    names: Annotated[
        list[str] | None, Argument(metavar="NAME", help="Stored models to sign.")
    ] = None,
    key: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="The private key: PEM (PKCS #8), or cosign's cosign.key. Its password is"
            " $COSIGN_PASSWORD, or is asked for.",
        ),
    ] = None,
    identity: Annotated[
        str | None,
        Option(
            metavar="REFERENCE",
            help="Sign for HOST/NAMESPACE/MODEL[:TAG] [default: the model's repository].",
        ),
    ] = None,
    generate: Annotated[
        str | None,
        Option(
            "--generate-key",
            metavar="PREFIX",
            help="Instead of signing, write a new key pair: PREFIX.key and PREFIX.pub.",
        ),
    ] = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign models by the digests of their manifests, as cosign does. Blobs are not read."""
    if generate is not None:
        if names or key is not None or identity is not None:
            raise UsageError("--generate-key only makes keys: leave out the rest")
        _generate(generate)
        return
    if not names or key is None:
        raise UsageError(
            "sign needs a NAME and a --key",
            hint="blobstore sign NAME --key FILE, or --generate-key PREFIX to make a key pair.",
        )
    opened = store_at(store, wait)
    signed_for = identity_of(identity)
    full_names = [opened.holder(name).find(name) for name in names]
    private = blobstore.PrivateKey.parse(_read_key(key), key, lambda: _password(key))
    signed = [
        blobstore.sign_model(name, opened, private, identity=signed_for) for name in full_names
    ]
    show_lines(
        signed,
        as_json,
        *(
            f"{'Signed' if model.is_new else 'Already signed'} {model.name}"
            f" ({model.digest.short}) for {model.identity}"
            for model in signed
        ),
    )


def _generate(prefix: str) -> None:
    """Write a new pair of keys, or no file. Raises: UsageError if one exists; StorageError."""
    private, public = Path(f"{prefix}.key"), Path(f"{prefix}.pub")
    for path in (private, public):
        if os.path.lexists(path):
            raise UsageError(
                f"{path} already exists", path=str(path), hint="Choose another PREFIX."
            )
    made = blobstore.PrivateKey.generate()
    encrypted = made.encrypted(_password(str(private), True))
    with ExitStack() as undo:
        for path, mode, data in ((private, 0o600, encrypted), (public, 0o644, made.public.pem)):
            with os_errors("write", path):
                write_new_file(path, data, mode=mode, syncs=True)
            undo.callback(path.unlink, missing_ok=True)
        undo.pop_all()  # both are there
    emit(f"Wrote {private}, the private key, and {public}, the public key")


def _password(path: str, is_new: bool = False) -> str:
    """Return the password of a key: from the environment, else from the user, twice if new."""
    if (password := os.environ.get(_PASSWORD)) is not None:
        return password
    if not sys.stdin.isatty():
        hint = f"Set {_PASSWORD}, or run the command in a terminal."
        raise UsageError(f"{path} needs a password", path=path, hint=hint)
    password = getpass(f"Password of {printable(path)}: ")
    if is_new and getpass("Repeat the password: ") != password:
        raise UsageError("the two passwords differ")
    return password
