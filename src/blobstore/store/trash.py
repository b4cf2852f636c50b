"""Trash: blobs that a clean-up took out of ``blobs/``, and gives back until the next one.

``.blobstore/trash/<random>/sha256-<hex>-<size>``: one folder a clean-up, filled by renames, so that nothing is copied and
each blob is at every moment in one of both places. The name keeps the size that the blob had. A folder whose name begins
with ``old-`` is being emptied. For holders of the store's exclusive lock, but for `Trash.empty`.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.digest import Digest
from blobstore.errors import from_os_error
from blobstore.store.files import make_folder, os_errors, remove_if_there, sync_folder

_NAME = re.compile(r"sha256-(?P<hex>[0-9a-f]{64})-(?P<size>[0-9]{1,15})", re.ASCII)
_OLD = "old-"


@dataclass(frozen=True, slots=True)
class TrashedBlob:
    """A blob in the trash, and the size in bytes that it had when it came there."""

    digest: Digest
    size: int
    path: Path


class Trash:
    """The trash of a store: ``folder`` is its own, ``blobs`` where the blobs come from. Made by the first blob."""

    def __init__(self, folder: Path, blobs: Path) -> None:
        self._folder = folder
        self._blobs = blobs

    def contents(self) -> list[TrashedBlob]:
        """Return the blobs that can be given back, sorted by digest."""
        found = (blob for folder in self._folders() if not folder.name.startswith(_OLD) for blob in _blobs_in(folder))
        return sorted(found, key=lambda blob: (blob.digest, blob.path))

    def nbytes(self) -> int:
        """Return the bytes of everything in the trash."""
        return sum(blob.size for folder in self._folders() for blob in _blobs_in(folder))

    def replace(self, paths: Iterable[Path | str]) -> None:
        """Take the blobs at ``paths`` into the trash, instead of what is in it now, which `empty` removes.

        Durable when it returns. Killed in between, each blob is in one place, and so it is after a power cut.
        Raises: StorageError; what was taken by then is in the trash.
        """
        with os_errors("write to the trash", self._folder):
            for folder in self._folders():
                if not folder.name.startswith(_OLD):
                    folder.rename(folder.with_name(_OLD + folder.name))
            if waiting := [os.fspath(path) for path in paths]:
                self._take(waiting)

    def _take(self, paths: list[str]) -> None:
        folder = self._folder / secrets.token_hex(8)
        make_folder(folder)
        for path in paths:
            name = os.path.basename(path).replace(":", "-")  # noqa: PTH119  # hundreds of thousands of them
            with suppress(FileNotFoundError):  # an Ollama has just removed it
                os.rename(path, f"{folder}/{name}-{os.lstat(path).st_size}")  # noqa: PTH104
        sync_folder(folder)
        sync_folder(self._blobs)

    def empty(self) -> int:
        """Remove what `replace` put aside; return its bytes. Needs no lock: nobody looks there. Raises: StorageError."""
        nbytes = 0
        for folder in self._folders():
            if folder.name.startswith(_OLD):
                with os_errors("empty the trash", folder):
                    nbytes += _remove(folder)
        return nbytes

    def restore(self, blob: TrashedBlob) -> bool:
        """Move a blob back to ``blobs/``, young again; return False when it can't be: it may have to stay or is damaged.

        A regular file of its name and size that lies there now stays. Not yet durable: see `settle`. Raises: StorageError.
        """
        target = self._blobs / blob.digest.file_name
        with os_errors("give back", target):
            if _size(blob.path) != blob.size or _size(target) == blob.size:
                return False
            os.utime(blob.path)  # a starting Ollama removes what is unreferenced for an hour
            blob.path.rename(target)
        return True

    def settle(self) -> None:
        """Make what was restored durable, and remove the folders that it left empty. Raises: StorageError."""
        with os_errors("give back to", self._blobs):
            if self._blobs.is_dir():
                sync_folder(self._blobs)
        for folder in self._folders():
            with suppress(OSError):  # not empty
                folder.rmdir()

    def _folders(self) -> Iterator[Path]:
        with os_errors("list", self._folder):
            found = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
            folders = [path for path in found if path.is_dir() and not path.is_symlink()]
        yield from folders


def _blobs_in(folder: Path) -> Iterator[TrashedBlob]:
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  # hundreds of thousands of them
    except FileNotFoundError:  # another process has just emptied it
        return
    except OSError as error:
        raise from_os_error(error, "list", folder) from error
    for name in names:
        if match := _NAME.fullmatch(name):
            yield TrashedBlob(Digest(match["hex"]), int(match["size"]), folder / name)


def _size(path: Path) -> int | None:
    """Return the size of a regular file, None when there is none. Raises: OSError."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _remove(folder: Path) -> int:
    """Remove a folder and the files in it; return their bytes. What another process removes meanwhile is no error."""
    nbytes = 0
    for blob in _blobs_in(folder):
        if remove_if_there(blob.path):
            nbytes += blob.size
    with suppress(OSError):  # gone already, or there is something in it that is not ours
        folder.rmdir()
    return nbytes
