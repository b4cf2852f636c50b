"""Ingest: everything that one import writes, invisible until it is all there.

Blobs are written to a folder of the ingest's own under ``.blobstore/tmp/``; `Ingest.commit` makes them durable, moves
them to ``blobs/``, and links the manifest last. A failed ingest leaves the store as it was; a killed one leaves only its
folder, which the next ingest that is alone removes. Temporary blobs are out of Ollama's sight, however long an import
takes: a starting Ollama deletes unreferenced files over an hour old from ``blobs/`` (server/images.go `PruneLayers`,
ollama/ollama@fb307609).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from blobstore.digest import Digest
from blobstore.documents import Manifest
from blobstore.errors import CorruptDataError, StorageError
from blobstore.names import ModelName
from blobstore.store.blobs import BlobFolder
from blobstore.store.files import (
    SYNCS_WHOLE_FILE_SYSTEM,
    create_file,
    make_folder,
    make_private_folder,
    os_errors,
    sync,
    sync_file_system,
    sync_folder,
    write_all,
)
from blobstore.store.manifests import ManifestFolder


@dataclass(frozen=True, slots=True)
class FinishedBlob:
    """A blob that is complete but not yet visible: its digest, its size in bytes, where it waits."""

    digest: Digest
    size: int
    path: Path


class BlobWriter:
    """Writes and hashes one blob in one pass. ``size`` bytes are promised, and `finish` checks that they came."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._written = 0
        self._hash = hashlib.sha256()
        with os_errors("create", path):
            self._fd = create_file(path)

    def write(self, data: Any) -> None:
        """Append the bytes of any contiguous buffer. Raises: StorageError (no space, I/O)."""
        view = memoryview(data).cast("B")
        with os_errors("write", self._path):
            write_all(self._fd, view)
        self._hash.update(view)
        self._written += len(view)

    def finish(self) -> FinishedBlob:
        """Return the finished blob. Raises: CorruptDataError when it has not the promised size; StorageError."""
        if self._written != self._size:
            raise CorruptDataError(f"{self._written:,} bytes were written where {self._size:,} were planned")
        if not SYNCS_WHOLE_FILE_SYSTEM:
            with os_errors("write", self._path):
                sync(self._fd)
        self.close()
        return FinishedBlob(Digest(self._hash.hexdigest()), self._written, self._path)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ingest:
    """One import's private folder. Use it as a context manager: what was not committed is gone at the end."""

    def __init__(self, blobs: BlobFolder, manifests: ManifestFolder, temporary_folder: Path) -> None:
        self._blobs = blobs
        self._manifests = manifests
        with os_errors("write to the store", temporary_folder):
            self._folder = make_private_folder(temporary_folder)
            _check_one_file_system(self._folder, blobs.path)
            # Opened before the first write, so that syncfs on it reports every write error since.
            self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def writer(self, size: int) -> BlobWriter:
        """Return a writer for one blob of ``size`` bytes. May be called from several threads."""
        return BlobWriter(self._folder / secrets.token_hex(8), size)

    def put(self, data: bytes) -> FinishedBlob:
        """Write bytes in memory as one blob."""
        with self.writer(len(data)) as writer:
            writer.write(data)
            return writer.finish()

    def commit(self, blobs: list[FinishedBlob], name: ModelName, manifest: Manifest) -> set[Digest]:
        """Make ``blobs`` and then the model ``name`` visible; return the digests that the store did not have before.

        Order: manifest and bytes durable, blobs renamed, their names durable, every blob of the manifest checked for
        presence and size, manifest renamed, its name durable. All space is taken before anything is visible. A blob or
        manifest that was there is replaced: what has just been computed heals what lies there.

        Raises: StorageError; NotFoundError or CorruptDataError when the manifest names a blob that is not in the store
        with its size; LimitExceededError for a manifest that could not be read back. The old manifest stays then.
        """
        Manifest.parse(manifest.raw)
        created = {blob.digest for blob in blobs if not self._blobs.has(blob.digest, blob.size)}
        prepared = self._folder / "manifest"
        self._manifests.prepare(name, manifest, prepared)
        with os_errors("write blobs to", self._blobs.path):
            sync_file_system(self._folder_fd)
            make_folder(self._blobs.path)
            for blob in blobs:
                os.utime(blob.path)  # young again: a starting Ollama spares it until its manifest is there
                blob.path.rename(self._blobs.path / blob.digest.file_name)
            sync_folder(self._blobs.path)
        for descriptor in manifest.descriptors:
            self._blobs.check(descriptor)
        self._manifests.link(name, prepared)
        return created

    def close(self) -> None:
        """Remove the folder with everything that was not committed."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._folder_fd)


def _check_one_file_system(folder: Path, blobs: Path) -> None:
    # Blobs are renamed into place, and one syncfs is for all of them.
    if blobs.exists() and blobs.stat().st_dev != folder.stat().st_dev:
        folder.rmdir()
        raise StorageError(f"{blobs} is on another file system than {folder.parent}: they must be on one", path=str(blobs))
