"""RegistryStore: the models of one registry as a home; push and pull, transfers from and to it.

A model's name says where it is: ``HOST/NAMESPACE/MODEL:TAG`` is the tag TAG of the repository
NAMESPACE/MODEL.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import not_

from blobstore.errors import BlobStoreError, NotFoundError, RemoteError, UsageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.oci import check_is_model
from blobstore.io.http.client import HttpClient
from blobstore.io.ranges import Closing, OpenReader
from blobstore.io.workers import Progress
from blobstore.names import Digest, ModelName
from blobstore.store.hints import Share
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import (
    Expected,
    Home,
    How,
    Readable,
    Removal,
    SpooledSession,
    check_blob_size,
    check_expected,
    check_reader_size,
    check_spelling,
    id_of,
    replaced_id,
    unique,
)
from blobstore.store.registry.api import Reference, RegistryApi, registry_address, repository_of
from blobstore.store.registry.logins import AnyLogin, Credentials
from blobstore.store.registry.repositories import (
    Others,
    Places,
    RegistryBlobs,
    RegistryManifests,
    RegistrySignatures,
    Uploads,
    check_manifest_size,
)
from blobstore.store.signing.signed_models import SignaturePolicy
from blobstore.store.transfer import TransferResult, transfer

_log = logging.getLogger("blobstore.store.registry")


class RegistryStore(Closing, Home):
    """A home in a registry. Safe to share between threads; a context manager.

    `remove` removes a tag; the registry removes blobs by its own rules.

    ``host``: the registry in the names of its models. ``address``: its web address, if that is
    another. ``client`` is closed with it. ``login`` and ``realms``: see `Authorization`.
    ``pinned``: models whose manifests are read by digest. ``others``: repositories of the registry
    that may have a blob, to mount it from. ``repository``: the only one whose models it lists.
    """

    def __init__(
        self,
        host: str,
        client: HttpClient,
        *,
        address: str | None = None,
        login: AnyLogin = None,
        realms: Collection[str] = (),
        pinned: Mapping[ModelName, Digest] | None = None,
        others: Others = lambda _: (),
        repository: str | None = None,
    ) -> None:
        self.address = address or f"https://{host}"
        self._client = client
        api = RegistryApi(client, self.address, login, realms=realms)
        self.manifests: RegistryManifests = RegistryManifests(
            api, host, Places(others), pinned or {}, repository
        )
        self.signatures: RegistrySignatures = RegistrySignatures(api, self.manifests)
        self.blobs: RegistryBlobs = RegistryBlobs(api, self.manifests.places, self.manifests)
        self._publishing = threading.Lock()

    def session(self, *, name: ModelName | None = None) -> AbstractContextManager[RegistrySession]:
        return closing(RegistrySession(self.manifests, self._publishing, name))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def remove(self, name: str | ModelName) -> Removal:
        stored = self.target(name)
        try:
            blobs = self.manifests.read(stored).descriptors
        except BlobStoreError:
            blobs = ()  # a manifest that can't be read can still be removed
        self.manifests.remove(stored)
        return Removal((), tuple(unique(blobs)), "the registry removes them itself")


class RegistrySession(SpooledSession):
    """A model on its way to a registry. See `Session`.

    Blobs go to the model's repository at once if the model is known from the start, as in a
    transfer. They stay invisible there until a manifest names them. The next push finds the blobs
    that a killed one has sent. Otherwise they wait in a temporary file. The manifest comes last.
    """

    def __init__(
        self, manifests: RegistryManifests, publishing: threading.Lock, name: ModelName | None
    ) -> None:
        super().__init__()
        self._api = manifests.api
        self._places = manifests.places
        self._manifests = manifests
        self._publishing = publishing
        self._repository = repository_of(name) if name is not None else None
        self._sent: set[Digest] = set()
        # Repositories that no blob can be mounted from.
        self._closed: set[str] = set()

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        # Those that can be mounted from another repository are mounted.
        wanted = unique(descriptors)
        if self._repository is None:
            return wanted
        there = self._api.at_once(wanted, partial(self._is_there, self._repository))
        return list(compress(wanted, map(not_, there)))

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        # It is sent to the model's repository, else to a temporary file.
        if self._repository is None or descriptor.digest in self._spooled:
            return super().add(descriptor, reader)
        if descriptor.digest in self._sent:
            return How.THERE
        check_reader_size(descriptor, reader)
        self._send(self._repository, descriptor, reader)
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
            check_spelling(name, self._manifests.stored_name(name))
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
        is_known = self._places.sizes_by_repository(blob.digest).get(repository) == blob.size
        if is_known or self._is_there(repository, blob):
            return
        if (spooled := self._spooled.get(blob.digest)) is not None:
            check_blob_size(blob, spooled.size)
            self._send(repository, blob, spooled)
        else:
            check_blob_size(blob, Uploads(self._api, repository).size(blob.digest))

    def _is_there(self, repository: str, blob: Descriptor) -> bool:
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


_CONNECTIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAccess:
    """How to connect to registries, and with which login.

    ``insecure``: also without TLS, where docker would ask for it. ``credentials``: logins (None:
    none). ``realms``: hosts of token servers to trust besides those of `realm_target`. ``ca_file``
    and ``proxies``: as for `open_folder`. ``connections``: requests at once (None: 16).
    """

    insecure: bool = False
    credentials: Credentials | None = None
    realms: Collection[str] = ()
    ca_file: str | None = None
    proxies: Mapping[str, str] | None = None
    connections: int | None = None

    def open_all(self, place: str) -> RegistryStore:
        """Return the registry at ``HOST``, or only what ``HOST/NAMESPACE/MODEL`` has there.

        Raises: InvalidNameError; as `open`.
        """
        path = place.rstrip("/")
        if "/" in path.rpartition("://")[2]:
            reference = Reference.parse(path)
            return self.open(reference, repository=repository_of(reference.name))
        return self.open(Reference.parse(f"{path}/any/any"))

    def open(
        self,
        reference: Reference,
        others: Others = lambda _: (),
        *,
        repository: str | None = None,
    ) -> RegistryStore:
        """Return the registry of a reference; the rest as for `RegistryStore`.

        The login is found when the registry asks for it, which raises as `Credentials.find`.

        Raises: UsageError if it would be contacted without TLS.
        """
        name = reference.name
        address = registry_address(name.host, insecure=self.insecure, scheme=reference.scheme)
        login = (
            partial(self.credentials.find, name.host, repository_of(name))
            if self.credentials is not None
            else None
        )
        return RegistryStore(
            name.host,
            HttpClient(
                connections=self.connections or _CONNECTIONS,
                ca_file=self.ca_file,
                proxies=self.proxies,
            ),
            address=f"{address.scheme}://{address.authority}",
            login=login,
            realms=self.realms,
            pinned={name: reference.digest} if reference.digest is not None else None,
            others=others,
            repository=repository,
        )


def push(
    name: str | ModelName,
    store: Readable | StorePlace = None,
    *,
    to: str | None = None,
    neighbours: Readable | None = None,
    access: RegistryAccess | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> TransferResult:
    """Send a model of ``store`` to a registry: the one in its name, or in ``to``.

    Only blobs that the repository lacks are sent. Those that another repository of the registry has
    are mounted from there, if a model of ``neighbours`` (None: of ``store``) with these blobs was
    pushed or pulled there.

    Raises: UsageError for a digest in ``to``; as `transfer` and `RegistryAccess.open`.
    """
    store = opened_store(store)
    reference = Reference.parse(to if to is not None else str(ModelName.of(name)))
    if reference.digest is not None:
        raise UsageError(f"a model is pushed to a tag, not to a digest: {to}")
    known = _repositories(neighbours or store, reference.name.host)
    access = access or RegistryAccess()
    with access.open(reference, lambda digest: known.get(digest, ())) as registry:
        pairs = {str(ModelName.of(name)): str(reference.name)}
        (done,) = transfer(
            pairs, store, registry, jobs=jobs, progress=progress, check=check_manifest_size
        )
    _note(store, done.name, done)
    return done


def pull(
    reference: str,
    store: Home | StorePlace = None,
    *,
    name: str | ModelName | None = None,
    access: RegistryAccess | None = None,
    policy: SignaturePolicy | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> TransferResult:
    """Fetch a model of a registry into ``store``, under its name there or ``name``.

    ``reference``: ``HOST/NAMESPACE/MODEL:TAG``, with Ollama's defaults, and perhaps ``@sha256:…``,
    the manifest that it must be. ``policy``: the signatures that the model needs, under its name
    there.

    Raises: UnsupportedSourceError for an image, or another artifact that is not a stored model; as
    `transfer` and `RegistryAccess.open`.
    """
    store = opened_store(store)
    asked = Reference.parse(reference)
    wanted = str(asked.name if name is None else ModelName.of(name))
    before = id_of(store, store.target(wanted))
    with (access or RegistryAccess()).open(asked) as registry:
        pairs = {str(asked.name): wanted}
        (done,) = transfer(
            pairs,
            registry,
            store,
            check=check_is_model,
            jobs=jobs,
            progress=progress,
            policy=policy,
        )
    _note(store, done.source, done)
    return replace(done, replaced=replaced_id(before, done.digest))


def _note(store: Readable, there: ModelName, done: TransferResult) -> None:
    if store.shares is not None:
        store.shares.add(Share(there.host, repository_of(there), done.digest))


def _repositories(store: Readable, host: str) -> dict[Digest, list[str]]:
    """Return the repositories of a registry that should have a blob.

    The models of the store that were pushed or pulled there, under whatever name, have their blobs
    there.
    """
    by_manifest = defaultdict(list)
    shares = store.shares.read() if store.shares is not None else ()
    for share in sorted(shares, key=lambda share: share.repository):
        if share.host == host:
            by_manifest[share.manifest].append(share.repository)
    by_digest: dict[Digest, list[str]] = {}
    for name, raw in store.manifests.texts() if by_manifest else ():
        repositories = by_manifest.get(Digest.of(raw)) if isinstance(raw, bytes) else None
        if repositories:
            with suppress(BlobStoreError):  # a manifest that can't be read is skipped
                blobs = store.manifests.read(name).descriptors
                by_digest |= {blob.digest: repositories for blob in blobs}
    return by_digest
