"""Every error that leaves the library.

One class a kind of fault, so that a caller can tell "you asked for the wrong thing" from "this file
is damaged" from "the disk is full". All carry the same optional fields, so that a message never has
to be parsed:

``rule``    the numbered rule that was broken (``F8``: see docs/design.md, "Rules")
``tensor``  tensor name · ``index`` element index in it
``blob``    digest text or blob name · ``model`` model name
``path``    file or folder · ``errno`` operating system error number
``hint``    one sentence: what to do about it
"""

from __future__ import annotations

from typing import Any, Self

_SHOWN = 80


class BlobStoreError(Exception):
    """Base of all errors of this package. ``str(error)`` is one sentence without the hint."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        rule: str | None = None,
        tensor: str | None = None,
        index: tuple[int, ...] | None = None,
        blob: str | None = None,
        model: str | None = None,
        path: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.rule = rule
        self.tensor = tensor
        self.index = index
        self.blob = blob
        self.model = model
        self.path = path
        self.errno = errno

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all fields, so that an error survives a process boundary."""
        return (_rebuild, (type(self), self.message, self._fields()))

    def at(self, place: str, **fields: Any) -> Self:
        """Return the same error with ``place`` before its message; ``fields`` fill those that it does not have yet."""
        return self._with(f"{place}: {self.message}", fields)

    def about(self, **fields: Any) -> Self:
        """Return the same error with ``fields``, but for those that it has already."""
        return self._with(self.message, fields)

    def _with(self, message: str, fields: dict[str, Any]) -> Self:
        known = {key: value for key, value in self._fields().items() if value is not None}
        return type(self)(message, **(fields | known))

    def kept(self) -> Self:
        """Return the error without its traceback, cause and context: a kept error would keep their memory too."""
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    def _fields(self) -> dict[str, Any]:
        fields = {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("message", "__notes__")
        }
        return fields | {
            "errno": self.errno
        }  # of errors that are OSErrors too it is not in the dictionary


def _rebuild(kind: type[BlobStoreError], message: str, fields: dict[str, Any]) -> BlobStoreError:
    return kind(message, **fields)


class UsageError(BlobStoreError, ValueError):
    """The caller asked for something that can't be done: an invalid name, an unknown type, a bad option.

    A ValueError too.
    """


class InvalidNameError(UsageError):
    """An invalid model name, or a file name that must not become a path."""


class AmbiguousNameError(UsageError):
    """A model name that several models of the store have, in spellings that differ only in case."""


class InvalidDigestError(UsageError):
    """Text that is not ``sha256:`` and 64 lower-case hex digits."""


class NotFoundError(BlobStoreError):
    """A model, tensor, blob, file or folder that was named does not exist."""


class MissingFileError(NotFoundError, FileNotFoundError):
    """A file or folder that was named does not exist. A FileNotFoundError too."""

    @property
    def filename(self) -> str | None:
        """Its path."""
        return self.path


class ModelNotFoundError(NotFoundError, KeyError):
    """A store has no model of that name. A KeyError too, as stores are looked up by names."""


class TensorNotFoundError(NotFoundError, KeyError):
    """A model has no tensor of that name. A KeyError too, as a mapping has to raise."""


class InvalidIndexError(UsageError, IndexError):
    """An index that numpy refuses for a tensor: out of bounds, a step of zero, text.

    An IndexError too, as for sequences.
    """


class CorruptDataError(BlobStoreError):
    """Bytes are not what they have to be: wherever they came from, they can't be used."""


class HeaderError(CorruptDataError):
    """A safetensors file breaks one of the rules F1 to F21."""


class DocumentError(CorruptDataError):
    """A JSON document (manifest, config, shard index) is not valid."""


class DigestMismatchError(CorruptDataError):
    """The bytes of a blob are not the bytes of its digest."""


class ShortReadError(CorruptDataError):
    """A file ended before the bytes that its header or manifest promises."""


class UnsupportedSourceError(BlobStoreError, ValueError):
    """A checkpoint is well-formed, but of a kind that is not imported, or not as asked.

    A ValueError too.
    """


class NonFiniteWeightError(UnsupportedSourceError):
    """A weight to be quantized is NaN or infinite; ``tensor`` and ``index`` say which."""


class LimitExceededError(BlobStoreError):
    """Valid input beyond a limit of ours (docs/design.md, "Limits")."""


class StorageError(BlobStoreError):
    """The operating system refused: no space, no permission, an I/O error."""


class AccessError(StorageError, PermissionError):
    """The operating system allows it not. A PermissionError too."""

    @property
    def filename(self) -> str | None:
        """The path."""
        return self.path


class BusyError(StorageError):
    """Another process holds the lock."""


class ConflictError(BlobStoreError):
    """The manifest of a name is not the expected one: somebody else has changed it."""


class RemoteError(BlobStoreError):
    """A server can't be reached, refuses, or answers what can't be used.

    ``path`` is its address, without a query.

    ``status`` is the HTTP status, None where there was no reply. ``temporary`` says that the same
    request may succeed later: it was tried again already, as often as the caller's patience allows.
    """

    def __init__(
        self, message: str, *, status: int | None = None, temporary: bool = False, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.status = status
        self.temporary = temporary


def quoted(value: object) -> str:
    """Return a value in quotes for a message, cut to 80 characters: hostile input may be megabytes long."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"


def from_os_error(error: OSError | BlobStoreError, operation: str, path: object) -> BlobStoreError:
    """Return our error for an operating system's error: what was tried, on what, and why it failed.

    A missing file becomes `MissingFileError`, what is not allowed `AccessError`, everything else
    `StorageError`, each with ``errno``. One that is ours already stays as it is.
    """
    if isinstance(error, BlobStoreError):
        return error
    reason = (error.strerror or str(error)).lower()
    kind: type[BlobStoreError] = StorageError
    for builtin, ours in ((FileNotFoundError, MissingFileError), (PermissionError, AccessError)):
        if isinstance(error, builtin):
            kind = ours
    return kind(f"can't {operation} {path}: {reason}", path=str(path), errno=error.errno)
