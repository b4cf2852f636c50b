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
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from blobstore.errors import BlobStoreError, InvalidNameError, ModelNotFoundError, NotFoundError
from blobstore.formats.documents import MANIFEST_MEDIA_TYPE, Descriptor, Manifest
from blobstore.formats.ocimanifest import OCI_MANIFEST_MEDIA_TYPE, under_oci
from blobstore.formats.signatures import Signature, SignatureManifest, is_tag_of_signatures
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import DEFAULT_HOST, DEFAULT_NAMESPACE, Digest, ModelName
from blobstore.store.holders import holder_of
from blobstore.store.ports import Readable, blob_not_found

_FRESH_S = 2
"""Seconds for which manifests and names are not read again, when a blob is asked for."""
_MOST_MANIFESTS = 8
_MOST_NBYTES = 16 * 2**20
"""Bytes of manifests that are kept. One of 50,000 layers has 10 MB."""
_DEEPEST = 3
_MEDIA_TYPE = re.compile(r"application/[a-z0-9.+-]+", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository: the models that differ in their tags only."""

    host: str
    namespace: str
    model: str

    @classmethod
    def parse(cls, path: str) -> Repository:
        """Return the repository of a path. Raises: InvalidNameError."""
        parts = path.split("/")
        if len(parts) > _DEEPEST:
            raise InvalidNameError("a repository has at most three parts", rule="N1")
        defaults = (DEFAULT_HOST, DEFAULT_NAMESPACE)[: _DEEPEST - len(parts)]
        found = cls(*defaults, *parts)
        found.name("any")
        return found

    @classmethod
    def of(cls, name: ModelName) -> Repository:
        """Return the repository of a model."""
        return cls(name.host, name.namespace, name.model)

    @property
    def folded(self) -> tuple[str, ...]:
        """The parts in lower case: equal for the same repository."""
        return (self.host.lower(), self.namespace.lower(), self.model.lower())

    def name(self, tag: str) -> ModelName:
        """Return the model with a tag. Raises: InvalidNameError."""
        return ModelName(host=self.host, namespace=self.namespace, model=self.model, tag=tag)

    def __str__(self) -> str:
        path = f"{self.namespace}/{self.model}"
        return path if self.host == DEFAULT_HOST else f"{self.host}/{path}"


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


class _Known:
    """A model's manifest, and what was derived from it. ``read_at``: when it was read last."""

    def __init__(self, name: ModelName, holder: Readable, raw: bytes, digest: Digest) -> None:
        manifest = Manifest.parse(raw, f"the manifest of {name}")
        self.name = name
        self.holder = holder
        self.read_at = 0.0
        self.own = ServedManifest(raw, ServedManifest.of(manifest).media_type, digest)
        self.sizes = {bytes.fromhex(one.digest.hex): one.size for one in manifest.descriptors}

    @cached_property
    def twin(self) -> ServedManifest:
        """The manifest of OCI's type; the model's own if that is one, or of no type we know."""
        if self.own.media_type != MANIFEST_MEDIA_TYPE:
            return self.own
        return ServedManifest.of(under_oci(Manifest.parse(self.own.raw)))

    def descriptor(self, digest: Digest) -> Descriptor | None:
        """Return the descriptor of one of its blobs, or None."""
        size = self.sizes.get(bytes.fromhex(digest.hex))
        return None if size is None else Descriptor("", digest, size)


class ServedModels:
    """The models of a home. Safe to share between threads.

    The home is read without the mutex: a bucket that is slow does not hold up what is in memory.
    """

    def __init__(self, home: Readable) -> None:
        self._home = home
        self._mutex = threading.Lock()
        self._known: OrderedDict[ModelName, _Known] = OrderedDict()
        self._listed: tuple[float, dict[tuple[str, ...], list[ModelName]]] = (0.0, {})

    def repositories(self) -> list[str]:
        """Return the repositories, sorted. Raises: StorageError; RemoteError."""
        return sorted(str(Repository.of(names[0])) for names in self._names(fresh_s=0).values())

    def tags(self, repository: Repository) -> list[str]:
        """Return the tags of a repository, sorted, without those of signatures.

        Raises: ModelNotFoundError for an unknown repository; StorageError; RemoteError.
        """
        return sorted(name.tag for name in self._models(repository, fresh_s=0))

    def tagged(self, repository: Repository, tag: str, *, oci: bool) -> ServedManifest:
        """Return the manifest of a tag, as it is now; with ``oci`` its twin of OCI's type.

        The tag of a manifest's signatures (`tag_of`) names the manifest of these.

        Raises: NotFoundError; InvalidNameError; CorruptDataError for a manifest that is not valid;
        StorageError; RemoteError.
        """
        if is_tag_of_signatures(tag):
            signed = Digest(tag.removeprefix("sha256-").removesuffix(".sig"))
            return self._signed(repository, signed)
        known = self._read(repository.name(tag), fresh_s=0)
        return known.twin if oci else known.own

    def manifest(self, repository: Repository, digest: Digest) -> ServedManifest:
        """Return the manifest of a digest, if the repository has it. Raises: as `tagged`."""
        each = list(self._each(repository))
        for known in each:
            if known.own.digest == digest:
                return known.own
        for known in each:
            if known.twin.digest == digest:
                return known.twin
        for known in each:
            if found := self._signatures(known):
                manifest = SignatureManifest.of(found)
                if Digest.of(manifest.raw) == digest:
                    return ServedManifest(manifest.raw, OCI_MANIFEST_MEDIA_TYPE, digest)
        raise _unknown(f"the manifest {digest}", repository)

    def blob(self, repository: Repository, digest: Digest) -> OpenReader:
        """Return a reader of a blob that a manifest of the repository names.

        Raises: NotFoundError if none names it, or it is missing; CorruptDataError if its size
        differs; StorageError; RemoteError.
        """
        for known in self._each(repository):
            if (descriptor := known.descriptor(digest)) is not None:
                return known.holder.blobs.open(descriptor)
        for known in self._each(repository):
            if (data := self._payloads(known).get(digest)) is not None:
                return BytesReader(data)
        raise blob_not_found(digest)

    def _each(self, repository: Repository) -> Iterator[_Known]:
        """Yield the models of a repository whose manifests are valid, those in memory first."""
        folded = repository.folded
        with self._mutex:
            recent = [name for name in self._known if Repository.of(name).folded == folded]
        seen = set()
        for name in reversed(recent):
            with suppress(BlobStoreError):
                seen.add(name)
                yield self._read(name, _FRESH_S)
        for name in self._models(repository, _FRESH_S):
            if name not in seen:
                with suppress(BlobStoreError):
                    yield self._read(name, _FRESH_S)

    def _models(self, repository: Repository, fresh_s: float) -> list[ModelName]:
        found = self._names(fresh_s).get(repository.folded)
        if not found:
            raise ModelNotFoundError(f"repository {str(repository)!r} not found")
        return found

    def _names(self, fresh_s: float) -> dict[tuple[str, ...], list[ModelName]]:
        """Return the names of all models by their repositories."""
        with self._mutex:
            now = time.monotonic()
            read_at, listed = self._listed
            if listed and now - read_at < fresh_s:
                return listed
        packed: Readable | None = getattr(self._home, "packed", None)
        others = packed.manifests.names() if packed is not None else []
        listed = {}
        for name in dict.fromkeys([*self._home.manifests.names(), *others]):
            listed.setdefault(Repository.of(name).folded, []).append(name)
        with self._mutex:
            if now >= self._listed[0]:  # else another thread has read a newer list
                self._listed = (now, listed)
        return listed

    def _read(self, asked: ModelName, fresh_s: float) -> _Known:
        """Return a model, read again unless that was done just before. Raises: as `tagged`."""
        with self._mutex:
            now = time.monotonic()
            known = self._known.get(asked)
            if known is not None and now - known.read_at < fresh_s:
                self._known.move_to_end(asked)
                return known
        try:
            holder = holder_of(asked, self._home)
            name = holder.find(asked)
            raw = holder.manifests.text(name)
        except NotFoundError:
            with self._mutex:
                self._known.pop(asked, None)
            raise
        return self._known_as(name, holder, raw, now)

    def _known_as(self, name: ModelName, holder: Readable, raw: bytes, read_at: float) -> _Known:
        """Return a model with the bytes of its manifest, and keep it."""
        digest = Digest.of(raw)
        with self._mutex:
            known = self._known.get(name)
        if known is None or known.own.digest != digest or known.holder is not holder:
            known = _Known(name, holder, raw, digest)
        with self._mutex:
            other = self._known.get(name)
            if other is None or other.read_at <= read_at:  # else another thread has a newer one
                known.read_at = read_at
                self._keep(known)
        return known

    def _keep(self, known: _Known) -> None:
        self._known[known.name] = known
        self._known.move_to_end(known.name)
        total = sum(len(one.own.raw) for one in self._known.values())
        while len(self._known) > 1 and (total > _MOST_NBYTES or len(self._known) > _MOST_MANIFESTS):
            total -= len(self._known.popitem(last=False)[1].own.raw)

    def _signed(self, repository: Repository, digest: Digest) -> ServedManifest:
        for known in self._each(repository):
            if known.own.digest == digest and (found := self._signatures(known)):
                return ServedManifest.of(Manifest.parse(SignatureManifest.of(found).raw))
        raise _unknown(f"signatures of {digest}", repository)

    def _signatures(self, known: _Known) -> list[Signature]:
        kept = known.holder.signatures or self._home.signatures
        return list(kept.read(known.name, known.own.digest)) if kept is not None else []

    def _payloads(self, known: _Known) -> dict[Digest, bytes]:
        """Return the blobs of a model's signatures."""
        found = self._signatures(known)
        if not found:
            return {}
        config = SignatureManifest.of(found).config or b""
        return {Digest.of(data): data for data in (*(one.payload for one in found), config)}


def _unknown(what: str, repository: Repository) -> NotFoundError:
    return NotFoundError(f"{what} is not in repository {str(repository)!r}")
