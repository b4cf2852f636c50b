"""The repositories of a registry: blobs, tags, and the signatures of models.

A registry keeps the blobs of each repository apart. A blob that another repository of the same
registry has can be mounted from there, without its bytes.

*From there.* The server's bytes count only when their digest is right, which the session that takes
them checks. So a stream that breaks goes on where it broke, whatever the server says of the file's
version.

*There* (specification, "Pushing blobs"). A blob is sent in one PUT, and after a failure as a whole
again, as often as the policy allows. Bytes are hashed as they are sent: the last ones leave only if
the digest is right.

A tag is the last part of a model's name. The protocol can't compare and set a tag, so `publish`
compares first and sets then: of two machines that write a name at the same time, the later one
wins.

Signatures are an OCI manifest under the tag ``sha256-<hex>.sig`` of a repository. So cosign keeps
them, and finds ours (specs/SIGNATURE_SPEC.md in sigstore/cosign@d6d86c22). They are not removed
with a model: another tag, or another machine, may have the same manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, count
from urllib.parse import urlencode

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    DigestMismatchError,
    ModelNotFoundError,
    NotFoundError,
    RemoteError,
    UsageError,
)
from blobstore.formats.documents import MANIFEST_MEDIA_TYPE, Descriptor, Manifest
from blobstore.formats.oci import (
    OCI_MANIFEST_MEDIA_TYPE,
    Signature,
    SignatureManifest,
    is_tag_of_signatures,
    tag_of,
)
from blobstore.formats.strictjson import check_limit, parse_object
from blobstore.io.budget import Budget, RequestLimits
from blobstore.io.http.client import Body, Fields, Reply, Request
from blobstore.io.http.remote_files import check_part
from blobstore.io.http.web_addresses import WebAddress
from blobstore.io.ranges import BytesReader, OpenReader, in_buffer
from blobstore.names import Digest, ModelName
from blobstore.store.ports import (
    Blobs,
    Manifests,
    ambiguous,
    blob_not_found,
    check_blob_size,
    checked_pieces,
    unique,
)
from blobstore.store.registry.api import (
    ACCEPTED,
    CREATED,
    LOWER_CASE,
    NOT_FOUND,
    OK,
    PARTIAL,
    RegistryApi,
    repository_of,
)
from blobstore.store.registry.authorization import CATALOG, Scope

_DIGEST = "docker-content-digest"


Others = Callable[[Digest], Iterable[str]]
"""Gives the repositories of a registry that may have a blob."""


@dataclass(eq=False)
class Places:
    """Which repositories have which blobs, as far as it is known. Safe to share between threads.

    ``others`` gives the repositories that may have a blob besides those that are noted.
    """

    _others: Others
    _known: dict[Digest, dict[str, int]] = field(default_factory=dict)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def note(self, repository: str, blobs: Iterable[Descriptor]) -> None:
        with self._mutex:
            for blob in blobs:
                self._known.setdefault(blob.digest, {})[repository] = blob.size

    def sizes_by_repository(self, digest: Digest) -> dict[str, int]:
        with self._mutex:
            return dict(self._known.get(digest, {}))

    def candidates(self, digest: Digest, repository: str) -> list[str]:
        every = dict.fromkeys([*self.sizes_by_repository(digest), *self._others(digest)])
        return [other for other in every if other != repository]


@dataclass(eq=False)
class RegistryBlobs(Blobs):
    """The blobs of a registry, in the repositories that are known to have them. See `Blobs`."""

    _api: RegistryApi
    _places: Places
    _manifests: RegistryManifests
    headers_at_once = 16

    def open(self, descriptor: Descriptor) -> BlobReader:
        sizes = self._places.sizes_by_repository(descriptor.digest)
        if not sizes:
            raise blob_not_found(descriptor.digest, str(self._api.root))
        fitting = [place for place, size in sizes.items() if size == descriptor.size]
        if not fitting:
            check_blob_size(descriptor, next(iter(sizes.values())), str(self._api.root))
        return BlobReader(self._api, fitting[0], descriptor)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        wanted = unique(descriptors)

        def is_missing(blob: Descriptor) -> bool:
            places = self._places.sizes_by_repository(blob.digest)
            return all(Uploads(self._api, place).size(blob.digest) != blob.size for place in places)

        return list(compress(wanted, self._api.at_once(wanted, is_missing)))

    def digests(self) -> set[str]:
        named = map(self._manifests.read, self._manifests.names())
        return {blob.digest.hex for manifest in named for blob in manifest.descriptors}


class BlobReader(OpenReader):
    """A blob of a repository. Safe to share between threads."""

    identity = None
    is_remote = True

    def __init__(self, api: RegistryApi, repository: str, descriptor: Descriptor) -> None:
        self._api = api
        self._scope = Scope(repository)
        self._address = api.address(repository, "blobs", str(descriptor.digest))
        self._digest = descriptor.digest
        self.name = str(self._address)
        self.size = descriptor.size

    def read(self, offset: int, length: int) -> bytes:
        self._check(offset, length)
        return b"".join(self._stream(offset, offset + length))

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        return in_buffer(self._stream(begin, self.size), buffer)

    def _stream(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes ``[begin, end)``.

        Raises: NotFoundError; RemoteError, after twice as many attempts without progress as the
        policy allows.
        """
        client = self._api.client
        policy = client.retry_policy
        patient = replace(policy, attempts=2 * policy.attempts)  # to begin a blob anew costs more
        limits = RequestLimits(patient, end - begin)
        attempt = partial(self._attempt, end=end)
        try:
            yield from client.resume_body(attempt, begin, end, limits, self.name)
        except NotFoundError:
            raise blob_not_found(self._digest, self.name) from None

    def _attempt(self, begin: int, end: int) -> Iterator[bytes]:
        fields: Fields = (("Range", f"bytes={begin}-{end - 1}"),)
        if (begin, end) == (0, self.size):
            fields = ()
        request = Request("GET", (OK, PARTIAL), fields, retries=False)
        with self._api.request(self._address, self._scope, request, self.size) as reply:
            before, nbytes = self._place(reply, begin, end)
            for chunk in reply.body(nbytes):
                wanted = chunk[before : before + end - begin]
                before = max(0, before - len(chunk))
                begin += len(wanted)
                yield wanted
                if begin == end < self.size:
                    return

    def _place(self, reply: Reply, begin: int, end: int) -> tuple[int, int]:
        """Return how many bytes of a reply's body come before ``begin``, and how many it has.

        A server may answer a request for a range with the whole blob (RFC 9110 section 14.2).
        """
        if reply.status == PARTIAL:
            stop, _ = check_part(reply, begin, end)
            return 0, stop - begin
        if reply.length not in (None, self.size):
            raise reply.refuse(f"has {reply.length:,} bytes, and the manifest says {self.size:,}")
        return begin, self.size


