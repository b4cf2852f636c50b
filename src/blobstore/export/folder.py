"""Export: a stored model becomes a checkpoint folder.

Read (the model's headers), decide (contents.py), do.

The folder is written under another name next to it, and renamed when everything in it is on the
disk: so a folder of that name is always a complete export. The other name is always the same, and
it is locked while it is written: two exports into one folder do not mix, and the next export
removes what a killed one left.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from blobstore.errors import BusyError, StorageError, UsageError, quoted
from blobstore.export.contents import plan_export
from blobstore.export.planned_files import (
    DEFAULT_SHARD,
    BlobRange,
    Computed,
    CopiedBlob,
    ExportOptions,
    ExportPlan,
    PlannedDocument,
    PlannedFile,
    PlannedShard,
    Step,
)
from blobstore.formats.dtypes import DType
from blobstore.io.budget import allow_open_files
from blobstore.io.copying import copy_around, copy_range, remove_tree, shares_blocks
from blobstore.io.durable import (
    DIRECT_FROM,
    FOLDER_MODE,
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
from blobstore.io.workers import Progress, batches, each, start_progress, threads
from blobstore.names import ModelName
from blobstore.store.local.locks import take_lock
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Readable, mismatch_error
from blobstore.store.stored_model import StoredModel


def export_folder(folder: str | os.PathLike[str], store: Readable) -> Path:
    """Return the path of an export.

    Raises: StorageError unless it is free or an empty folder; UsageError when it is in the store.
    """
    try:
        with os_errors("access", os.fspath(folder)):
            path = Path(folder).expanduser().resolve()
            is_free = not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))
            is_mount = path.is_mount()
    # A NUL in the path; an unknown ~user, a loop of links.
    except (ValueError, RuntimeError) as error:
        raise StorageError(
            f"can't write to {quoted(os.fspath(folder))}: {error}", path=os.fspath(folder)
        ) from error
    if Path(store.address) in (path, *path.parents):
        raise UsageError(
            f"{path} is in the store {store.address}, which is for blobs and manifests",
            path=str(path),
        )
    if is_mount:
        raise StorageError(
            f"{path} is a mount point: no other folder can take its place",
            hint=f"Export into a folder inside it, such as {path / 'model'}.",
        )
    if not is_free:
        raise StorageError(
            f"{path} already exists and is not an empty folder",
            path=str(path),
            hint="Name a folder that does not exist, or an empty one.",
        )
    return path


@contextmanager
def stage_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder next to ``path``, which takes its place when the block ends.

    What the block writes is durable then. After an error the folder is removed.

    Raises: BusyError when another export into the same folder is running; StorageError.
    """
    staging = path.with_name(f".{path.name}.blobstore-export")
    with os_errors("write to", staging):
        make_folder(staging.parent)
        fd = _take(staging)
    try:
        with os_errors("write to", staging):
            for left in staging.iterdir():
                if left.is_dir() and not left.is_symlink():
                    remove_tree(left)
                else:
                    left.unlink()
        yield staging
        with os_errors("write to", path):
            staging.rename(path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            remove_tree(staging)
        raise
    finally:
        close_quietly(fd)


def _take(staging: Path) -> int:
    with suppress(FileExistsError):
        staging.mkdir(mode=FOLDER_MODE)
    # The process that had the lock may have renamed or removed the folder just now.
    with ExitStack() as unless_locked, suppress(FileNotFoundError):
        fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        unless_locked.callback(close_quietly, fd)
        is_locked = take_lock(fd, fcntl.LOCK_EX, 0)
        if is_locked and os.path.samestat(os.fstat(fd), staging.stat(follow_symlinks=False)):
            unless_locked.pop_all()
            return fd
    raise BusyError(
        f"another export into the same folder is running ({staging})", path=str(staging)
    )


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote.

    ``files``: sizes in bytes by path in ``folder``; ``notes``: sentences about what was left out or
    changed; ``seconds``: the time of writing.
    """

    KEYS = ("name", "folder", "files=written", "bytes=nbytes", "notes", "seconds", "loads_in")

    name: ModelName
    folder: Path
    files: dict[str, int]
    notes: tuple[str, ...]
    seconds: float
    loads_in: Annotated[
        tuple[str, ...], "programs that read the folder, if they know the architecture"
    ]

    @property
    def written(self) -> list[WrittenFile]:
        """The files that were written."""
        return [WrittenFile(*item) for item in self.files.items()]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def export_model(
    name: str | ModelName,
    folder: str | os.PathLike[str],
    *,
    store: Readable | StorePlace = None,
    format: str = "safetensors",  # noqa: A002  # the option's name
    dequantize: str | DType | None = None,
    max_shard_size: int | str = DEFAULT_SHARD,
    jobs: int | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a stored model into a new ``folder`` as a checkpoint.

    The folder holds shards and their index, JSON documents, the other files of the source, and a
    Modelfile if the model needs one.

    ``format``: "safetensors" keeps names and stored arrays, so that an import of the folder stores
    the same; "mlx" gives what ``mlx_lm.load`` opens. ``dequantize``: "bfloat16", "float16" or
    "float32" for all quantized weights and floats. ``max_shard_size``: bytes of a file at most, by
    huggingface_hub's rule, or "source" for the files that were imported. ``jobs``: threads (None:
    one per core). ``verify``: hash every blob first. ``progress`` is called with the bytes that are
    written.

    The folder appears when all of it is on the disk, or not at all. A draft model becomes a
    checkpoint in ``draft/``.

    Raises: UsageError (an unknown word, a folder in the store, mlx without the ``lm`` extra); as
    `open_model`; UnsupportedSourceError when mlx-lm can't load the model, or a value does not fit
    the dtype; StorageError when the folder exists and is not empty, and for errors of the operating
    system; BusyError when another export into it is running.
    """
    store = opened_store(store)
    options = ExportOptions.parse(format, dequantize, max_shard_size)
    workers = threads(jobs)
    target = export_folder(folder, store)
    with store.lease():  # blobs are opened one by one, until the last was copied
        full = store.find(name)
        model = StoredModel(full, store.manifests.read(full), store)
        store.prefetch(model.manifest.descriptors)
        plan = plan_export(model, options, verify=verify)
        started = time.monotonic()
        with stage_folder(target) as staging:
            write_files(plan, staging, workers, start_progress(progress, plan.nbytes))
    files = {file.path: file.size for file in sorted(plan.files, key=lambda file: file.path)}
    return ExportResult(
        full, target, files, plan.notes, time.monotonic() - started, _loads_in(plan, options)
    )


def _loads_in(plan: ExportPlan, options: ExportOptions) -> tuple[str, ...]:
    """Return the programs that read the folder, if they know the architecture.

    Of folders of both models in fixtures, transformers 5 and mlx-lm refuse int4 and nvfp4 codes in
    Ollama's layout, and transformers also those in MLX's; it misses the experts of MLX's layout.
    """
    if options.is_mlx:
        return ("mlx-lm", "blobstore")
    has_codes = any(array.dtype is DType.U32 for shard in plan.shards for array in shard.arrays)
    return ("blobstore",) if has_codes else ("transformers", "mlx-lm", "blobstore")


_COPY_BUFFER = 2**22
SPARE_THREADS = 1
"""Threads beyond the jobs: one that writes around the page cache waits for the disk.

Another one works meanwhile: dequantizing with two jobs took 15 % less time, on a busy machine.
"""
_BATCH_BYTES = 2**24
BATCH_PIECES = 256


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
            with document.blob.open() as reader, _create_file(path) as fd:
                if reader.digest() != document.blob.digest:  # nothing else would find damage
                    raise mismatch_error(document.blob.digest).at(document.path)
                copy_range(reader, 0, fd, path, 0, document.size)
        else:
            with _create_file(path) as fd, os_errors("write", path):
                write_all_at(fd, 0, memoryview(document.data))
        progress(document.size, document.path)
    allow_open_files(2 * len(plan.shards) + 2 * (jobs + SPARE_THREADS))
    with os_errors("write to", folder):
        by_server = is_remote(folder)
    with ExitStack() as stack:
        files: list[_File] = []
        for shard in plan.shards:
            path = folder / shard.path
            files.append(stack.enter_context(_open_shard(shard, path, around=not by_server)))
            progress(len(shard.header), shard.path)
        parts = (
            (file, steps)
            for file in files
            for steps in batches(
                file.shard.steps(),
                lambda step: max(step.nbytes, _BATCH_BYTES // BATCH_PIECES),
                _BATCH_BYTES,
            )
        )
        spare = SPARE_THREADS if any(file.direct >= 0 for file in files) else 0
        each(parts, _Work(progress).do, jobs + spare, name="export")
    with os_errors("write to", folder):
        for place in {folder, *((folder / file.path).parent for file in plan.files)}:
            sync_folder(place)


@contextmanager
def _create_file(path: Path) -> Iterator[int]:
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
def _open_shard(shard: PlannedShard, path: Path, *, around: bool) -> Iterator[_File]:
    with _create_file(path) as fd, ExitStack() as stack:
        file = _File(shard, path, fd, -1)
        with os_errors("write", path):
            if around and any(map(_goes_around, shard.steps())):
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
    piece = step.piece
    is_shared = isinstance(piece, BlobRange) and shares_blocks(piece.offset + step.begin, step.at)
    return step.nbytes >= DIRECT_FROM and not is_shared


@dataclass(slots=True)
class _Work:
    _progress: Progress
    _local: threading.local = field(default_factory=threading.local)

    def do(self, batch: tuple[_File, list[Step]]) -> None:
        file, steps = batch
        groups = itertools.groupby(
            steps, lambda step: step.piece.blob if isinstance(step.piece, BlobRange) else None
        )
        for blob, group in groups:
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
        if file.direct >= 0 and _goes_around(step):
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
            return Segment(step.nbytes, partial(_computed_reader, step, piece))


def _computed_reader(step: Step, piece: Computed) -> OpenReader:
    data = memoryview(bytearray(step.nbytes))
    piece.fill(step.begin, data)
    return BytesReader(data, step.array)
