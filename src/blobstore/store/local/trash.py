"""Trash: the blobs and copies that a clean-up removed, which can be restored until the next one.

``.blobstore/trash/<random>/sha256-<hex>-<size>`` is a blob of the clean-up that made the folder,
with the size that it had then. ``.blobstore/trash/<random>/copies/HOST/NAMESPACE/MODEL/TAG/<sha256
of its bytes>`` is a copy of a manifest. Files are moved by renames, so nothing is copied, and each
file is at any moment in one of both places. Folders are never renamed: overlayfs refuses that for a
folder of a lower layer, as in a container's image (EXDEV; torvalds/linux fs/overlayfs/dir.c
`ovl_can_move`). For holders of the store's exclusive lock.
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

from blobstore.io.copying import remove_tree
from blobstore.io.durable import check_one_mount, listed, make_folder, os_errors, sync_folder
from blobstore.names import Digest, ModelName
from blobstore.store.local.copies import ManifestCopies

_NAME = re.compile(r"sha256-(?P<hex>[0-9a-f]{64})-(?P<size>[0-9]{1,15})", re.ASCII)
_COPIES = "copies"


@dataclass(frozen=True, slots=True)
class TrashedBlob:
    """A blob in the trash, and the size in bytes that it had when it was moved there."""

    digest: Digest
    size: int
    path: Path


class Trash:
    """The trash of a store, in ``folder``, for the files of ``blobs`` and ``copies``.

    The folder is made with the first blob or copy.
    """

    def __init__(self, folder: Path, blobs: Path, copies: ManifestCopies) -> None:
        self._folder = folder
        self._blobs = blobs
        self._copies = copies

    def contents(self) -> list[TrashedBlob]:
        """Return the blobs that can be restored, sorted by digest. Raises: StorageError."""
        found = (blob for folder in self._folders() for blob in _blobs_in(folder))
        return sorted(found, key=lambda blob: (blob.digest, blob.path))

    def models(self) -> list[ModelName]:
        """Return the models whose manifests have copies in the trash, sorted.

        Raises: StorageError.
        """
        found = (ManifestCopies(folder / _COPIES).names() for folder in self._folders())
        return sorted(set().union(*found))

    def nbytes(self) -> int:
        """Return the bytes of the blobs in the trash."""
        return sum(blob.size for blob in self.contents())

    def empty(self) -> int:
        """Delete everything in the trash; return the bytes of its blobs. Needs no space.

        Raises: StorageError.
        """
        nbytes = self.nbytes()
        for folder in self._folders():
            with os_errors("empty the trash", folder):
                remove_tree(folder)
        return nbytes

    def take(self, paths: Iterable[Path | str], models: Iterable[ModelName] = ()) -> None:
        """Move the blobs at ``paths`` to the trash, then the copies of the manifests of ``models``.

        Durable when it returns. After a crash or a power cut, each file is in one of both places.
        Raises: StorageError, before anything is moved if ``blobs/`` is on another mount; later, the
        files that were moved by then are in the trash.
        """
        waiting, names = [os.fspath(path) for path in paths], list(models)
        if not waiting and not names:
            return
        folder = self._folder / secrets.token_hex(8)
        with os_errors("write to the trash", self._folder):
            make_folder(folder)
            try:
                check_one_mount(folder, self._blobs)
            except BaseException:
                _remove_empty(folder)
                raise
            for path in waiting:
                name = os.path.basename(path).replace(":", "-")  # noqa: PTH119  # hundreds of thousands of them
                with suppress(FileNotFoundError):  # Ollama has just removed it
                    os.rename(path, f"{folder}/{name}-{os.lstat(path).st_size}")  # noqa: PTH104
            for model in names:
                self._copies.move(model, ManifestCopies(folder / _COPIES))
            sync_folder(folder)
            if waiting:
                sync_folder(self._blobs)

    def restore(self, blob: TrashedBlob) -> bool:
        """Move a blob back to ``blobs/`` with the current time; `settle` makes that durable.

        Return False if ``blobs/`` has a file of its name and size, or the blob has another size
        than before. Raises: StorageError.
        """
        target = self._blobs / blob.digest.file_name
        with os_errors("restore", target):
            if _size(blob.path) != blob.size or _size(target) == blob.size:
                return False
            os.utime(blob.path)  # a starting Ollama removes unreferenced blobs over an hour old
            blob.path.rename(target)
        return True

    def restore_copies(self) -> None:
        """Move all copies of manifests back to where they were. Raises: StorageError."""
        for folder in self._folders():
            trashed = ManifestCopies(folder / _COPIES)
            for name in trashed.names():
                trashed.move(name, self._copies)

    def settle(self) -> None:
        """Make the restored files durable, and remove the folders that are empty now.

        Raises: StorageError.
        """
        with os_errors("restore blobs to", self._blobs):
            if self._blobs.is_dir():
                sync_folder(self._blobs)
        for folder in self._folders():
            _remove_empty(folder)

    def _folders(self) -> Iterator[Path]:
        with os_errors("list", self._folder):
            found = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
            folders = [path for path in found if path.is_dir() and not path.is_symlink()]
        yield from folders


def _blobs_in(folder: Path) -> Iterator[TrashedBlob]:
    with os_errors("list", folder):
        names = [entry.name for entry in listed(folder)]
    for name in names:
        if match := _NAME.fullmatch(name):
            yield TrashedBlob(Digest(match["hex"]), int(match["size"]), folder / name)


def _size(path: Path) -> int | None:
    """Return the size of a regular file, None for anything else. Raises: OSError."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return None


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it contains copies, or does not exist
        (folder / _COPIES).rmdir()
    with suppress(OSError):  # it contains blobs that were not restored, or files of others
        folder.rmdir()
