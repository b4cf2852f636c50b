"""Manifests: one small file a model, at ``HOST/NAMESPACE/MODEL/TAG``."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from blobstore.errors import (
    AmbiguousNameError,
    BlobStoreError,
    DocumentError,
    LimitExceededError,
    ModelNotFoundError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import MAX_MANIFEST, Manifest
from blobstore.io.durable import (
    create_file,
    listed,
    make_folder,
    os_errors,
    remove_if_there,
    sync,
    sync_folder,
    write_all_at,
)
from blobstore.io.ranges import FileReader
from blobstore.names import ModelName, hint_for

_DEPTH = 4  # host, namespace, model, tag
LARGE = 2**20
"""Bytes of a manifest that is searched for a NUL byte before it is read: it may be a hole of 64 MiB."""


class ManifestFolder:
    """The ``manifests/`` folder of a store.

    No folder or file below it is reached through a symbolic link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[ModelName]:
        """Return the names of all models, sorted.

        Links, and files at another depth or with other names, are not models.
        """
        return sorted(
            name
            for path, is_link in self._entries()
            if not is_link and (name := self._name(path)) is not None
        )

    def strays(self) -> list[Path]:
        """Return what may be a manifest but is not a model here: files with odd names, and links anywhere."""
        return [path for path, is_link in self._entries() if is_link or self._name(path) is None]

    def everything(self) -> Iterator[Path]:
        """Yield every file and link below ``manifests/``, sorted; links are not followed.

        A folder below the level of manifests is yielded instead of what it holds: nesting may have
        no end. Raises: StorageError.
        """
        with os_errors("list", self.path):
            self._refuse_dangling()
            yield from _files(self.path, _DEPTH + 1)

    def is_name(self, path: Path) -> bool:
        """Return True when a path that is as deep as manifests are gives a model's name."""
        return self._name(path) is not None

    def _entries(self) -> Iterator[tuple[Path, bool]]:
        """Yield the files at the depth of manifests and the links at any depth, and whether each is a link."""
        with os_errors("list", self.path):
            self._refuse_dangling()
            yield from _walk(self.path, _DEPTH)

    def _refuse_dangling(self) -> None:
        """Raise StorageError when the folder is a link to nothing: its models lie on a disk that is not there just now."""
        if self.path.is_symlink() and not self.path.exists():
            raise StorageError(
                f"{self.path} is a symbolic link to {self.path.readlink()}, which does not exist",
                path=str(self.path),
                hint="Is a disk not mounted?",
            )

    def _name(self, path: Path) -> ModelName | None:
        return ModelName.of_path(path.relative_to(self.path).parts)

    def spelled(self, name: ModelName) -> ModelName:
        """Return the name as it is spelled here: names that differ only in case are one model, as for Ollama.

        The spelling that was asked for wins where it is there. Of a model that is not there, the
        parts are spelled as the folders are on its way. So a name means the same on file systems
        that tell case apart and on others.

        Raises: AmbiguousNameError when there are several other spellings; StorageError.
        """
        parts: tuple[str, ...] = name.path_parts
        found: list[tuple[str, ...]] = [()]
        for depth in range(_DEPTH):
            deeper = [
                (*above, part) for above in found for part in self._spellings(above, parts[depth])
            ]
            if not deeper:  # what is not there yet; with several folders for it, it gets its own
                above = parts[:depth] if len(found) > 1 else found[0]
                return _respelled(name, (*above, *parts[depth:]))
            found = deeper
        if parts in found:
            return name
        if len(found) > 1:
            raise _ambiguous(name, sorted(found))
        return _respelled(name, found[0])

    def _spellings(self, above: tuple[str, ...], part: str) -> list[str]:
        """Return what lies in a folder and differs from ``part`` at most in case.

        Nothing behind a link.
        """
        folder = self.path.joinpath(*above)
        with os_errors("list", folder):
            if above and not stat.S_ISDIR(_mode(folder)):
                return []
            names = [entry.name for entry in listed(folder)]
        # Only ASCII: the Kelvin sign is a k in lower case, and is in no name.
        return [name for name in names if name.isascii() and name.lower() == part.lower()]

    def read(self, name: ModelName) -> Manifest:
        """Return the manifest of ``name``, and the bytes it was read from.

        Raises: NotFoundError when there is none; DocumentError when it is no manifest;
        StorageError; each with ``model``.
        """
        raw = self.text(name)
        try:
            return Manifest.parse(raw, f"the manifest of {name}")
        except BlobStoreError as error:
            error.model = str(name)
            raise

    def text(self, name: ModelName) -> bytes:
        """Return the bytes of a manifest that is to be parsed.

        Raises: as `read_bytes`; DocumentError (rule M1) for a large one with a NUL byte, read only
        up to there: a few bytes and a hole behind them may be 64 MiB.
        """
        return self._read(name, is_text=True)

    def read_bytes(self, name: ModelName) -> bytes:
        """Return the bytes of a manifest, whatever is in them.

        Raises: NotFoundError when there is none; LimitExceededError over 64 MiB; StorageError; each
        with ``model``.
        """
        return self._read(name)

    def raw(self, name: ModelName) -> bytes | None:
        """Return the bytes of a model's manifest: None where there is none, empty ones where they can't be read."""
        try:
            return self.read_bytes(name)
        except NotFoundError:
            return None
        except BlobStoreError:
            return b""

    def _read(self, name: ModelName, *, is_text: bool = False) -> bytes:
        path = self._path(name)
        try:
            self._refuse_links(name)
            with FileReader(path, follow=False) as reader:
                if reader.size > MAX_MANIFEST:
                    message = f"limit exceeded: the manifest of {name} has {reader.size:,} bytes, at most {MAX_MANIFEST:,}"
                    raise LimitExceededError(
                        message, path=str(path), hint=f"Remove it: blobstore rm {name}"
                    )
                if is_text and reader.size > LARGE and reader.has_nul():
                    message = f"the manifest of {name} is not valid JSON: it contains a NUL byte (rule M1)"
                    raise DocumentError(message, rule="M1", path=str(path))
                return reader.read(0, reader.size)
        except NotFoundError:
            raise self._missing(name) from None
        except BlobStoreError as error:
            error.model = str(name)
            raise

    def modified(self, name: ModelName) -> datetime | None:
        """Return when the manifest was written, UTC; None when that is out of range.

        Raises: NotFoundError, StorageError.
        """
        path = self._path(name)
        with os_errors("access", path):
            seconds = path.stat(follow_symlinks=False).st_mtime
        try:
            return datetime.fromtimestamp(seconds, UTC)
        except (ValueError, OverflowError, OSError):
            return None

    def prepare(self, name: ModelName, manifest: Manifest, temporary: Path) -> None:
        """Write a manifest to the path ``temporary``, durably, and make its folder: all that needs space on the disk.

        A copy of an older manifest of that name is kept beside it, for `link`. Raises:
        StorageError, also when a folder has the name; LimitExceededError when an older file of that
        name is too large for a manifest; nothing is visible yet.
        """
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("write the manifest", path):
            older = _mode(path)
            if stat.S_ISDIR(older):
                raise StorageError(f"{path} is in the way: it is a folder", path=str(path))
            if stat.S_ISREG(older):
                _write_durably(_older(temporary), self.read_bytes(name))
            _write_durably(temporary, manifest.raw)
            make_folder(path.parent)

    def link(self, name: ModelName, temporary: Path) -> None:
        """Put a prepared manifest under ``name``, durably; an older one is replaced.

        Raises: StorageError; the older manifest, if any, is back in its place then.
        """
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("write the manifest", path):
            temporary.rename(path)
            try:
                sync_folder(path.parent)
            except OSError:
                if _mode(_older(temporary)):
                    _older(temporary).rename(path)
                else:
                    path.unlink()
                raise

    def has(self, name: ModelName) -> bool:
        """Return True when there is something in the place of the manifest of that name.

        Raises: StorageError.
        """
        with os_errors("access", self._path(name)):
            return _mode(self._path(name)) != 0

    def require(self, name: ModelName) -> None:
        """Raise NotFoundError when the manifest does not exist; it is not read."""
        if not self.has(name):
            raise self._missing(name)

    def remove(self, name: ModelName) -> None:
        """Remove a manifest, durably. Raises: NotFoundError when it does not exist."""
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("remove the manifest", path):
            if not remove_if_there(path):
                raise self._missing(name)
            sync_folder(path.parent)

    def remove_empty_folders(self, name: ModelName) -> None:
        """Remove the folders that a removed manifest left empty.

        Only for a holder of the store's exclusive lock.
        """
        for folder in list(self._path(name).parents)[: _DEPTH - 1]:
            try:
                folder.rmdir()
            except OSError:
                break  # not empty

    def remove_all_empty_folders(self) -> None:
        """Remove every folder, as deep as manifests lie, that holds nothing.

        Only for a holder of the exclusive lock.

        Raises: StorageError when they can't be listed.
        """
        with os_errors("list", self.path):
            empty = list(_empty(self.path, _DEPTH)) if self.path.is_dir() else []
        for folder in empty:
            with suppress(OSError):  # an Ollama has just put something there
                folder.rmdir()

    def _missing(self, name: ModelName) -> NotFoundError:
        return ModelNotFoundError(
            f"model {str(name)!r} not found", model=str(name), hint=hint_for(self.path, name)
        )

    def _path(self, name: ModelName) -> Path:
        return self.path.joinpath(*name.path_parts)

    def _refuse_links(self, name: ModelName) -> None:
        folder = self.path
        for part in name.path_parts[:-1]:
            folder /= part
            with os_errors("access", folder):
                mode = _mode(folder)
            if stat.S_ISLNK(mode):
                raise StorageError(
                    f"the folder {folder} of model {name} is a symbolic link",
                    model=str(name),
                    path=str(folder),
                )


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Yield files and links up to ``depth`` levels below ``folder``, and the folders at that depth.

    Raises: OSError.
    """
    for entry in listed(folder):
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), depth - 1)
        else:
            yield Path(entry.path)


def _empty(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders up to ``depth`` levels below ``folder`` that hold nothing but empty folders; no link is followed."""
    for entry in listed(folder):
        if entry.is_dir(follow_symlinks=False):
            path = Path(entry.path)
            below = list(_empty(path, depth - 1)) if depth > 1 else []
            yield from below
            if set(path.iterdir()) <= set(below):
                yield path


