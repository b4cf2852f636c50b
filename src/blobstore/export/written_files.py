"""Written files: an export plan becomes files. Nothing is decided here.

Every file gets its header and its size, then every piece its bytes at its place, by any thread:
many bytes of a blob are copied around the page cache, few by the kernel, and values are computed a
few megabytes at a time. Memory is that of one chunk a thread, or of one array a thread where arrays
have to be made as a whole.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from blobstore.export.planned_files import (
    BlobRange,
    CopiedBlob,
    ExportPlan,
    MadeArray,
    PlannedShard,
    ValueRange,
)
from blobstore.export.steps import VALUES_AT_ONCE, Step, steps_of, whole_steps
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
    write_aligned,
    write_all_at,
)
from blobstore.io.ranges import FileReader, close_quietly
from blobstore.io.workers import Progress, each
from blobstore.store.stored_model import BlobFile, damaged

_WIDEST = 4
"""Bytes of a float32, the widest of the dtypes that values become."""
_SPARE_THREADS = 1
"""Threads beyond the jobs: one that writes around the page cache waits for the disk.

Another one works meanwhile: dequantizing with two jobs took 15 % less time, on a busy machine.
"""
_BATCH_BYTES = 2**24
_BATCH_PIECES = 256


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
    """Write the plan's files into ``folder``; they are not yet durable.

    With ``jobs`` threads that work, and one more if some wait for the disk.

    Raises: the error of the first piece in plan order that fails: CorruptDataError when a blob was
    replaced since, or the bytes of a file are damaged; UnsupportedSourceError for a value that does
    not fit; StorageError.
    """
    for document in plan.documents:
        path = folder / document.path
        if isinstance(document, CopiedBlob):
            _copy_blob(document, path)
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


@contextmanager
def _created(path: Path) -> Iterator[int]:
    """Yield a new file, open; its folder is made too. Raises: StorageError, also for closing it."""
    with os_errors("write", path):
        make_folder(path.parent)
        fd = create_file(path)
    try:
        yield fd
    finally:
        with os_errors("write", path):
            os.close(fd)


def _copy_blob(file: CopiedBlob, path: Path) -> None:
    with file.blob.open() as reader:
        if reader.digest() != file.blob.digest:  # nothing else would find damage in it
            raise damaged(file.blob.digest).at(file.path)
        with _created(path) as fd:
            copy_range(reader, 0, fd, path, 0, file.size)


@contextmanager
def _opened(shard: PlannedShard, path: Path, *, around: bool) -> Iterator[_File]:
    """Yield the shard's file with its header; with ``around`` it may bypass the page cache."""
    with _created(path) as fd, ExitStack() as stack:
        file = _File(shard, path, fd, -1)
        with os_errors("write", path):
            if around and any(map(_goes_around, whole_steps(shard))):
                file.direct = open_direct(path)
            if file.direct >= 0:
                stack.callback(close_quietly, file.direct)  # nothing that it wrote waits
                reserve(fd, shard.size)
            else:
                os.ftruncate(fd, shard.size)
            write_all_at(fd, 0, memoryview(shard.header))
        yield file


def _goes_around(step: Step) -> bool:
    """Return True if the bytes are many, and no file system can share them with their blob."""
    match step.piece:
        case BlobRange(_, offset, nbytes):
            return nbytes >= DIRECT_FROM and not shares_blocks(offset, step.at)
        case piece:
            return piece.nbytes >= DIRECT_FROM


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
                    self._write(step, reader, file)
                    self._progress(step.piece.nbytes, step.array)

    def _write(self, step: Step, reader: FileReader | None, file: _File) -> None:
        match step.piece:
            case BlobRange(_, offset, nbytes) if reader is not None:
                if file.direct >= 0 and _goes_around(step):
                    both, buffer = (file.fd, file.direct), self._memory()[:-PAGE]
                    copy_around(reader, offset, both, file.path, step.at, nbytes, buffer)
                else:
                    copy_range(reader, offset, file.fd, file.path, step.at, nbytes)
            case ValueRange() as piece if reader is not None:
                self._convert(piece, reader, file, step.at)
            case MadeArray(_, make):
                with os_errors("write", file.path):
                    write_all_at(file.fd, step.at, make())

    def _convert(self, piece: ValueRange, reader: FileReader, file: _File, at: int) -> None:
        from blobstore.export.values import fill_range

        # A file that was not written by the safetensors library may have its arrays at odd places.
        is_aligned = at % piece.dtype.nbytes((1,)) == 0
        data = self._memory()[at % PAGE if is_aligned else 0 :][: piece.nbytes]
        fill_range(piece, reader, data)
        with os_errors("write", file.path):
            write_aligned(file.fd, file.direct if is_aligned else -1, at, data)

    def _memory(self) -> memoryview:
        """Return memory of the thread: for a run of values and a page, from a page's beginning."""
        if not hasattr(self._local, "memory"):
            with os_errors("allocate", "memory"):
                self._local.memory = memoryview(mmap.mmap(-1, VALUES_AT_ONCE * _WIDEST + PAGE))
        memory: memoryview = self._local.memory
        return memory


def _blob_of(step: Step) -> BlobFile | None:
    return None if isinstance(step.piece, MadeArray) else step.piece.weight.blob


def _batches(file: _File) -> Iterator[tuple[_File, list[Step]]]:
    """Yield steps in file order: a large one alone, small ones together."""
    batch: list[Step] = []
    size = 0
    for step in steps_of(file.shard):
        batch.append(step)
        size += step.piece.nbytes
        if size >= _BATCH_BYTES or len(batch) == _BATCH_PIECES:
            yield file, batch
            batch, size = [], 0
    if batch:
        yield file, batch
