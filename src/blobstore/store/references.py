"""References: which blobs the manifests of a store name, those of newer Ollamas included.

Reading is fast enough for hundreds of thousands of manifests. One regular expression recognises a
*plain* manifest, written as Ollama and we write it (compact, without escapes). Then its digests are
picked out without building a document, in a fifth of the time. Every other manifest is parsed.
Digests are hex digits here: as many `Digest` objects would take longer than reading all manifests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from blobstore.errors import BlobStoreError, StorageError
from blobstore.formats.documents import MAX_LAYERS, MAX_MANIFEST, Manifest
from blobstore.names import ModelName

_K = TypeVar("_K")
_T = TypeVar("_T")
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
    line = raw.removesuffix(b"\n")
    if len(raw) > MAX_MANIFEST or line.translate(None, _PLAIN):
        return None
    text = line.decode()
    if _PLAIN_MANIFEST.fullmatch(text) is None:
        return None
    matches = _REFERENCE.findall(text)
    if len(matches) > MAX_LAYERS or len(matches) != text.count('"digest":'):  # an invalid digest
        return None
    needs = {digest: int(size) for digest, size in matches}
    # The parser decides about a blob with two sizes.
    has_two_sizes = len(needs) < len(matches) and len(needs) < len(set(matches))
    return None if has_two_sizes else needs


def _split(
    pairs: Iterable[tuple[_K, Needs | BlobStoreError]],
) -> tuple[dict[_K, Needs], dict[_K, BlobStoreError]]:
    every = dict(pairs)
    faults = {key: error for key, error in every.items() if isinstance(error, BlobStoreError)}
    return {
        key: needs for key, needs in every.items() if not isinstance(needs, BlobStoreError)
    }, faults


class ReadOnce(Generic[_T]):
    """What ``read`` makes of manifests, by the sha256 of their bytes, which thousands may share."""

    def __init__(
        self, read: Callable[[bytes, str], _T], known: Mapping[bytes, _T] | None = None
    ) -> None:
        self._read = read
        self._known = known or {}
        self._found: dict[bytes, _T | BlobStoreError] = {}

    def of(self, raw: bytes) -> _T | BlobStoreError:
        key = hashlib.sha256(raw).digest()
        if key not in self._found:
            try:
                known = self._known.get(key)
                self._found[key] = self._read(raw, "the manifest") if known is None else known
            except BlobStoreError as error:
                self._found[key] = error.without_traceback()
        return self._found[key]

    @property
    def parsed(self) -> dict[bytes, _T]:
        found = self._found.items()
        return {key: one for key, one in found if not isinstance(one, BlobStoreError)}


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
        needs = ReadOnce(needs_of, known.parsed if known is not None else None)
        models, faults = _split(
            (name, raw if isinstance(raw, BlobStoreError) else needs.of(raw))
            for name, raw in manifests
        )
        broken = {name: error.about(model=str(name)) for name, error in faults.items()}
        others, unread = _split(newer)
        return cls(models, broken, tuple(strays), needs.parsed, tuple(others.values()), unread)

    @property
    def names(self) -> set[ModelName]:
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
            hint = f"{error.message}. Import the model again, or remove it: blobstore rm {name}"
            return type(error)(message, model=str(name), path=error.path, hint=hint)
        for path, error in self.unread.items():
            message = f"{path}, a manifest of a newer Ollama, can't be read"
            hint = f"{error.message}. Remove the model with that Ollama, or move the file away."
            return type(error)(message, path=str(path), hint=hint)
        return None

    def each(self) -> Iterator[Needs]:
        yield from self.models.values()
        yield from self.newer

    def needed(self) -> set[str]:
        return set().union(*self.each())
