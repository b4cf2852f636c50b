"""Inspection: what is in a checkpoint, here or far away, and in a stored model, from headers. No weight is read."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blobstore import safetensors
from blobstore.inspection.counting import FoundQuantization, LogicalTensor
from blobstore.inspection.files import InspectedFile
from blobstore.inspection.inspection import Inspection, TargetKind
from blobstore.inspection.reading import inspect_model, inspect_path
from blobstore.inspection.targets import LocalTarget, ModelTarget, is_address, parse_target
from blobstore.ranges import FileReader
from blobstore.safetensors import Header
from blobstore.source.hub import HUB

if TYPE_CHECKING:
    from blobstore.store import Store

__all__ = [
    "HUB",
    "FoundQuantization",
    "InspectedFile",
    "Inspection",
    "LogicalTensor",
    "TargetKind",
    "inspect",
    "inspect_at",
    "read_header",
]


def inspect(
    target: str | os.PathLike[str], *, store: Store | None = None, token: str | None = None, endpoint: str | None = None
) -> Inspection:
    """Return what a target holds: its files, headers, logical tensors and counts. Headers are read, and no weight.

    ``target`` is a .safetensors file, a folder, a shard index, a stored model's name, the http(s) address of a file, of an
    index or of a folder, or ``hf://ORG/NAME[@REVISION][/PATH]``. A path that exists wins over a stored model; a
    ``PathLike`` is always a path. ``store`` is where names are looked up: Ollama's default folder when it is None. ``token``
    is sent to the target's origin and to no other. ``endpoint`` is the Hub's address, when it is another one.

    Raises: NotFoundError (nothing there, a shard that is missing), HeaderError, DocumentError and CorruptDataError (index
    and shards disagree, a damaged blob), UsageError (no address, no name), UnsupportedSourceError (a stored model without
    tensors), LimitExceededError, StorageError, RemoteError.
    """

    def stored() -> Store:
        from blobstore.store import open_store

        return open_store() if store is None else store

    return inspect_at(target, stored, token=token, endpoint=endpoint)


def inspect_at(
    target: str | os.PathLike[str], store: Callable[[], Store], *, token: str | None = None, endpoint: str | None = None
) -> Inspection:
    """Return what `inspect` returns; ``store`` gives the store when a name has to be looked up in it."""
    found = parse_target(target, endpoint or HUB) if isinstance(target, str) else LocalTarget(os.fspath(target), None)
    with _collector_paused():
        if isinstance(found, ModelTarget):
            return inspect_model(found, store())
        if isinstance(found, LocalTarget):
            return inspect_path(found, store)
        from blobstore.inspection.web import inspect_address

        return inspect_address(found, token, endpoint or HUB)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector: it would walk the hundred thousands of new objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_header(path: str | os.PathLike[str], *, token: str | None = None) -> Header:
    """Return the validated header of a .safetensors file: its tensors, metadata, and where its data start.

    ``path`` is a path, or the http(s) address of a file; ``token`` is sent to that origin and to no other.

    Raises: HeaderError with the rule that is broken, NotFoundError, StorageError, LimitExceededError; RemoteError and
    UsageError for an address.
    """
    if isinstance(path, str) and is_address(path):
        from blobstore.remote import Remote

        with Remote(token) as remote:
            return safetensors.read_header(remote.open(path))
    with FileReader(path) as reader:
        return safetensors.read_header(reader)
