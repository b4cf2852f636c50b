"""Transfer: models from one store to another, whatever kind the two are.

Only blobs that the target lacks are read, several at once, each checked against its digest; a model's manifest comes last.
So a transfer that ends early leaves no half model, and the next one does not begin again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blobstore.formats.documents import Descriptor
from blobstore.io.ranges import allow_open_files
from blobstore.io.workers import Progress, each, silent, threads
from blobstore.names import ModelName
from blobstore.store.ports import Home, How


@dataclass(frozen=True, slots=True)
class Transferred:
    """A model that is in the target now, as ``name``: ``source`` is what it is called where it came from.

    ``blobs`` and ``nbytes``: how many blobs, and bytes, came in which way.
    """

    source: ModelName
    name: ModelName
    blobs: Mapping[How, int]
    nbytes: Mapping[How, int]


def transfer(
    names: Iterable[str | ModelName] | Mapping[str, str],
    source: Home,
    target: Home,
    *,
    jobs: int | None = None,
    progress: Progress = silent,
) -> list[Transferred]:
    """Copy models from ``source`` to ``target``, with their raw manifests; return what became of each.

    ``names``: those in the source, which they get in the target too; a mapping gives them others. A model of that name is
    replaced. ``jobs``: threads (None: one a core). ``progress`` is told of the bytes of each blob that has come.

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError before anything is written; for a blob that is
    missing or damaged in the source NotFoundError, CorruptDataError or DigestMismatchError; StorageError. Models before the
    one that fails are in the target, and what has come of it is used again by the next transfer.
    """
    pairs = names.items() if isinstance(names, Mapping) else ((name, name) for name in names)
    planned = [(source.find(old), target.target(new)) for old, new in pairs]
    return [_transfer(old, new, source, target, threads(jobs), progress) for old, new in planned]


def _transfer(old: ModelName, new: ModelName, source: Home, target: Home, jobs: int, progress: Progress) -> Transferred:
    allow_open_files(2 * jobs)
    took: list[tuple[How, Descriptor]] = []
    with source.lease(), target.session(source.address) as session:
        manifest = source.manifests.read(old)

        def take(descriptor: Descriptor) -> None:
            with source.blobs.open(descriptor) as reader:
                how = session.add(descriptor, reader)
            took.append((how, descriptor))
            progress(descriptor.size, descriptor.name or str(descriptor.digest))

        missing = target.blobs.missing(manifest.descriptors)
        each(missing, take, jobs, name="transfer")
        session.publish(new, manifest)
    came = {blob.digest for blob in missing}
    took += (
        (How.THERE, blob)
        for blob in {blob.digest: blob for blob in manifest.descriptors}.values()
        if blob.digest not in came
    )
    blobs, nbytes = Counter[How](), Counter[How]()
    for how, blob in took:
        blobs[how] += 1
        nbytes[how] += blob.size
    return Transferred(old, new, blobs, nbytes)
