"""RegistryStore: the models of one registry as a home.

A model's name says where it is: ``HOST/NAMESPACE/MODEL:TAG`` is the tag TAG of the repository
NAMESPACE/MODEL. Pulling is a transfer from here, pushing one to here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from blobstore.errors import BlobStoreError
from blobstore.formats.documents import Descriptor
from blobstore.io.budget import Budget
from blobstore.io.http.client import HttpClient
from blobstore.io.workers import each
from blobstore.names import Digest, ModelName
from blobstore.store.ports import (
    Home,
    Removal,
    blob_not_found,
    check_blob_size,
    check_document_size,
    checked_bytes,
    unique,
)
from blobstore.store.registry.api import RegistryApi
from blobstore.store.registry.downloads import BlobReader
from blobstore.store.registry.login import AnyLogin
from blobstore.store.registry.registry_signatures import RegistrySignatures
from blobstore.store.registry.repositories import Places
from blobstore.store.registry.session import RegistrySession
from blobstore.store.registry.tags import RegistryManifests
from blobstore.store.registry.uploads import Uploads


class RegistryBlobs:
    """The blobs of a registry, in the repositories that are known to have them. See `Blobs`."""

    def __init__(self, api: RegistryApi, places: Places, manifests: RegistryManifests) -> None:
        self._api = api
        self._places = places
        self._manifests = manifests

    def open(self, descriptor: Descriptor) -> BlobReader:
        """See `Blobs`: no request is made before the first read."""
        places = self._places.known(descriptor.digest)
        if not places:
            raise blob_not_found(descriptor.digest, str(self._api.root))
        fitting = [one for one, size in places.items() if size == descriptor.size]
        if not fitting:
            check_blob_size(descriptor, next(iter(places.values())), str(self._api.root))
        return BlobReader(self._api, fitting[0], descriptor)

    def read(self, descriptor: Descriptor) -> bytes:
        """See `Blobs`."""
        check_document_size(descriptor)
        return checked_bytes(self.open(descriptor).read(0, descriptor.size), descriptor)

    def headers(self, descriptors: Sequence[Descriptor], _budget: Budget) -> list[None]:
        """See `Blobs`: they are read from open blobs."""
        return [None] * len(descriptors)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Blobs`: those that their known repositories no longer have."""
        wanted, there = unique(descriptors), set[Digest]()

        def look(blob: Descriptor) -> None:
            for repository in self._places.known(blob.digest):
                if Uploads(self._api, repository).size(blob.digest) == blob.size:
                    there.add(blob.digest)

        each(wanted, look, max(1, min(self._api.client.connections, len(wanted))), name="registry")
        return [blob for blob in wanted if blob.digest not in there]

    def digests(self) -> set[str]:
        """See `Blobs`: those that the registry's manifests name. It lists no others."""
        found: set[str] = set()
        for name in self._manifests.names():
            found.update(blob.digest.hex for blob in self._manifests.read(name).descriptors)
        return found

    def sequence(self, descriptors: Sequence[Descriptor]) -> None:
        """See `Blobs`: None, several are downloaded at once."""


class RegistryStore(Home):
    """A home in a registry. Safe to share between threads; a context manager.

    ``host``: the registry in the names of its models. ``address``: its web address, if that is
    another. ``client`` is closed with it. ``login`` and ``realms``: see `Authorization`.
    ``pinned``: models whose manifests are read by digest. ``others``: repositories of the registry
    that may have a blob, to mount it from.
    """

    blobs: RegistryBlobs
    manifests: RegistryManifests
    signatures: RegistrySignatures

    def __init__(
        self,
        host: str,
        client: HttpClient,
        *,
        address: str | None = None,
        login: AnyLogin = None,
        realms: Collection[str] = (),
        pinned: Mapping[ModelName, Digest] | None = None,
        others: Callable[[Digest], Iterable[str]] = lambda _: (),
    ) -> None:
        """Raises: UsageError for another address than one of http or https."""
        self.address = address or f"https://{host}"
        self._client = client
        self._api = RegistryApi(client, self.address, login, realms=realms)
        self._places = Places(others)
        self.manifests = RegistryManifests(self._api, host, self._places, pinned or {})
        self.signatures = RegistrySignatures(self._api, self.manifests)
        self.blobs = RegistryBlobs(self._api, self._places, self.manifests)
        self._publishing = threading.Lock()

    @contextmanager
    def session(
        self,
        source: str = "",  # noqa: ARG002  # the registry keeps what was sent
        name: ModelName | None = None,
    ) -> Iterator[RegistrySession]:
        """See `Home`."""
        session = RegistrySession(self._api, self.manifests, self._places, self._publishing, name)
        try:
            yield session
        finally:
            session.close()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remove(self, name: str | ModelName) -> Removal:
        """See `Home`: the tag is removed, and the registry removes blobs by its own rules."""
        found = self.target(name)
        try:
            blobs = self.manifests.read(found).descriptors
        except BlobStoreError:
            blobs = ()  # a manifest that can't be read can still be removed
        self.manifests.remove(found)
        return Removal((), tuple(unique(blobs)), "the registry removes them itself")
