"""Every error that leaves the library.

There is one class for each kind of fault, so that a caller can tell "you asked for the wrong thing"
from "this file is damaged" from "the disk is full". All carry the same optional fields, so that no
caller has to parse a message:

``rule``    the numbered rule that was broken (``F8``: see docs/design.md, "Rules")
``tensor``  tensor name · ``index`` element index in it
``blob``    digest text or blob name · ``model`` model name
``path``    file or folder · ``errno`` operating system error number
``hint``    one sentence: what to do about it
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Self

_SHOWN = 80


@dataclass(eq=False, repr=False)
class BlobStoreError(Exception):
    """Base of all errors of this package. ``str(error)`` is one sentence without the hint."""

    message: str
    _: KW_ONLY
    hint: str | None = None
    rule: str | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    blob: str | None = None
    model: str | None = None
    path: str | None = None
    errno: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all fields, so that an error survives a process boundary."""
        return (partial(type(self), self.message, **self._fields()), ())

    def at(self, place: str, **fields: Any) -> Self:
        """Return the same error with ``place`` before its message; ``fields``: as `about`."""
        return self._with(f"{place}: {self.message}", fields)

    def about(self, **fields: Any) -> Self:
        """Return the same error with those of ``fields`` that it does not have yet."""
        return self._with(self.message, fields)

    def _with(self, message: str, fields: dict[str, Any]) -> Self:
        known = {key: value for key, value in self._fields().items() if value is not None}
        return type(self)(message, **(fields | known))

    def without_traceback(self) -> Self:
        """Return the error without its traceback, cause and context, which would stay in memory."""
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    def _fields(self) -> dict[str, Any]:
        left_out = ("message", "__notes__")
        return {key: value for key, value in vars(self).items() if key not in left_out}


class UsageError(BlobStoreError, ValueError):
    """The request is invalid: an invalid name, an unknown type, a bad option.

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
        return self.path


class ModelNotFoundError(NotFoundError, KeyError):
    """A store has no model of that name. A KeyError too, because stores are looked up by name."""


class TensorNotFoundError(NotFoundError, KeyError):
    """A model has no tensor of that name. A KeyError too, because a model is a mapping."""


@dataclass(eq=False, repr=False, kw_only=True)
class UnfinishedPlanError(NotFoundError):
    """Tasks of a plan are not done, or the store lost their blobs; ``tasks`` are their numbers."""

    tasks: tuple[int, ...] = ()


class InvalidIndexError(UsageError, IndexError):
    """An index that numpy refuses for a tensor: out of bounds, a step of zero, text.

    An IndexError too, as for sequences.
    """


class CorruptDataError(BlobStoreError):
    """Bytes are not what they should be, and can't be used."""


class HeaderError(CorruptDataError):
    """A safetensors file breaks one of the rules F1 to F19, or a GGUF file one of G1 to G8."""


class DocumentError(CorruptDataError):
    """A JSON document (manifest, config, shard index) is not valid."""


class DigestMismatchError(CorruptDataError):
    """The bytes of a blob are not the bytes of its digest."""


class SignatureError(BlobStoreError):
    """A model is not signed as a key or a policy requires; the message says what is missing."""


class ShortReadError(CorruptDataError):
    """A file ended before the bytes that its header or manifest promises."""


class UnsupportedSourceError(BlobStoreError, ValueError):
    """A checkpoint is well-formed, but can't be imported, or not with these options.

    A ValueError too.
    """


class NonFiniteWeightError(UnsupportedSourceError):
    """A weight to be quantized is NaN or infinite; ``tensor`` and ``index`` say which."""


class LimitExceededError(BlobStoreError):
    """Valid input beyond a limit of blobstore (docs/design.md, "Limits")."""


class StorageError(BlobStoreError):
    """The operating system refused: no space, no permission, an I/O error."""


class AccessError(StorageError, PermissionError):
    """The operating system denies access. A PermissionError too."""

    filename = MissingFileError.filename


class BusyError(StorageError):
    """Another process holds the lock."""


class ConflictError(BlobStoreError):
    """The manifest of a name is not the expected one: another process has changed it."""


@dataclass(eq=False, repr=False, kw_only=True)
class RemoteError(BlobStoreError):
    """A server can't be reached, refuses, or sends an invalid reply.

    ``path`` is its address, without a query. ``status`` is the HTTP status, None if there was no
    reply. ``temporary`` says that the same request may succeed later: it was retried already, as
    often as the caller's retry policy allows. ``retry_after_s``: how long the server asks to wait.
    """

    status: int | None = None
    temporary: bool = False
    retry_after_s: float = 0


class AuthenticationError(RemoteError):
    """A registry or its token server needs a login, or refuses the one that it was given.

    Also a challenge that would send credentials to a server that they are not for.
    """


def quoted(value: object) -> str:
    """Return a value in quotes for a message, cut to 80 characters: input may be megabytes long."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"


def from_os_error(error: OSError | BlobStoreError, operation: str, path: object) -> BlobStoreError:
    """Return our error for an error of the operating system: operation, path and reason.

    A missing file becomes `MissingFileError`, a denied access `AccessError`, everything else
    `StorageError`, each with ``errno``. An error of ours is returned as it is.
    """
    if isinstance(error, BlobStoreError):
        return error
    reason = (error.strerror or str(error)).lower()
    kinds = {FileNotFoundError: MissingFileError, PermissionError: AccessError}
    kind = kinds.get(type(error), StorageError)
    return kind(f"can't {operation} {path}: {reason}", path=str(path), errno=error.errno)


@contextmanager
def needs(extra: str, message: str) -> Iterator[None]:
    """Raise UsageError with the message, and how to install an extra, if an import fails."""
    try:
        yield
    except ImportError as error:
        raise UsageError(message, hint=install_hint(extra)) from error


def install_hint(extra: str) -> str:
    """Return the command that installs what an extra needs, for the Python that runs.

    It names the extra's packages, from this package's metadata (PEP 566, ``Requires-Dist``): that
    compiles nothing again, and this package's name on an index may be another project's. Without
    metadata, in a source tree, it names the extra of the folder.
    """
    import re
    import shlex
    import sys
    from importlib.metadata import PackageNotFoundError, requires
    from importlib.util import find_spec

    try:
        lines = requires("blobstore") or []
    except PackageNotFoundError:
        lines = []
    of_extra = re.compile(rf"extra *== *['\"]{extra}['\"]")
    packages = [line.partition(";")[0].strip() for line in lines if of_extra.search(line)]
    command = [sys.executable, "-m", "pip", "install"]
    if find_spec("pip") is None:  # as uv makes environments
        command = ["uv", "pip", "install", "--python", sys.executable]
    return f"Install it: {shlex.join([*command, *(packages or [f'.[{extra}]'])])}"
