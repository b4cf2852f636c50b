"""Inspection: the contents of a checkpoint, local or remote, or of a stored model, from headers.

No weight is read. Headers of remote files come by HTTP Range.

A path that exists wins over a stored model of that name: ``./NAME`` is always the path,
``NAME:TAG`` nearly always the model.

Of a folder's files the only set of weights counts (source/files.py): with a shard index, its
files; without one the single file, else its shards. Else every .safetensors file counts by itself.
An import takes fewer: an inspection refuses only missing and damaged files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from blobstore.errors import (
    BlobStoreError,
    InvalidNameError,
    MissingFileError,
    NotFoundError,
    quoted,
)
from blobstore.formats.checkpoint import CONFIG_NAME, SourceConfig
from blobstore.formats.safetensors.header import Header, common_metadata, header_of
from blobstore.formats.strictjson import MAX_CONFIG
from blobstore.inspection.inspection import (
    InspectedFile,
    Inspection,
    LogicalTensor,
    TargetKind,
    count_tensors,
    stored_tensor,
)
from blobstore.io.ranges import UNKNOWN_SIZE
from blobstore.names import ModelName, shortened
from blobstore.source.addresses import (
    FILE_ENDS,
    Source,
    folder_or_file,
    is_address,
    is_web_address,
    open_folder,
)
from blobstore.source.files import (
    INDEX_NAME,
    SINGLE_NAME,
    ShardCheck,
    ShardIndex,
    WeightSet,
    check_complete,
    folder_with_weights,
    gguf_sets,
    headers,
    is_index,
    missing_shard,
    other_weights,
    parts_of,
    read_index,
    weight_sets,
)
from blobstore.source.folders import SUFFIX, Folder, LocalFolder
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Readable

_MOST_NAMES = 3
Groups = Sequence[tuple[InspectedFile, ...]]
"""Files that count: no two files of a group have a tensor of one name."""


def inspect(
    target: str | os.PathLike[str],
    *,
    store: Readable | StorePlace = None,
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
    as `open_store`, the default store when it is None. ``token`` is sent to the target's origin
    and to no other. ``endpoint`` is the Hub's address, when it is another one. ``bucket_options``:
    as for `open_folder`.

    Raises: NotFoundError (nothing there, a shard that is missing), HeaderError, DocumentError and
    CorruptDataError (index and shards disagree, a damaged blob), UsageError (no address, no name),
    UnsupportedSourceError (a stored model without tensors), LimitExceededError, StorageError,
    RemoteError.
    """
    name = model_named(target) if isinstance(target, str) else None
    if name is None:
        folder = open_folder(target, token=token, endpoint=endpoint, bucket_options=bucket_options)
        return inspect_source(folder, os.fspath(target))
    return inspect_model(name, os.fspath(target), opened_store(store))


def model_named(text: str) -> ModelName | None:
    """Return the stored model that a text names; None for an address and for what is a path."""
    is_path = (
        text.startswith(("/", "./", "../", "~")) or text in (".", "..") or text.endswith(FILE_ENDS)
    )
    if is_path or is_address(text) or os.path.lexists(text):
        return None
    try:
        return ModelName.parse(text)
    except InvalidNameError:
        return None


def inspect_source(source: Source, text: str) -> Inspection:
    """Return the contents of a source that is named ``text``. Raises: as `inspect`."""
    with open_folder(source) as folder:

        def of_file(own: Folder, file: str) -> Inspection:
            # An address may have a secret in its query.
            name = text if isinstance(own, LocalFolder) else own.place(file)
            if is_index(file):
                return _inspect(name, TargetKind.INDEX, own, _read_indexed(own, file), [])
            return _inspect(
                name, TargetKind.FILE, own, ((read_files(own, parts_of(file)),), None), []
            )

        def of_all(own: Folder) -> Inspection:
            name = text if isinstance(own, LocalFolder) or is_web_address(text) else own.name
            notes: list[str] = []
            return _inspect(name, TargetKind.FOLDER, own, _read_folder(own, notes), notes)

        if folder.file is not None:
            return of_file(folder, folder.file)
        return folder_or_file(folder, of_all, of_file)


