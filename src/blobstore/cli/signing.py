"""``sign``, and the part of ``verify`` that checks signatures: ``--key`` and ``--policy``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.output import (
    JsonOption,
    ReaderGoneError,
    counted,
    emit,
    printable,
    show_result,
)
from blobstore.cli.stores import StoreOption, WaitOption, store_at
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.formats.signatures import DockerReference
    from blobstore.store.signing.signature_policy import SignaturePolicy
    from blobstore.store.signing.signed_models import CheckedModel, SignedModel


KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="FILE", help="Require a signature by this public key, for the repository."
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="FILE", help="Require the signatures of this containers policy.json."
    ),
]


def verify_signatures(
    store: Any,
    names: list[str] | None,
    key: str | None,
    policy: str | None,
    identity: str | None,
    as_json: bool,
) -> bool:
    """Check and show the signatures of models; return whether all are signed as required."""
    from blobstore.store.signing.signed_models import check_signatures

    checked = check_signatures(names or (), store, policy_of(key, policy, identity))
    with suppress(ReaderGoneError):  # the exit code tells the result, too
        show_result(checked, _show_checked, as_json=as_json)
    return all(model.is_accepted for model in checked)


def policy_of(key: str | None, policy: str | None, identity: str | None = None) -> SignaturePolicy:
    """Return what --key or --policy requires. Raises: UsageError unless one of them is given."""
    from blobstore.store.signing.key_pairs import MAX_KEY_FILE, PublicKey
    from blobstore.store.signing.signature_policy import SignaturePolicy, read_file

    if (key is None) == (policy is None):
        raise UsageError("signatures are checked with either --key or --policy")
    if policy is not None:
        if identity is not None:
            raise UsageError("--identity needs --key; a policy has signedIdentity instead")
        return SignaturePolicy.read(Path(policy))
    path = key or ""
    public = PublicKey.parse(read_file(Path(path), MAX_KEY_FILE), path)
    return SignaturePolicy.of_key(public, identity_of(identity))


def _show_checked(models: Sequence[CheckedModel]) -> None:
    for model in models:
        named = f"{model.name} ({model.digest.short})"
        if model.error is not None:
            emit(printable(model.error.message))
        elif not model.accepted:
            emit(f"{named} needs no signature")
        for one in model.accepted:
            emit(printable(f"{named} is signed by {one.key.name} for {one.identity}"))
    refused = sum(not model.is_accepted for model in models)
    verdict = f"{refused} refused" if refused else "all accepted"
    emit(f"Checked the signatures of {counted(len(models), 'model')}: {verdict}")


def identity_of(text: str | None) -> DockerReference | None:
    """Return the identity in ``--identity``, None without one. Raises: InvalidNameError."""
    from blobstore.formats.signatures import DockerReference

    return None if text is None else DockerReference.parse(text)


_PASSWORD = "COSIGN_PASSWORD"  # noqa: S105  # the name of a variable


def sign(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Stored models to sign.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="The private key: PEM (PKCS #8), or cosign's cosign.key. Its password is asked "
            "for [default: $COSIGN_PASSWORD].",
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            "--identity",
            metavar="REFERENCE",
            help="Sign for HOST/NAMESPACE/MODEL[:TAG] [default: the model's repository].",
        ),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            "--generate-key",
            metavar="PREFIX",
            help="Instead of signing, write a new pair of keys: PREFIX.key and PREFIX.pub.",
        ),
    ] = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sign models by the digests of their manifests, as cosign does. Blobs are not read."""
    if generate is not None:
        if names or key is not None or identity is not None:
            raise UsageError("--generate-key makes keys and signs nothing: leave out the rest")
        _generate(generate)
        return
    if not names or key is None:
        hint = "blobstore sign NAME --key FILE, or --generate-key PREFIX to make a key."
        raise UsageError("sign needs a NAME and a --key", hint=hint)
    from blobstore.store.holders import holder_of
    from blobstore.store.signing.key_pairs import MAX_KEY_FILE, PrivateKey
    from blobstore.store.signing.signature_policy import read_file
    from blobstore.store.signing.signed_models import sign_model

    opened = store_at(store, wait)
    signed_for = identity_of(identity)
    found = [holder_of(name, opened).find(name) for name in names]
    private = PrivateKey.parse(read_file(Path(key), MAX_KEY_FILE), key, lambda: _password(key))
    signed = [sign_model(name, opened, private, identity=signed_for) for name in found]
    show_result(signed, _show_signed, as_json=as_json)


def _show_signed(models: Sequence[SignedModel]) -> None:
    for model in models:
        verb = "Signed" if model.is_new else "Already signed"
        emit(f"{verb} {model.name} ({model.digest.short}) for {model.identity}")


def _generate(prefix: str) -> None:
    """Write a new pair of keys, or no file. Raises: UsageError if one exists; StorageError."""
    from blobstore.io.durable import os_errors, write_new_file
    from blobstore.store.signing.key_pairs import PrivateKey

    private, public = Path(f"{prefix}.key"), Path(f"{prefix}.pub")
    for path in (private, public):
        if os.path.lexists(path):
            raise UsageError(
                f"{path} already exists", path=str(path), hint="Choose another PREFIX."
            )
    made = PrivateKey.generate()
    encrypted = made.encrypted(_password(str(private), is_new=True))
    with ExitStack() as undo:
        for path, mode, data in ((private, 0o600, encrypted), (public, 0o644, made.public.pem)):
            with os_errors("write", path):
                write_new_file(path, data, mode=mode, syncs=True)
            undo.callback(path.unlink, missing_ok=True)
        undo.pop_all()  # both are there
    emit(f"Wrote {private}, the private key, and {public}, the public key")


def _password(path: str, *, is_new: bool = False) -> str:
    """Return the password of a key: from the environment, else from the user, twice if new."""
    if (password := os.environ.get(_PASSWORD)) is not None:
        return password
    if not sys.stdin.isatty():
        hint = f"Set {_PASSWORD}, or run the command in a terminal."
        raise UsageError(f"{path} needs a password", path=path, hint=hint)
    password = getpass(f"Password of {printable(path)}: ")
    if is_new and getpass("The same again: ") != password:
        raise UsageError("the two passwords differ")
    return password
