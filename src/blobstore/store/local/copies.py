"""Copies of manifests, and the models of which only copies are left.

The manifest of a *missing* model is gone, though copies of it are kept. Another program may have
removed the model, or the disk that its manifest lies on is not mounted: an unmounted disk looks
like an empty folder. An ``ollama rm`` deletes the blobs that only this model needs, together with
its manifest. So a missing model whose own blobs are still there is called *lost*: something other
than a removal took its manifest.

A manifest has no checksum: a bit that flips in a layer's name leaves a valid manifest of another
model. So a copy of each is kept, at ``.blobstore/copies/HOST/NAMESPACE/MODEL/TAG/<sha256 of its
bytes>``; its own name says whether it is still right. It is written before the manifest is linked
and the older ones go afterwards, so that killed in between there is one of either; a repair takes
the one that looks like what was there. A copy is a hint: nothing needs it, and an Ollama that
replaces or removes a manifest does not know of it. So the copies also tell which models a store
should have.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, StorageError
from blobstore.formats.documents import MAX_MANIFEST
from blobstore.io.copying import remove_tree
from blobstore.io.durable import listed, make_folder, os_errors, read_own, replace_file
from blobstore.names import ModelName
from blobstore.store.local.references import KnownNeeds

_DEPTH = 4
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


class ManifestCopies:
    """The copies of a store's manifests, in ``folder``, which is made when there is the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, name: ModelName) -> list[bytes]:
        """Return the intact copies of a model's manifest: one, rarely two, none for a model that others made."""
        found = []
        for path in self._paths(name):
            with suppress(BlobStoreError):
                raw = read_own(path, MAX_MANIFEST)
                if _key(raw) == path.name:
                    found.append(raw)
        return found

    def needs(self, name: ModelName, known: KnownNeeds | None = None) -> AbstractSet[str]:
        """Return the hex digits of the blobs that the intact copies of a model's manifest name.

        ``known``: what was found of other models' copies, whose bytes may be the same.
        """
        found = [(known or KnownNeeds()).of(raw) for raw in self.of(name)]
        needs = [
            each.keys() for each in found if not isinstance(each, BlobStoreError)
        ]  # one of a later version, perhaps
        return needs[0] if len(needs) == 1 else frozenset().union(*needs)

    def write(self, name: ModelName, raw: bytes) -> bool:
        """Write a copy, as durable as a later sync of the file system makes it.

        Return False when it was there.

        Raises: StorageError.
        """
        if raw in self.of(name):
            return False
        path = self._place(name) / _key(raw)
        self._refuse_links(name)
        with os_errors("write", path):
            try:
                _write(path, raw)
            except (
                FileNotFoundError
            ):  # the removal of another model has just removed the empty folder
                _write(path, raw)
        return True

    def forget(self, name: ModelName, raw: bytes) -> None:
        """Remove the copy of these bytes, whose manifest was not linked after all."""
        if not self._is_ours(name):
            return
        with suppress(OSError):
            (self._place(name) / _key(raw)).unlink()
            self._place(name).rmdir()

    def settle(self, name: ModelName, raw: bytes) -> None:
        """Remove all copies of a model's manifest but that of these bytes."""
        for path in self._paths(name):
            if path.name != _key(raw):
                with suppress(OSError):
                    path.unlink()

    def remove(self, name: ModelName) -> None:
        """Remove the copies of a model that is gone."""
        if not self._is_ours(name):
            return
        with suppress(OSError):  # folders of other models are not empty
            remove_tree(self._place(name))
            for folder in list(self._place(name).parents)[: _DEPTH - 1]:
                folder.rmdir()

    def names(self) -> list[ModelName]:
        """Return the models that have a folder of copies, sorted. Raises: StorageError."""
        with os_errors("list", self._folder):
            return sorted(
                name
                for folder in _folders(self._folder, _DEPTH)
                if (name := _name(folder)) is not None
            )

    def move(self, name: ModelName, target: ManifestCopies) -> None:
        """Move the copies of a model's manifest to ``target``, on the same file system.

        What killed imports left there goes.

        Raises: StorageError.
        """
        place = target._place(name)
        target._refuse_links(name)
        with os_errors("move the copies of a manifest to", place):
            for path in self._paths(name):
                if _KEY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    make_folder(place, durable=False)
                    path.rename(place / path.name)
        self.remove(name)

    def _place(self, name: ModelName) -> Path:
        return self._folder.joinpath(*name.path_parts)

    def _refuse_links(self, name: ModelName) -> None:
        if (link := self._link(name)) is not None:
            raise StorageError(
                f"{link} is a symbolic link, and nothing is written through one", path=str(link)
            )

    def _link(self, name: ModelName) -> Path | None:
        """Return the first folder on the way to a model's copies that is a link: what lies behind it is not ours.

        Raises: StorageError when that can't be told.
        """
        place = self._place(name)
        with os_errors("access", place):
            return next(
                (path for path in (*reversed(place.parents[:_DEPTH]), place) if path.is_symlink()),
                None,
            )

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


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders that lie so deep below ``folder``; none is reached through a link.

    Raises: OSError.
    """
    for entry in listed(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _folders(Path(entry.path), depth - 1) if depth > 1 else [Path(entry.path)]


def _key(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _name(folder: Path) -> ModelName | None:
    return ModelName.of_path(folder.parts[-_DEPTH:])


@dataclass(frozen=True, slots=True)
class MissingModel:
    """A model without a manifest, and the hex digits of the blobs that the copies of its manifest name."""

    name: ModelName
    needs: AbstractSet[str]


@dataclass(frozen=True, slots=True)
class CopiedModels:
    """The models whose manifests have copies: those that are ``there``, with a manifest, and those that are ``missing``."""

    there: tuple[ModelName, ...]
    missing: tuple[MissingModel, ...]

    @classmethod
    def read(cls, copies: ManifestCopies, names: AbstractSet[ModelName]) -> CopiedModels:
        """Return the copied models of a store whose manifests have ``names``.

        Raises: StorageError.
        """
        copied = copies.names()
        known = KnownNeeds()
        missing = (
            MissingModel(name, copies.needs(name, known)) for name in copied if name not in names
        )
        return cls(tuple(name for name in copied if name in names), tuple(missing))

    def lost(self, unneeded: AbstractSet[str]) -> list[MissingModel]:
        """Return the lost models, given the hex digits of the blobs in the store that no manifest needs."""
        return [model for model in self.missing if not unneeded.isdisjoint(model.needs)]
