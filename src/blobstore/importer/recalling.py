"""Recall: the blobs of a plan that an earlier session has made are found by their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blobstore import hashing
from blobstore.importer.planning.outputs import PlannedBlob
from blobstore.io.workers import Progress, each
from blobstore.names import Digest
from blobstore.store.ports import Finished, Session


@dataclass(frozen=True, slots=True)
class WrittenBlobs:
    """The tensor blobs of a plan, in its order; and how many earlier imports had made.

    ``sums``: digests of parts of the source, by path, begin and end (`SourceChecks`).
    """

    blobs: list[Finished]
    recalled: int
    sums: Mapping[tuple[str, int, int], Digest] = field(default_factory=dict)


def recall(
    blobs: Sequence[PlannedBlob],
    keys: Sequence[str],
    session: Session,
    jobs: int,
    progress: Progress,
    *,
    verify: bool,
) -> dict[int, Finished]:
    """Return the blobs that an earlier import has made, by number.

    With ``jobs`` threads where they have to be read. Raises: StorageError.
    """
    earlier = session.earlier
    found: dict[int, Finished] = {}
    if earlier is None:
        return found

    def find_one(number: int) -> None:
        blob = earlier.find(keys[number], blobs[number].size, verify=verify)
        if blob is not None:
            found[number] = blob

    # Each thread hashes one blob, together with those of the others.
    threads = jobs * hashing.width() if verify or earlier.takes_time() else 1
    each(range(len(blobs)), find_one, max(1, min(threads, len(blobs))), name="recall")
    if found:
        progress(sum(blobs[number].source_bytes for number in found), "")
    return found