class Uploads:
    """Sends blobs to a repository. Safe to share between threads."""

    def __init__(self, api: RegistryApi, repository: str) -> None:
        self._api = api
        self._repository = repository
        self._scope = Scope(repository, ("pull", "push"))

    def size(self, digest: Digest) -> int | None:
        """Return the size of a blob of the repository, None if it is missing.

        Raises: RemoteError, also if the registry does not say the size.
        """
        address = self._api.address(self._repository, "blobs", str(digest))
        request = Request("HEAD", (OK, NOT_FOUND))
        with self._api.request(address, Scope(self._repository), request) as reply:
            if reply.status == NOT_FOUND:
                return None
            if reply.length is None:
                raise reply.refuse("does not send the size of a blob")
            return reply.length

    def mount(self, digest: Digest, source: str) -> bool:
        """Mount a blob of another repository; return False if the registry does not do that.

        It begins an upload instead then, which it forgets after a while.
        """
        query = urlencode({"mount": str(digest), "from": source})
        with self._post(replace(self._scope, mounted=(source,)), query) as reply:
            return reply.status == CREATED

    def send(self, descriptor: Descriptor, reader: OpenReader) -> None:
        """Send a blob.

        Raises: DigestMismatchError if the bytes are not those of the digest; as ``reader``;
        RemoteError.
        """
        limits = self._api.client.limits(0, sent=2 * descriptor.size)
        for attempt in count():
            with self._post(self._scope) as reply:
                location = self._api.resolve(reply, reply.field("location"))
            try:
                self._put(location, descriptor, reader)
            except (NotFoundError, RemoteError) as error:
                # The registry may have taken a part of the bytes, or forgotten the upload (404).
                if isinstance(error, RemoteError) and not error.temporary:
                    raise
                self._api.client.pause(attempt, limits, error)
            else:
                return

    def _post(self, scope: Scope, query: str = "") -> AbstractContextManager[Reply]:
        address = self._api.address(self._repository, "blobs", "uploads", "", query=query)
        return self._api.request(
            address, scope, Request("POST", (ACCEPTED, CREATED), body=Body.of(b""))
        )

    def _put(self, location: WebAddress, descriptor: Descriptor, reader: OpenReader) -> None:
        digest = str(descriptor.digest)
        body = Body(descriptor.size, partial(checked_pieces, descriptor, reader))
        fields = (("Content-Type", "application/octet-stream"),)
        request = Request("PUT", (CREATED,), fields, body, retries=False)
        with self._api.request(location.with_query(digest=digest), self._scope, request) as reply:
            said = reply.field(_DIGEST)
            if said not in (None, digest):
                raise reply.refuse(f"says that {digest} has the digest {said[:80]!r}")


