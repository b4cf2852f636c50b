"""References: which blobs the manifests of a store name, those of newer Ollamas included.

Reading is fast enough for hundreds of thousands of manifests. One regular expression recognises a
*plain* manifest, written as Ollama and we write it (compact, without escapes). Then its digests are
picked out without building a document, in a fifth of the time. Every other manifest is parsed.
Digests are hex digits here: as many `Digest` objects would take longer than reading all manifests.

Manifests of newer Ollamas, in ``manifests-v2/``, are read only as far as needed to remove no blob
that they name. Nothing is loaded from there, and nothing is written. The layout is proposed, not
shipped (ollama/ollama PRs 15735 and 16590; @baa78e71 manifest/manifest.go `linkManifest`,
`referencedBlobDigestsForData`): ``HOST/NAMESPACE/MODEL/TAG`` is a symbolic link to the blob of the
manifest, or a hard link or a copy if the file system has no symbolic links. The host
registry.ollama.ai is ollama.com there, and a colon in a host is ``%3A``. A manifest may be a list
of manifests, each contained as a whole or as the digest of its blob. A name there hides the same
name under ``manifests/``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    InvalidDigestError,
    NotFoundError,
    StorageError,
)
from blobstore.formats.documents import MAX_LAYERS, MAX_MANIFEST, Descriptor, Manifest
from blobstore.formats.strictdocument import validated
from blobstore.formats.strictjson import parse_object
from blobstore.io.durable import os_errors
from blobstore.io.ranges import FileReader, real_path
from blobstore.names import DEFAULT_HOST, Digest, ModelName
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.manifests import ManifestFolder, manifest_text
from blobstore.store.ports import checked_bytes

Needs = Mapping[str, int]
"""Hex digits of each blob that a model needs → size in bytes, as its manifest says."""

# Fourteen digits of a size are under MAX_BLOB: a larger one is parsed, and refused there.
_TEXT = '[^"]'  # of printable ASCII without backslashes; _REFERENCE checks the digests, faster
_DESCRIPTOR = (
    rf'\{{"mediaType":"{_TEXT}{{0,255}}+","digest":"sha256:{_TEXT}{{64}}"'
    rf',"size":(?:0|[1-9][0-9]{{0,13}})(?:,"from":"{_TEXT}*+")?(?:,"name":"{_TEXT}*+")?\}}'
)
_PLAIN_MANIFEST = re.compile(
    rf'\{{"schemaVersion":2,"mediaType":"{_TEXT}{{0,255}}+"(?:,"config":{_DESCRIPTOR})?'
    rf',"layers":\[(?:(?:{_DESCRIPTOR},)*+{_DESCRIPTOR})?\]\}}',
    re.ASCII,
)
_REFERENCE = re.compile(r'"digest":"sha256:([0-9a-f]{64})","size":([0-9]+)', re.ASCII)
_DIGEST = '"digest":"sha256:'
_PUBLIC_HOST = "ollama.com"
_K = TypeVar("_K")
_PLAIN = bytes(code for code in range(0x20, 0x7F) if code != ord("\\"))


def is_plain(raw: bytes) -> bool:
    """Return True if a manifest is plain, and so valid."""
    return _plain_needs(raw) is not None


def needs_of(raw: bytes, what: str) -> Needs:
    """Return the blobs that a manifest's bytes name.

    Raises: as `Manifest.parse`, naming ``what``.
    """
    needs = _plain_needs(raw)
    if needs is not None:
        return needs
    return {blob.digest.hex: blob.size for blob in Manifest.parse(raw, what).descriptors}


def missing_blob(raw: bytes, there: AbstractSet[str], *, is_plain: bool) -> str | None:
    """Return the first blob that a manifest names and that is not ``there``, else None.

    Blobs are given in hex digits. ``is_plain``: the result of `is_plain` for these bytes. Raises:
    as `Manifest.parse`.
    """
    if is_plain:  # no text contains a quote, so every match is the digest of a descriptor
        digests = [part[:64] for part in raw.decode().split(_DIGEST)[1:]]
    else:
        digests = [blob.digest.hex for blob in Manifest.parse(raw, "the manifest").descriptors]
    return next((digest for digest in digests if digest not in there), None)


def _plain_needs(raw: bytes) -> Needs | None:
    """Return the needs of a plain manifest; None if it is not plain."""
    line = raw.removesuffix(b"\n")
    if len(raw) > MAX_MANIFEST or line.translate(None, _PLAIN):
        return None
    text = line.decode()
    if _PLAIN_MANIFEST.fullmatch(text) is None:
        return None
    found = _REFERENCE.findall(text)
    if len(found) > MAX_LAYERS or len(found) != text.count('"digest":'):  # an invalid digest
        return None
    needs = {digest: int(size) for digest, size in found}
    # The parser decides about a blob with two sizes.
    has_two_sizes = len(needs) < len(found) and len(needs) < len(set(found))
    return None if has_two_sizes else needs


class KnownNeeds:
    """The needs of manifests by the sha256 of their bytes, which thousands of names may share.

    ``read`` returns the needs of a manifest's bytes.
    """

    def __init__(
        self,
        known: Mapping[bytes, Needs] | None = None,
        read: Callable[[bytes, str], Needs] = needs_of,
    ) -> None:
        self._known = known or {}
        self._read = read
        self._found: dict[bytes, Needs | BlobStoreError] = {}

    def of(self, raw: bytes) -> Needs | BlobStoreError:
        """Return the blobs that a manifest's bytes name, or the error of reading them."""
        key = hashlib.sha256(raw).digest()
        if key not in self._found:
            self._found[key] = self._known[key] if key in self._known else self._needs(raw)
        return self._found[key]

    def _needs(self, raw: bytes) -> Needs | BlobStoreError:
        try:
            return self._read(raw, "the manifest")
        except BlobStoreError as error:
            return error.kept()

    @property
    def parsed(self) -> dict[bytes, Needs]:
        """The needs that were asked for, without errors."""
        return _readable(self._found)


