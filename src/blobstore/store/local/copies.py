"""Copies of manifests, and models of which only a copy is left.

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
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, StorageError
from blobstore.formats.documents import MAX_MANIFEST
from blobstore.io.copying import remove_tree
from blobstore.io.durable import make_folder, os_errors, read_own, replace_file
from blobstore.names import ModelName
from blobstore.store.local.locks import refuse_link
from blobstore.store.local.manifests import DEPTH, walk
from blobstore.store.local.references import KnownNeeds

_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


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
        if raw in self.of(name):
            return False
        path = self._place(name) / _key(raw)
        refuse_link(self._link(name))
        with os_errors("write", path):
            make_folder(path.parent, durable=False)
            try:
                replace_file(path, raw)
            except FileNotFoundError:  # the removal of another model has removed the empty folder
                make_folder(path.parent, durable=False)
                replace_file(path, raw)
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
                if _KEY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
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
