"""Errors of buckets: obstore's exceptions become errors of ours.

obstore's messages quote the server's answer and the address with its query, which may be a
signature (Azure's SAS). So a message of ours contains only the operation, the key, the HTTP status
and the service's error code. Source: obstore 0.12 `obstore.exceptions`; S3's, Google's and Azure's
error documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from blobstore.errors import (
    AccessError,
    BlobStoreError,
    ConflictError,
    NotFoundError,
    RemoteError,
    ShortReadError,
    StorageError,
    UsageError,
)

_STATUS = re.compile(r"status code: ([0-9]{3})", re.ASCII)
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>", re.ASCII)
_REASON = re.compile(r" - HTTP error: ([A-Za-z ,']{3,80})", re.ASCII)
_PATH = re.compile(r'object with invalid path: (?:Error parsing )?Path "([^"]{1,300})"')
_SETTING = re.compile(r"error: ([A-Za-z ,']{3,80})", re.ASCII)
OPEN = "open"
"""The operation before any request: only settings can fail then."""
_UNREACHABLE = "kind: Connect"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_CREDENTIALS = (
    "169.254.169.254",  # a machine's own identity, which object stores ask for last
    "metadata.google.internal",
    "latest/api/token",
    "oauth2/token",
    "MissingAccessKeyId",
    "MissingSecretAccessKey",
)
_DENIED = frozenset({401, 403})
_TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})
_BEYOND, _MISSING, _REDIRECT = 416, 404, range(300, 400)
_LONGEST = 200
_HINTS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for a public"
    " bucket), and AWS_REGION.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login"
    " (GOOGLE_SKIP_SIGNATURE=true for a public bucket).",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_KEY"
    " (AZURE_SKIP_SIGNATURE=true for a public container).",
}


@contextmanager
def object_errors(operation: str, place: str) -> Iterator[None]:
    """Turn obstore's exceptions in the block into errors of ours.

    ``place``: the address of an object, or of a prefix.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, BlobStoreError):
            raise
        # Without its cause: a traceback would print obstore's message, with its address.
        raise object_error(error, operation, place) from None


def object_error(error: Exception, operation: str, place: str) -> BlobStoreError:
    """Return our error for one of obstore's: ``operation`` failed at ``place``."""
    text = str(error)
    status = int(match[1]) if (match := _STATUS.search(text)) else None
    return (
        _of_access(error, operation, place, status)
        or _of_object(error, place, status)
        or _of_request(error, operation, place)
        or _of_server(text, operation, place, status)
    )


def _of_access(
    error: Exception, operation: str, place: str, status: int | None
) -> BlobStoreError | None:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error)
    if any(word in text for word in _CREDENTIALS):
        return _denied(AccessError, "missing credentials for", place)
    kinds = PermissionDeniedError | UnauthenticatedError | PermissionError
    if isinstance(error, kinds) or status in _DENIED:
        said = _code(text) or ": access is denied"
        return _denied(AccessError, f"can't {operation}", place, said)
    return None


def _of_object(error: Exception, place: str, status: int | None) -> BlobStoreError | None:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    text = str(error)
    if any(word in text for word in _NO_BUCKET):
        return NotFoundError(f"{place}: its bucket does not exist", path=place)
    if isinstance(error, FileNotFoundError) or status == _MISSING:
        return NotFoundError(f"{place} does not exist", path=place)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return ConflictError(f"{place} is not as expected: another writer changed it", path=place)
    if status == _BEYOND or "StartTooLarge" in text:
        return ShortReadError(f"{place} ends before the bytes that were asked for", path=place)
    return None


def _of_request(error: Exception, operation: str, place: str) -> BlobStoreError | None:
    """Return the error of a request that could not be sent, because of what was asked."""
    from obstore import exceptions

    text, why, hint = str(error), None, None
    if "BadScheme" in text:
        why = "its endpoint is http and not on this machine"
        hint = 'Use https, or allow it: AWS_ALLOW_HTTP=true, or the option "allow_http".'
    elif isinstance(error, exceptions.InvalidPathError) or type(error) is ValueError:
        why = "an invalid key or address"
        if (found := _PATH.search(text)) is not None:
            why, hint = (
                f"an object has the invalid key {found[1]!r}",
                "Rename or remove the object.",
            )
    elif isinstance(error, exceptions.UnknownConfigurationKeyError):
        why = text.partition("\n")[0][:_LONGEST]
    elif operation == OPEN:
        why = match[1] if (match := _SETTING.search(text)) else "its settings are invalid"
        hint = _hint(place)
    elif isinstance(error, exceptions.NotSupportedError | NotImplementedError):
        return StorageError(f"can't {operation} {place}: its kind of store does not", path=place)
    elif isinstance(error, OSError) and error.errno is not None:
        return StorageError(f"can't {operation} {place}: {error.strerror}", path=place)
    return UsageError(f"{place}: {why}", path=place, hint=hint) if why is not None else None


def _of_server(text: str, operation: str, place: str, status: int | None) -> RemoteError:
    elsewhere = "redirect without LOCATION" in text or status in _REDIRECT
    unreachable = _UNREACHABLE in text
    why = ": can't connect to its server" if unreachable else _code(text, status)
    hint = "Check the network, and the endpoint if you set one." if unreachable else None
    return RemoteError(
        f"can't {operation} {place}{why}",
        path=place,
        status=status,
        temporary=not elsewhere and (status is None or status in _TEMPORARY),
        hint="The bucket may be in another region: set AWS_REGION." if elsewhere else hint,
    )


def _code(text: str, status: int | None = None) -> str:
    """Return the service's code or reason, for the end of a message."""
    code, reason = _CODE.search(text), _REASON.search(text)
    said = code[1] if code is not None else reason[1].strip() if reason is not None else None
    parts = [f"the server answers {status}"] if status is not None else []
    return "".join(f": {part}" for part in [*parts, *([said] if said is not None else [])])


def _denied(kind: type[BlobStoreError], what: str, place: str, said: str = "") -> BlobStoreError:
    return kind(f"{what} {place}{said}", path=place, hint=_hint(place))


def _hint(place: str) -> str | None:
    return _HINTS.get(place.partition(":")[0])
