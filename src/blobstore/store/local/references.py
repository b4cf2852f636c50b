"""References: which blobs the manifests of a store name, read fast enough for hundreds of thousands of them.

A manifest that is written as Ollama and we write it (compact, no escapes) is recognised as a whole
by one expression, and then its digests can be picked out without building a document: a fifth of
the time. Every other one is parsed as always. Digests are their hex digits here: as many objects of
`Digest` would take longer than reading all manifests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.errors import BlobStoreError, StorageError
from blobstore.formats.documents import MAX_LAYERS, MAX_MANIFEST, Manifest
from blobstore.names import ModelName

Needs = Mapping[str, int]
"""Hex digits of each blob that a model needs → size in bytes, as its manifest says."""

# Fourteen digits of a size are under MAX_BLOB: a larger one is parsed, and refused there.
_TEXT = '[^"]'  # of printable ASCII without backslashes; also of digests, which _REFERENCE looks at, faster
_DESCRIPTOR = (
    rf'\{{"mediaType":"{_TEXT}{{0,255}}+","digest":"sha256:{_TEXT}{{64}}","size":(?:0|[1-9][0-9]{{0,13}})'
    rf'(?:,"from":"{_TEXT}*+")?(?:,"name":"{_TEXT}*+")?\}}'
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
    """Return True when a manifest is written as Ollama and we write it, without escapes: it is valid then."""
    return _plain_needs(raw) is not None


def needs_of(raw: bytes, what: str) -> Needs:
    """Return the blobs that a manifest's bytes name.

    Raises: as `Manifest.parse`, naming ``what``.
    """
    needs = _plain_needs(raw)
    return (
        {blob.digest.hex: blob.size for blob in Manifest.parse(raw, what).descriptors}
        if needs is None
        else needs
    )


def missing_blob(raw: bytes, there: AbstractSet[str], *, is_plain: bool) -> str | None:
    """Return the first blob that a manifest names and that is not ``there``, else None.

    All by the hex digits of digests.

    ``is_plain``: what `is_plain` said of these bytes. Raises: as `Manifest.parse`.
    """
    if is_plain:  # no text holds a quote: what looks like the digest of a descriptor is one
        digests = [part[:64] for part in raw.decode().split(_DIGEST)[1:]]
    else:
        digests = [blob.digest.hex for blob in Manifest.parse(raw, "the manifest").descriptors]
    return (
        None if there >= set(digests) else next(digest for digest in digests if digest not in there)
    )


def _plain_needs(raw: bytes) -> Needs | None:
    """Return what a plain manifest needs; None if it is not plain."""
    line = raw.removesuffix(b"\n")
    if len(raw) > MAX_MANIFEST or line.translate(None, _PLAIN):
        return None
    text = line.decode()
    if _PLAIN_MANIFEST.fullmatch(text) is None:
        return None
    found = _REFERENCE.findall(text)
    if len(found) > MAX_LAYERS or len(found) != text.count('"digest":'):  # a digest that is none
        return None
    needs = {digest: int(size) for digest, size in found}
    if len(needs) < len(found) and len(needs) < len(
        set(found)
    ):  # one blob of two sizes: the parser decides
        return None
    return needs


class KnownNeeds:
    """What manifests need, by the sha256 of their bytes: thousands of names may be links to the same ones."""

    def __init__(self, known: Mapping[bytes, Needs] | None = None) -> None:
        self._known = known or {}
        self._found: dict[bytes, Needs | BlobStoreError] = {}

    def of(self, raw: bytes) -> Needs | BlobStoreError:
        """Return the blobs that a manifest's bytes name, or the error why that can't be told."""
        key = hashlib.sha256(raw).digest()
        if key not in self._found:
            self._found[key] = self._known[key] if key in self._known else _needs_or_error(raw)
        return self._found[key]

    @property
    def parsed(self) -> dict[bytes, Needs]:
        """What was asked for, without errors."""
        return {
            key: needs
            for key, needs in self._found.items()
            if not isinstance(needs, BlobStoreError)
        }


def _needs_or_error(raw: bytes) -> Needs | BlobStoreError:
    try:
        return needs_of(raw, "the manifest")
    except BlobStoreError as error:
        return error.kept()


@dataclass(frozen=True, slots=True)
class References:
    """What the manifests of a store name: by model, and those that could not be read.

    ``strays``: what may be a manifest but is not a model here. ``parsed``: the needs by the sha256
    of a manifest's bytes. ``newer``: what the manifests of newer Ollamas need (newer.py), and
    ``unread`` those that could not be read, by path.
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
        """Return what manifests name, from their bytes.

        What ``known`` has of equal bytes is not parsed again.
        """
        models: dict[ModelName, Needs] = {}
        broken: dict[ModelName, BlobStoreError] = {}
        needs_of_bytes = KnownNeeds(known.parsed if known is not None else None)
        for name, raw in manifests:
            needs = raw if isinstance(raw, BlobStoreError) else needs_of_bytes.of(raw)
            if isinstance(needs, BlobStoreError):
                broken[name] = needs.about(model=str(name))
            else:
                models[name] = needs
        others = dict(newer)
        unread = {
            path: found for path, found in others.items() if isinstance(found, BlobStoreError)
        }
        readable = tuple(
            found for found in others.values() if not isinstance(found, BlobStoreError)
        )
        return cls(models, broken, tuple(strays), needs_of_bytes.parsed, readable, unread)

    @property
    def names(self) -> set[ModelName]:
        """The models that have a manifest, readable or not."""
        return {*self.models, *self.broken}

    @property
    def obstacle(self) -> BlobStoreError | None:
        """Why no blob may be removed: something that may need it can't be read.

        None when all is known.
        """
        if self.strays:
            path = self.strays[0]
            hint = "Check it, and move it away if it is not a manifest."
            return StorageError(
                f"{path} may be a manifest that needs blobs", path=str(path), hint=hint
            )
        for name, error in self.broken.items():
            message = f"the manifest of {name} can't be read"
            hint = f"{error.message}. Make the model again, or remove it: blobstore rm {name}"
            return type(error)(message, model=str(name), path=error.path, hint=hint)
        for path, error in self.unread.items():
            message = f"{path}, a newer Ollama's, can't be read"
            hint = f"{error.message}. Remove the model with that Ollama, or move the file away."
            return type(error)(message, path=str(path), hint=hint)
        return None

    def each(self) -> Iterator[Needs]:
        """Yield what each model needs, those of newer Ollamas too."""
        yield from self.models.values()
        yield from self.newer

    def needed(self) -> set[str]:
        """Return the hex digits of every blob that some model needs, a newer Ollama's too."""
        needed: set[str] = set()
        for needs in self.each():
            needed.update(needs)
        return needed
