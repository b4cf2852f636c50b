"""Backups: copies of manifests, and the trash, from which a clean-up can be undone.

A manifest has no checksum: a flipped bit in a layer's name leaves a valid manifest of another
model. So a copy of each is kept, at ``.blobstore/copies/HOST/NAMESPACE/MODEL/TAG/<sha256 of its
bytes>``; its name tells whether it is intact. It is written before the manifest is linked, and
older copies are removed afterwards. A crash in between leaves both, and a repair takes the one that
resembles the damaged manifest. A copy is a hint: nothing needs it, and an Ollama that replaces or
removes a manifest does not change it. So the copies also tell which models a store should have.

The manifest of a *missing* model is gone, but it has copies. Another program may have removed the
model, or the disk of its manifest is not mounted: an unmounted disk looks like an empty folder. An
``ollama rm`` deletes the blobs that only this model needs together with its manifest. So a missing
model whose own blobs still exist is called *lost*: something other than a removal took its
manifest.

``.blobstore/trash/<random>/sha256-<hex>-<size>`` is a blob of the clean-up that made the folder,
with the size that it had then. Blobs are moved by renames, so nothing is copied, and each is at any
moment in one of both places. Folders are never renamed: overlayfs refuses that for a folder of a
lower layer, as in a container's image (EXDEV; torvalds/linux fs/overlayfs/dir.c `ovl_can_move`).
Only for holders of the store's exclusive lock. Copies of manifests stay where they are until their
model is missing and a clean-up finds none of its blobs: an undo needs them.

``.blobstore/signatures/<sha256 of a manifest>/<sha256>`` is a signature of that manifest.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError
from blobstore.formats.documents import MAX_MANIFEST
from blobstore.formats.oci import MAX_SIGNATURE_FILE, Signature
from blobstore.io.copying import remove_tree
from blobstore.io.durable import (
    check_one_mount,
    list_folder,
    make_folder,
    os_errors,
    read_own,
    replace_file,
    sync_folder,
)
from blobstore.names import Digest, ModelName
from blobstore.store.local.locks import StoreLock, is_young, refuse_links
from blobstore.store.local.manifests import DEPTH, walk
from blobstore.store.ports import (
    KeptSignatures,
    Leftover,
)
from blobstore.store.references import Needs, ReadOnce, needs_of

_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"sha256-(?P<hex>[0-9a-f]{64})-(?P<size>[0-9]{1,15})", re.ASCII)


@dataclass(eq=False)
class ManifestCopies:
    """The copies of a store's manifests, in ``folder``, which is made with the first one."""

    _folder: Path

    def of(self, name: ModelName) -> list[bytes]:
        """Return the intact copies of a model's manifest: one or two, none if Ollama made it."""
        copies = []
        for path in self._paths(name):
            with suppress(BlobStoreError):
                raw = read_own(path, MAX_MANIFEST)
                if Digest.of(raw).hex == path.name:
                    copies.append(raw)
        return copies

    def needs(self, name: ModelName, known: ReadOnce[Needs]) -> AbstractSet[str]:
        """Return the hex digits of the blobs that the intact copies of a model's manifest name."""
        needs_of = map(known.of, self.of(name))
        # A manifest of a later version may be unreadable.
        needs = [each.keys() for each in needs_of if not isinstance(each, BlobStoreError)]
        return needs[0] if len(needs) == 1 else frozenset().union(*needs)

    def write(self, name: ModelName, raw: bytes) -> bool:
        """Write a copy, which a later sync of the file system makes durable.

        Return False if it exists. Raises: StorageError.
        """
        if raw in self.of(name):
            return False
        self._refuse_links(name)
        path = self._place(name) / Digest.of(raw).hex
        with os_errors("write", path):
            while True:
                make_folder(path.parent, durable=False)
                # Another process may remove the folder while it is empty (`forget`).
                with suppress(FileNotFoundError):
                    replace_file(path, raw)
                    return True

    def forget(self, name: ModelName, raw: bytes) -> None:
        """Remove the copy of these bytes, because its manifest was not linked."""
        place = self._place(name)
        with suppress(OSError, BlobStoreError):
            self._refuse_links(name)
            (place / Digest.of(raw).hex).unlink()
            place.rmdir()

    def settle(self, name: ModelName, raw: bytes) -> None:
        """Remove all copies of a model's manifest except that of these bytes."""
        for path in self._paths(name):
            if path.name != Digest.of(raw).hex:
                with suppress(OSError):
                    path.unlink()

    def remove(self, name: ModelName) -> None:
        """Remove the copies of a model that was removed. Failures are ignored."""
        place = self._place(name)
        with suppress(OSError, BlobStoreError):  # folders of other models are not empty
            self._refuse_links(name)
            remove_tree(place)
            for folder in place.parents[: DEPTH - 1]:
                folder.rmdir()

    def names(self) -> list[ModelName]:
        """Return the models that have a folder of copies, sorted. Raises: StorageError."""
        with os_errors("list", self._folder):
            copies = (
                ModelName.of_path(Path(entry.path).parts[-DEPTH:])
                for level, entry in walk(self._folder, DEPTH)
                if level == DEPTH and entry.is_dir(follow_symlinks=False)
            )
            return sorted(filter(None, copies))

    def digests(self) -> set[str]:
        """Return the sha256 of the manifests that have copies. Raises: StorageError."""
        with os_errors("list", self._folder):
            entries = walk(self._folder, DEPTH + 1)
            return {entry.name for level, entry in entries if level > DEPTH}

    def _place(self, name: ModelName) -> Path:
        return self._folder.joinpath(*name.path_parts)

    def _refuse_links(self, name: ModelName) -> None:
        refuse_links(self._folder.parent, (self._folder.name, *name.path_parts))

    def _paths(self, name: ModelName) -> list[Path]:
        try:
            self._refuse_links(name)
            return sorted(self._place(name).iterdir())
        except (OSError, BlobStoreError):  # most models of an Ollama's store have none
            return []