def _readable(found: Mapping[_K, Needs | BlobStoreError]) -> dict[_K, Needs]:
    return {key: needs for key, needs in found.items() if not isinstance(needs, BlobStoreError)}


def _unreadable(found: Mapping[_K, Needs | BlobStoreError]) -> dict[_K, BlobStoreError]:
    return {key: error for key, error in found.items() if isinstance(error, BlobStoreError)}


@dataclass(frozen=True, slots=True)
class References:
    """The blobs that the manifests of a store name, by model; ``broken`` could not be read.

    ``strays``: files that may be manifests but are not models here. ``parsed``: the needs by the
    sha256 of a manifest's bytes. ``newer``: the needs of the manifests of newer Ollamas; ``unread``
    are those that could not be read, by path.
    """

    models: Mapping[ModelName, Needs]
    broken: Mapping[ModelName, BlobStoreError]
    strays: tuple[Path, ...]
    parsed: Mapping[bytes, Needs] = field(repr=False)
    newer: tuple[Needs, ...]
    unread: Mapping[Path, BlobStoreError]

    @classmethod
    def read(
        cls,
        manifests: Iterable[tuple[ModelName, bytes | BlobStoreError]],
        strays: Iterable[Path],
        newer: Iterable[tuple[Path, Needs | BlobStoreError]],
        known: References | None,
    ) -> References:
        """Return the references of manifests, given as bytes or as the error of reading them.

        Bytes that ``known`` has are not parsed again.
        """
        needs = KnownNeeds(known.parsed if known is not None else None)
        found = {
            name: raw if isinstance(raw, BlobStoreError) else needs.of(raw)
            for name, raw in manifests
        }
        others = dict(newer)
        return cls(
            models=_readable(found),
            broken={
                name: error.about(model=str(name)) for name, error in _unreadable(found).items()
            },
            strays=tuple(strays),
            parsed=needs.parsed,
            newer=tuple(_readable(others).values()),
            unread=_unreadable(others),
        )

    @property
    def names(self) -> set[ModelName]:
        """The models that have a manifest, readable or not."""
        return {*self.models, *self.broken}

    @property
    def obstacle(self) -> BlobStoreError | None:
        """Why no blob may be removed: a manifest can't be read. None if all can be."""
        for path in self.strays:
            message = f"{path} may be a manifest that needs blobs"
            hint = "Check it, and move it away if it is not a manifest."
            return StorageError(message, path=str(path), hint=hint)
        for name, error in self.broken.items():
            message = f"the manifest of {name} can't be read"
            hint = f"{error.message}. Make the model again, or remove it: blobstore rm {name}"
            return type(error)(message, model=str(name), path=error.path, hint=hint)
        for path, error in self.unread.items():
            message = f"{path}, a manifest of a newer Ollama, can't be read"
            hint = f"{error.message}. Remove the model with that Ollama, or move the file away."
            return type(error)(message, path=str(path), hint=hint)
        return None

    def each(self) -> Iterator[Needs]:
        """Yield the needs of each model, also of newer Ollamas."""
        yield from self.models.values()
        yield from self.newer

    def needed(self) -> set[str]:
        """Return the hex digits of every blob that a model needs, also of newer Ollamas."""
        return set().union(*self.each())


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
