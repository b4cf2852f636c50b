"""``/v2/``: the reading half of the OCI distribution protocol.

Sources: opencontainers/distribution-spec@967efdc spec.md ("Pull", "Content Discovery", "Error
Codes"); distribution/distribution docs/spec/api.md for ``_catalog`` and
``Docker-Distribution-Api-Version``; ollama/ollama@fb307609 server/download.go, which takes the
address of a blob from ``Location``, of an answer of 200 too.

Which manifest a tag gives is negotiated: the model's own, unless the client prefers OCI's type. It
does if it names that type alone, with a greater weight, or first (RFC 9110 section 12.5.1 leaves
the order to us: skopeo names OCI's type first, and docker's clients, Ollama and blobstore docker's
or only docker's).
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    LimitExceededError,
    ModelNotFoundError,
    NotFoundError,
    RemoteError,
    UsageError,
)
from blobstore.formats import strictjson
from blobstore.formats.documents import MANIFEST_MEDIA_TYPE, Descriptor, Manifest
from blobstore.formats.oci import (
    OCI_MANIFEST_MEDIA_TYPE,
    SignatureManifest,
    is_tag_of_signatures,
    under_oci,
)
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Readable, all_names
from blobstore.store.sessions import checked_pieces
from blobstore.web.application import is_known

# Seconds for which a manifest is not read again, when a blob is asked for.
_FRESH_S = 2
# Manifests that are kept. One of 50,000 layers takes 50 MB.
_MOST_MANIFESTS = 4
_MEDIA_TYPE = re.compile(r"application/[a-z0-9.+-]+", re.ASCII | re.IGNORECASE)
_T = TypeVar("_T")


def path_of(repository: ModelName) -> str:
    """Return the path of a repository."""
    name = replace(repository, tag="any").short.removesuffix(":any")
    return name if "/" in name else f"{repository.namespace}/{name}"


class _Tagged:
    def __init__(self, name: ModelName, holder: Readable, home: Readable) -> None:
        self.own = Manifest.parse(holder.manifests.text(name), f"the manifest of {name}")
        self.name = name
        self.holder = holder
        self.blobs = {descriptor.digest: descriptor for descriptor in self.own.descriptors}
        self._kept = holder.signatures or home.signatures

    @cached_property
    def twin(self) -> Manifest:
        """The manifest of OCI's type; the model's own if that is one, or of no type we know."""
        return self.own if _type_of(self.own) != MANIFEST_MEDIA_TYPE else under_oci(self.own)

    def signed(self) -> tuple[Manifest | None, dict[Digest, bytes]]:
        """Return the manifest of the signatures, None without any, and its blobs."""
        signatures = list(self._kept.read(self.name, self.own.digest)) if self._kept else []
        if not signatures:
            return None, {}
        manifest = SignatureManifest.of(signatures)
        blobs = [*(one.payload for one in signatures), manifest.config or b""]
        return Manifest.parse(manifest.raw), {Digest.of(data): data for data in blobs}


def _type_of(manifest: Manifest) -> str:
    kind = manifest.media_type
    return kind if _MEDIA_TYPE.fullmatch(kind) else MANIFEST_MEDIA_TYPE


_log = logging.getLogger("blobstore.web")

_INDEX_MEDIA_TYPE = "application/vnd.oci.image.index.v1+json"
_READS = ("GET", "HEAD")
_MOST_LISTED = 1000
# Bytes that are read and sent at once: 2.0 GB/s, and 0.4 in pieces of 64 KiB.
_PIECE = 2**20
_RANGE = re.compile(r"bytes=[ \t]*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})[ \t]*", re.ASCII)
_WEIGHT = re.compile(r"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)", re.ASCII | re.IGNORECASE)
_VERSION = {"docker-distribution-api-version": "registry/2.0"}


class RefusedError(Exception):
    """The answer is an error: its status, its code in the protocol, a message, more fields."""

    def __init__(self, status: int, code: str, message: str, **fields: str) -> None:
        super().__init__(status, code, message)
        document = {"errors": [{"code": code, "message": message, "detail": None}]}
        self.answer = _json(document, status, **fields)


def distribution_routes(home: Readable) -> list[BaseRoute]:
    """Return the routes of ``/v2/`` over a home."""
    served = ServedModels(home)
    routes: dict[str, Callable[[Request], Response]] = {
        "/": lambda _: _json({}, 200),
        "/_catalog": served.catalog,
        "/{name:path}/tags/list": served.tags,
        "/{name:path}/manifests/{reference}": served.manifest,
        "/{name:path}/blobs/{reference}": served.blob,
        "/{name:path}/referrers/{reference}": _referrers,
        "/{rest:path}": _unknown,
    }
    app = Starlette(
        routes=[Route(path, endpoint, methods=_READS) for path, endpoint in routes.items()],
        exception_handlers=_HANDLERS,
    )
    app.router.redirect_slashes = False
    return [Mount("/v2", app)]


def _unsupported_reply(*_: object) -> Response:
    message = "this registry is only read: use GET or HEAD"
    return RefusedError(405, "UNSUPPORTED", message, allow=", ".join(_READS)).answer


_HANDLERS: dict[Any, Any] = {
    RefusedError: lambda _, error: error.answer,
    HTTPException: _unsupported_reply,
}


def _unknown(_request: Request) -> Response:
    raise RefusedError(404, "NAME_UNKNOWN", "not found")


class ServedModels:
    """The models of a home, and the answers to requests for them. Safe to share between threads."""

    def __init__(self, home: Readable) -> None:
        self._home = home
        self._last: dict[tuple[str, ...], tuple[float, _Tagged]] = {}
        """When a model of each repository had what was asked for; the latest are last."""

    def catalog(self, request: Request) -> Response:
        return _list_page(
            request,
            "repositories",
            lambda: [*{_key(name): path_of(name) for name in all_names(self._home)}.values()],
        )

    def tags(self, request: Request) -> Response:
        """Answer with the tags of a repository, without those of signatures."""
        path = request.path_params["name"]
        repository = _repository(path)
        return _list_page(
            request,
            "tags",
            lambda: [name.tag for name in self._models(repository)],
            {"name": path},
        )

    def manifest(self, request: Request) -> Response:
        repository = _repository(request.path_params["name"])
        reference = request.path_params["reference"]
        tagged = ":" not in reference
        try:
            if tagged:
                oci = prefers_oci(request.headers.getlist("accept"))
                document = self.manifest_of(replace(repository, tag=reference), oci=oci)
            else:
                document = self._manifest_by_digest(repository, _digest(reference))
        except BlobStoreError as error:
            raise _refusal(error, "MANIFEST_UNKNOWN") from error
        fields = _fields(document.digest)
        if tagged:
            fields |= {"cache-control": "no-cache", "vary": "Accept"}
        if is_known(str(document.digest), request):
            return Response(status_code=304, headers=fields)
        return Response(document.raw, headers={**fields, "content-type": _type_of(document)})

    def blob(self, request: Request) -> Response:
        path = request.path_params["name"]
        repository, digest = _repository(path), _digest(request.path_params["reference"])
        try:
            reader = self._open_blob(repository, digest)
        except BlobStoreError as error:
            raise _refusal(error, "BLOB_UNKNOWN") from error
        is_get = request.method == "GET"
        fields = _fields(digest) | {
            "accept-ranges": "bytes",
            "content-type": "application/octet-stream",
        }
        # A range is of GET alone (RFC 9110 section 14.2): HEAD says how large the whole is.
        ranged = is_get and request.headers.get("if-range", fields["etag"]) == fields["etag"]
        asked = part_of(reader.size, request.headers.get("range") if ranged else None)
        part = range(reader.size) if asked is None else asked
        if asked is not None and not asked:
            reader.close()
            raise RefusedError(
                416,
                "RANGE_INVALID",
                "the blob has no such bytes",
                **{"content-range": f"bytes */{reader.size}"},
            )
        if is_known(str(digest), request):
            reader.close()
            return Response(status_code=304, headers=fields)
        fields["content-length"] = str(len(part))
        if asked is None:
            fields["location"] = f"/v2/{quote(path)}/blobs/{digest}"
        else:
            fields["content-range"] = f"bytes {part.start}-{part.stop - 1}/{reader.size}"
        if not is_get:
            reader.close()
            return Response(headers=fields)
        return BlobResponse(reader, part, digest, 200 if asked is None else 206, fields)

    def manifest_of(self, name: ModelName, *, oci: bool) -> Manifest:
        """Return the manifest of a tag, as it is now; with ``oci`` its twin of OCI's type.

        The tag of a manifest's signatures (`tag_of`) names the manifest of these.

        Raises: NotFoundError; CorruptDataError for a manifest that is not valid; StorageError;
        RemoteError.
        """
        if is_tag_of_signatures(name.tag):
            digest = Digest(name.tag.removeprefix("sha256-").removesuffix(".sig"))
            model = self._first(name, lambda one: one if one.own.digest == digest else None)
            signed, _ = model.signed()
            if signed is None:
                raise NotFoundError(f"{digest} has no signatures")
            return signed
        model = self._read(name)
        return model.twin if oci else model.own

    def _manifest_by_digest(self, repository: ModelName, digest: Digest) -> Manifest:
        def picked(model: _Tagged) -> Manifest | None:
            known = filter(None, (model.own, model.twin, model.signed()[0]))
            return next((found for found in known if found.digest == digest), None)

        return self._first(repository, picked)

    def _open_blob(self, repository: ModelName, digest: Digest) -> OpenReader:
        """Return a reader of a blob that a manifest of the repository names.

        Raises: NotFoundError if none names it, or it is missing; CorruptDataError if its size
        differs; StorageError; RemoteError.
        """

        def picked(model: _Tagged) -> Callable[[], OpenReader] | None:
            if (blob := model.blobs.get(digest)) is not None:
                return partial(model.holder.blobs.open, blob)
            payload = model.signed()[1].get(digest)
            return None if payload is None else partial(BytesReader, payload)

        return self._first(repository, picked)()

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
        names = [name for name in all_names(self._home) if _key(name) == _key(repository)]
        if not names:
            raise ModelNotFoundError(f"repository {path_of(repository)!r} not found")
        return names

    def _read(self, asked: ModelName) -> _Tagged:
        holder = self._home.holder(asked)
        return _Tagged(holder.find(asked), holder, self._home)


def _key(name: ModelName) -> tuple[str, ...]:
    return name.folded[:-1]


def _list_page(
    request: Request,
    key: str,
    names: Callable[[], Iterable[str]],
    more: Mapping[str, str] = {},  # it is not changed
) -> Response:
    """Return a page of a list (spec.md, "Listing Tags"), and the address of the next."""
    text = request.query_params.get("n", str(_MOST_LISTED))
    if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) is None:
        raise RefusedError(400, "PAGINATION_NUMBER_INVALID", "n is not a number")
    most, last = min(int(text), _MOST_LISTED), request.query_params.get("last", "")
    try:
        after = sorted(name for name in names() if name > last)
    except BlobStoreError as error:
        raise _refusal(error, "NAME_UNKNOWN") from error
    page = after[:most]
    fields = {}
    if page and len(page) < len(after):
        query = urlencode({"n": most, "last": page[-1]})
        fields["link"] = f'<{quote(request.url.path)}?{query}>; rel="next"'
    return _json({**more, key: page}, 200, **fields)


def _fields(digest: Digest) -> dict[str, str]:
    return {
        **_VERSION,
        "docker-content-digest": str(digest),
        "etag": f'"{digest}"',
        "cache-control": "max-age=31536000, immutable",
    }


class BlobResponse(StreamingResponse):
    """A part of a blob, sent in pieces. Closes the reader."""

    def __init__(
        self, reader: OpenReader, part: range, digest: Digest, status: int, fields: dict[str, str]
    ) -> None:
        super().__init__(_pieces(reader, part, digest), status, fields)
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises: CorruptDataError if it is damaged: the client gets too few bytes."""
        with closing(self._reader):
            await super().__call__(scope, receive, send)


