"""Trash: what a clean-up took out of a store, and gives back until the next one.

``.blobstore/trash/<random>/sha256-<hex>-<size>``: a blob of the clean-up that made the folder; the
name keeps the size that the blob had.
``.blobstore/trash/<random>/copies/HOST/NAMESPACE/MODEL/TAG/<sha256>``: copies of manifests that it
took along. Files are moved by renames, so that nothing is copied and each is at every moment in one
of both places. Folders are never renamed: overlayfs refuses that for one that lies in a lower
layer, as everything in a container's image does (EXDEV; torvalds/linux fs/overlayfs/dir.c
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

from blobstore.errors import from_os_error
from blobstore.io.copying import remove_tree
from blobstore.io.durable import check_one_mount, make_folder, os_errors, sync_folder
from blobstore.names import Digest, ModelName
from blobstore.store.local.copies import ManifestCopies

_NAME = re.compile(r"sha256-(?P<hex>[0-9a-f]{64})-(?P<size>[0-9]{1,15})", re.ASCII)
_COPIES = "copies"


@dataclass(frozen=True, slots=True)
class TrashedBlob:
    """A blob in the trash, and the size in bytes that it had when it came there."""

    digest: Digest
    size: int
    path: Path


class Trash:
    """The trash of a store: ``folder`` is its own, ``blobs`` and ``copies`` are where its contents come from.

    Its folder is made with the first blob or copy.
    """

    def __init__(self, folder: Path, blobs: Path, copies: ManifestCopies) -> None:
        self._folder = folder
        self._blobs = blobs
        self._copies = copies

    def contents(self) -> list[TrashedBlob]:
        """Return the blobs that can be given back, sorted by digest."""
        found = (blob for folder in self._folders() for blob in _blobs_in(folder))
        return sorted(found, key=lambda blob: (blob.digest, blob.path))

    def models(self) -> list[ModelName]:
        """Return the models whose manifests have copies in the trash, sorted.

        Raises: StorageError.
        """
        return sorted(
            {
                name
                for folder in self._folders()
                for name in ManifestCopies(folder / _COPIES).names()
            }
        )

    def nbytes(self) -> int:
        """Return the bytes of the blobs in the trash."""
        return sum(blob.size for folder in self._folders() for blob in _blobs_in(folder))

    def empty(self) -> int:
        """Remove everything in the trash for good; return the bytes of its blobs. Needs no space.

        Raises: StorageError.
        """
        nbytes = 0
        for folder in self._folders():
            nbytes += sum(blob.size for blob in _blobs_in(folder))
            with os_errors("empty the trash", folder):
                remove_tree(folder)
        return nbytes

    def take(self, paths: Iterable[Path | str], models: Iterable[ModelName] = ()) -> None:
        """Move the blobs at ``paths`` into the trash, then the copies of the manifests of ``models``.

        Durable when it returns. Killed in between, each file is in one place, and so it is after a
        power cut. Raises: StorageError, before anything is moved where ``blobs/`` is on another
        mount; later, what was taken by then is in the trash.
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
                with suppress(FileNotFoundError):  # an Ollama has just removed it
                    os.rename(path, f"{folder}/{name}-{os.lstat(path).st_size}")  # noqa: PTH104
            for model in names:
                self._copies.move(model, ManifestCopies(folder / _COPIES))
            sync_folder(folder)
            if waiting:
                sync_folder(self._blobs)

    def restore(self, blob: TrashedBlob) -> bool:
        """Move a blob back to ``blobs/``, young again.

        Return False when it can't be: it may have to stay or is damaged.

        A regular file of its name and size that lies there now stays. Not yet durable: see
        `settle`. Raises: StorageError.
        """
        target = self._blobs / blob.digest.file_name
        with os_errors("give back", target):
            if _size(blob.path) != blob.size or _size(target) == blob.size:
                return False
            os.utime(blob.path)  # a starting Ollama removes what is unreferenced for an hour
            blob.path.rename(target)
        return True

    def restore_copies(self) -> None:
        """Move all copies of manifests back to where they were. Raises: StorageError."""
        for folder in self._folders():
            trashed = ManifestCopies(folder / _COPIES)
            for name in trashed.names():
                trashed.move(name, self._copies)

    def settle(self) -> None:
        """Make what was restored durable, and remove the folders that it left empty.

        Raises: StorageError.
        """
        with os_errors("give back to", self._blobs):
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
    """Return the size of a regular file, None for anything else. Raises: OSError."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it holds copies, or is not there
        (folder / _COPIES).rmdir()
    with suppress(OSError):  # what could not be given back, or is not ours
        folder.rmdir()
