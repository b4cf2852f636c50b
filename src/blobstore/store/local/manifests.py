"""Manifests: one small file for each model, at ``HOST/NAMESPACE/MODEL/TAG``."""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    LimitExceededError,
    ModelNotFoundError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import MAX_MANIFEST, Manifest
from blobstore.formats.strictjson import parse_object
from blobstore.io.durable import (
    list_folder,
    make_folder,
    os_errors,
    remove_if_there,
    sync_folder,
    write_new_file,
)
from blobstore.io.ranges import FileReader, real_path
from blobstore.names import DEFAULT_HOST, Digest, ModelName, hint_for
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.locks import mode_of, refuse_links
from blobstore.store.ports import Manifests, ambiguous, checked_bytes
from blobstore.store.references import Needs, ReadOnce

_PUBLIC_HOST = "ollama.com"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})", re.ASCII)


class NewerManifests:
    """The manifests of newer Ollamas: ``manifests-v2/`` of a store, whose blobs are ``blobs``.

    They are read only as far as needed to remove no blob that they name. Nothing is loaded from
    there, and nothing is written. The layout is proposed, not shipped (ollama/ollama PRs 15735 and
    16590; @baa78e71 manifest/manifest.go `linkManifest`, `referencedBlobDigestsForData`):
    ``HOST/NAMESPACE/MODEL/TAG`` is a symbolic link to the blob of the manifest, or a hard link or a
    copy if the file system has no symbolic links. The host registry.ollama.ai is ollama.com there,
    and a colon in a host is ``%3A``. A manifest may be a list of manifests, each contained as a
    whole or as the digest of its blob. A name there hides the same name under ``manifests/``.
    """

    def __init__(self, path: Path, blobs: BlobFolder) -> None:
        self._folder = ManifestFolder(path)
        self._blobs = blobs

    def names(self) -> list[ModelName]:
        """Return the names there, sorted, as ``manifests/`` has them. Raises: StorageError."""
        return sorted(set(filter(None, map(self._name, self._folder.walk()))))

    def has(self, name: ModelName) -> bool:
        """Return True if a newer Ollama finds ``name`` there, and not under ``manifests/``.

        Raises: StorageError.
        """
        wanted = _logical(name).folded
        return any(found.folded == wanted for found in self.names())

    def needs(self) -> Iterator[tuple[Path, Needs | BlobStoreError]]:
        """Yield each file, sorted, with the blobs that it needs, or the error of reading it.

        A manifest's own blob is among them. Raises: StorageError if the folder can't be listed.
        """
        known = ReadOnce(self._reachable)
        for path in self._folder.walk():
            try:
                raw = self._read(path)
            except BlobStoreError as error:
                yield path, error.without_traceback()
            else:
                yield path, known.of(raw)

    def _name(self, path: Path) -> ModelName | None:
        host, *others = path.relative_to(self._folder.path).parts
        name = ModelName.of_path((host.replace("%3A", ":").replace("%3a", ":"), *others))
        return None if name is None else _logical(name)

    def _read(self, path: Path) -> bytes:
        if self._name(path) is None:
            message = f"{path} may be a manifest, but its path is not a model's name"
            raise StorageError(message, path=str(path))
        with os_errors("access", path):
            is_link = path.is_symlink()
        if is_link:
            try:
                return self._read_blob(self._link_target(path))
            except NotFoundError as error:
                raise StorageError(f"{path}: {error.message}", path=str(path)) from None
        with FileReader(path, follow=False) as reader:
            return _text(reader, reader.name)

    def _link_target(self, path: Path) -> Digest:
        """Return the digest of the blob that a link leads to; the link is not followed to read."""
        target = Path(real_path(path))
        digest = Digest.from_file_name(target.name)
        if digest is None or target.parent != Path(real_path(self._blobs.path)):
            message = f"{path} is a symbolic link to {target}, which is not a blob of this store"
            raise StorageError(message, path=str(path))
        return digest

    def _read_blob(self, digest: Digest) -> bytes:
        with self._blobs.reader(digest) as reader:
            raw = _text(reader, reader.name)
        return checked_bytes(raw, digest)

    def _reachable(self, raw: bytes, what: str) -> Needs:
        """Return every blob that can be reached from a manifest, itself included.

        A manifest of a list may be missing: Ollama pulls only those that it runs
        (`parseManifestBlobIfExists`).
        """
        digests, waiting = {Digest.of(raw).hex}, [_document(raw, what)]
        followed: set[str] = set()
        while waiting:
            document = waiting.pop()
            digests.update(_DIGEST.findall(json.dumps(document)))
            for child in document.get("manifests", ()):
                waiting.append(child)
                if "digest" in child and child["digest"] not in followed:
                    followed.add(child["digest"])
                    with suppress(NotFoundError):
                        text = self._read_blob(Digest.parse(child["digest"]))
                        waiting.append(_document(text, what))
        states = self._blobs.states(digests)
        return {digest: states[digest].size if digest in states else 0 for digest in digests}