def _pieces(reader: OpenReader, part: range, digest: Digest) -> Iterator[bytes]:
    """Yield the bytes of a part.

    Bytes that are decoded or fetched on the way (packed blobs, buckets) are hashed if all of the
    blob is sent, and the last piece of a damaged blob is not. Files are not hashed: clients do.
    """
    if (place := reader.place()) is not None:
        fd, start = place
        for begin in range(part.start, part.stop, _PIECE):
            yield os.pread(fd, min(_PIECE, part.stop - begin), start + begin)
        return
    if (left := len(part)) == reader.size:
        yield from checked_pieces(Descriptor("", digest, left), reader)
        return
    for view in reader.pieces(memoryview(bytearray(_PIECE)), part.start):
        piece = bytes(view[:left])
        left -= len(piece)
        yield piece
        if not left:
            return


def part_of(size: int, field: str | None) -> range | None:
    """Return the bytes that a ``Range`` field asks for, empty if the blob has none of them (416).

    None, the whole, for no field, several ranges, other units, and a field that is not valid: a
    server may ignore it (RFC 9110 section 14.2).
    """
    match = _RANGE.fullmatch(field or "")
    if match is None or not (match["first"] or match["last"]):
        return None
    if not match["first"]:
        return range(max(0, size - int(match["last"])), size)
    begin = int(match["first"])
    last = int(match["last"]) if match["last"] else size - 1
    return None if match["last"] and last < begin else range(begin, min(last + 1, size))