def _inspect(
    name: str,
    kind: TargetKind,
    folder: Folder,
    read: tuple[Groups, ShardIndex | None],
    notes: list[str],
) -> Inspection:
    """Return the inspection of files of ``folder``; its config.json adds to what headers say."""

    @cache
    def config() -> SourceConfig | None:
        try:
            return _read_config(folder)
        except NotFoundError:
            return None
        except BlobStoreError as error:
            notes.append(f"config.json is not used: {error.message}")
            return None

    groups, index = read
    files = tuple(file for group in groups for file in group)
    tensors: list[LogicalTensor] = []
    for group in groups:
        tensors += count_tensors(group, config, notes)
    return Inspection(
        name=name,
        kind=kind,
        files=files,
        index=index.document if index is not None else None,
        tensors=tuple(tensors),
        metadata=_common([file.header.metadata for file in files], notes),
        notes=tuple(notes),
    )


def _read_config(folder: Folder) -> SourceConfig:
    config = SourceConfig.parse(folder.read(CONFIG_NAME, MAX_CONFIG), folder.place(CONFIG_NAME))
    inner = (config.text_config or {}).get("quantization_config")
    if config.quantization_config is None and isinstance(inner, dict):
        # As some models of several modalities have it.
        config = replace(config, quantization_config=inner)
    _ = config.mlx_quantization  # raises here, and not in the midst of counting
    return config


def inspect_model(name: ModelName, text: str, store: Readable) -> Inspection:
    """Return the contents of a stored model that is named ``text``.

    Raises: NotFoundError (no such model, a missing blob); UnsupportedSourceError (no tensors: a
    GGUF model); CorruptDataError, StorageError: with ``model`` and ``blob``.
    """
    from blobstore.store.stored_model import StoredModel

    try:
        model = StoredModel.find(name, store)
    except NotFoundError as error:
        raise MissingFileError(
            f"no file or folder at {quoted(text)}, and no stored model {str(name)!r}",
            path=text,
            model=str(name),
            hint=error.hint,
        ) from None
    files: dict[str, InspectedFile] = {}
    tensors: list[LogicalTensor] = []
    read = [
        named
        for some, found in model.headers_of(model.weight_layers)
        for named in zip(some, found, strict=True)
    ]
    for layer, known in read:
        with model.open_layer(layer, header=known) as (reader, header, weights):
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
    common, differing = common_metadata(maps)
    if differing:
        notes.append(f"metadata that differs between files is not shown: {_some(differing)}")
    return common


def read_files(
    folder: Folder, names: Sequence[str], check: ShardCheck | None = None
) -> tuple[InspectedFile, ...]:
    """Return files of a folder with their headers, each checked before the next is waited for.

    Raises: NotFoundError, HeaderError, LimitExceededError, StorageError, RemoteError; as
    `ShardCheck.add`.
    """
    files = []
    with headers(folder, names) as parsed:
        for name, (reader, header) in zip(names, parsed, strict=True):
            if check is not None:
                check.add(reader.name, name, header.tensors.keys())
            size = None if reader.size == UNKNOWN_SIZE else reader.size
            files.append(InspectedFile(name, reader.name, size, header))
    return tuple(files)


