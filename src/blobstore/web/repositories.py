"""The models of a home as a registry has them: repositories, tags, manifests and blobs.

A repository is a model with all its tags. ``NAMESPACE/MODEL`` has Ollama's default host, and
``HOST/NAMESPACE/MODEL`` names another one. ``MODEL`` alone is short for ``library/MODEL``. Case is
ignored, as everywhere in a store; a registry's clients write repositories in lower case.

A repository has exactly the blobs that its manifests name, and the payloads of its signatures. No
other file of the store, or of the machine, has an address.

Tools for containers refuse a manifest of docker's type with layers of Ollama's types. So each such
manifest has a twin of OCI's type over the same blobs (`under_oci`), with a digest of its own. Both
are manifests of the repository.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from blobstore.errors import BlobStoreError, ModelNotFoundError, NotFoundError
from blobstore.formats.documents import MANIFEST_MEDIA_TYPE, Descriptor, Manifest
from blobstore.formats.oci import under_oci
from blobstore.formats.signatures import SignatureManifest, is_tag_of_signatures
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.holders import holder_of
from blobstore.store.ports import Readable

_FRESH_S = 2
"""Seconds for which a manifest is not read again, when a blob is asked for."""
_MOST_MANIFESTS = 8
"""Manifests that are kept. One of 50,000 layers has 10 MB."""
_MEDIA_TYPE = re.compile(r"application/[a-z0-9.+-]+", re.ASCII | re.IGNORECASE)
_T = TypeVar("_T")


def repository(path: str) -> ModelName:
    """Return the repository of a path: a name whose tag means nothing. Raises: InvalidNameError."""
    return ModelName.parse(f"{path}:any")


def path_of(repository: ModelName) -> str:
    """Return the path of a repository."""
    name = replace(repository, tag="any").short.removesuffix(":any")
    return name if "/" in name else f"{repository.namespace}/{name}"


@dataclass(frozen=True, slots=True)
class ServedManifest:
    """The exact bytes of a manifest, their media type and digest."""

    raw: bytes
    media_type: str
    digest: Digest

    @classmethod
    def of(cls, manifest: Manifest) -> ServedManifest:
        """Return a manifest as it is sent."""
        kind = manifest.media_type
        sound = kind if _MEDIA_TYPE.fullmatch(kind) else MANIFEST_MEDIA_TYPE
        return cls(manifest.raw, sound, manifest.digest)


class _Tagged:
    """A model's manifest, and what follows from it."""

    def __init__(self, name: ModelName, holder: Readable, home: Readable) -> None:
        manifest = Manifest.parse(holder.manifests.text(name), f"the manifest of {name}")
        self.name = name
        self.holder = holder
        self.own = ServedManifest.of(manifest)
        self.sizes = {bytes.fromhex(one.digest.hex): one.size for one in manifest.descriptors}
        self._kept = holder.signatures or home.signatures

    @cached_property
    def twin(self) -> ServedManifest:
        """The manifest of OCI's type; the model's own if that is one, or of no type we know."""
        if self.own.media_type != MANIFEST_MEDIA_TYPE:
            return self.own
        return ServedManifest.of(under_oci(Manifest.parse(self.own.raw)))

    def signed(self) -> tuple[ServedManifest, dict[Digest, bytes]] | None:
        """Return the manifest of the signatures and its blobs; None without signatures."""
        found = list(self._kept.read(self.name, self.own.digest)) if self._kept else []
        if not found:
            return None
        manifest = SignatureManifest.of(found)
        blobs = [*(one.payload for one in found), manifest.config or b""]
        served = ServedManifest.of(Manifest.parse(manifest.raw))
        return served, {Digest.of(data): data for data in blobs}