MAX_MANIFEST = 4 * 2**20
"""Bytes of a manifest in a registry: the limit of docker-registry (distribution/distribution
registry/handlers/manifests.go ``maxManifestBodySize``), and the least that the specification
requires."""
_ACCEPTED_TYPES = (("Accept", f"{MANIFEST_MEDIA_TYPE}, {OCI_MANIFEST_MEDIA_TYPE}"),)
_MAX_PAGE = 4 * 2**20
_MOST_PAGES = 1000
# Bytes of all pages of a list. They may take 60 s, or longer at 192 KiB/s and more.
_MAX_LIST = 32 * 2**20
# Bytes of the lists of all repositories together.
_MAX_NAMES = 200_000_000
# Seconds that these may take, or longer at such a rate.
_NAMES_S = 600
_UNSUPPORTED = (400, 405)


@dataclass(eq=False)
class RegistryManifests(Manifests):
    """The models of a registry by name. See `Manifests`.

    ``host`` is the registry in the names of its models. ``pinned``: the digests that the manifests
    of some names must have. ``repository``: the only one that is listed; None: all.
    """

    api: RegistryApi
    _host: str
    places: Places
    _pinned: Mapping[ModelName, Digest]
    _repository: str | None = None

    def names(self) -> list[ModelName]:
        address = self.api.address("_catalog", query="n=1000")
        budget = Budget(
            f"the list of models at {self._host}", received=_MAX_NAMES, seconds=_NAMES_S
        )
        repositories = (
            list(self._list(address, CATALOG, "repositories", budget))
            if self._repository is None
            else [self._repository]
        )
        models = (
            ModelName.of_path((self._host, *repository.split("/"), tag))
            for repository in repositories
            for tag in self._tags(repository, budget)
            if not is_tag_of_signatures(tag)
        )
        return sorted(name for name in models if name is not None)

    def stored_name(self, name: ModelName) -> ModelName:
        # A registry tells tags apart by case; a repository is written in one.
        self._check_host(name)
        if name in self._pinned or self.digest(name) is not None:
            return name
        others = [other for other in self._siblings(name) if other.tag.lower() == name.tag.lower()]
        if len(others) > 1:
            raise ambiguous(name, others)
        return others[0] if others else name

    def text(self, name: ModelName) -> bytes:
        # Its blobs are noted as those of the repository.
        pinned = self._pinned.get(name)
        reference = str(pinned or name.tag)
        with self._send(name, reference, _request("GET"), nbytes=MAX_MANIFEST) as reply:
            if reply.status == NOT_FOUND:
                raise self._missing(name)
            raw = reply.whole(MAX_MANIFEST)
            _check_digest(reply, raw)
        if pinned is not None and Digest.of(raw) != pinned:
            message = f"{reply.address}: its bytes are not those of {pinned}"
            raise DigestMismatchError(message, path=str(reply.address), model=str(name))
        with suppress(BlobStoreError):  # one that is not valid is the caller's
            self.places.note(repository_of(name), Manifest.parse(raw).descriptors)
        return raw

    def raw(self, name: ModelName) -> bytes | None:
        try:
            return self.text(name)
        except NotFoundError:
            return None

    def digest(self, name: ModelName) -> str | None:
        """Return the digest of a model's manifest as the registry says it, None if it is missing.

        "" if the registry does not say it.
        """
        with self._send(name, name.tag, _request("HEAD")) as reply:
            return (reply.field(_DIGEST) or "") if reply.status == OK else None

    def put(self, name: ModelName, manifest: Manifest) -> None:
        check_manifest_size(manifest, str(name))
        raw = manifest.raw
        fields = (("Content-Type", manifest.media_type),)
        request = Request("PUT", (CREATED,), fields, Body.of(raw))
        with self._send(name, name.tag, request, "push") as reply:
            _check_digest(reply, raw)
        self.places.note(repository_of(name), manifest.descriptors)

    def remove(self, name: ModelName) -> None:
        """Remove a tag, and no other of the repository.

        A registry that can't remove a tag alone is asked to remove the manifest, if no other tag
        has it. Raises: ModelNotFoundError; UsageError if another tag has it; RemoteError if the
        registry removes nothing.
        """
        digest = self.digest(name)
        if digest is None:
            raise self._missing(name)
        if self._delete(name, name.tag, _UNSUPPORTED):
            return
        same = [other for other in self._siblings(name) if self.digest(other) == digest]
        if same:
            message = f"{name} can't be removed alone: {same[0]} has the same manifest"
            raise UsageError(
                message, model=str(name), hint="This registry removes manifests, not tags."
            )
        self._delete(name, digest or str(Digest.of(self.text(name))), ())

    def _delete(self, name: ModelName, reference: str, unsupported: tuple[int, ...]) -> bool:
        request = Request("DELETE", (ACCEPTED, *unsupported))
        with self._send(name, reference, request, "delete") as reply:
            return reply.status == ACCEPTED

    def _siblings(self, name: ModelName) -> Iterator[ModelName]:
        budget = Budget(f"the tags of {repository_of(name)}", received=_MAX_LIST)
        for tag in self._tags(repository_of(name), budget):
            other = ModelName.of_path((*name.path_parts[:3], tag))
            if other is not None and other != name:
                yield other

    def _tags(self, repository: str, budget: Budget) -> Iterator[str]:
        address = self.api.address(repository, "tags", "list", query="n=1000")
        return self._list(address, Scope(repository), "tags", budget)

    def _list(self, address: WebAddress, scope: Scope, key: str, budget: Budget) -> Iterator[str]:
        """Yield the texts of a list, which comes in pages; nothing if the list does not exist."""
        seen: set[WebAddress] = set()
        following: WebAddress | None = address
        while following is not None:
            if following in seen or len(seen) == _MOST_PAGES:
                raise address.refuse("has an endless list", "R1")
            seen.add(following)
            request = Request("GET", (OK, NOT_FOUND))
            with self.api.request(following, scope, request, _MAX_PAGE, budget) as reply:
                if reply.status == NOT_FOUND:
                    return
                page = parse_object(reply.whole(_MAX_PAGE), str(address), rule="R1")
                reference = reply.next_page()
                following = self.api.resolve(reply, reference) if reference is not None else None
            texts = page.get(key) or []  # null: docker-registry's, for a repository without tags
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise address.refuse("does not answer with a list of names", "R1")
            yield from texts

    def _send(
        self, name: ModelName, reference: str, request: Request, *also: str, nbytes: int = 0
    ) -> AbstractContextManager[Reply]:
        """Send a request for a manifest; ``also``: what it needs besides the right to pull."""
        self._check_host(name)
        repository = repository_of(name)
        address = self.api.address(repository, "manifests", reference)
        return self.api.request(address, Scope(repository, ("pull", *also)), request, nbytes)

    def _check_host(self, name: ModelName) -> None:
        if name.host != self._host:
            message = f"{name} is not a model of the registry {self._host}"
            raise UsageError(message, model=str(name))

    def _missing(self, name: ModelName) -> ModelNotFoundError:
        repository = repository_of(name)
        return ModelNotFoundError(
            f"model {str(name)!r} not found at {self.api.root}",
            model=str(name),
            hint=LOWER_CASE
            if repository != repository.lower()
            else f"blobstore list {name.host}/{repository} lists its tags.",
        )


