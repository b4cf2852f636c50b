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
with the size that it had then. ``.blobstore/trash/<random>/copies/HOST/NAMESPACE/MODEL/TAG/<sha256
of its bytes>`` is a copy of a manifest. Files are moved by renames, so nothing is copied, and each
file is at any moment in one of both places. Folders are never renamed: overlayfs refuses that for a
folder of a lower layer, as in a container's image (EXDEV; torvalds/linux fs/overlayfs/dir.c
`ovl_can_move`). Only for holders of the store's exclusive lock.

``.blobstore/signatures/<sha256 of a manifest>/<sha256>`` is a signature of that manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, CorruptDataError, LimitExceededError, StorageError
from blobstore.formats.documents import MAX_MANIFEST
from blobstore.formats.signatures import MAX_FILE, MAX_SIGNATURES, Signature
from blobstore.io.copying import remove_tree
from blobstore.io.durable import (
    check_one_mount,
    listed,
    make_folder,
    os_errors,
    read_own,
    replace_file,
    sync_folder,
)
from blobstore.io.ranges import FileReader
from blobstore.names import Digest, ModelName
from blobstore.store.local.kept import is_young
from blobstore.store.local.locks import StoreLock, refuse_link
from blobstore.store.local.manifests import DEPTH, walk
from blobstore.store.ports import Leftover
from blobstore.store.references import KnownNeeds

_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_UNFINISHED = re.compile(r"new-[0-9a-f]{16}", re.ASCII)


