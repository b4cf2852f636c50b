"""Push and pull: a transfer to or from a registry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock

from blobstore.errors import BlobStoreError, UsageError
from blobstore.formats.oci import check_is_model
from blobstore.io.http.client import HttpClient
from blobstore.io.workers import Progress
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Home, Readable, Share, id_of, replaced_id
from blobstore.store.registry.api import Reference, registry_address, repository_of
from blobstore.store.registry.logins import Credentials
from blobstore.store.registry.manifests import check_manifest_size
from blobstore.store.registry.store import RegistryStore
from blobstore.store.signing.signed_models import SignaturePolicy
from blobstore.store.transfer import Transferred, transfer

_CONNECTIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAccess:
    """How registries are reached, and as whom.

    ``insecure``: also without TLS, where docker would ask for it. ``credentials``: logins (None:
    none). ``realms``: hosts of token servers to trust beside those of `realm_target`. ``ca_file``:
    certificates (PEM) to trust beside the system's. ``connections``: requests at once (None: 16).
    """

    insecure: bool = False
    credentials: Credentials | None = None
    realms: Collection[str] = ()
    ca_file: str | None = None
    connections: int | None = None

    def open(
        self, reference: Reference, others: Callable[[Digest], Iterable[str]] = lambda _: ()
    ) -> RegistryStore:
        """Return the registry of a reference; ``others`` as for `RegistryStore`.

        The login is found when the registry asks for it, which raises as `Credentials.find`.

        Raises: UsageError if it would be asked without TLS.
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
            HttpClient(connections=self.connections or _CONNECTIONS, ca_file=self.ca_file),
            address=f"{address.scheme}://{address.authority}",
            login=login,
            realms=self.realms,
            pinned={name: reference.digest} if reference.digest is not None else None,
            others=others,
        )


def push(
    name: str | ModelName,
    store: Readable,
    *,
    to: str | None = None,
    neighbours: Readable | None = None,
    access: RegistryAccess | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Transferred:
    """Send a model of ``store`` to a registry: the one in its name, or in ``to``.

    Only blobs that the repository lacks are sent. Those that another repository of the registry has
    are mounted from there, if a model of ``neighbours`` (None: of ``store``) with these blobs was
    pushed or pulled there.

    Raises: UsageError for a digest in ``to``; as `transfer` and `RegistryAccess.open`.
    """
    reference = Reference.parse(to if to is not None else str(ModelName.of(name)))
    if reference.digest is not None:
        raise UsageError(f"a model is pushed to a tag, not to a digest: {to}")
    known = _Repositories(neighbours or store, reference.name.host)
    with (access or RegistryAccess()).open(reference, known.of) as registry:
        pairs = {str(ModelName.of(name)): str(reference.name)}
        (done,) = transfer(
            pairs, store, registry, jobs=jobs, progress=progress, check=check_manifest_size
        )
    _note(store, done.name, done)
    return done


def pull(
    reference: str,
    store: Home,
    *,
    name: str | ModelName | None = None,
    access: RegistryAccess | None = None,
    policy: SignaturePolicy | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Transferred:
    """Fetch a model of a registry into ``store``, under its name there or ``name``.

    ``reference``: ``HOST/NAMESPACE/MODEL:TAG``, with Ollama's defaults, and perhaps ``@sha256:…``,
    the manifest that it must be. ``policy``: what the model must be signed with, under its name
    there.

    Raises: UnsupportedSourceError for an image, or another artifact that is not a stored model; as
    `transfer` and `RegistryAccess.open`.
    """
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


def _note(store: Readable, there: ModelName, done: Transferred) -> None:
    if store.shares is not None:
        store.shares.add(Share(there.host, repository_of(there), done.digest))


class _Repositories:
    """The repositories of a registry that should have a blob.

    The models of the store that were pushed or pulled there, under whatever name, have their blobs
    there.
    """

    def __init__(self, store: Readable, host: str) -> None:
        self._store = store
        self._host = host
        self._mutex = Lock()

    def of(self, digest: Digest) -> list[str]:
        """Return those that may have a blob."""
        with self._mutex:  # the threads of a push would all read the manifests
            return self._by_blob.get(digest, [])

    @cached_property
    def _by_blob(self) -> dict[Digest, list[str]]:
        by_manifest = defaultdict(list)
        for share in sorted(self._shares(), key=lambda share: share.repository):
            by_manifest[share.manifest].append(share.repository)
        found: dict[Digest, list[str]] = {}
        for name in self._store.manifests.names() if by_manifest else ():
            with suppress(BlobStoreError):  # a manifest that can't be read is skipped
                manifest = self._store.manifests.read(name)
                if repositories := by_manifest.get(manifest.digest):
                    found |= {blob.digest: repositories for blob in manifest.descriptors}
        return found

    def _shares(self) -> Iterable[Share]:
        shares = self._store.shares.read() if self._store.shares is not None else ()
        return (share for share in shares if share.host == self._host)
