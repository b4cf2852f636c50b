"""Checks of packed files: each blob in them is decoded, and hashed. Nothing is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.formats.documents import Descriptor
from blobstore.io.workers import Progress, results_of
from blobstore.names import Digest, ModelName
from blobstore.store.local.packed_blobs import PackedBlobs
from blobstore.store.local.store import Store


@dataclass(slots=True)
class PackedChecks:
    """The packed blobs of a store, or of some packed models, and their damage.

    ``broken``: models whose manifests can't be read, and why. ``damaged``: blobs, by hex digits,
    and why. ``users``: the models that need each blob, with its descriptors in their manifests.
    """

    broken: dict[ModelName, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    users: dict[str, list[tuple[ModelName, Descriptor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    checked: int = 0
    nbytes: int = 0


def check_packed(
    store: Store,
    names: Collection[ModelName] | None,
    part: Callable[[str], bool],
    *,
    quick: bool,
    jobs: int,
    progress: Progress,
) -> PackedChecks:
    """Decode and hash the packed blobs of the models ``names``, or of all and of none (None).

    ``part``: which blobs, by hex digits. ``quick``: only the index of each packed file is read.
    Raises: StorageError if the folders can't be listed; damage is a result.
    """
    checks = PackedChecks()
    known = store.packed.names()
    for name in known if names is None else names:
        _add_needs(store, name, checks)
    packed = store.packed.blobs
    everything = packed.digests() if names is None and known else set()
    wanted = sorted(filter(part, everything | checks.users.keys()))
    sizes = {digest: users[0][1].size for digest, users in checks.users.items()}
    reasons = results_of(
        wanted,
        lambda digest: _wrong(packed, digest, sizes, progress, quick=quick),
        jobs,
        name="verify",
    )
    checks.checked = len(wanted)
    checks.nbytes = 0 if quick else sum(sizes.get(digest, 0) for digest in wanted)
    found = zip(wanted, reasons, strict=True)
    checks.damaged = {digest: reason for digest, reason in found if reason is not None}
    damaged = packed.damaged_files() if names is None and known else []
    checks.damaged |= {packed.digest_of(name).hex: reason for name, reason in damaged}
    return checks


def _add_needs(store: Store, name: ModelName, checks: PackedChecks) -> None:
    try:
        manifest = store.packed.manifests.read(name)
    except NotFoundError:
        return  # it was removed after the names were read
    except BlobStoreError as error:
        checks.broken[name] = error.message
        return
    for blob in manifest.descriptors:
        checks.users[blob.digest.hex].append((name, blob))


def _wrong(
    packed: PackedBlobs,
    digest: str,
    sizes: Mapping[str, int],
    progress: Progress,
    *,
    quick: bool,
) -> str | None:
    """Return the fault of a packed blob, None if it is sound."""
    try:
        with packed.open_of(Digest(digest), sizes.get(digest)) as reader:
            if not quick and reader.digest().hex != digest:
                return f"{reader.name}: its bytes do not match its digest"
            progress(reader.size, "")
    except BlobStoreError as error:
        return error.message
    return None


def models_of(users: Sequence[tuple[ModelName, Descriptor]]) -> tuple[ModelName, ...]:
    """Return the models that need a blob, sorted."""
    return tuple(sorted({name for name, _ in users}))


def names_of(users: Sequence[tuple[ModelName, Descriptor]]) -> tuple[str, ...]:
    """Return the names of a blob in the manifests of its models."""
    return tuple(dict.fromkeys(blob.name for _, blob in users if blob.name is not None))
