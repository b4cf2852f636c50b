"""Names that users and files give: model names, and file names that may become paths.

Rule N1 (Ollama's grammar, tightened where it would let a URL or an empty port through; types/model/name.go in
ollama/ollama@fb307609): ``[scheme://][host[:port]/][namespace/]model[:tag]``, ASCII, matched as a whole.
Rule P1: a name from an index or a remote list is joined to a folder only when every ``/`` segment is an ordinary name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from blobstore.errors import InvalidNameError, quoted

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
_PART_COUNTS = range(1, 4)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ModelName:
    """A full model name: where its manifest lies in a store, and where a registry serves it."""

    host: str = DEFAULT_HOST
    namespace: str = DEFAULT_NAMESPACE
    model: str
    tag: str = DEFAULT_TAG
    scheme: str = field(default="https", compare=False)
    """How its registry is asked; two names that differ in it only are one model of a store."""

    def __post_init__(self) -> None:
        _check(_HOST, _MAX_HOST, self.host, "host")
        _check(_NAMESPACE, _MAX_PART, self.namespace, "namespace")
        _check(_PART, _MAX_PART, self.model, "model")
        _check(_PART, _MAX_PART, self.tag, "tag")
        if self.scheme not in ("http", "https"):
            raise InvalidNameError(f"not a model name: scheme {self.scheme!r} is neither http nor https", rule="N1")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the name that ``text`` gives, with Ollama's defaults for what it leaves out.

        Raises: InvalidNameError (rule N1) when a part is empty, too long, or contains an invalid character.
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
        if len(parts) not in _PART_COUNTS:
            raise InvalidNameError(f"not a model name: {text!r} has {len(parts)} parts, at most 3 are possible", rule="N1")
        fields |= dict(zip(("model", "namespace", "host"), reversed(parts), strict=False))
        return cls(**fields)  # the keys are the fields' names

    @classmethod
    def of_path(cls, parts: Sequence[str]) -> Self | None:
        """Return the name with these `path_parts`; None if they are not those of a valid name."""
        try:
            return cls(**dict(zip(("host", "namespace", "model", "tag"), parts, strict=True)))
        except (InvalidNameError, ValueError):  # ValueError: there are more or fewer than four
            return None

    @property
    def path_parts(self) -> tuple[str, str, str, str]:
        """The manifest's place below ``manifests/``: host, namespace, model, tag. Each is one ordinary path segment."""
        return (self.host, self.namespace, self.model, self.tag)

    @property
    def folded(self) -> tuple[str, ...]:
        """The parts in lower case: names that are equal in them are one model, as for Ollama.

        Source: ollama/ollama@fb307609 server/routes.go `getExistingName`, types/model/name.go `EqualFold`.
        """
        return tuple(part.lower() for part in self.path_parts)

    @property
    def short(self) -> str:
        """The name as a person writes it: defaults for host and namespace left out, the tag always there."""
        text = f"{self.model}:{self.tag}"
        if (self.host, self.namespace) == (DEFAULT_HOST, DEFAULT_NAMESPACE):
            return text
        if self.host == DEFAULT_HOST:
            return f"{self.namespace}/{text}"
        return f"{self.host}/{self.namespace}/{text}"

    def __str__(self) -> str:
        return self.short


def _check(pattern: re.Pattern[str], longest: int, text: str, part: str) -> None:
    if not text:
        raise InvalidNameError(f"not a model name: the {part} is empty", rule="N1")
    if len(text) > longest:
        raise InvalidNameError(f"not a model name: the {part} is longer than {longest} characters", rule="N1")
    if pattern.fullmatch(text) is None:
        raise InvalidNameError(f"not a model name: the {part} {text!r} contains an invalid character", rule="N1")


def relative_path(text: object) -> str:
    """Return ``text`` unchanged when it is a relative path of ordinary names (rule P1); ``~`` and ``%`` are plain text.

    Raises: InvalidNameError for an empty, ``.`` or ``..`` segment, an absolute path, a backslash, a colon (drives,
    URLs, streams), NUL or another control character, a ``.git`` segment, a name over 255 bytes or a path over 4095.
    """
    if not isinstance(text, str):
        raise InvalidNameError(f"not a file name: {text!r}", rule="P1")
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidNameError(f"not a file name: {quoted(text)} is not UTF-8", rule="P1") from None
    if nbytes > _MAX_PATH_BYTES:
        raise InvalidNameError(f"not a file name: longer than {_MAX_PATH_BYTES} bytes", rule="P1")
    if any(character in "\\:" or not (character.isprintable() or ord(character) > _LAST_CONTROL) for character in text):
        raise InvalidNameError(f"not a file name: {text!r} contains an invalid character", rule="P1")
    for segment in text.split("/"):
        if segment in ("", ".", "..") or segment.lower() == ".git":
            raise InvalidNameError(f"not a file name: {text!r} has the segment {segment!r}", rule="P1")
        if len(segment.encode()) > _MAX_FILE_NAME_BYTES:
            raise InvalidNameError(f"not a file name: a segment is longer than {_MAX_FILE_NAME_BYTES} bytes", rule="P1")
    return text


def file_name(text: object) -> str:
    """Return ``text`` unchanged when it is one ordinary file name without a folder (rule P1), else raise."""
    name = relative_path(text)
    if "/" in name:
        raise InvalidNameError(f"not a plain file name: {name!r}", rule="P1")
    return name
