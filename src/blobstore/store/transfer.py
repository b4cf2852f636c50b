"""Transfer: copies models from one store to another, of whatever kind.

Only blobs that the target lacks are read, several at once, each checked against its digest; a
model's manifest comes last. So a transfer that ends early leaves no incomplete model, and the next
one continues it.

A model's signatures come after its blobs and before its manifest: where models must be signed, no
model may be visible without them. Signatures of a digest that no model has do no harm. A policy is
checked before a blob is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    UsageError,
)
from blobstore.formats.documents import Manifest
from blobstore.formats.oci import Signature
from blobstore.io.workers import Progress, threads
from blobstore.names import Digest, ModelName
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import How, Readable, Receiver, unique
from blobstore.store.sessions import add_missing, keep_for_the_next
from blobstore.store.signing.signed_models import SignaturePolicy

_log = logging.getLogger("blobstore.store.transfer")

Check = Callable[[Manifest, str], None]


@dataclass(frozen=True, slots=True)
class Amount:
    """How many blobs, and bytes."""

    KEYS = ("blobs", "bytes=nbytes")

    blobs: int
    nbytes: int

    def __bool__(self) -> bool:
        return self.blobs > 0


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A model that was copied from one store to another, and its blobs by how they got there."""

    KEYS = ("source", "name", "digest", "there", "moved", "signatures", "replaced")

    source: Annotated[ModelName, "its name in the source"]
    name: Annotated[ModelName, "its name in the target"]
    digest: Annotated[Digest, "of its manifest"]
    there: Annotated[Amount, "Blobs that the target already had"]
    linked: Annotated[Amount, "Blobs that are the same file"]
    cloned: Annotated[Amount, "Blobs that share their blocks"]
    copied: Annotated[Amount, "Blobs that were copied"]
    signatures: Annotated[int, "those that are new in the target"] = 0
    replaced: Annotated[
        Digest | None, "for pull and load: the ID of the model that had the name before"
    ] = None

    @property
    def moved(self) -> Amount:
        """Blobs that were sent or fetched."""
        ways = (self.linked, self.cloned, self.copied)
        return Amount(sum(one.blobs for one in ways), sum(one.nbytes for one in ways))


def transfer(
    names: str | ModelName | Iterable[str | ModelName] | Mapping[str, str],
    source: Readable | StorePlace,
    target: Receiver | StorePlace,
    *,
    check: Check = lambda _manifest, _what: None,
    jobs: int | None = None,
    progress: Progress | None = None,
    policy: SignaturePolicy | None = None,
) -> list[TransferResult]:
    """Copy models from ``source`` to ``target``, with their raw manifests; return what was copied.

    Signatures are copied too, if both homes keep them.

    ``names``: one or several names in the source, which the models keep in the target; a mapping
    gives them others. A model of that name is replaced. ``check`` is called with each manifest and
    its name for messages, and refuses it by raising, before a blob is read. ``jobs``: threads
    (None: one per core). ``progress`` is called with the bytes of each blob that was copied. A blob
    that the target has with the right name and size is not read. ``policy``: models that it does
    not accept under their names in the source are refused. Without one, signatures that can't be
    read are left out, with a warning.

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError, UsageError (one name
    for two) before anything is written; SignatureError for a model that the policy does not accept,
    before any of it is written; NotFoundError, CorruptDataError or DigestMismatchError for a blob
    that is missing or damaged in the source; StorageError. Models before the one that fails
    are in the target. The blobs of the model that fails are kept for the next transfer by a home
    that can do so, except after a StorageError: the disk may be full.
    """
    origin, home = opened_store(source), opened_store(target)
    if isinstance(names, str | ModelName):
        names = [names]
    pairs = names.items() if isinstance(names, Mapping) else ((name, name) for name in names)
    planned = [(origin.find(old), home.target(new)) for old, new in pairs]
    if len({new.folded for _, new in planned}) < len(planned):
        raise UsageError(
            f"two models would get the same name: {', '.join(str(new) for _, new in planned)}"
        )
    workers = threads(jobs)

    def copy(old: ModelName, new: ModelName) -> TransferResult:
        with origin.lease(), home.session(name=new) as session:
            manifest = origin.manifests.read(old)
            check(manifest, str(old))
            signatures = _signatures(origin, old, manifest.digest, policy)
            with keep_for_the_next(session):
                took = add_missing(session, manifest, origin.blobs.open, workers, progress)
                added = 0
                if signatures and home.signatures is not None:
                    added = home.signatures.add(new, manifest.digest, signatures)
                elif signatures:
                    _log.warning(
                        "the signatures of %s were not copied: the target can't store them", old
                    )
                session.publish(new, manifest)
        sizes: dict[How, list[int]] = {how: [] for how in How}
        for blob in unique(manifest.descriptors):
            sizes[took.get(blob.digest, How.THERE)].append(blob.size)
        there, linked, cloned, copied = (
            Amount(len(sizes[how]), sum(sizes[how]))
            for how in (How.THERE, How.LINKED, How.CLONED, How.COPIED)
        )
        digest = manifest.digest
        return TransferResult(old, new, digest, there, linked, cloned, copied, added)

    return [copy(old, new) for old, new in planned]


def _signatures(
    source: Readable, name: ModelName, digest: Digest, policy: SignaturePolicy | None
) -> Sequence[Signature]:
    signatures: Sequence[Signature] = ()
    try:
        if source.signatures is not None:
            signatures = source.signatures.read(name, digest)
    except (CorruptDataError, LimitExceededError, NotFoundError, RemoteError) as error:
        # A registry may refuse the tag of signatures. One that can't be reached is another matter.
        if policy is not None or getattr(error, "temporary", False):
            raise
        _log.warning("the signatures of %s are not copied: %s", name, error)
    if policy is not None:
        policy.check(name, digest, signatures)
    return signatures
