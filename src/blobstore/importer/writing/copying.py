"""Copying: a file of the source becomes a blob, byte for byte. Nothing is decided here."""

from __future__ import annotations

from blobstore.importer.planning.outputs import PlannedCopy
from blobstore.ranges import FileReader
from blobstore.store import FinishedBlob, Ingest

_PIECE = 2**20


def copy_file(layer: PlannedCopy, ingest: Ingest) -> FinishedBlob:
    """Return the blob of a file, written to ``ingest`` in pieces of 1 MiB; it is not yet visible.

    Raises: CorruptDataError when the file is not the one any more that was planned, or changes meanwhile; NotFoundError;
    StorageError.
    """
    with FileReader(layer.file.path) as reader:
        reader.check_is(layer.file.identity)
        is_small = reader.size <= _PIECE
        blob = ingest.put(reader.read(0, reader.size)) if is_small else _copy_large(reader, ingest)
        reader.check_unchanged()
        return blob


def _copy_large(reader: FileReader, ingest: Ingest) -> FinishedBlob:
    writer = ingest.writer(reader.size)
    blob, done = None, 0
    try:
        for piece in reader.pieces(memoryview(bytearray(_PIECE))):
            blob = writer.put(done, piece)
            done += len(piece)
    finally:
        writer.close()
    if blob is None:
        raise AssertionError("the last piece finishes a blob")
    return blob
