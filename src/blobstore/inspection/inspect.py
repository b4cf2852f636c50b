"""Inspection: what is in a checkpoint, here or far away, and in a stored model, from headers.

No weight is read. Headers that are far away come by HTTP Range.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blobstore.errors import BlobStoreError, MissingFileError, NotFoundError
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.inspection.inspection import Inspection, TargetKind
from blobstore.inspection.places import (
    Files,
    InspectTarget,
    missing,
    parse_target,
    read_files,
    read_folder,
    read_indexed,
)
from blobstore.inspection.reading import inspect_model, inspection_of
from blobstore.io.ranges import FileReader
from blobstore.source.addresses import is_web_address, open_folder
from blobstore.source.folders import Folder, LocalFolder
from blobstore.source.shards import is_index

if TYPE_CHECKING:
    from blobstore.names import ModelName
    from blobstore.store.ports import Home


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
    found = parse_target(target) if isinstance(target, str) else InspectTarget(os.fspath(target))
    with _collector_paused():
        if found.is_model:
            return inspect_model(found, store())
        with _opened(found, token, endpoint) as folder:
            notes: list[str] = []
            if found.model is not None and _has_model(store, found.model):
                notes.append(
                    f"this is the path ./{found.text}; the stored model of that name is {found.model}"
                )
            return _inspect_folder(folder, found.text, notes)


def _opened(target: InspectTarget, token: str | None, endpoint: str | None) -> Folder:
    try:
        return open_folder(target.text, token=token, endpoint=endpoint)
    except MissingFileError as error:
        if error.path != target.text:  # what a snapshot in the Hub's cache lacks
            raise
        raise missing(target) from None


def _has_model(store: Callable[[], Home], name: ModelName) -> bool:
    try:
        store().find(name)
    except BlobStoreError:
        return False
    return True


def _inspect_folder(folder: Folder, text: str, notes: list[str]) -> Inspection:
    """Return what a folder holds, or the file of it that was asked for.

    A web address that does not end as a file's, and has nothing below it, may still be one.
    """
    if folder.file is not None:
        return _inspect_file(folder, folder.file, text, notes)
    try:
        files = read_folder(folder, notes)
    except NotFoundError as error:
        other = folder.as_file()
        if error.rule is not None or other is None or other.file is None:
            raise
        try:
            return _inspect_file(other, other.file, text, notes)
        except BlobStoreError:
            raise error from None
    name = text if isinstance(folder, LocalFolder) or is_web_address(text) else folder.name
    return inspection_of(name, TargetKind.FOLDER, files, folder, notes)


def _inspect_file(folder: Folder, file: str, text: str, notes: list[str]) -> Inspection:
    name = text if isinstance(folder, LocalFolder) else folder.place(file)  # a query may be secret
    if is_index(file):
        return inspection_of(name, TargetKind.INDEX, read_indexed(folder, file), folder, notes)
    files = Files((read_files(folder, [file]),))
    return inspection_of(name, TargetKind.FILE, files, folder, notes)


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
    if not (isinstance(path, str) and is_web_address(path)):
        with FileReader(path) as reader:
            return header_of(reader)
    with open_folder(path, token=token) as folder:
        whole = folder if folder.file is not None else folder.as_file()
        if whole is None or whole.file is None:
            raise NotFoundError(f"{folder.name} is not the address of a file", path=folder.name)
        with whole.reading([whole.file], header_of) as headers:
            return next(headers)