def check_manifest_size(manifest: Manifest, model: str) -> None:
    """Raise LimitExceededError if a model's manifest is too large for a registry."""
    what = f"the manifest of {model}, for a registry,"
    check_limit(what, len(manifest.raw), "bytes", MAX_MANIFEST, "M1")


def _request(method: str) -> Request:
    return Request(method, (OK, NOT_FOUND), _ACCEPTED_TYPES)


def _check_digest(reply: Reply, raw: bytes) -> None:
    said = reply.field(_DIGEST)
    if said is not None and said != str(Digest.of(raw)):
        raise reply.refuse(f"gives a manifest the digest {said[:80]!r}, and it is {Digest.of(raw)}")


_TRIES = 5


@dataclass(eq=False)
class RegistrySignatures:
    """The signatures of a registry's models. See `Signatures`. Safe to share between threads."""

    _api: RegistryApi
    _manifests: RegistryManifests

    def read(self, name: ModelName, digest: Digest) -> list[Signature]:
        manifest = self._manifest(name, digest)
        if manifest is None:
            return []
        blobs = unique(manifest.layers)  # several keys: one payload
        payloads = {
            blob.digest: BlobReader(self._api, repository_of(name), blob).read(0, blob.size)
            for blob in blobs
        }
        return [layer.signature(payloads[layer.digest]) for layer in manifest.layers]

    def add(self, name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        """See `Signatures`. Those that are there are kept.

        A registry can't compare and set a tag. So it is read again after it was set, and signatures
        that another machine's have replaced are added once more. Raises: ConflictError if that
        happens again and again.
        """
        added = 0
        for _ in range(_TRIES):
            there = self._manifest(name, digest)
            wanted = SignatureManifest.of([]) if there is None else there
            new = wanted.with_signatures(signatures)
            if new is wanted:
                return added
            added = max(added, len(new.layers) - len(wanted.layers))
            self._put(name, digest, new, signatures)
        message = f"other machines keep replacing the signatures of {name}"
        raise ConflictError(message, model=str(name), hint="Try again.")

    def _manifest(self, name: ModelName, digest: Digest) -> SignatureManifest | None:
        raw = self._manifests.raw(_with_tag(name, digest))
        return None if raw is None else SignatureManifest.parse(raw, f"the signatures of {name}")

    def _put(
        self,
        name: ModelName,
        digest: Digest,
        manifest: SignatureManifest,
        signatures: Sequence[Signature],
    ) -> None:
        uploads = Uploads(self._api, repository_of(name))
        for data in (*(signature.payload for signature in signatures), manifest.config or b""):
            blob = Descriptor(media_type="", digest=Digest.of(data), size=len(data))
            if uploads.size(blob.digest) != blob.size:
                uploads.send(blob, BytesReader(data))
        self._manifests.put(_with_tag(name, digest), Manifest.parse(manifest.raw))


def _with_tag(name: ModelName, digest: Digest) -> ModelName:
    return replace(name, tag=tag_of(digest))