def prefers_oci(accept: Sequence[str]) -> bool:
    """Return True if ``Accept`` fields prefer OCI's type of manifests to docker's."""
    best = {OCI_MANIFEST_MEDIA_TYPE: (0.0, 0), MANIFEST_MEDIA_TYPE: (0.0, 0)}
    for number, entry in enumerate(",".join(accept).split(",")):
        kind, *parameters = (part.strip() for part in entry.lower().split(";"))
        if kind in best:
            weights = [
                found[1] for parameter in parameters if (found := _WEIGHT.fullmatch(parameter))
            ]
            weight = float(weights[0]) if weights else 1.0
            best[kind] = max(best[kind], (weight, -number))
    oci = best[OCI_MANIFEST_MEDIA_TYPE]
    return oci[0] > 0 and oci > best[MANIFEST_MEDIA_TYPE]


def _referrers(request: Request) -> Response:
    """Return an empty index: signatures are kept under cosign's tags, and nothing else refers."""
    _repository(request.path_params["name"])
    _digest(request.path_params["reference"])
    body = {"schemaVersion": 2, "mediaType": _INDEX_MEDIA_TYPE, "manifests": []}
    filtered = {"oci-filters-applied": "artifactType"}
    fields = filtered if request.query_params.get("artifactType") else {}
    return _json(body, 200, **{"content-type": _INDEX_MEDIA_TYPE, **fields})


