"""Streamed files: the files of an export plan as readers, without a folder.

A reader gives the bytes that `write_files` would write. Stored bytes are read from their blobs, and
values are computed as they are read, a few megabytes at a time. An array that has to be made as a
whole is held while it is read.
"""

from __future__ import annotations

from functools import partial

from blobstore.export.planned_files import (
    BlobRange,
    CopiedBlob,
    ExportPlan,
    MadeArray,
    Piece,
    PlannedDocument,
    PlannedShard,
    ValueRange,
)
from blobstore.export.steps import steps_of
from blobstore.hashing.stage import HashStage
from blobstore.io.ranges import BytesReader, JoinedReader, OpenReader, Segment
from blobstore.names import Digest
from blobstore.store.stored_model import damaged

PlannedFile = PlannedShard | PlannedDocument | CopiedBlob


def open_file(file: PlannedFile) -> OpenReader:
    """Return a reader over the bytes of a file of a plan.

    Reading raises: CorruptDataError when a blob was replaced since the plan was made;
    UnsupportedSourceError for a value that does not fit; NotFoundError; StorageError.
    """
    match file:
        case PlannedDocument():
            return BytesReader(file.data, file.path)
        case CopiedBlob():
            return file.blob.open()
        case PlannedShard():
            header = Segment(len(file.header), partial(BytesReader, file.header, file.path))
            pieces = (_part(step.piece, step.array) for step in steps_of(file))
            return JoinedReader(file.path, [header, *pieces])


def digest_of(file: PlannedFile, stage: HashStage) -> Digest:
    """Return the digest of a file of a plan: a copied blob's own, else that of the bytes.

    ``stage``: see `OpenReader.digest`. Raises: as reading it.
    """
    match file:
        case CopiedBlob():
            return file.blob.digest
        case PlannedDocument():
            return Digest.of(file.data)
        case PlannedShard():
            with open_file(file) as reader:
                return reader.digest(stage)


def check_copies(plan: ExportPlan) -> None:
    """Hash the blobs that become files as they are. Raises: DigestMismatchError; as reading them.

    `plan_export` checks those of tensors.
    """
    for file in plan.documents:
        if isinstance(file, CopiedBlob):
            with file.blob.open() as reader:
                if reader.digest() != file.blob.digest:
                    raise damaged(file.blob.digest).at(file.path)


def _part(piece: Piece, name: str) -> Segment:
    match piece:
        case BlobRange():
            return Segment(piece.nbytes, piece.weight.blob.open, piece.offset)
        case ValueRange():
            return Segment(piece.nbytes, partial(_values, piece, name))
        case MadeArray():
            return Segment(piece.nbytes, lambda: BytesReader(piece.make(), name))


def _values(piece: ValueRange, name: str) -> OpenReader:
    from blobstore.export.values import fill_range

    data = memoryview(bytearray(piece.nbytes))
    with piece.weight.blob.open() as reader:
        fill_range(piece, reader, data)
    return BytesReader(data, name)
