"""Files: an export plan becomes files in a folder, or readers of them. Nothing is decided here.

Every file gets its header and its size, then every piece its bytes at its place, by any thread:
many bytes of a blob are copied around the page cache, few by the kernel, and values are computed a
few megabytes at a time. Memory is that of one step a thread.

A reader gives the same bytes without a folder (`open_file`).
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blobstore.export.planned_files import (
    BlobRange,
    Computed,
    CopiedBlob,
    ExportPlan,
    Piece,
    PlannedDocument,
    PlannedShard,
    Step,
)
from blobstore.hashing.stage import HashStage
from blobstore.io.budget import allow_open_files
from blobstore.io.copying import copy_around, copy_range, shares_blocks
from blobstore.io.durable import (
    DIRECT_FROM,
    PAGE,
    create_file,
    is_remote,
    make_folder,
    open_direct,
    os_errors,
    reserve,
    sync,
    sync_folder,
    write_aligned,
    write_all_at,
)
from blobstore.io.ranges import (
    BytesReader,
    FileReader,
    JoinedReader,
    OpenReader,
    Segment,
    close_quietly,
)
from blobstore.io.workers import Progress, each
from blobstore.names import Digest
from blobstore.store.stored_model import BlobFile, damaged

_COPY_BUFFER = 2**22
_SPARE_THREADS = 1
"""Threads beyond the jobs: one that writes around the page cache waits for the disk.

Another one works meanwhile: dequantizing with two jobs took 15 % less time, on a busy machine.
"""
_BATCH_BYTES = 2**24
_BATCH_PIECES = 256

PlannedFile = PlannedShard | PlannedDocument | CopiedBlob


@dataclass(slots=True)
class _File:
    """An open file of the export.

    ``direct`` is the same file, to be written around the page cache, or -1.
    """

    shard: PlannedShard
    path: Path
    fd: int
    direct: int


def write_files(plan: ExportPlan, folder: Path, jobs: int, progress: Progress) -> None:
    """Write the plan's files into ``folder``, and make all but its own name durable.

    With ``jobs`` threads that work, and one more if some wait for the disk.

    Raises: the error of the first piece in plan order that fails: CorruptDataError when a blob was
    replaced since, or the bytes of a file are damaged; UnsupportedSourceError for a value that does
    not fit; StorageError.
    """
    for document in plan.documents:
        path = folder / document.path
        if isinstance(document, CopiedBlob):
            with _checked(document) as reader, _created(path) as fd:
                copy_range(reader, 0, fd, path, 0, document.size)
        else:
            with _created(path) as fd, os_errors("write", path):
                write_all_at(fd, 0, memoryview(document.data))
        progress(document.size, document.path)
    allow_open_files(2 * len(plan.shards) + 2 * (jobs + _SPARE_THREADS))
    with os_errors("write to", folder):
        by_server = is_remote(folder)
    with ExitStack() as stack:
        files: list[_File] = []
        for shard in plan.shards:
            path = folder / shard.path
            files.append(stack.enter_context(_opened(shard, path, around=not by_server)))
            progress(len(shard.header), shard.path)
        batches = (batch for file in files for batch in _batches(file))
        spare = _SPARE_THREADS if any(file.direct >= 0 for file in files) else 0
        each(batches, _Work(progress).do, jobs + spare, name="export")
    with os_errors("write to", folder):
        for place in {folder, *((folder / file.path).parent for file in plan.files)}:
            sync_folder(place)


@contextmanager
def _created(path: Path) -> Iterator[int]:
    """Yield a new file, open; its folder is made too. Raises: StorageError, also for closing it."""
    with os_errors("write", path):
        make_folder(path.parent)
        fd = create_file(path)
    try:
        yield fd
        with os_errors("write", path):
            sync(fd)
    finally:
        with os_errors("write", path):
            os.close(fd)


@contextmanager
def _checked(file: CopiedBlob) -> Iterator[FileReader]:
    """Yield a reader of the blob, which was hashed: nothing else would find damage in it."""
    with file.blob.open() as reader:
        if reader.digest() != file.blob.digest:
            raise damaged(file.blob.digest).at(file.path)
        yield reader


def check_copies(plan: ExportPlan) -> None:
    """Hash the blobs that become files as they are. Raises: DigestMismatchError; as reading them.

    `plan_export` checks those of tensors.
    """
    for file in plan.documents:
        if isinstance(file, CopiedBlob):
            with _checked(file):
                pass


@contextmanager
def _opened(shard: PlannedShard, path: Path, *, around: bool) -> Iterator[_File]:
    """Yield the shard's file with its header; with ``around`` it may bypass the page cache."""
    with _created(path) as fd, ExitStack() as stack:
        file = _File(shard, path, fd, -1)
        with os_errors("write", path):
            pieces = shard.pieces() if around else ()
            if any(_goes_around(piece, 0, piece.nbytes, at) for _, piece, at in pieces):
                file.direct = open_direct(path)
            if file.direct >= 0:
                stack.callback(close_quietly, file.direct)  # nothing that it wrote waits
                reserve(fd, shard.size)
            else:
                os.ftruncate(fd, shard.size)
            write_all_at(fd, 0, memoryview(shard.header))
        yield file


