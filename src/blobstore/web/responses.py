"""Responses: documents with their tags, and errors as documents with the status of their class."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from blobstore.errors import (
    AmbiguousNameError,
    BlobStoreError,
    BusyError,
    InvalidDigestError,
    InvalidNameError,
    ModelNotFoundError,
    RemoteError,
    StorageError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.views.api_documents import Problem
from blobstore.web.served import in_json

BAD_REQUEST, NOT_FOUND, CONFLICT = 400, 404, 409
METHOD_NOT_ALLOWED, TOO_LONG, MISDIRECTED, HEAD_TOO_LARGE = 405, 414, 421, 431
FAILED, BAD_GATEWAY, BUSY = 500, 502, 503

_STATUSES: tuple[tuple[tuple[type[BlobStoreError], ...], int], ...] = (
    ((InvalidNameError, InvalidDigestError, AmbiguousNameError), NOT_FOUND),
    ((ModelNotFoundError, TensorNotFoundError), NOT_FOUND),
    ((UnsupportedSourceError,), CONFLICT),  # before UsageError: neither is the other
    ((UsageError,), BAD_REQUEST),
    ((BusyError,), BUSY),
    ((StorageError,), FAILED),
    ((RemoteError,), BAD_GATEWAY),
)
"""The first row that fits counts. Every other error is about a model that can't be read: 409."""


def problem(status: int, error: str, hint: str | None = None) -> Response:
    """Return an error as a document."""
    body = in_json(Problem(error, hint))
    return Response(body, status, media_type="application/json")


def problem_of(error: BlobStoreError, shown: Callable[[str], str]) -> Response:
    """Return an error of the library as a document, whose texts are ``shown``."""
    statuses = (status for kinds, status in _STATUSES if isinstance(error, kinds))
    hint = None if error.hint is None else shown(error.hint)
    return problem(next(statuses, CONFLICT), shown(error.message), hint)


def with_tag(body: bytes, tag: str, content_type: str, request: Request) -> Response:
    """Return a body and its tag, or only the tag if the client has it."""
    if is_known(tag, request):
        return unchanged(tag)
    return Response(body, headers={**_caching(tag), "content-type": content_type})


def unchanged(tag: str) -> Response:
    """Return the answer to a client that has the document of that tag."""
    return Response(status_code=304, headers=_caching(tag))


def is_known(tag: str, request: Request) -> bool:
    """Return True if the client says that it has the document of that tag."""
    known = request.headers.get("if-none-match", "").split(",")
    return any(one.strip().removeprefix("W/") in (f'"{tag}"', "*") for one in known)


def _caching(tag: str) -> dict[str, str]:
    return {"etag": f'"{tag}"', "cache-control": "no-cache"}
