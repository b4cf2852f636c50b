"""Inspection: the contents of a checkpoint, local or remote, or of a stored model, from headers.

No weight is read. Headers of remote files come by HTTP Range.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from blobstore.errors import BlobStoreError, MissingFileError, NotFoundError
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.inspection.counting import InspectedFile, LogicalTensor, count_tensors, stored_tensor
from blobstore.inspection.inspection import Inspection, TargetKind
from blobstore.inspection.places import (
    ConfigFile,
    Files,
    InspectTarget,
    missing,
    parse_target,
    read_files,
    read_folder,
    read_indexed,
    some,
)
from blobstore.io.ranges import FileReader
from blobstore.source.addresses import OpenSource, folder_or_file, is_web_address, open_folder
from blobstore.source.folders import Folder, LocalFolder
from blobstore.source.shards import ShardIndex, is_index

if TYPE_CHECKING:
    from blobstore.names import ModelName
    from blobstore.store.ports import Readable


def inspect(
    target: str | os.PathLike[str],
    *,
    store: Readable | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    bucket_options: Mapping[str, str] | None = None,
) -> Inspection:
    """Return what a target holds: its files, headers, logical tensors and counts.

    Headers are read, and no weight.

    ``target`` is a .safetensors file, a folder, a shard index, a stored model's name, the http(s)
    address of a file, of an index or of a folder, ``hf://ORG/NAME[@REVISION][/PATH]``, or a
    bucket's ``s3://``, ``gs://`` or ``az://`` address. A path that exists wins
    over a stored model; a ``PathLike`` is always a path. ``store`` is where names are looked up:
    Ollama's default folder when it is None. ``token`` is sent to the target's origin
    and to no other. ``endpoint`` is the Hub's address, when it is another one. ``bucket_options``:
    as for `open_folder`.

    Raises: NotFoundError (nothing there, a shard that is missing), HeaderError, DocumentError and
    CorruptDataError (index and shards disagree, a damaged blob), UsageError (no address, no name),
    UnsupportedSourceError (a stored model without tensors), LimitExceededError, StorageError,
    RemoteError.
    """

    def stored() -> Readable:
        from blobstore.store.local.store import open_store

        return open_store() if store is None else store

    opening = partial(open_folder, token=token, endpoint=endpoint, bucket_options=bucket_options)
    return inspect_at(target, stored, opening)


def inspect_at(
    target: str | os.PathLike[str],
    store: Callable[[], Readable],
    open_source: OpenSource,
) -> Inspection:
    """Return what `inspect` returns; ``store`` is called when a name has to be looked up."""
    found = parse_target(target) if isinstance(target, str) else InspectTarget(os.fspath(target))
    if found.is_model:
        return inspect_model(found, store())
    with _opened(found, open_source) as folder:
        notes: list[str] = []
        if found.model is not None and _has_model(store, found.model):
            notes.append(
                f"this is the path ./{found.text}; the stored model of that name is {found.model}"
            )
        return _inspect_folder(folder, found.text, notes)


def _opened(target: InspectTarget, open_source: OpenSource) -> Folder:
    try:
        return open_folder(open_source(target.text))
    except MissingFileError as error:
        if error.path != target.text:  # what a snapshot in the Hub's cache lacks
            raise
        raise missing(target) from None


def _has_model(store: Callable[[], Readable], name: ModelName) -> bool:
    try:
        store().find(name)
    except BlobStoreError:
        return False
    return True


def _inspect_folder(folder: Folder, text: str, notes: list[str]) -> Inspection:
    """Return the contents of a folder, or of the file of it that was asked for."""
    if folder.file is not None:
        return _inspect_file(folder, folder.file, text, notes)
    name = text if isinstance(folder, LocalFolder) or is_web_address(text) else folder.name
    return folder_or_file(
        folder,
        lambda own: inspection_of(name, TargetKind.FOLDER, read_folder(own, notes), own, notes),
        lambda other, file: _inspect_file(other, file, text, notes),
    )


def _inspect_file(folder: Folder, file: str, text: str, notes: list[str]) -> Inspection:
    name = text if isinstance(folder, LocalFolder) else folder.place(file)  # a query may be secret
    if is_index(file):
        return inspection_of(name, TargetKind.INDEX, read_indexed(folder, file), folder, notes)
    files = Files((read_files(folder, [file]),))
    return inspection_of(name, TargetKind.FILE, files, folder, notes)


def inspection_of(
    name: str, kind: TargetKind, files: Files, folder: Folder, notes: list[str]
) -> Inspection:
    """Return the inspection of files of ``folder``; its config.json adds to what headers say.

    Raises: DocumentError when two files of a group hold a tensor of one name.
    """
    config = ConfigFile(folder, notes)
    tensors: list[LogicalTensor] = []
    for group in files.groups:
        tensors += count_tensors(group, config, notes)
    if files.index is not None:
        _note_size(files.index, sum(tensor.nbytes for tensor in tensors), notes)
    return Inspection(
        name=name,
        kind=kind,
        files=files.all,
        index=files.index.document if files.index is not None else None,
        tensors=tuple(tensors),
        metadata=_common([file.header.metadata for file in files.all], notes),
        notes=tuple(notes),
    )


def _note_size(index: ShardIndex, held: int, notes: list[str]) -> None:
    metadata = index.document.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(said) is int and said != held:
        notes.append(
            f"the index says that the tensors have {said:,} bytes (total_size); they have {held:,}"
        )


def inspect_model(target: InspectTarget, store: Readable) -> Inspection:
    """Return the contents of a stored model.

    Raises: NotFoundError (no such model, a missing blob); UnsupportedSourceError (no tensors: a
    GGUF model); CorruptDataError, StorageError: with ``model`` and ``blob``.
    """
    from blobstore.store.stored_model import StoredModel

    if target.model is None:
        raise missing(target)
    try:
        model = StoredModel.find(target.model, store)
    except NotFoundError as error:
        raise missing(target, error.hint) from None
    files: dict[str, InspectedFile] = {}
    tensors: list[LogicalTensor] = []
    for layer in model.weight_layers:
        with model.opened(layer) as (reader, header, weights):
            file_name = layer.name or str(layer.digest)
            if file_name in files:
                file_name = str(layer.digest)
            files[file_name] = InspectedFile(file_name, reader.name, reader.size, header)
        tensors += (stored_tensor(weight, file_name) for weight in weights)
    provenance = model.provenance
    sources = provenance.sources if provenance is not None else []
    notes: list[str] = []
    return Inspection(
        name=str(model.name),
        kind=TargetKind.MODEL,
        files=tuple(files.values()),
        index=None,
        tensors=tuple(tensors),
        metadata=_common([source.metadata for source in sources], notes),
        notes=tuple(notes),
    )


def _common(maps: Sequence[Mapping[str, str]], notes: list[str]) -> dict[str, str]:
    """Return the metadata on which files agree; ``notes`` gets a sentence on where they differ."""
    common: dict[str, str] = {}
    differing: dict[str, None] = {}
    for one in maps:
        for key, value in one.items():
            if common.setdefault(key, value) != value:
                differing[key] = None
    if differing:
        notes.append(
            f"metadata that differ from file to file are not shown: {some(list(differing))}"
        )
    return {key: value for key, value in common.items() if key not in differing}


def read_header(path: str | os.PathLike[str], *, token: str | None = None) -> Header:
    """Return the validated header of a .safetensors file: tensors, metadata, start of its data.

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
