"""Targets: what a person may ask to inspect, told from its text. Nothing is read but whether a path exists.

A path that exists wins over a stored model of that name: ``./NAME`` is always the path, ``NAME:TAG`` nearly always the
model. Addresses of the Hub are in source/hub.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from blobstore.errors import InvalidNameError, NotFoundError, quoted
from blobstore.names import ModelName
from blobstore.source.hub import HUB, HUB_SCHEME, HubTarget, parse_hub, parse_hub_page

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
class ModelTarget:
    """A stored model, as it was asked for and by its full name."""

    text: str
    name: ModelName


Target = LocalTarget | WebTarget | HubTarget | ModelTarget


def parse_target(text: str, endpoint: str = HUB) -> Target:
    """Return what ``text`` names; ``endpoint`` is where the Hub's pages are.

    Raises: UsageError for an invalid address, or one of something else than a model; NotFoundError for a path that does
    not exist and can't be a model's name.
    """
    if text.startswith(HUB_SCHEME):
        return parse_hub(text)
    if is_address(text):
        return parse_hub_page(text, endpoint) or WebTarget(text)
    model = _model(text)
    if model is None or _exists(text):
        return LocalTarget(text, model)
    return ModelTarget(text, model)


def is_address(text: str) -> bool:
    """Return True for a web address."""
    return text.lower().startswith(("http://", "https://"))


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


def missing(text: str, model: ModelName | None, near: str | None = None) -> NotFoundError:
    """Return the error for a text that names neither a path nor a stored model; ``near``: the store's hint about it."""
    if model is None or text.endswith(_PATH_ENDS):
        return NotFoundError(f"no file or folder at {quoted(text)}", path=text)
    return NotFoundError(
        f"no file or folder at {quoted(text)}, and no stored model {str(model)!r}",
        path=text,
        model=str(model),
        hint=" ".join(filter(None, (near, "A Hub repository is hf://ORG/NAME."))),
    )
