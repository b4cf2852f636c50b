"""RegistryStore: the models of one registry as a home.

A model's name says where it is: ``HOST/NAMESPACE/MODEL:TAG`` is the tag TAG of the repository
NAMESPACE/MODEL. Pulling is a transfer from here, pushing one to here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any, Self

from blobstore.errors import BlobStoreError, NotFoundError, RemoteError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.hashing.stage import HashStage
from blobstore.io.http.client import HttpClient
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.ports import (
    Expected,
    Home,
    How,
    Removal,
    Session,
    blob_not_found,
    check_blob_size,
    check_expected,
    check_reader_size,
    other_spelling,
    unique,
    wrong_bytes,
)
from blobstore.store.registry.api import RegistryApi, repository_of
from blobstore.store.registry.blobs import Places, RegistryBlobs, Uploads
from blobstore.store.registry.logins import AnyLogin
from blobstore.store.registry.manifests import RegistryManifests, RegistrySignatures
from blobstore.store.spool import Spool, SpooledBlob, SpoolWriter

_log = logging.getLogger("blobstore.store.registry")


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
        self.blobs = RegistryBlobs(self._api, self._places, self.manifests.blobs)
        self._publishing = threading.Lock()

    def session(self, *, name: ModelName | None = None) -> AbstractContextManager[RegistrySession]:
        return closing(
            RegistrySession(self._api, self.manifests, self._places, self._publishing, name)
        )

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


class RegistrySession(Session):
    """A model on its way to a registry. See `Session`.

    Blobs go to the model's repository at once if the model is known from the start, as in a
    transfer. They stay invisible there until a manifest names them. The next push finds the blobs
    that a killed one has sent. Otherwise they wait in a temporary file. The manifest comes last.
    """

    def __init__(
        self,
        api: RegistryApi,
        manifests: RegistryManifests,
        places: Places,
        publishing: threading.Lock,
        name: ModelName | None,
    ) -> None:
        self._api = api
        self._manifests = manifests
        self._places = places
        self._publishing = publishing
        self._repository = repository_of(name) if name is not None else None
        self._spool = Spool()
        self._spooled: dict[Digest, SpooledBlob] = {}
        self._sent: set[Digest] = set()
        self._closed: set[str] = set()
        """Repositories that no blob can be mounted from."""

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """See `Session`: those that can be mounted from another repository are mounted."""
        wanted = unique(descriptors)
        if self._repository is None:
            return wanted
        there = self._api.at_once(wanted, partial(self._is_there, self._repository))
        return [blob for blob, is_there in zip(wanted, there, strict=True) if not is_there]

    def writer(
        self,
        size: int,
        finished: Callable[[Any], None],
        stage: HashStage | None = None,  # noqa: ARG002  # hashed when it is complete
    ) -> SpoolWriter:
        """See `Session`: through a temporary file, because a registry takes bytes in order."""
        blob = self._spool.reserve(size)
        return SpoolWriter(blob, lambda digest: finished(self._keep(digest, blob)))

    def copy(self, reader: OpenReader) -> Descriptor:
        """See `Session`: through a temporary file, because its digest comes last."""
        blob = self._spool.keep(reader)
        return self._keep(blob.digest(), blob)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        """See `Session`: sent to the model's repository, else to a temporary file."""
        check_reader_size(descriptor, reader)
        if descriptor.digest in self._spooled or descriptor.digest in self._sent:
            return How.THERE
        if self._repository is not None:
            self._send(self._repository, descriptor, reader)
        else:
            blob = self._spool.keep(reader)
            if blob.digest() != descriptor.digest:
                raise wrong_bytes(descriptor, reader)
            self._keep(descriptor.digest, blob)
        return How.COPIED

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        """See `Session`.

        ``expected`` is compared just before the tag is set: another machine may be faster in
        between. ``below`` is refused: a registry has all blobs of its models.
        """
        manifest.check_limits()
        named = unique(blob for blob in manifest.descriptors if blob.digest not in below)
        self._api.at_once(named, partial(self._bring, repository_of(name)))
        with self._publishing:
            spelled = self._manifests.spelled(name)
            if spelled != name:
                raise other_spelling(name, spelled)
            if expected is not None:
                check_expected(name, self._manifests.raw(name), expected)
            self._manifests.put(name, manifest)
        created = self._sent & {blob.digest for blob in named}
        self._sent.clear()
        return created

    def _bring(self, repository: str, blob: Descriptor) -> None:
        """Make sure that the repository has a blob.

        Raises: NotFoundError, CorruptDataError if neither the repository nor this session has it.
        """
        if self._places.known(blob.digest).get(repository) == blob.size:
            return
        spooled = self._spooled.get(blob.digest)
        if spooled is not None:
            check_blob_size(blob, spooled.size)
        if self._is_there(repository, blob):
            return
        if spooled is not None:
            self._send(repository, blob, spooled)
            return
        if (there := Uploads(self._api, repository).size(blob.digest)) is not None:
            check_blob_size(blob, there)
        raise blob_not_found(blob.digest)

    def _is_there(self, repository: str, blob: Descriptor) -> bool:
        """Return whether the repository has a blob, perhaps just now from another one."""
        uploads = Uploads(self._api, repository)
        is_there = uploads.size(blob.digest) == blob.size or any(
            self._is_mounted(uploads, blob.digest, source)
            for source in self._places.candidates(blob.digest, repository)
        )
        if is_there:
            self._places.note(repository, [blob])
        return is_there

    def _is_mounted(self, uploads: Uploads, digest: Digest, source: str) -> bool:
        """Return whether a blob was mounted; False if the registry or its token server refuses.

        The user may lack the right to read ``source``. It is not tried again then.
        """
        if source in self._closed:
            return False
        try:
            return uploads.mount(digest, source)
        except (NotFoundError, RemoteError) as error:
            if isinstance(error, RemoteError) and error.temporary:
                raise
            self._closed.add(source)
            _log.info("no blob of %s is mounted: %s", source, error)
            return False

    def _send(self, repository: str, blob: Descriptor, reader: OpenReader) -> None:
        Uploads(self._api, repository).send(blob, reader)
        self._places.note(repository, [blob])
        self._sent.add(blob.digest)

    def _keep(self, digest: Digest, blob: SpooledBlob) -> Descriptor:
        self._spooled[digest] = blob
        return Descriptor(media_type="", digest=digest, size=blob.size)

    def close(self) -> None:
        """Remove unpublished blobs of the temporary file."""
        self._spool.close()