class ServedModels:
    """The models of a home. Safe to share between threads."""

    def __init__(self, home: Readable) -> None:
        self._home = home
        self._last: dict[tuple[str, ...], tuple[float, _Tagged]] = {}
        """When a model of each repository had what was asked for; the latest are last."""

    def repositories(self) -> list[str]:
        """Return the repositories, sorted. Raises: StorageError; RemoteError."""
        return sorted({_key(name): path_of(name) for name in self._names()}.values())

    def tags(self, repository: ModelName) -> list[str]:
        """Return the tags of a repository, sorted, without those of signatures.

        Raises: ModelNotFoundError for an unknown repository; StorageError; RemoteError.
        """
        return sorted(name.tag for name in self._models(repository))

    def tagged(self, name: ModelName, *, oci: bool) -> ServedManifest:
        """Return the manifest of a tag, as it is now; with ``oci`` its twin of OCI's type.

        The tag of a manifest's signatures (`tag_of`) names the manifest of these.

        Raises: NotFoundError; CorruptDataError for a manifest that is not valid; StorageError;
        RemoteError.
        """
        if is_tag_of_signatures(name.tag):
            digest = Digest(name.tag.removeprefix("sha256-").removesuffix(".sig"))
            model = self._first(name, lambda one: one if one.own.digest == digest else None)
            if (signed := model.signed()) is None:
                raise NotFoundError(f"{digest} has no signatures")
            return signed[0]
        model = self._read(name)
        return model.twin if oci else model.own

    def manifest(self, repository: ModelName, digest: Digest) -> ServedManifest:
        """Return the manifest of a digest, if the repository has it. Raises: as `tagged`."""

        def picked(model: _Tagged) -> ServedManifest | None:
            if digest in (model.own.digest, model.twin.digest):
                return model.own if digest == model.own.digest else model.twin
            signed = model.signed()
            return signed[0] if signed is not None and signed[0].digest == digest else None

        return self._first(repository, picked)

    def blob(self, repository: ModelName, digest: Digest) -> OpenReader:
        """Return a reader of a blob that a manifest of the repository names.

        Raises: NotFoundError if none names it, or it is missing; CorruptDataError if its size
        differs; StorageError; RemoteError.
        """
        key = bytes.fromhex(digest.hex)

        def picked(model: _Tagged) -> tuple[_Tagged, bytes | None] | None:
            if key in model.sizes:
                return model, None
            signed = model.signed()
            return (model, signed[1][digest]) if signed and digest in signed[1] else None

        model, payload = self._first(repository, picked)
        if payload is not None:
            return BytesReader(payload)
        return model.holder.blobs.open(Descriptor("", digest, model.sizes[key]))

    def _first(self, repository: ModelName, pick: Callable[[_Tagged], _T | None]) -> _T:
        """Return the first value that is picked of a repository's models with valid manifests.

        A client asks for the blobs of one model, so the model that had the last one is first.
        Manifests are read again if it does not have it. Raises: NotFoundError.
        """
        key, now = _key(repository), time.monotonic()
        read, last = self._last.get(key, (now, None))
        if last is not None and now < read + _FRESH_S and (value := pick(last)) is not None:
            return value
        for name in self._models(repository):
            with suppress(BlobStoreError):
                model = self._read(name)
                if (value := pick(model)) is not None:
                    others = [item for item in self._last.copy().items() if item[0] != key]
                    self._last = dict([*others, (key, (now, model))][-_MOST_MANIFESTS:])
                    return value
        raise NotFoundError(f"repository {path_of(repository)!r} does not have it")

    def _models(self, repository: ModelName) -> list[ModelName]:
        names = [name for name in self._names() if _key(name) == _key(repository)]
        if not names:
            raise ModelNotFoundError(f"repository {path_of(repository)!r} not found")
        return names

    def _names(self) -> list[ModelName]:
        packed = self._home.packed
        others = packed.manifests.names() if packed is not None else []
        return list(dict.fromkeys([*self._home.manifests.names(), *others]))

    def _read(self, asked: ModelName) -> _Tagged:
        holder = holder_of(asked, self._home)
        return _Tagged(holder.find(asked), holder, self._home)


def _key(name: ModelName) -> tuple[str, ...]:
    """Return what names of one repository have in common."""
    return name.folded[:-1]
