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
from blobstore.store.files import create_temporary, make_folder, os_errors, remove_if_there, sync, sync_folder, write_all


class ManifestFolder:
    """The ``manifests/`` folder of a store. No folder or file below it is reached through a symbolic link."""

    def __init__(self, path: Path, temporary_folder: Path) -> None:
        self.path = path
        self._temporary_folder = temporary_folder

    def names(self) -> list[ModelName]:
        """Return the names of all models, sorted. Files at another depth or with other names are not models."""
        return sorted(self._walk(self.path, ()))

    def _walk(self, folder: Path, parts: tuple[str, ...]) -> Iterator[ModelName]:
        if not folder.exists():
            return
        with os_errors("list", folder), os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            inner = (*parts, entry.name)
            if len(inner) == 4 and entry.is_file(follow_symlinks=False):  # noqa: PLR2004  # host, namespace, model, tag
                with suppress(InvalidNameError):
                    yield _name(inner)
            elif len(inner) < 4 and entry.is_dir(follow_symlinks=False):  # noqa: PLR2004
                yield from self._walk(folder / entry.name, inner)

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

    def write(self, name: ModelName, manifest: Manifest) -> None:
        """Put ``manifest`` under ``name``: bytes durable, renamed into place, the name and new folders durable.

        Raises: StorageError; the old manifest, if any, is untouched then.
        """
        path = self._path(name)
        with os_errors("write the manifest", path):
            fd, temporary = create_temporary(self._temporary_folder)
            try:
                write_all(fd, memoryview(manifest.raw))
                sync(fd)
                make_folder(path.parent)
                self._refuse_links(name)
                temporary.rename(path)
                sync_folder(path.parent)
            except BaseException:
                remove_if_there(temporary)
                raise
            finally:
                os.close(fd)

    def remove(self, name: ModelName) -> None:
        """Remove a manifest and the folders that it leaves empty. Raises: NotFoundError when there is none."""
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("remove the manifest", path):
            if not remove_if_there(path):
                raise NotFoundError(f"model {str(name)!r} not found", model=str(name), path=str(path))
            sync_folder(path.parent)
            for folder in list(path.parents)[:3]:
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
                raise InvalidNameError(f"the folder {folder} of model {name} is a symbolic link", model=str(name), path=str(folder))


def _name(parts: tuple[str, ...]) -> ModelName:
    host, namespace, model, tag = parts
    return ModelName(host=host, namespace=namespace, model=model, tag=tag)
