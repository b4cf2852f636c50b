"""Small files of ours: appended to, or written at once and renamed into place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blobstore.errors import StorageError
from blobstore.io.durable import FILE_MODE, create_file, sync, write_all_at


def append_file(path: Path, data: bytes) -> None:
    """Append to a file, which is made when it is missing.

    A link is an error, and so is a FIFO. Raises: OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, FILE_MODE)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def replace_file(
    path: Path,
    data: bytes,
    *,
    temporary: Path | None = None,
    mode: int = FILE_MODE,
    syncs: bool = False,
) -> None:
    """Write a file and put it in the place of the one that is there.

    ``temporary``: its path until it is complete (None: a random name beside ``path``).
    ``syncs``: its bytes are durable then; its name is after a `sync_folder`.

    Raises: OSError.
    """
    written = temporary or path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    write_new_file(written, data, mode=mode, syncs=syncs)
    with _removed_after_an_error(written):
        written.rename(path)


def add_file(path: Path, data: bytes, *, temporary: Path, syncs: bool = False) -> None:
    """Write a file that appears when it is complete, and never in the place of another.

    As `replace_file`. Raises: FileExistsError, also if another process was first; OSError.
    """
    write_new_file(temporary, data, syncs=syncs)
    with _removed_after_an_error(temporary):
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
            temporary.rename(path)
        else:
            temporary.unlink()


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise StorageError if something is there that is not a file: a folder, a device, a FIFO.

    A rename would replace a device, such as /dev/null.
    """
    if os.path.lexists(path) and not Path(path).is_file():
        name = os.fspath(path)
        raise StorageError(f"{name} is not a regular file", path=name)


def write_new_file(path: Path, data: bytes, *, mode: int = FILE_MODE, syncs: bool = False) -> None:
    """Write a file that must not exist; none is left if that fails. As `replace_file`."""
    fd = create_file(path, mode=mode)
    with _removed_after_an_error(path), os.fdopen(fd, "wb") as file:
        write_all_at(file.fileno(), 0, memoryview(data))
        if syncs:
            sync(file.fileno())


@contextmanager
def _removed_after_an_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