def _mode(path: Path) -> int:
    """Return a file's own mode, or 0 when nothing is there.

    Raises: OSError when that can't be told.
    """
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _older(temporary: Path) -> Path:
    return temporary.with_suffix(".older")


def _write_durably(path: Path, data: bytes) -> None:
    fd = create_file(path)
    try:
        write_all_at(fd, 0, memoryview(data))
        sync(fd)
    finally:
        os.close(fd)


def _respelled(name: ModelName, parts: tuple[str, ...]) -> ModelName:
    host, namespace, model, tag = parts
    return replace(name, host=host, namespace=namespace, model=model, tag=tag)


def _ambiguous(name: ModelName, found: Sequence[tuple[str, ...]]) -> AmbiguousNameError:
    names = [str(_respelled(name, parts)) for parts in found]
    message = f"{str(name)!r} may be {' or '.join(names)}: they differ only in case"
    return AmbiguousNameError(message, model=str(name), hint="Spell it as one of them.")


def _walk(folder: Path, depth: int) -> Iterator[tuple[Path, bool]]:
    for entry in listed(folder):
        if entry.is_symlink():
            yield Path(entry.path), True
        elif depth == 1 and entry.is_file(follow_symlinks=False):
            yield Path(entry.path), False
        elif depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), depth - 1)