def _document(raw: bytes, what: str) -> dict[str, Any]:
    """Return a manifest or a list of manifests. Raises: DocumentError (rule M1)."""
    document = parse_object(raw, what, rule="M1", limit=MAX_MANIFEST)
    lists = [document]
    for manifest in lists:
        children = manifest.get("manifests", [])
        if not isinstance(children, list) or not all(map(_is_manifest, children)):
            raise DocumentError(f"{what}: manifests is not a list of objects (rule M1)", rule="M1")
        lists += children
    if not document.keys() & {"layers", "manifests"}:
        raise DocumentError(f"{what} is not a manifest (rule M1)", rule="M1")
    return document


def _is_manifest(child: Any) -> bool:
    return isinstance(child, dict) and isinstance(child.get("digest", ""), str)


def _logical(name: ModelName) -> ModelName:
    return replace(name, host=DEFAULT_HOST) if name.host.lower() == _PUBLIC_HOST else name


DEPTH = 4
"""Levels of a manifest below its folder: host, namespace, model, tag."""
# Bytes from which a manifest is searched for NUL bytes before it is read: it may be a hole.
_LARGE = 2**20


@dataclass(eq=False)
class ManifestFolder(Manifests):
    """The ``manifests/`` folder of a store. No symbolic link below it is followed."""

    path: Path

    def names(self) -> list[ModelName]:
        """Return the names of all models, sorted.

        Links, and files at another depth or with invalid names, are not models.
        """
        entries = (Path(entry.path) for level, entry in self._walk(DEPTH) if _is_file(level, entry))
        return sorted(filter(None, map(self.name_of, entries)))

    def strays(self) -> list[Path]:
        """Return files with invalid names, and links: they may be manifests, but are not models."""
        return [
            Path(entry.path)
            for level, entry in self._walk(DEPTH)
            if entry.is_symlink()
            or (_is_file(level, entry) and self.name_of(Path(entry.path)) is None)
        ]

    def walk(self) -> Iterator[Path]:
        """Yield every file and link below ``manifests/``, sorted; links are not followed.

        A folder below the level of manifests is yielded instead of its contents: nesting may be
        endless. Raises: StorageError.
        """
        for level, entry in self._walk(DEPTH + 1):
            if level > DEPTH or not entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)

    def name_of(self, path: Path) -> ModelName | None:
        return ModelName.of_path(path.relative_to(self.path).parts)

    def _walk(self, depth: int) -> Iterator[tuple[int, os.DirEntry[str]]]:
        """Yield as `walk`. Raises: StorageError, also if ``manifests/`` is a dangling link."""
        with os_errors("list", self.path):
            if self.path.is_symlink() and not self.path.exists():
                link = f"{self.path} is a symbolic link to {self.path.readlink()}"
                hint = "Is a disk not mounted?"
                raise StorageError(f"{link}, which does not exist", path=str(self.path), hint=hint)
            yield from walk(self.path, depth)

    def stored_name(self, name: ModelName) -> ModelName:
        """See `Manifests`: names that differ only in case are one model, as for Ollama.

        An exact match wins. The parts of a missing model take the spelling of existing folders. So
        a name means the same on file systems with and without case.

        Raises: AmbiguousNameError if there are several other spellings; StorageError.
        """
        parts: tuple[str, ...] = name.path_parts
        found: list[tuple[str, ...]] = [()]
        for depth in range(DEPTH):
            deeper = [
                (*above, part) for above in found for part in self._spellings(above, parts[depth])
            ]
            if not deeper:  # the rest does not exist; with several folders for it, it gets its own
                above = parts[:depth] if len(found) > 1 else found[0]
                return _existing_spelling(name, (*above, *parts[depth:]))
            found = deeper
        if parts in found:
            return name
        if len(found) > 1:
            raise ambiguous(name, [_existing_spelling(name, several) for several in sorted(found)])
        return _existing_spelling(name, found[0])

    def _spellings(self, above: tuple[str, ...], part: str) -> list[str]:
        """Return the entries of a folder that differ from ``part`` at most in case.

        None are returned for a link.
        """
        folder = self.path.joinpath(*above)
        with os_errors("list", folder):
            if above and not stat.S_ISDIR(mode_of(folder)):
                return []
            names = [entry.name for entry in list_folder(folder)]
        # Only ASCII: the Kelvin sign is a k in lower case, and is in no name.
        return [name for name in names if name.isascii() and name.lower() == part.lower()]

    def text(self, name: ModelName, *, damaged: bool = False) -> bytes:
        """Return the bytes of a manifest.

        Raises: NotFoundError; LimitExceededError over 64 MiB; DocumentError (rule M1) for a large
        one with a NUL byte, unless it may be ``damaged``; StorageError; each with ``model``.
        """
        try:
            self._refuse_links(name)
            with FileReader(self._path(name), follow=False) as reader:
                return _text(reader, f"the manifest of {name}", damaged=damaged)
        except NotFoundError:
            raise self.missing(name) from None
        except LimitExceededError as error:
            hint = f"Remove it: blobstore rm {name}"
            raise error.about(model=str(name), hint=hint) from error
        except BlobStoreError as error:
            raise error.about(model=str(name)) from error

    def raw(self, name: ModelName) -> bytes | None:
        """Return the bytes of a manifest: None if it is missing, b"" if it can't be read."""
        text = self.text_or_error(name)
        return b"" if isinstance(text, BlobStoreError) else text

    def modified_at(self, name: ModelName) -> datetime | None:
        """Return when the manifest was written, in UTC; None if that is out of range.

        Raises: NotFoundError, StorageError.
        """
        path = self._path(name)
        with os_errors("access", path):
            seconds = path.stat(follow_symlinks=False).st_mtime
        try:
            return datetime.fromtimestamp(seconds, UTC)
        except (ValueError, OverflowError, OSError):
            return None

    def set_modified(self, name: ModelName, moment: datetime | None) -> None:
        """Set when the manifest was written, where that is known. Failures are ignored."""
        if moment is not None:
            with suppress(OSError, OverflowError):
                seconds = moment.timestamp()
                os.utime(self._path(name), (seconds, seconds), follow_symlinks=False)

    def prepare(self, name: ModelName, manifest: Manifest, temporary: Path) -> None:
        """Write a manifest to the path ``temporary``, durably, and make its folder.

        `link` needs no more space on the disk. A copy of an older manifest of that name is kept
        next to it, for `link`. Nothing is visible yet. Raises: StorageError, also if a folder has
        the name; LimitExceededError if an older file of that name is too large for a manifest.
        """
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("write the manifest", path):
            older = mode_of(path)
            if stat.S_ISDIR(older):
                raise StorageError(f"{path} is in the way: it is a folder", path=str(path))
            if stat.S_ISREG(older):
                write_new_file(_older(temporary), self.text(name, damaged=True), syncs=True)
            write_new_file(temporary, manifest.raw, syncs=True)
            make_folder(path.parent)

    def link(self, name: ModelName, temporary: Path) -> None:
        """Give ``name`` a prepared manifest, durably; an older one is replaced.

        Raises: StorageError; the older manifest, if any, is restored then.
        """
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("write the manifest", path):
            _rename(temporary, path)
            try:
                sync_folder(path.parent)
            except OSError:
                if mode_of(_older(temporary)):
                    _older(temporary).rename(path)
                else:
                    path.unlink()
                raise

    def has(self, name: ModelName) -> bool:
        """Return True if anything is at the path of the manifest. Raises: StorageError."""
        with os_errors("access", self._path(name)):
            return mode_of(self._path(name)) != 0

    def require(self, name: ModelName) -> None:
        if not self.has(name):
            raise self.missing(name)

    def remove(self, name: ModelName) -> None:
        """Remove a manifest, durably. Raises: NotFoundError if it does not exist."""
        path = self._path(name)
        self._refuse_links(name)
        with os_errors("remove the manifest", path):
            if not remove_if_there(path):
                raise self.missing(name)
            for folder in path.parents:  # Ollama may have removed the folder already
                with suppress(FileNotFoundError):
                    sync_folder(folder)
                    break

    def remove_empty_folders(self, name: ModelName) -> None:
        """Remove the folders that a removed manifest left empty. Failures are ignored.

        Only for a holder of the store's exclusive lock.
        """
        with suppress(OSError):  # a folder that is not empty ends it
            for folder in self._path(name).parents[: DEPTH - 1]:
                folder.rmdir()

    def remove_all_empty_folders(self) -> None:
        """Remove every empty folder down to the level of manifests.

        Only for a holder of the store's exclusive lock. Raises: StorageError if a folder can't be
        listed.
        """
        with os_errors("list", self.path):
            below = list(walk(self.path, DEPTH))
        for _, entry in reversed(below):
            with suppress(OSError):  # the folder is not empty
                if entry.is_dir(follow_symlinks=False):
                    os.rmdir(entry.path)  # noqa: PTH106  # thousands of them

    def missing(self, name: ModelName, hint: str | None = None) -> NotFoundError:
        hint = hint or hint_for(self.names(), name)
        return ModelNotFoundError(f"model {str(name)!r} not found", model=str(name), hint=hint)

    def _path(self, name: ModelName) -> Path:
        return self.path.joinpath(*name.path_parts)

    def _refuse_links(self, name: ModelName) -> None:
        refuse_links(self.path, name.path_parts[:-1])


