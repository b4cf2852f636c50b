"""Names of models, blobs and files, and the digests that blobs are named by, as validated values.

Rule N1 (Ollama's grammar, tightened where it would let a URL or an empty port through;
types/model/name.go in ollama/ollama@fb307609):
``[scheme://][host[:port]/][namespace/]model[:tag]``, ASCII, matched as a whole. Rule P1: a name
from an index or a remote list is joined to a folder only when every ``/`` segment is an ordinary
name. Rule D1: a digest is exactly ``sha256:`` and 64 lower-case hex digits. As a file name in
``blobs/``: ``sha256-`` and the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from blobstore.errors import InvalidDigestError, InvalidNameError, quoted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEXT_LENGTH = len("sha256:") + 64


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A sha256 digest. ``hex`` is 64 lower-case hex digits: no other value can exist."""

    hex: str

    def __post_init__(self) -> None:
        if _HEX.fullmatch(self.hex) is None:
            raise InvalidDigestError(f"not a sha256 digest: {quoted(self.hex)}", rule="D1")

    def __repr__(self) -> str:
        return f"Digest({str(self)!r})"

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Return the digest that ``sha256:<64 hex>`` names.

        Raises: InvalidDigestError (rule D1) for anything else, upper case and ``sha256-`` included.
        """
        # The length comes first: a hostile megabyte costs nothing.
        if not isinstance(text, str) or len(text) != _TEXT_LENGTH or not text.startswith("sha256:"):
            raise InvalidDigestError(
                f"not a digest (sha256: and 64 lower-case hex digits): {quoted(text)}", rule="D1"
            )
        return cls(text[len("sha256:") :])

    @classmethod
    def from_file_name(cls, name: str) -> Digest | None:
        """Return the digest in the name of a blob file, None unless ``sha256-<64 hex>``."""
        prefix, _, digits = name.partition("-")
        return cls(digits) if prefix == "sha256" and _HEX.fullmatch(digits) else None

    @classmethod
    def of(cls, data: ReadableBuffer) -> Digest:
        """Return the digest of bytes in memory, of any contiguous buffer."""
        return cls(hashlib.sha256(data).hexdigest())

    @property
    def file_name(self) -> str:
        """The blob's name in ``blobs/``: ``sha256-<hex>``."""
        return f"sha256-{self.hex}"

    @property
    def short(self) -> str:
        """The first 12 hex digits, as Ollama and docker show an ID."""
        return self.hex[:12]

    def __str__(self) -> str:
        return f"sha256:{self.hex}"


DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_MAX_TEXT = 1024
_MAX_PART = 80
_MAX_HOST = 350
_MAX_FILE_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
_LAST_CONTROL = 0x9F

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[0-9]{1,5})?", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_MOST_PARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ModelName:
    """A full model name: where its manifest is in a store, and where a registry serves it."""

    host: str = DEFAULT_HOST
    namespace: str = DEFAULT_NAMESPACE
    model: str
    tag: str = DEFAULT_TAG
    scheme: str = field(default="https", compare=False)
    """The scheme of the registry's address. A store ignores it when it compares names."""

    def __repr__(self) -> str:
        return f"ModelName({str(self)!r})"

    def __post_init__(self) -> None:
        _check(_HOST, _MAX_HOST, self.host, "host")
        _check(_NAMESPACE, _MAX_PART, self.namespace, "namespace")
        _check(_PART, _MAX_PART, self.model, "model")
        _check(_PART, _MAX_PART, self.tag, "tag")
        if self.scheme not in ("http", "https"):
            raise InvalidNameError(
                f"not a model name: scheme {self.scheme!r} is neither http nor https",
                rule="N1",
                hint="A registry's model is HOST/NAMESPACE/MODEL:TAG.",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the name in ``text``, with Ollama's defaults for missing parts.

        Raises: InvalidNameError (rule N1) when a part is empty, too long, or contains an invalid
        character.
        """
        if len(text) > _MAX_TEXT:
            raise InvalidNameError("not a model name: too long", rule="N1")
        fields: dict[str, str] = {}
        rest = text
        if "://" in rest:
            fields["scheme"], rest = rest.split("://", 1)
        *ahead, last = rest.split("/")
        if ":" in last:
            last, fields["tag"] = last.split(":", 1)
        parts = [*ahead, last]
        if len(parts) > _MOST_PARTS:
            raise InvalidNameError(
                f"not a model name: {text!r} has {len(parts)} parts, at most 3 are possible",
                rule="N1",
            )
        fields |= dict(zip(("model", "namespace", "host"), reversed(parts), strict=False))
        return cls(**fields)  # the keys are the fields' names

    @classmethod
    def of(cls, name: str | Self) -> Self:
        """Return the name, parsed if it is text. Raises: as `parse`."""
        return cls.parse(name) if isinstance(name, str) else name

    @classmethod
    def of_path(cls, parts: Sequence[str]) -> Self | None:
        """Return the name with these `path_parts`; None if they are not those of a valid name."""
        try:
            return cls(**dict(zip(("host", "namespace", "model", "tag"), parts, strict=True)))
        except ValueError:  # an InvalidNameError too; a plain one unless there are four parts
            return None

    @property
    def path_parts(self) -> tuple[str, str, str, str]:
        """Host, namespace, model and tag: the segments of the manifest's path in ``manifests/``."""
        return (self.host, self.namespace, self.model, self.tag)

    @property
    def folded(self) -> tuple[str, ...]:
        """The parts in lower case. Names with equal ones are one model, as for Ollama.

        Source: ollama/ollama@fb307609 server/routes.go `getExistingName`, types/model/name.go
        `EqualFold`.
        """
        return tuple(part.lower() for part in self.path_parts)

    @property
    def short(self) -> str:
        """The name as a person writes it: without the default host and namespace, with the tag."""
        text = f"{self.model}:{self.tag}"
        if (self.host, self.namespace) == (DEFAULT_HOST, DEFAULT_NAMESPACE):
            return text
        host = "" if self.host == DEFAULT_HOST else f"{self.host}/"
        return f"{host}{self.namespace}/{text}"

    def __str__(self) -> str:
        return self.short


def _check(pattern: re.Pattern[str], longest: int, text: str, part: str) -> None:
    if not text:
        problem = "is empty"
    elif len(text) > longest:
        problem = f"is longer than {longest} characters"
    elif pattern.fullmatch(text) is None:
        problem = f"{text!r} contains an invalid character"
    else:
        return
    raise InvalidNameError(f"not a model name: the {part} {problem}", rule="N1")


def relative_path(text: object) -> str:
    """Return ``text`` unchanged when it is a relative path of ordinary names (rule P1).

    ``~`` and ``%`` are plain text.

    Raises: InvalidNameError for an empty, ``.`` or ``..`` segment, an absolute path, a backslash, a
    colon (drives, URLs, streams), NUL or another control character, a ``.git`` segment, a name over
    255 bytes or a path over 4095.
    """
    if not isinstance(text, str):
        raise InvalidNameError(f"not a file name: {text!r}", rule="P1")
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidNameError(f"not a file name: {quoted(text)} is not UTF-8", rule="P1") from None
    if nbytes > _MAX_PATH_BYTES:
        raise InvalidNameError(f"not a file name: longer than {_MAX_PATH_BYTES} bytes", rule="P1")
    if any(
        character in "\\:" or not (character.isprintable() or ord(character) > _LAST_CONTROL)
        for character in text
    ):
        raise InvalidNameError(
            f"not a file name: {text!r} contains an invalid character", rule="P1"
        )
    for segment in text.split("/"):
        if segment in ("", ".", "..") or segment.lower() == ".git":
            raise InvalidNameError(
                f"not a file name: {text!r} has the segment {segment!r}", rule="P1"
            )
        if len(segment.encode()) > _MAX_FILE_NAME_BYTES:
            raise InvalidNameError(
                f"not a file name: a segment is longer than {_MAX_FILE_NAME_BYTES} bytes", rule="P1"
            )
    return text


def file_name(text: object) -> str:
    """Return ``text`` unchanged when it is one ordinary file name without a folder (rule P1).

    Raises: InvalidNameError.
    """
    name = relative_path(text)
    if "/" in name:
        raise InvalidNameError(f"not a plain file name: {name!r}", rule="P1")
    return name


_MOST_MODELS = 3
_MOST_NAMES = 8


def hint_for(names: Iterable[ModelName], name: ModelName) -> str:
    """Return the hint for a missing model: its other tags, else the tags of similar names."""
    from difflib import get_close_matches

    models: dict[str, list[str]] = {}
    for one in names:
        if (one.host, one.namespace) == (name.host, name.namespace):
            models.setdefault(one.model.lower(), []).append(str(one))
    wanted = name.model.lower()
    if wanted in models:
        return f"The store has {shortened(models[wanted], _MOST_NAMES)}."
    if similar := get_close_matches(wanted, models, _MOST_MODELS):
        named = [one for model in similar for one in models[model]]
        return f"Did you mean {shortened(named, _MOST_NAMES)}?"
    return (
        "blobstore list shows the models of the store, blobstore pull NAME fetches one."
        " A Hub repository is hf://ORG/NAME."
    )


def shortened(names: Sequence[object], most: int) -> str:
    """Return the first ``most`` names: ``a, b and 3 more``."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more:,} more" if more > 0 else "")
