"""Problems: errors as documents, and the HTTP status of each class of error."""

from __future__ import annotations

from collections.abc import Callable

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
from blobstore.views.looked import ProblemView
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


def status_of(error: BlobStoreError) -> int:
    """Return the HTTP status of an error."""
    found = (status for kinds, status in _STATUSES if isinstance(error, kinds))
    return next(found, CONFLICT)


def problem(status: int, error: str, hint: str | None = None) -> Response:
    """Return an error as a document."""
    body = in_json(ProblemView(error=error, hint=hint))
    return Response(body, status, media_type="application/json")


def problem_of(error: BlobStoreError, shown: Callable[[str], str]) -> Response:
    """Return an error of the library as a document, whose texts are ``shown``."""
    hint = None if error.hint is None else shown(error.hint)
    return problem(status_of(error), shown(error.message), hint)
