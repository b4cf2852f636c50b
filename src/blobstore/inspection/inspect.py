"""Inspection: what is in a checkpoint, here or far away, and in a stored model, from headers.

No weight is read.

Web: what lies at an address, or in a repository of the Hub, as an inspection. Headers come by HTTP
Range.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.inspection.counting import InspectedFile
from blobstore.inspection.inspection import Inspection, TargetKind
from blobstore.inspection.places import (
    Files,
    LocalTarget,
    ModelTarget,
    WebTarget,
    is_address,
    parse_target,
    read_files,
    read_folder,
    read_indexed,
)
from blobstore.inspection.reading import inspect_model, inspect_path, inspection_of
from blobstore.io.budget import Budget
from blobstore.io.ranges import FileReader
from blobstore.source.folders import RemoteFolder, WebFolder, hub_folder
from blobstore.source.hub import HUB, HubTarget
from blobstore.source.shards import SUFFIX, is_index

if TYPE_CHECKING:
    from blobstore.io.http.reader import Remote
    from blobstore.store.ports import Home


def inspect_address(target: WebTarget | HubTarget, token: str | None, endpoint: str) -> Inspection:
    """Return what an address holds. Raises: as `blobstore.inspection.inspect.inspect`."""
    from blobstore.io.http.reader import Remote

    with Remote(token) as remote:
        if isinstance(target, HubTarget):
            return _hub(remote, target, endpoint, Budget(str(target)))
        return _web(remote, target, Budget(target.url.partition("?")[0]))


def _hub(remote: Remote, target: HubTarget, endpoint: str, budget: Budget) -> Inspection:
    root = hub_folder(remote, target.repository, target.revision, endpoint)
    path = PurePosixPath(target.path)
    if not path.name.endswith(SUFFIX) and not is_index(path.name):
        return _folder(str(target), WebFolder(_inner(remote, root, path), budget))
    return _named(str(target), WebFolder(_inner(remote, root, path.parent), budget), path.name)


def _inner(remote: Remote, folder: RemoteFolder, path: PurePosixPath) -> RemoteFolder:
    return RemoteFolder(remote, folder.url(str(path))) if path.parts else folder


def _named(name: str, folder: WebFolder, file: str) -> Inspection:
    notes: list[str] = []
    if is_index(file):
        return inspection_of(name, TargetKind.INDEX, read_indexed(folder, file), folder, notes)
    return inspection_of(name, TargetKind.FILE, Files((read_files(folder, [file]),)), folder, notes)


def _folder(name: str, folder: WebFolder) -> Inspection:
    notes: list[str] = []
    return inspection_of(name, TargetKind.FOLDER, read_folder(folder, notes), folder, notes)


def _web(remote: Remote, target: WebTarget, budget: Budget) -> Inspection:
    """Return what an address holds.

    One that does not end as a file's, and has nothing below it, may still be one.
    """
    last = unquote(target.path.rpartition("/")[2])
    if is_index(last):
        folder = WebFolder(RemoteFolder(remote, target.folder), budget)
        return _named(folder.place(last), folder, last)
    if last.endswith(SUFFIX) or target.has_query:
        return _file(remote, target, budget)
    try:
        return _folder(target.url, WebFolder(RemoteFolder(remote, target.url), budget))
    except NotFoundError as error:
        if error.rule is not None or not last:
            raise
        try:
            return _file(remote, target, budget)
        except BlobStoreError:
            raise error from None


def _file(remote: Remote, target: WebTarget, budget: Budget) -> Inspection:
    """Return what one file holds.

    Its address is asked for as it is: it may be signed, and spelt in its own way.
    """
    reader = remote.open(target.url, budget)
    name = unquote(target.path.rpartition("/")[2]) or reader.name
    file = InspectedFile(name, reader.name, reader.size, header_of(reader, budget))
    folder = WebFolder(RemoteFolder(remote, target.folder), budget)
    return inspection_of(reader.name, TargetKind.FILE, Files(((file,),)), folder, [])


def inspect(
    target: str | os.PathLike[str],
    *,
    store: Home | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> Inspection:
    """Return what a target holds: its files, headers, logical tensors and counts.

    Headers are read, and no weight.

    ``target`` is a .safetensors file, a folder, a shard index, a stored model's name, the http(s)
    address of a file, of an index or of a folder, or ``hf://ORG/NAME[@REVISION][/PATH]``. A path
    that exists wins over a stored model; a ``PathLike`` is always a path. ``store`` is where names
    are looked up: Ollama's default folder when it is None. ``token`` is sent to the target's origin
    and to no other. ``endpoint`` is the Hub's address, when it is another one.

    Raises: NotFoundError (nothing there, a shard that is missing), HeaderError, DocumentError and
    CorruptDataError (index and shards disagree, a damaged blob), UsageError (no address, no name),
    UnsupportedSourceError (a stored model without tensors), LimitExceededError, StorageError,
    RemoteError.
    """

    def stored() -> Home:
        from blobstore.store.local.store import open_store

        return open_store() if store is None else store

    return inspect_at(target, stored, token=token, endpoint=endpoint)


def inspect_at(
    target: str | os.PathLike[str],
    store: Callable[[], Home],
    *,
    token: str | None = None,
    endpoint: str | None = None,
) -> Inspection:
    """Return what `inspect` returns; ``store`` gives the store when a name has to be looked up in it."""
    found = (
        parse_target(target, endpoint or HUB)
        if isinstance(target, str)
        else LocalTarget(os.fspath(target), None)
    )
    with _collector_paused():
        if isinstance(found, ModelTarget):
            return inspect_model(found, store())
        if isinstance(found, LocalTarget):
            return inspect_path(found, store)

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

    ``path`` is a path, or the http(s) address of a file; ``token`` is sent to that origin and to no
    other.

    Raises: HeaderError with the rule that is broken, NotFoundError, StorageError,
    LimitExceededError; RemoteError and UsageError for an address.
    """
    if isinstance(path, str) and is_address(path):
        from blobstore.io.http.reader import Remote

        with Remote(token) as remote:
            return header_of(remote.open(path))
    with FileReader(path) as reader:
        return header_of(reader)