class SignatureFolder:
    """The signatures of a store, in ``folder``, which is made with the first one. See `Signatures`.

    Each file is named for the sha256 of its bytes, so several processes add signatures without
    waiting for each other. A file is durable before it is renamed into place. Ollama does not see
    them: a name under ``manifests/`` would be a model.

    ``lock``: the store's, shared while signatures are added.
    """

    def __init__(self, folder: Path, lock: StoreLock) -> None:
        self._folder = folder
        self._lock = lock

    def read(self, _name: ModelName, digest: Digest) -> list[Signature]:
        """See `Signatures`. Sorted by the sha256 of their files."""
        return [_read(path) for path in self._files(digest)]

    def add(self, _name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        encoded = {Digest.of(raw).hex: raw for raw in (each.encode() for each in signatures)}
        with self._lock.shared():
            there = {path.name for path in self._files(digest)}
            new = {name: raw for name, raw in encoded.items() if name not in there}
            if len(there) + len(new) > MAX_SIGNATURES:
                message = f"{digest} would have over {MAX_SIGNATURES:,} signatures"
                raise LimitExceededError(f"limit exceeded: {message}", rule="S1")
            if new:
                self._write(digest, new)
        return len(new)

    def unneeded(self, needed: AbstractSet[str], kept_s: float) -> Iterator[Leftover]:
        """Yield the signatures of manifests whose hex digits are not ``needed``.

        Unfinished files of killed processes are among them. What was changed in the last ``kept_s``
        seconds is left out, and so are files of other programs. Raises: StorageError.
        """
        with os_errors("list", self._folder):
            folders = [] if self._folder.is_symlink() else listed(self._folder)
            for folder in folders:
                if _HEX.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                    yield from _unneeded(Path(folder.path), kept_s, whole=folder.name not in needed)

    def _write(self, digest: Digest, new: dict[str, bytes]) -> None:
        place = self._folder / digest.hex
        refuse_link(self._link(digest))
        with os_errors("write", place):
            make_folder(place)
            for name, raw in new.items():
                temporary = place / f"new-{os.urandom(8).hex()}"
                replace_file(place / name, raw, temporary=temporary, syncs=True)
            sync_folder(place)

    def _files(self, digest: Digest) -> list[Path]:
        """Return the files of a manifest's signatures, sorted. Raises: LimitExceededError."""
        place = self._folder / digest.hex
        refuse_link(self._link(digest))
        with os_errors("list", place):
            names = [entry.name for entry in listed(place) if _HEX.fullmatch(entry.name)]
        if len(names) > MAX_SIGNATURES:
            message = f"{place} has {len(names):,} signatures, at most {MAX_SIGNATURES:,}"
            raise LimitExceededError(f"limit exceeded: {message}", rule="S1", path=str(place))
        return [place / name for name in names]

    def _link(self, digest: Digest) -> Path | None:
        with os_errors("access", self._folder):
            places = (self._folder, self._folder / digest.hex)
            return next((place for place in places if place.is_symlink()), None)


def _read(path: Path) -> Signature:
    raw = read_own(path, MAX_FILE)
    if Digest.of(raw).hex != path.name:
        message = f"{path} is damaged: its bytes do not match its name"
        hint = "Remove the file, and sign or pull the model again."
        raise CorruptDataError(message, path=str(path), hint=hint)
    return Signature.parse(raw, str(path))


def _unneeded(folder: Path, kept_s: float, *, whole: bool) -> Iterator[Leftover]:
    files = listed(folder)
    if whole and not is_young(folder, kept_s):
        nbytes = sum(file.stat(follow_symlinks=False).st_size for file in files)
        yield Leftover(folder, nbytes, "signatures of a manifest that no model has")
    elif not whole:
        for file in files:
            if _UNFINISHED.fullmatch(file.name) and not is_young(Path(file.path), kept_s):
                nbytes = file.stat(follow_symlinks=False).st_size
                yield Leftover(Path(file.path), nbytes, "a signature left unfinished")


_NAME = re.compile(r"sha256-(?P<hex>[0-9a-f]{64})-(?P<size>[0-9]{1,15})", re.ASCII)
_COPIES = "copies"


class ManifestCopies:
    """The copies of a store's manifests, in ``folder``, which is made with the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, name: ModelName) -> list[bytes]:
        """Return the intact copies of a model's manifest: one or two, none if Ollama made it."""
        found = []
        for path in self._paths(name):
            with suppress(BlobStoreError):
                raw = read_own(path, MAX_MANIFEST)
                if _key(raw) == path.name:
                    found.append(raw)
        return found

    def needs(self, name: ModelName, known: KnownNeeds | None = None) -> AbstractSet[str]:
        """Return the hex digits of the blobs that the intact copies of a model's manifest name.

        ``known``: the needs of other models' copies, whose bytes may be the same.
        """
        found = [(known or KnownNeeds()).of(raw) for raw in self.of(name)]
        # A manifest of a later version may be unreadable.
        needs = [each.keys() for each in found if not isinstance(each, BlobStoreError)]
        return needs[0] if len(needs) == 1 else frozenset().union(*needs)

    def write(self, name: ModelName, raw: bytes) -> bool:
        """Write a copy, which a later sync of the file system makes durable.

        Return False if it exists. Raises: StorageError.
        """
        path = self._place(name) / _key(raw)
        if path in self._paths(name) and _is_intact(path):
            return False
        refuse_link(self._link(name))
        with os_errors("write", path):
            try:
                _write(path, raw)
            except FileNotFoundError:  # the removal of another model has removed an empty folder
                _write(path, raw)
        return True

    def forget(self, name: ModelName, raw: bytes) -> None:
        """Remove the copy of these bytes, because its manifest was not linked."""
        with suppress(OSError):
            if self._is_ours(name):
                (self._place(name) / _key(raw)).unlink()
                self._place(name).rmdir()

    def settle(self, name: ModelName, raw: bytes) -> None:
        """Remove all copies of a model's manifest except that of these bytes."""
        for path in self._paths(name):
            if path.name != _key(raw):
                with suppress(OSError):
                    path.unlink()

    def remove(self, name: ModelName) -> None:
        """Remove the copies of a model that was removed."""
        with suppress(OSError):  # folders of other models are not empty
            if self._is_ours(name):
                remove_tree(self._place(name))
                for folder in self._place(name).parents[: DEPTH - 1]:
                    folder.rmdir()

    def names(self) -> list[ModelName]:
        """Return the models that have a folder of copies, sorted. Raises: StorageError."""
        with os_errors("list", self._folder):
            found = (
                ModelName.of_path(Path(entry.path).parts[-DEPTH:])
                for level, entry in walk(self._folder, DEPTH)
                if level == DEPTH and entry.is_dir(follow_symlinks=False)
            )
            return sorted(filter(None, found))

    def move(self, name: ModelName, target: ManifestCopies) -> None:
        """Move the copies of a model's manifest to ``target``, on the same file system.

        Remains of killed imports are removed. Raises: StorageError.
        """
        place = target._place(name)
        refuse_link(target._link(name))
        with os_errors("move the copies of a manifest to", place):
            for path in self._paths(name):
                if _HEX.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    make_folder(place, durable=False)
                    path.rename(place / path.name)
        self.remove(name)

    def _place(self, name: ModelName) -> Path:
        return self._folder.joinpath(*name.path_parts)

    def _link(self, name: ModelName) -> Path | None:
        """Return the first folder on the path of a model's copies that is a link, or None.

        Raises: StorageError if a folder can't be accessed.
        """
        place = self._place(name)
        folders = (*reversed(place.parents[:DEPTH]), place)
        with os_errors("access", place):
            return next((folder for folder in folders if folder.is_symlink()), None)

    def _is_ours(self, name: ModelName) -> bool:
        try:
            return self._link(name) is None
        except StorageError:  # another user's, without rights for others
            return False

    def _paths(self, name: ModelName) -> list[Path]:
        if not self._is_ours(name):
            return []
        try:
            return sorted(self._place(name).iterdir())
        except OSError:  # most models of an Ollama's store have none
            return []


def _write(path: Path, raw: bytes) -> None:
    make_folder(path.parent, durable=False)
    replace_file(path, raw)


def _is_intact(path: Path) -> bool:
    """Return True for a copy with the bytes that it is named for. They are not held: 64 MiB."""
    with suppress(BlobStoreError), FileReader(path, follow=False) as reader:
        return reader.digest().hex == path.name
    return False


def _key(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@dataclass(frozen=True, slots=True)
class MissingModel:
    """A model without a manifest, and the blobs, in hex digits, that its copies name."""

    name: ModelName
    needs: AbstractSet[str]


@dataclass(frozen=True, slots=True)
class CopiedModels:
    """The models with copies: those ``there`` have a manifest, those ``missing`` do not."""

    there: tuple[ModelName, ...]
    missing: tuple[MissingModel, ...]

    @classmethod
    def read(cls, copies: ManifestCopies, names: AbstractSet[ModelName]) -> CopiedModels:
        """Return the models with copies, of a store with the models ``names``.

        Raises: StorageError.
        """
        copied = copies.names()
        known = KnownNeeds()
        gone = [name for name in copied if name not in names]
        missing = tuple(MissingModel(name, copies.needs(name, known)) for name in gone)
        return cls(tuple(name for name in copied if name in names), missing)

    def lost(self, unneeded: AbstractSet[str]) -> list[MissingModel]:
        """Return the lost models; ``unneeded``: the blobs in the store that no manifest needs."""
        return [model for model in self.missing if not unneeded.isdisjoint(model.needs)]


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
        nbytes = 0
        for folder in self._folders():
            nbytes += sum(blob.size for blob in _blobs_in(folder))
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
        folder = self._folder / os.urandom(8).hex()
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
