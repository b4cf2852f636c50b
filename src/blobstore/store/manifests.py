"""Manifests: one small file a model, at ``HOST/NAMESPACE/MODEL/TAG``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from blobstore.documents import MAX_MANIFEST, Manifest
from blobstore.errors import BlobStoreError, InvalidNameError, LimitExceededError, NotFoundError
from blobstore.names import ModelName
from blobstore.ranges import FileReader
from blobstore.store.files import create_file, make_folder, os_errors, remove_if_there, sync, sync_folder, write_all

_DEPTH = 4  # host, namespace, model, tag


class ManifestFolder:
    """The ``manifests/`` folder of a store. No folder or file below it is reached through a symbolic link."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[ModelName]:
        """Return the names of all models, sorted. Files at another depth or with other names are no models."""
        names = []
        for parts in self._files(self.path, ()):
            with suppress(InvalidNameError):
                names.append(_name(parts))
        return sorted(names)

    def strays(self) -> list[Path]:
        """Return the files that lie where manifests lie, but whose path is no model name."""
        strays = []
        for parts in self._files(self.path, ()):
            try:
                _name(parts)
            except InvalidNameError:
                strays.append(self.path.joinpath(*parts))
        return strays

    def _files(self, folder: Path, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if not folder.exists():
            return
        with os_errors("list", folder), os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            inner = (*parts, entry.name)
            if len(inner) == _DEPTH and entry.is_file(follow_symlinks=False):
                yield inner
            elif len(inner) < _DEPTH and entry.is_dir(follow_symlinks=False):
                yield from self._files(folder / entry.name, inner)

    def read(self, name: ModelName) -> Manifest:
        """Return the manifest of ``name``, and the bytes it was read from.

        Raises: NotFoundError when there is none; DocumentError when it is no manifest; StorageError; each with ``model``.
        """
        path = self._path(name)
        try:
            self._refuse_links(name)
            with FileReader(path, follow=False) as reader:
                if reader.size > MAX_MANIFEST:
                    raise LimitExceededError(f"limit exceeded: the manifest of {name} has {reader.size:,} bytes")
                raw = reader.read(0, reader.size)
            return Manifest.parse(raw, f"the manifest of {name}")
        except NotFoundError:
            raise NotFoundError(f"model {str(name)!r} not found", model=str(name), path=str(path)) from None
        except BlobStoreError as error:
            error.model = str(name)
            raise

    def modified(self, name: ModelName) -> float:
        """Return when the manifest was written, in seconds since the epoch. Raises: NotFoundError, StorageError."""
        path = self._path(name)
        with os_errors("look at", path):
            return path.stat(follow_symlinks=False).st_mtime

    def prepare(self, name: ModelName, manifest: Manifest, temporary: Path) -> None:
        """Write a manifest to the path ``temporary``, durably, and make its folder: all that needs space on the disk.

        Raises: StorageError; nothing is visible yet.
        """
        folder = self._path(name).parent
        with os_errors("write the manifest", self._path(name)):
            fd = create_file(temporary)
            try:
                write_all(fd, memoryview(manifest.raw))
                sync(fd)
            finally:
                os.close(fd)
            self._refuse_links(name)
            make_folder(folder)

    def link(self, name: ModelName, temporary: Path) -> None:
        """Put a prepared manifest under ``name``, durably; an older one is replaced. Raises: StorageError."""
        path = self._path(name)
        with os_errors("write the manifest", path):
            self._refuse_links(name)
            temporary.rename(path)
            sync_folder(path.parent)

    def remove(self, name: ModelName) -> None:
        """Remove a manifest and the folders that it leaves empty. Raises: NotFoundError when there is none."""
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("remove the manifest", path):
            if not remove_if_there(path):
                raise NotFoundError(f"model {str(name)!r} not found", model=str(name), path=str(path))
            sync_folder(path.parent)
            for folder in list(path.parents)[: _DEPTH - 1]:
                try:
                    folder.rmdir()
                except OSError:
                    break  # not empty

    def _path(self, name: ModelName) -> Path:
        return self.path.joinpath(*name.path_parts)

    def _refuse_links(self, name: ModelName) -> None:
        folder = self.path
        for part in name.path_parts[:-1]:
            folder /= part
            if folder.is_symlink():
                raise InvalidNameError(
                    f"the folder {folder} of model {name} is a symbolic link", model=str(name), path=str(folder)
                )


def _name(parts: tuple[str, ...]) -> ModelName:
    host, namespace, model, tag = parts
    return ModelName(host=host, namespace=namespace, model=model, tag=tag)
