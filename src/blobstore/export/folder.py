"""Export: a stored model becomes a checkpoint folder.

Read (the model's headers), decide (contents.py), do (files.py).

The folder is written under another name beside it, and renamed when everything in it is on the
disk: so a folder of that name is always a complete export. The other name is always the same, and
its lock is held while it is written: two exports into one folder do not mix, and the next export
removes what a killed one left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blobstore.errors import BusyError, StorageError, UsageError, quoted
from blobstore.export.contents import plan_export
from blobstore.export.files import write_files
from blobstore.export.planned_files import (
    DEFAULT_SHARD,
    ExportOptions,
    ExportPlan,
)
from blobstore.formats.dtypes import DType
from blobstore.io.copying import remove_tree
from blobstore.io.durable import FOLDER_MODE, make_folder, os_errors, sync_folder
from blobstore.io.ranges import close_quietly
from blobstore.io.workers import Progress, begun, threads
from blobstore.names import ModelName
from blobstore.store.local.locks import take_lock
from blobstore.store.ports import Readable
from blobstore.store.stored_model import StoredModel

_HINT = "Name a folder that does not exist, or an empty one."


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
        hint = f"Export into a folder of it, such as {path / 'model'}."
        raise StorageError(
            f"{path} is a mount point: no other folder can take its place", hint=hint
        )
    if not is_free:
        raise _taken(path)
    return path


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path``, which takes its place when the block ends.

    What the block writes is durable then. After an error the folder is removed.

    Raises: BusyError when another export into the same folder is at work; StorageError.
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
            try:
                staging.rename(path)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise _taken(path) from error
                raise
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            remove_tree(staging)
        raise
    finally:
        close_quietly(fd)


def _take(staging: Path) -> int:
    """Return the folder, created if it is missing, open and locked."""
    with suppress(FileExistsError):
        staging.mkdir(mode=FOLDER_MODE)
    busy = BusyError(
        f"another export into the same folder is at work ({staging})", path=str(staging)
    )
    try:
        fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # another export renamed or removed it just now
        raise busy from None
    try:
        # The process that held the lock may have renamed or removed the folder just now.
        if not take_lock(fd, fcntl.LOCK_EX, 0) or not os.path.samestat(
            os.fstat(fd), staging.stat(follow_symlinks=False)
        ):
            raise busy  # noqa: TRY301  # the folder is closed below
    except BaseException as error:
        close_quietly(fd)
        if isinstance(error, FileNotFoundError):
            raise busy from None
        raise
    return fd


def _taken(path: Path) -> StorageError:
    return StorageError(
        f"{path} already exists and is not an empty folder", path=str(path), hint=_HINT
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
    store: Readable,
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
    one a core). ``verify``: hash every blob first. ``progress`` is told of the bytes that are
    written.

    The folder appears when all of it is on the disk, or not at all. A draft model becomes a
    checkpoint in ``draft/``.

    Raises: UsageError (an unknown word, a folder in the store, mlx without the ``lm`` extra); as
    `open_model`; UnsupportedSourceError when mlx-lm can't load the model, or a value does not fit
    the dtype; StorageError when the folder exists and is not empty, and for errors of the operating
    system; BusyError when another export into it is at work.
    """
    options = ExportOptions.parse(format, dequantize, max_shard_size)
    workers = threads(jobs)
    target = export_folder(folder, store)
    with store.lease():  # blobs are opened one by one, until the last was copied
        full = store.find(name)
        model = StoredModel(full, store.manifests.read(full), store)
        store.prefetch(model.manifest.descriptors)
        plan = plan_export(model, options, verify=verify)
        started = time.monotonic()
        with staged(target) as staging:
            write_files(plan, staging, workers, begun(progress, plan.nbytes))
    files = {file.path: file.size for file in sorted(plan.files, key=lambda file: file.path)}
    seconds = time.monotonic() - started
    return ExportResult(full, target, files, plan.notes, seconds, _loads_in(plan, options))


def _loads_in(plan: ExportPlan, options: ExportOptions) -> tuple[str, ...]:
    """Return the programs that read the folder, if they know the architecture.

    Of folders of both models in fixtures, transformers 5 and mlx-lm refuse int4 and nvfp4 codes in
    Ollama's layout, and transformers also those in MLX's; it misses the experts of MLX's layout.
    """
    if options.is_mlx:
        return ("mlx-lm", "blobstore")
    has_codes = any(array.dtype is DType.U32 for shard in plan.shards for array in shard.arrays)
    return ("blobstore",) if has_codes else ("transformers", "mlx-lm", "blobstore")
