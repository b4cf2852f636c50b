"""``--key`` and ``--policy``, and the part of ``verify`` that checks signatures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.output import ReaderGoneError, counted, emit, printable, short, show_view
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.formats.signatures import DockerReference
    from blobstore.store.signing.signature_policy import SignaturePolicy
    from blobstore.views.signed import SignatureCheckView

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
    from blobstore.views.signed import SignatureCheckView

    checked = check_signatures(names or (), store, policy_of(key, policy, identity))
    views = list(map(SignatureCheckView.of, checked))
    with suppress(ReaderGoneError):  # the exit code tells the result, too
        show_view(views, _show_checked, as_json=as_json)
    return all(view.accepted for view in views)


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


def _show_checked(views: Sequence[SignatureCheckView]) -> None:
    for view in views:
        if not view.accepted:
            emit(printable(view.error))
        elif not view.signatures:
            emit(f"{view.name} ({short(view.digest)}) needs no signature")
        for one in view.signatures:
            said = f"{view.name} ({short(view.digest)}) is signed by {one.key}"
            emit(printable(f"{said} for {one.identity}"))
    refused = sum(not view.accepted for view in views)
    verdict = f"{refused} refused" if refused else "all accepted"
    emit(f"Checked the signatures of {counted(len(views), 'model')}: {verdict}")


def identity_of(text: str | None) -> DockerReference | None:
    """Return the identity in ``--identity``, None without one. Raises: InvalidNameError."""
    from blobstore.formats.signatures import DockerReference

    return None if text is None else DockerReference.parse(text)