@dataclass(frozen=True, slots=True)
class CopiedModels:
    """The models with copies: those ``there`` have a manifest, those ``missing`` do not.

    The missing ones have the blobs, in hex digits, that their copies name.
    """

    there: tuple[ModelName, ...]
    missing: Mapping[ModelName, AbstractSet[str]]

    @classmethod
    def read(cls, copies: ManifestCopies, names: AbstractSet[ModelName]) -> CopiedModels:
        copied, known = copies.names(), ReadOnce(needs_of)
        gone = [name for name in copied if name not in names]
        missing = {name: copies.needs(name, known) for name in gone}
        return cls(tuple(name for name in copied if name in names), missing)

    def find_lost(self, unneeded: AbstractSet[str]) -> list[ModelName]:
        """Return the lost models; ``unneeded``: the blobs in the store that no manifest needs."""
        return [name for name, needs in self.missing.items() if not unneeded.isdisjoint(needs)]


@dataclass(frozen=True, slots=True)
class TrashedBlob:
    """A blob in the trash, and the size in bytes that it had when it was moved there."""

    digest: Digest
    size: int
    path: Path


@dataclass(eq=False)
class Trash:
    """The trash of a store, in ``folder``, for the files of ``blobs``; made with the first one."""

    _folder: Path
    _blobs: Path

    def contents(self) -> list[TrashedBlob]:
        """Return the blobs that can be restored, sorted by digest. Raises: StorageError."""
        blobs = []
        for folder in self._folders():
            with os_errors("list", folder):
                names = [entry.name for entry in list_folder(folder)]
            for match in filter(None, map(_NAME.fullmatch, names)):
                size = int(match["size"])
                blobs.append(TrashedBlob(Digest(match["hex"]), size, folder / match[0]))
        return sorted(blobs, key=lambda blob: (blob.digest, blob.path))

    def nbytes(self) -> int:
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

    def take(self, paths: Sequence[Path]) -> None:
        """Move the blobs at ``paths`` to the trash.

        Durable when it returns. After a crash or a power cut, each file is in one of both places.
        Raises: StorageError, before anything is moved if ``blobs/`` is on another mount; later, the
        files that were moved by then are in the trash.
        """
        if not paths:
            return
        folder = self._folder / os.urandom(8).hex()
        with os_errors("write to the trash", self._folder):
            make_folder(self._folder)
            check_one_mount(self._folder, self._blobs)
            make_folder(folder)
            for path in paths:
                name = path.name.replace(":", "-")
                with suppress(FileNotFoundError):  # Ollama has just removed it
                    path.rename(folder / f"{name}-{path.lstat().st_size}")
            sync_folder(folder)
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

    def settle(self) -> None:
        """Make the restored files durable, and remove the folders that are empty now.

        Raises: StorageError.
        """
        with os_errors("restore blobs to", self._blobs):
            if self._blobs.is_dir():
                sync_folder(self._blobs)
        for folder in self._folders():
            with suppress(OSError):  # it contains blobs that were not restored, or files of others
                folder.rmdir()

    def _folders(self) -> list[Path]:
        with os_errors("list", self._folder):
            return [
                Path(entry.path)
                for entry in list_folder(self._folder)
                if entry.is_dir(follow_symlinks=False)
            ]


def _size(path: Path) -> int | None:
    """Return the size of a regular file, None for anything else. Raises: OSError."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return None


@dataclass(eq=False)
class SignatureFolder(KeptSignatures):
    """The signatures of a store, in ``folder``, which is made with the first one. See `Signatures`.

    A file is durable before it is renamed into place. Ollama does not see them: a name under
    ``manifests/`` would be a model. ``lock``: the store's, shared while signatures are added.
    """

    _folder: Path
    _lock: StoreLock

    def add(self, name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        with self._lock.shared():
            return super().add(name, digest, signatures)

    def _keys(self, digest: Digest) -> list[str]:
        place = self._folder / digest.hex
        refuse_links(self._folder.parent, (self._folder.name, digest.hex))
        with os_errors("list", place):
            return [entry.name for entry in list_folder(place) if _HEX.fullmatch(entry.name)]

    def _raw(self, digest: Digest, key: str) -> tuple[bytes, str]:
        path = self._folder / digest.hex / key
        return read_own(path, MAX_SIGNATURE_FILE), str(path)

    def _write(self, digest: Digest, new: Mapping[str, bytes]) -> int:
        place = self._folder / digest.hex
        with os_errors("write", place):
            if new:
                make_folder(place)
                for name, raw in new.items():
                    replace_file(place / name, raw, syncs=True)
                sync_folder(place)
        return len(new)

    def find_unneeded(self, needed: AbstractSet[str], kept_s: float) -> Iterator[Leftover]:
        """Yield the signatures of manifests whose hex digits are not ``needed``.

        What was changed in the last ``kept_s`` seconds is left out, and so are files of other
        programs. Raises: StorageError.
        """
        with os_errors("list", self._folder):
            for folder in [] if self._folder.is_symlink() else list_folder(self._folder):
                is_ours = _HEX.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)
                path = Path(folder.path)
                if is_ours and folder.name not in needed and not is_young(path, kept_s):
                    nbytes = sum(
                        file.stat(follow_symlinks=False).st_size for file in list_folder(path)
                    )
                    yield Leftover(path, nbytes, "signatures of a manifest that no model has")