def _goes_around(piece: Piece, begin: int, nbytes: int, at: int) -> bool:
    """Return True if the bytes are many, and no file system can share them with their blob."""
    is_shared = isinstance(piece, BlobRange) and shares_blocks(piece.offset + begin, at)
    return nbytes >= DIRECT_FROM and not is_shared


class _Work:
    """The state that the threads of one export share."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._local = threading.local()

    def do(self, batch: tuple[_File, list[Step]]) -> None:
        """Write the pieces of one batch."""
        file, steps = batch
        for blob, group in itertools.groupby(steps, key=_blob_of):
            with nullcontext() if blob is None else blob.open() as reader:
                for step in group:
                    match step.piece:
                        case BlobRange() as piece if reader is not None:
                            self._copy(step, piece, reader, file)
                        case Computed() as piece:
                            self._compute(step, piece, file)
                    self._progress(step.nbytes, step.array)

    def _copy(self, step: Step, piece: BlobRange, reader: FileReader, file: _File) -> None:
        start = piece.offset + step.begin
        if file.direct >= 0 and _goes_around(piece, step.begin, step.nbytes, step.at):
            both, buffer = (file.fd, file.direct), self._memory(_COPY_BUFFER)
            copy_around(reader, start, both, file.path, step.at, step.nbytes, buffer)
        else:
            copy_range(reader, start, file.fd, file.path, step.at, step.nbytes)

    def _compute(self, step: Step, piece: Computed, file: _File) -> None:
        # A file that was not written by the safetensors library may have its arrays at odd places.
        is_aligned = step.at % piece.itemsize == 0
        begin = step.at % PAGE if is_aligned else 0
        data = self._memory(begin + step.nbytes)[begin:]
        piece.fill(step.begin, data)
        with os_errors("write", file.path):
            write_aligned(file.fd, file.direct if is_aligned else -1, step.at, data)

    def _memory(self, nbytes: int) -> memoryview:
        """Return memory of the thread, from a page's beginning on; a later call may reuse it."""
        memory: memoryview = getattr(self._local, "memory", memoryview(b""))
        if len(memory) < nbytes:
            with os_errors("allocate", "memory"):
                memory = self._local.memory = memoryview(mmap.mmap(-1, nbytes))
        return memory[:nbytes]


def _blob_of(step: Step) -> BlobFile | None:
    return step.piece.blob if isinstance(step.piece, BlobRange) else None


def _batches(file: _File) -> Iterator[tuple[_File, list[Step]]]:
    """Yield steps in file order: a large one alone, small ones together."""
    batch: list[Step] = []
    size = 0
    for step in file.shard.steps():
        batch.append(step)
        size += step.nbytes
        if size >= _BATCH_BYTES or len(batch) == _BATCH_PIECES:
            yield file, batch
            batch, size = [], 0
    if batch:
        yield file, batch


def open_file(file: PlannedFile) -> OpenReader:
    """Return a reader over the bytes of a file of a plan, as `write_files` would write them.

    Values are computed as they are read. Reading raises: CorruptDataError when a blob was replaced
    since the plan was made; UnsupportedSourceError for a value that does not fit; NotFoundError;
    StorageError.
    """
    match file:
        case PlannedDocument():
            return BytesReader(file.data, file.path)
        case CopiedBlob():
            return file.blob.open()
        case PlannedShard():
            header = Segment(len(file.header), partial(BytesReader, file.header, file.path))
            return JoinedReader(file.path, [header, *map(_segment, file.steps())])


def _segment(step: Step) -> Segment:
    match step.piece:
        case BlobRange(blob, offset, _):
            return Segment(step.nbytes, blob.open, offset + step.begin)
        case piece:
            return Segment(step.nbytes, partial(_computed, step, piece))


def _computed(step: Step, piece: Computed) -> OpenReader:
    data = memoryview(bytearray(step.nbytes))
    piece.fill(step.begin, data)
    return BytesReader(data, step.array)


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