def _read_folder(folder: Folder, notes: list[str]) -> tuple[Groups, ShardIndex | None]:
    """Return the files of a folder that count, and its index; ``notes`` gets the others.

    Raises: NotFoundError when the folder has none, or one is missing; as `read_files`;
    CorruptDataError and DocumentError when index and shards disagree.
    """
    names = folder.names()
    if names is None:  # a server
        try:
            return _read_indexed(folder, INDEX_NAME)
        except NotFoundError as error:
            if error.rule is not None:  # a shard is missing, and not the index
                raise
        return (read_files(folder, [SINGLE_NAME]),), None
    others = [name for name in names if name.endswith(SUFFIX)]
    if not others and (sets := gguf_sets(names)):
        return [read_files(folder, parts) for parts in sets], None
    if (found := _read_set(folder, names)) is not None:
        groups, index = found
        chosen = {file.name for group in groups for file in group}
        if left_out := [name for name in others if name not in chosen]:
            notes.append(f"not part of the checkpoint, not counted: {_some(left_out)}")
        return groups, index
    if not others:
        raise NotFoundError(
            f"no .safetensors or .gguf file in {folder.name}",
            path=folder.name,
            hint=_hint(folder, names),
        )
    distinct = _distinct(folder, others)
    if len(distinct) > 1:
        notes.append(
            f"no index and no model.safetensors: {len(distinct):,} separate files are counted"
        )
    if links := sorted({*others} - {*distinct}):
        notes.append(f"links to counted files, not counted again: {_some(links)}")
    return [(file,) for file in read_files(folder, distinct)], None


def _distinct(folder: Folder, names: Sequence[str]) -> list[str]:
    """Return the first name of each file; others on a disk may be links to it."""
    files: dict[object, str] = {}
    for name in names:
        key: object = name
        if not folder.is_remote:
            with suppress(OSError):  # opening it raises the error that says why
                status = os.stat(folder.place(name))  # noqa: PTH116  # a text, for errors
                key = status.st_dev, status.st_ino
        files.setdefault(key, name)
    return list(files.values())


def _read_set(folder: Folder, names: Sequence[str]) -> tuple[Groups, ShardIndex | None] | None:
    """Return the files of the weight set, and its index; None if the names form none or several.

    A single index is a set, whatever its name.
    """
    sets = weight_sets(names)
    only = sets[0] if len(sets) == 1 else WeightSet("")
    indexes = (
        [only.index]
        if only.index
        else [name for name in names if is_index(name) and SUFFIX in name]
    )
    if only.single and not only.index:
        return (read_files(folder, [only.single]),), None
    if len(indexes) == 1:
        return _read_indexed(folder, indexes[0])
    if not only.shards:
        return None
    check_complete(folder, only.shards)
    return (read_files(folder, only.shards, ShardCheck(None)),), None


def _read_indexed(folder: Folder, name: str) -> tuple[Groups, ShardIndex]:
    """Return the shards that an index names.

    Raises: NotFoundError (no index; with rule I1, a missing shard), DocumentError,
    CorruptDataError; as `read_files`.
    """
    index = read_index(folder, name)
    check = ShardCheck(index)
    try:
        files = read_files(folder, index.files, check)
    except NotFoundError as error:
        shard = next((shard for shard in index.files if folder.place(shard) == error.path), None)
        if shard is None:
            raise
        raise missing_shard(folder, name, shard) from error
    check.finish()
    return (files,), index


def _some(names: Sequence[str]) -> str:
    return shortened([*map(quoted, names)], _MOST_NAMES)


def _hint(folder: Folder, names: Sequence[str]) -> str | None:
    if other := other_weights(names):
        return f"{other} is neither safetensors nor GGUF."
    if (inner := folder_with_weights(folder)) is not None:
        return f"The folder {inner} has some."
    return None


def read_header(path: str | os.PathLike[str], *, token: str | None = None) -> Header:
    """Return the validated header of a .safetensors file: tensors, metadata, start of its data.

    ``path`` is a path, or the http(s) address of a file; ``token`` is sent to that origin and to no
    other.

    Raises: HeaderError with the rule that is broken, NotFoundError, StorageError,
    LimitExceededError; RemoteError and UsageError for an address.
    """
    with open_folder(path, token=token) as folder:
        whole = folder if folder.file is not None else folder.as_file()
        if whole is None or whole.file is None:
            raise NotFoundError(f"{folder.name} is not the address of a file", path=folder.name)
        with whole.read_each([whole.file], header_of) as headers:
            return next(headers)
