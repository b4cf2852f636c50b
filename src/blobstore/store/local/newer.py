"""Manifests of newer Ollamas: ``manifests-v2/`` of a store in a folder.

They are read only as far as needed to remove no blob that they name. Nothing is loaded from there,
and nothing is written. The layout is proposed, not
shipped (ollama/ollama PRs 15735 and 16590; @baa78e71 manifest/manifest.go `linkManifest`,
`referencedBlobDigestsForData`): ``HOST/NAMESPACE/MODEL/TAG`` is a symbolic link to the blob of the
manifest, or a hard link or a copy if the file system has no symbolic links. The host
registry.ollama.ai is ollama.com there, and a colon in a host is ``%3A``. A manifest may be a list
of manifests, each contained as a whole or as the digest of its blob. A name there hides the same
name under ``manifests/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    InvalidDigestError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import MAX_MANIFEST, Descriptor, Manifest
from blobstore.formats.strictdocument import validated
from blobstore.formats.strictjson import parse_object
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileReader, real_path
from blobstore.names import DEFAULT_HOST, Digest, ModelName
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.manifests import ManifestFolder, manifest_text
from blobstore.store.ports import checked_bytes
from blobstore.store.references import KnownNeeds, Needs, needs_of

_PUBLIC_HOST = "ollama.com"


class NewerManifests:
    """The ``manifests-v2/`` folder of a store, whose blobs are ``blobs``."""

    def __init__(self, path: Path, blobs: BlobFolder) -> None:
        self._folder = ManifestFolder(path)
        self._blobs = blobs

    def names(self) -> list[ModelName]:
        """Return the names there, sorted, as ``manifests/`` has them. Raises: StorageError."""
        return sorted(set(filter(None, map(self._name, self._folder.everything()))))

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
        known = KnownNeeds(read=self._reachable)
        for path in self._folder.everything():
            try:
                raw = self._read(path)
            except BlobStoreError as error:
                yield path, error.kept()
            else:
                yield path, known.of(raw)

    def _name(self, path: Path) -> ModelName | None:
        """Return the model of a file's path; None if it is not that of a valid name."""
        host, *others = path.relative_to(self._folder.path).parts
        name = ModelName.of_path((host.replace("%3A", ":").replace("%3a", ":"), *others))
        return None if name is None else _logical(name)

    def _read(self, path: Path) -> bytes:
        if self._name(path) is None:
            message = f"{path} may be a manifest, and its path is not a model's name"
            raise StorageError(message, path=str(path))
        with os_errors("access", path):
            is_link = path.is_symlink()
        if is_link:
            digest = self._linked(path)
            try:
                return self._read_blob(digest)
            except NotFoundError:
                message = f"{path} is a symbolic link to blob {digest}, which is missing"
                raise StorageError(message, path=str(path), blob=str(digest)) from None
        with FileReader(path, follow=False) as reader:
            return manifest_text(reader, reader.name)

    def _linked(self, path: Path) -> Digest:
        """Return the digest of the blob that a link leads to; the link is not followed to read."""
        target = Path(real_path(path))
        digest = Digest.from_file_name(target.name)
        if digest is None or target.parent != Path(real_path(self._blobs.path)):
            message = f"{path} is a symbolic link to {target}, which is not a blob of this store"
            raise StorageError(message, path=str(path))
        return digest

    def _read_blob(self, digest: Digest) -> bytes:
        with self._blobs.reader(digest) as reader:
            raw = manifest_text(reader, reader.name)
        return checked_bytes(raw, Descriptor(media_type="", digest=digest, size=len(raw)))

    def _reachable(self, raw: bytes, what: str) -> Needs:
        """Return every blob that can be reached from a manifest, itself included.

        A manifest of a list may be missing: Ollama pulls only those that it runs
        (`parseManifestBlobIfExists`).
        """
        needs = {Digest.of(raw).hex: len(raw)}
        seen: set[Digest] = set()
        waiting = [raw]
        while waiting:
            blobs, manifests = _parts(waiting.pop(), what)
            needs.update(blobs)
            for digest in sorted(manifests - seen):
                seen.add(digest)
                try:
                    waiting.append(self._read_blob(digest))
                    needs[digest.hex] = len(waiting[-1])
                except NotFoundError:
                    needs[digest.hex] = 0
        return needs


def _parts(raw: bytes, what: str) -> tuple[Needs, set[Digest]]:
    """Return the blobs that a manifest or list of manifests names, and the manifests it refers to.

    Raises: DocumentError (rule M1), LimitExceededError.
    """
    if b'"manifests"' not in raw:
        return needs_of(raw, what), set()
    document = parse_object(raw, what, rule="M1", limit=MAX_MANIFEST)
    children = document.pop("manifests", None)
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        raise DocumentError(f"{what}: manifests is not a list of objects (rule M1)", rule="M1")
    if not all("digest" in child or _is_whole(child) for child in children):
        message = f"{what}: one of its manifests has neither layers nor a digest (rule M1)"
        raise DocumentError(message, rule="M1")
    whole = filter(_is_whole, (document, *children))
    found = [validated(Manifest, manifest, what, "M1") for manifest in whole]
    blobs = {blob.digest.hex: blob.size for manifest in found for blob in manifest.descriptors}
    try:
        return blobs, {Digest.parse(child["digest"]) for child in children if "digest" in child}
    except InvalidDigestError as error:
        raise DocumentError(f"{what}: {error.message} (rule M1)", rule="M1") from None


def _is_whole(manifest: dict[str, Any]) -> bool:
    """Return True if a manifest has content, and is more than a reference."""
    return "layers" in manifest or "config" in manifest


def _logical(name: ModelName) -> ModelName:
    """Return a name with its host in ``manifests/`` (manifest/paths.go `normalizeLogicalName`)."""
    return replace(name, host=DEFAULT_HOST) if name.host.lower() == _PUBLIC_HOST else name