def _rename(temporary: Path, path: Path) -> None:
    """Rename a prepared manifest. Its folder is made again if another program removed it.

    Ollama removes empty folders when a model is removed, and when it starts (ollama/ollama
    server/images.go `PruneDirectory`); a folder with a manifest stays. Raises: OSError.
    """
    while True:
        try:
            temporary.rename(path)
        except FileNotFoundError:
            temporary.lstat()
            make_folder(path.parent)
        else:
            return


def _is_file(level: int, entry: os.DirEntry[str]) -> bool:
    return level == DEPTH and entry.is_file(follow_symlinks=False)


def walk(folder: Path, depth: int, level: int = 1) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Yield each entry down to ``depth`` levels below a folder, by name, and its level.

    A folder comes before its contents, and no link is followed. Raises: OSError.
    """
    for entry in list_folder(folder):
        yield level, entry
        if level < depth and entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path), depth, level + 1)


def _text(reader: FileReader, what: str, *, damaged: bool = False) -> bytes:
    """Return the bytes of a manifest.

    A NUL byte in a large file is an error before the rest is read, unless it may be ``damaged``: a
    few bytes and a hole may be 64 MiB. Raises: LimitExceededError; DocumentError (rule
    M1); StorageError.
    """
    if reader.size > MAX_MANIFEST:
        message = f"limit exceeded: {what} has {reader.size:,} bytes, at most {MAX_MANIFEST:,}"
        raise LimitExceededError(message, path=reader.name)
    if reader.size > _LARGE and not damaged and reader.has_nul():
        message = f"{what} is not valid JSON: it contains a NUL byte (rule M1)"
        raise DocumentError(message, rule="M1", path=reader.name)
    return reader.read(0, reader.size)


def _older(temporary: Path) -> Path:
    return temporary.with_suffix(".older")


def _existing_spelling(name: ModelName, parts: tuple[str, ...]) -> ModelName:
    host, namespace, model, tag = parts
    return replace(name, host=host, namespace=namespace, model=model, tag=tag)
