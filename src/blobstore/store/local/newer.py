"""Manifests of newer Ollamas, in ``manifests-v2/``: read as far as it takes to remove no blob that they need.

Nothing is loaded from there, and nothing is written. The layout is proposed, not shipped
(ollama/ollama PRs 15735 and 16590; @baa78e71 manifest/manifest.go `linkManifest`,
`referencedBlobDigestsForData`): ``HOST/NAMESPACE/MODEL/TAG`` is a symbolic link to the blob of the
manifest, a hard link or a copy where the file system takes none. The host registry.ollama.ai is
ollama.com there, and a colon in a host ``%3A``. A manifest may be a list of manifests, each in it
as a whole or as the digest of its blob. A name there hides the same name under ``manifests/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    DigestMismatchError,
    DocumentError,
    InvalidDigestError,
    LimitExceededError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import MAX_MANIFEST, Manifest, validated
from blobstore.formats.strictjson import parse_object
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileReader, real_path
from blobstore.names import DEFAULT_HOST, Digest, ModelName
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.manifests import LARGE, ManifestFolder
from blobstore.store.local.references import Needs, needs_of

_PUBLIC_HOST = "ollama.com"


class NewerManifests:
    """The ``manifests-v2/`` folder of a store, whose blobs are ``blobs``."""

    def __init__(self, path: Path, blobs: BlobFolder) -> None:
        self._folder = ManifestFolder(path)
        self._blobs = blobs

    def names(self) -> list[ModelName]:
        """Return the names that live there, sorted, as ``manifests/`` would have them.

        Raises: StorageError.
        """
        found = (
            _name(path.relative_to(self._folder.path).parts) for path in self._folder.everything()
        )
        return sorted({name for name in found if name is not None})

    def has(self, name: ModelName) -> bool:
        """Return True when a newer Ollama finds ``name`` there, and not under ``manifests/``.

        Raises: StorageError.
        """
        wanted = _logical(name).folded
        return any(found.folded == wanted for found in self.names())

    def needs(self) -> Iterator[tuple[Path, Needs | BlobStoreError]]:
        """Yield everything there, sorted, with the blobs that it needs, or with the error why that can't be told.

        A manifest's own blob is among them. Raises: StorageError when the folder can't be listed.
        """
        found: dict[Digest, Needs | BlobStoreError] = {}
        for path in self._folder.everything():
            try:
                raw = self._read(path)
            except BlobStoreError as error:
                yield path, error.kept()
                continue
            digest = Digest.of(raw)
            if digest not in found:  # thousands of names may be links to one manifest
                found[digest] = self._reachable_or_error(raw)
            yield path, found[digest]

    def _read(self, path: Path) -> bytes:
        """Return the bytes of a manifest.

        Raises: StorageError, CorruptDataError, LimitExceededError.
        """
        if _name(path.relative_to(self._folder.path).parts) is None:
            raise StorageError(
                f"{path} may be a manifest, and its path is not a model's name", path=str(path)
            )
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
            return _whole(reader)

    def _linked(self, path: Path) -> Digest:
        """Return the digest of the blob that a link leads to.

        The link is not followed to read it.
        """
        target = Path(real_path(path))
        digest = Digest.from_file_name(target.name)
        if digest is None or target.parent != Path(real_path(self._blobs.path)):
            raise StorageError(
                f"{path} is a symbolic link to {target}, which is not a blob of this store",
                path=str(path),
            )
        return digest

    def _read_blob(self, digest: Digest) -> bytes:
        with self._blobs.reader(digest) as reader:
            raw = _whole(reader)
        if Digest.of(raw) != digest:
            raise DigestMismatchError(
                f"blob {digest} is damaged: its bytes are not its digest's", blob=str(digest)
            )
        return raw

    def _reachable_or_error(self, raw: bytes) -> Needs | BlobStoreError:
        try:
            return self._reachable(raw, "the manifest")
        except BlobStoreError as error:
            return error.kept()

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
                    child = self._read_blob(digest)
                except NotFoundError:
                    needs[digest.hex] = 0
                    continue
                needs[digest.hex] = len(child)
                waiting.append(child)
        return needs


def _parts(raw: bytes, what: str) -> tuple[Needs, set[Digest]]:
    """Return the blobs that a manifest or a list of manifests names, and the manifests that it refers to.

    Raises: DocumentError (rule M1), LimitExceededError.
    """
    if b'"manifests"' not in raw:
        return needs_of(raw, what), set()
    document = parse_object(raw, what, rule="M1", limit=MAX_MANIFEST)
    children = document.pop("manifests", None)
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        raise DocumentError(f"{what}: manifests is not a list of objects (rule M1)", rule="M1")
    if not all("digest" in child or _is_whole(child) for child in children):
        raise DocumentError(
            f"{what}: one of its manifests has neither layers nor a digest (rule M1)", rule="M1"
        )
    whole = [
        validated(Manifest, child, what, "M1")
        for child in (document, *children)
        if _is_whole(child)
    ]
    blobs = {blob.digest.hex: blob.size for manifest in whole for blob in manifest.descriptors}
    try:
        return blobs, {Digest.parse(child["digest"]) for child in children if "digest" in child}
    except InvalidDigestError as error:
        raise DocumentError(f"{what}: {error.message} (rule M1)", rule="M1") from None


def _is_whole(manifest: dict[str, Any]) -> bool:
    """Return True when a manifest has content of its own, and is more than a reference."""
    return "layers" in manifest or "config" in manifest


def _whole(reader: FileReader) -> bytes:
    if reader.size > MAX_MANIFEST:
        raise LimitExceededError(
            f"limit exceeded: {reader.name} has {reader.size:,} bytes, too many for a manifest"
        )
    if reader.size > LARGE and reader.has_nul():
        raise DocumentError(
            f"{reader.name} is not valid JSON: it contains a NUL byte (rule M1)", rule="M1"
        )
    return reader.read(0, reader.size)


def _name(parts: tuple[str, ...]) -> ModelName | None:
    """Return the name that a path below the folder stands for; None when it is not a name's."""
    host, *others = parts
    name = ModelName.of_path((host.replace("%3A", ":").replace("%3a", ":"), *others))
    return None if name is None else _logical(name)


def _logical(name: ModelName) -> ModelName:
    """Return a name with the host that ``manifests/`` has for it (manifest/paths.go `normalizeLogicalName`)."""
    return replace(name, host=DEFAULT_HOST) if name.host.lower() == _PUBLIC_HOST else name
