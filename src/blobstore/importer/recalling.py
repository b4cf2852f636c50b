"""Recall: the blobs of a plan that an earlier session has made are found by their keys.

A key is the hash of everything that a planned blob's bytes depend on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blobstore import hashing
from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.io.workers import Progress, each
from blobstore.source.weights import SourceFile, SourceWeight
from blobstore.store.ports import Finished, Session

_ARITHMETIC = 1
"""Goes up when the same weights are quantized to other bytes than before."""


@dataclass(frozen=True, slots=True)
class WrittenBlobs:
    """The tensor blobs of a plan, in its order; and how many earlier imports had made."""

    blobs: list[Finished]
    recalled: int


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
    found: dict[int, Finished] = {}
    if not session.remembers:
        return found

    def find_one(number: int) -> None:
        blob = session.recall(keys[number], blobs[number].size, verify=verify)
        if blob is not None:
            found[number] = blob

    # A thread hashes one blob at a time, together with those of the others.
    threads = jobs * hashing.width()
    each(range(len(blobs)), find_one, max(1, min(threads, len(blobs))), name="recall")
    if found:
        progress(sum(blobs[number].source_bytes for number in found), "")
    return found


def _state(file: SourceFile) -> str:
    return f"{file.identity.key} {file.path!r}"


def entry_keys(
    blobs: Sequence[PlannedBlob], state: Callable[[SourceFile], str] = _state
) -> Iterator[str]:
    """Yield the key of each blob: of its header, its sources' bytes and files, and the method.

    The header has names, dtypes, shapes and types. The ``state`` of a file is its path, device,
    inode, size and times, so a source that is written to, replaced or moved has other keys.
    """
    states: dict[int, str] = {}

    def known_state(file: SourceFile) -> str:
        if id(file) not in states:
            states[id(file)] = state(file)
        return states[id(file)]

    for blob in blobs:
        texts = []
        for tensor in blob.tensors:
            texts.append(_made(tensor, blob))
            texts += [_stored(source, known_state) for source in tensor.sources]
        start = b"%d\n%b" % (_ARITHMETIC, blob.header)
        yield hashlib.sha256(start + "".join(texts).encode()).hexdigest()


def _made(tensor: OutputTensor, blob: PlannedBlob) -> str:
    """Say what the header does not say about how a tensor is made."""
    options = blob.options
    importance = options.importance.digest.hex if options.importance is not None else ""
    return f"{tensor.name}\n{tensor.copies}\n{tensor.dtype.value}\n{options.method}\n{importance}\n"


def _stored(source: SourceWeight, state: Callable[[SourceFile], str]) -> str:
    parts = "\n".join(
        [
            f"{suffix} {part.dtype.value} {part.offset} {part.nbytes} {state(part.file)}"
            for suffix, part in source.parts.items()
        ]
    )
    kind = f"{source.form.value} {source.dtype.value} {source.quantization}"
    return f"{source.name}\n{kind} {source.inverse_global_scale} {source.shape}\n{parts}\n"
