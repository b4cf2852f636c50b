"""Export: a stored model becomes a checkpoint folder.

Read (the model's headers), decide (plan.py), do (writing.py).

The folder of an export: written under another name beside it, and renamed when everything in it is
on the disk.

So a folder of that name is a whole export or none. The other name is always the same, and its lock
is held while it is written: two exports into one folder do not mix, and what a killed one left is
removed by the next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import (
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BusyError, StorageError, UsageError, quoted
from blobstore.export.options import DEFAULT_SHARD, ExportOptions
from blobstore.export.plan import make_plan
from blobstore.export.writing import write_files
from blobstore.formats.dtypes import DType
from blobstore.io.copying import remove_tree
from blobstore.io.durable import (
    FOLDER_MODE,
    listed,
    make_folder,
    os_errors,
    sync,
    sync_file_system,
    sync_folder,
    syncs_whole,
)
from blobstore.io.ranges import close_quietly
from blobstore.io.workers import Progress, begun, threads
from blobstore.model.parts import read_model
from blobstore.names import ModelName
from blobstore.store.ports import Home

_HINT = "Name a folder that does not exist, or an empty one."


class Target:
    """The folder that an export shall become."""

    def __init__(self, path: str | os.PathLike[str], store: Home) -> None:
        """Check the folder.

        Raises: StorageError unless it is an empty folder; UsageError when it is in the store.
        """
        try:
            with os_errors("access", os.fspath(path)):
                self.path = Path(path).expanduser().resolve()
                is_free = not os.path.lexists(self.path) or (
                    self.path.is_dir() and not any(self.path.iterdir())
                )
                is_mount = self.path.is_mount()
        except (
            ValueError,
            RuntimeError,
        ) as error:  # a NUL in the path, an unknown ~user, a loop of links
            raise StorageError(
                f"can't write to {quoted(os.fspath(path))}: {error}", path=os.fspath(path)
            ) from error
        if Path(store.address) in (self.path, *self.path.parents):
            message = f"{self.path} is in the store {store.address}, where only blobs and manifests may be"
            raise UsageError(message, path=str(self.path))
        if is_mount:
            hint = f"Export into a folder of it, such as {self.path / 'model'}."
            raise StorageError(
                f"{self.path} is where a file system is mounted: no other folder can take its place",
                hint=hint,
            )
        if not is_free:
            raise _taken(self.path)

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a new folder beside the target's.

        When the block ends well it is made durable and takes the target's place.

        Raises: BusyError when another export into the same folder is at work; StorageError. Nothing
        is left then.
        """
        staging = self.path.with_name(f".{self.path.name}.blobstore-export")
        with os_errors("write to", staging):
            make_folder(staging.parent)
            fd = _take(staging)
        try:
            with os_errors("write to", staging):
                _clear(staging)
                is_enough = syncs_whole(fd)
            yield staging
            with os_errors("write to", staging):
                _sync_all(staging, fd if is_enough else -1)
            self._link(staging)
        except BaseException:
            with suppress(OSError):
                remove_tree(staging)
            raise
        finally:
            close_quietly(fd)

    def _link(self, staging: Path) -> None:
        try:
            staging.rename(self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _taken(self.path) from error
            with os_errors("write to", self.path):
                raise
        with os_errors("write to", self.path.parent):
            sync_folder(self.path.parent)


def _take(staging: Path) -> int:
    """Return the folder, made if need be, open and locked."""
    with suppress(FileExistsError):
        staging.mkdir(mode=FOLDER_MODE)
    fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have renamed or removed the folder just now.
        is_there = os.path.samestat(os.fstat(fd), staging.stat(follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    except BaseException:
        close_quietly(fd)
        raise
    if not is_there:
        close_quietly(fd)
        raise BusyError(
            f"another export into the same folder is at work ({staging})", path=str(staging)
        )
    return fd


def _clear(staging: Path) -> None:
    for path in staging.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()


def _sync_all(staging: Path, fd: int) -> None:
    """Make all files and names durable: by one call where there is one (``fd`` is not -1), else one by one."""
    if fd >= 0:
        sync_file_system(fd)
        return
    waiting = [staging]
    while waiting:  # a stored name may have two thousand folders in it: no recursion
        folder = waiting.pop()
        for entry in listed(folder):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            else:
                _sync_file(Path(entry.path))
        sync_folder(folder)


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        sync(file)
    finally:
        close_quietly(file)


def _taken(path: Path) -> StorageError:
    return StorageError(
        f"{path} already exists and is not an empty folder", path=str(path), hint=_HINT
    )


"""Gives what is told of progress, for a number of bytes."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote: its files by path in ``folder``, with their sizes in bytes.

    ``notes`` are sentences about what was left out or changed; ``seconds`` are those of writing.
    """

    name: ModelName
    folder: Path
    files: dict[str, int]
    notes: tuple[str, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def export_model(
    name: str | ModelName,
    folder: str | os.PathLike[str],
    *,
    store: Home,
    format: str = "safetensors",  # noqa: A002  # the option's name
    dequantize: str | DType | None = None,
    max_shard_size: int | str = DEFAULT_SHARD,
    jobs: int | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a stored model into a new ``folder`` as a checkpoint: shards and their index, JSON documents, maybe a Modelfile.

    ``format``: "safetensors" keeps names and stored arrays, so that an import of the folder stores
    the same; "mlx" gives what ``mlx_lm.load`` opens. ``dequantize``: "bfloat16", "float16" or
    "float32" for all quantized weights and floats. ``max_shard_size``: bytes of a file at most, by
    huggingface_hub's rule, or "source" for the files that were imported. ``jobs``: threads (None:
    one a core). ``verify``: hash every blob first. ``progress`` is told of the bytes that are
    written.

    The folder appears when all of it is on the disk, or not at all. A draft model becomes a
    checkpoint in ``draft/``.

    Raises: UsageError (an unknown word, a folder in the store, mlx without the ``lm`` extra); as
    `open_model`; UnsupportedSourceError when mlx-lm can't have the model, or a value does not fit
    the dtype; StorageError when the folder is there and not empty, and for what the system refuses;
    BusyError when another export into it is at work.
    """
    options = ExportOptions.parse(format, dequantize, max_shard_size)
    workers = threads(jobs)
    target = Target(folder, store)
    with store.lease():  # blobs are opened one by one, until the last was copied
        model = read_model(name, store, verify=verify)
        plan = make_plan(model, options)
        started = time.monotonic()
        with target.staged() as staging:
            write_files(plan, staging, workers, begun(progress, plan.nbytes))
    files = {file.path: file.size for file in sorted(plan.files, key=lambda file: file.path)}
    return ExportResult(model.name, target.path, files, plan.notes, time.monotonic() - started)