def _repository(path: str) -> ModelName:
    try:
        return ModelName.parse(f"{path}:any")  # a tag that means nothing
    except UsageError as error:
        # A registry can't have it, so it is unknown; the specification's own tests ask for that.
        raise RefusedError(404, "NAME_UNKNOWN", error.message) from error


def _digest(text: str) -> Digest:
    try:
        return Digest.parse(text)
    except UsageError as error:
        raise RefusedError(400, "DIGEST_INVALID", error.message) from error


def _refusal(error: BlobStoreError, unknown: str) -> RefusedError:
    """Return the answer for an error. The library's message names files, so the log gets it."""
    if isinstance(error, NotFoundError | UsageError):
        return RefusedError(404, unknown, "not found in the repository")
    _log.warning("/v2/: %s", error)
    if isinstance(error, CorruptDataError | LimitExceededError):
        code = "MANIFEST_INVALID" if unknown == "MANIFEST_UNKNOWN" else "SIZE_INVALID"
        return RefusedError(409, code, "it is damaged in the store: blobstore verify shows how")
    if isinstance(error, RemoteError) and error.temporary:
        return RefusedError(503, "UNAVAILABLE", "the bucket does not answer")
    return RefusedError(500, "UNKNOWN", "it can't be read; see the server's log")


def _json(body: Any, status: int, **fields: str) -> Response:
    headers = {**_VERSION, "content-type": "application/json", **fields}
    return Response(strictjson.encode(body), status, headers)
