"""Targets: what a person may ask to inspect, told from its text. Nothing is read but whether a path exists.

A path that exists wins over a stored model of that name: ``./NAME`` is always the path, ``NAME:TAG`` nearly always the
model. ``hf://`` addresses follow huggingface_hub's grammar (utils/_hf_uris.py at version 2.4.0):
``hf://[models/]ORG/NAME[@REVISION][/PATH]``, where a revision is one segment, its slashes as ``%2F``, or ``refs/pr/N`` or
``refs/convert/NAME``. Addresses of the Hub's pages (``https://huggingface.co/ORG/NAME/tree/main``) are the repositories
that they show.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from blobstore.errors import InvalidNameError, NotFoundError, UsageError, quoted
from blobstore.names import ModelName, relative_path

HUB = "https://huggingface.co"
MAIN = "main"

_HUB_SCHEME = "hf://"
_REVISION = re.compile(r"@(refs/(?:convert/[A-Za-z0-9_.-]+|pr/[0-9]+)|[^/]*)(?:/|$)", re.ASCII)
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")
_PAGES = ("tree", "blob", "resolve", "raw")
_PATH_MARKS = ("/", "./", "../", "~")
_PATH_ENDS = (".safetensors", ".json")


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """A path on this machine. ``model`` is the stored model that the same text would name, None where it can't be one."""

    path: str
    model: ModelName | None


@dataclass(frozen=True, slots=True)
class WebTarget:
    """An address of a file, of an index or of a folder."""

    url: str

    @property
    def path(self) -> str:
        """The address's path, without its query."""
        return urlsplit(self.url).path

    @property
    def folder(self) -> str:
        """The address of the folder that the file or index is in, without a query."""
        return urlsplit(self.url)._replace(query="", fragment="", path=self.path.rpartition("/")[0] + "/").geturl()

    @property
    def has_query(self) -> bool:
        """Whether it has a query, as signed addresses of single files have."""
        return bool(urlsplit(self.url).query)


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A repository of the Hub at a revision, or a file or folder in it; ``path`` is empty for the repository itself."""

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{_HUB_SCHEME}{self.repository}{revision}{'/' if self.path else ''}{self.path}"


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A stored model, as it was asked for and by its full name."""

    text: str
    name: ModelName


Target = LocalTarget | WebTarget | HubTarget | ModelTarget


def parse_target(text: str, endpoint: str = HUB) -> Target:
    """Return what ``text`` names; ``endpoint`` is where the Hub's pages are.

    Raises: UsageError for an address that is none, or of something else than a model; NotFoundError for a path that does
    not exist and can't be a model's name.
    """
    if text.startswith(_HUB_SCHEME):
        return _hub(text.removeprefix(_HUB_SCHEME), text)
    if is_address(text):
        return _hub_page(text, endpoint) or WebTarget(text)
    model = _model(text)
    if model is None or _exists(text):
        return LocalTarget(text, model)
    return ModelTarget(text, model)


def is_address(text: str) -> bool:
    """Return True for a web address."""
    return text.lower().startswith(("http://", "https://"))


def is_index(name: str) -> bool:
    """Return True for a shard index's file name; some have a variant in it: ``model.safetensors.index.fp16.json``."""
    return name.endswith(".json") and ".safetensors.index." in name


def _exists(path: str) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:  # a NUL
        return False


def _model(text: str) -> ModelName | None:
    """Return the model that a text may name; None for what can only be a path."""
    if text.startswith(_PATH_MARKS) or text in (".", ".."):
        return None
    try:
        return ModelName.parse(text)
    except InvalidNameError:
        return None


def missing(text: str, model: ModelName | None) -> NotFoundError:
    """Return the error for a text that names neither a path nor a stored model."""
    if model is None or text.endswith(_PATH_ENDS):
        return NotFoundError(f"no file or folder at {quoted(text)}", path=text)
    return NotFoundError(
        f"no file or folder at {quoted(text)}, and no stored model {str(model)!r}",
        path=text,
        model=str(model),
        hint="A Hub repository is hf://ORG/NAME.",
    )


def _hub(body: str, text: str) -> HubTarget:
    first, _, rest = body.partition("/")
    if first in _OTHER_KINDS:
        raise UsageError(f"{quoted(text)} is none of the Hub's models")
    if first == "models":
        body = rest
    before, at, _ = body.partition("@")
    if at and before.count("/") <= 1:
        match = _REVISION.match(body, len(before))
        if match is None or not match[1]:
            raise UsageError(f"{quoted(text)} has no revision after its @", hint="hf://ORG/NAME@REVISION/PATH")
        revision, path = unquote(match[1]), body[match.end() :]
        return HubTarget(before, revision, _path(path, text))
    parts = body.split("/", 2)
    return HubTarget("/".join(parts[:2]), MAIN, _path("/".join(parts[2:]), text))


def _path(path: str, text: str) -> str:
    path = path.rstrip("/")
    try:
        return relative_path(path) if path else ""
    except InvalidNameError as error:
        raise UsageError(f"{quoted(text)}: {error.message}", rule=error.rule) from None


def _hub_page(url: str, endpoint: str) -> HubTarget | None:
    """Return what a page of the Hub shows; None for every other address, a repository's raw files included."""
    parts, hub = urlsplit(url), urlsplit(endpoint)
    base = hub.path.rstrip("/") + "/"
    if (parts.scheme, parts.netloc.lower()) != (hub.scheme, hub.netloc.lower()) or not parts.path.startswith(base):
        return None
    owner, *more = (unquote(part) for part in parts.path.removeprefix(base).rstrip("/").split("/"))
    if not owner or not more or owner in (*_OTHER_KINDS, "api"):
        return None
    repository = f"{owner}/{more[0]}"
    if len(more) == 1:
        return HubTarget(repository, MAIN, "")
    if more[1] not in _PAGES or len(more) < 3:  # noqa: PLR2004
        return None
    return HubTarget(repository, more[2], _path("/".join(more[3:]), url))
