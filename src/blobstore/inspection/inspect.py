"""Inspection: the contents of a checkpoint, local or remote, or of a stored model, from headers.

No weight is read. Headers of remote files come by HTTP Range.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from blobstore.errors import BlobStoreError, MissingFileError, NotFoundError
from blobstore.formats.safetensors.header import Header, header_of
from blobstore.inspection.inspection import (
    InspectedFile,
    Inspection,
    LogicalTensor,
    TargetKind,
    count_tensors,
    stored_tensor,
)
from blobstore.io.ranges import FileReader
from blobstore.source.addresses import OpenSource, folder_or_file, is_web_address, open_folder
from blobstore.source.files import ShardIndex, is_index
from blobstore.source.folders import Folder, LocalFolder

if TYPE_CHECKING:
    from blobstore.names import ModelName
    from blobstore.store.ports import Readable


from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from blobstore.errors import (
    InvalidNameError,
    quoted,
)
from blobstore.formats.strictjson import MAX_CONFIG
from blobstore.io.budget import Budget
from blobstore.io.ranges import OpenReader
from blobstore.names import ModelName
from blobstore.source.addresses import is_address
from blobstore.source.files import (
    INDEX_NAME,
    SINGLE_NAME,
    ShardCheck,
    WeightSet,
    check_complete,
    folder_with_weights,
    missing_shard,
    other_weights,
    read_index,
    weight_sets,
)
from blobstore.source.folders import FIRST_READ, SUFFIX

if TYPE_CHECKING:
    from blobstore.formats.checkpoint import SourceConfig


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


_PATH_MARKS = ("/", "./", "../", "~")
_PATH_ENDS = (".safetensors", ".json")


@dataclass(frozen=True, slots=True)
class InspectTarget:
    """A text that names a path, an address or a stored model.

    ``model`` is the stored model that the text may name, or None; ``is_model``: no such path
    exists.
    """

    text: str
    model: ModelName | None = None
    is_model: bool = False


def parse_target(text: str) -> InspectTarget:
    """Return what ``text`` names; only the existence of a path is read."""
    if is_address(text):
        return InspectTarget(text)
    model = _model(text)
    return InspectTarget(text, model, is_model=model is not None and not os.path.lexists(text))


def _model(text: str) -> ModelName | None:
    """Return the model that a text may name; None if it can only be a path."""
    if text.startswith(_PATH_MARKS) or text in (".", ".."):
        return None
    try:
        return ModelName.parse(text)
    except InvalidNameError:
        return None


def missing(target: InspectTarget, near: str | None = None) -> NotFoundError:
    """Return the error for a target that is missing; ``near``: the store's hint about its name."""
    text, model = target.text, target.model
    if model is None or text.endswith(_PATH_ENDS):
        return MissingFileError(f"no file or folder at {quoted(text)}", path=text)
    return MissingFileError(
        f"no file or folder at {quoted(text)}, and no stored model {str(model)!r}",
        path=text,
        model=str(model),
        hint=" ".join(filter(None, (near, "A Hub repository is hf://ORG/NAME."))),
    )


_CONFIG_NAME = "config.json"
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Files:
    """The files that count, in groups: no two files of a group have a tensor of one name."""

    groups: tuple[tuple[InspectedFile, ...], ...]
    index: ShardIndex | None = None

    @property
    def all(self) -> tuple[InspectedFile, ...]:
        """All files."""
        return tuple(file for group in self.groups for file in group)


def read_files(
    folder: Folder, names: Sequence[str], check: ShardCheck | None = None
) -> tuple[InspectedFile, ...]:
    """Return files of a folder with their headers, each checked before the next is waited for.

    Raises: NotFoundError, HeaderError, LimitExceededError, StorageError, RemoteError; as
    `ShardCheck.add`.
    """
    files = []
    with folder.reading(names, partial(_read_file, budget=folder.budget)) as found:
        for name, (place, size, header) in zip(names, found, strict=True):
            if check is not None:
                check.add(place, name, header.tensors.keys())
            files.append(InspectedFile(name, place, size, header))
    return tuple(files)


def _read_file(reader: OpenReader, budget: Budget) -> tuple[str, int | None, Header]:
    return reader.name, reader.size, header_of(reader, budget, first_nbytes=FIRST_READ)


def read_folder(folder: Folder, notes: list[str]) -> Files:
    """Return the files of a folder that count; ``notes`` gets the others.

    Raises: NotFoundError when the folder has none, or one is missing; as `read_files`;
    CorruptDataError and DocumentError when index and shards disagree.
    """
    names = folder.names()
    if names is None:
        return _read_unlisted(folder)
    if (weights := _weights_among(names)) is not None:
        files = _read_set(folder, weights)
        _note_left_out(names, files, notes)
        return files
    others = [name for name in names if name.endswith(SUFFIX)]
    if not others:
        raise NotFoundError(
            f"no .safetensors file in {folder.name}", path=folder.name, hint=_hint(folder, names)
        )
    distinct = _distinct(folder, others)
    if len(distinct) > 1:
        notes.append(
            f"no index and no model.safetensors: {len(distinct):,} files are counted, each for"
            " itself"
        )
    if links := sorted({*others} - {*distinct}):
        notes.append(f"not counted, being links to files that are: {some(links)}")
    return Files(tuple((file,) for file in read_files(folder, distinct)))


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


def _weights_among(names: Sequence[str]) -> WeightSet | None:
    """Return the weight set, or None when the names form none or several.

    A single index is a set, whatever its name.
    """
    sets = weight_sets(names)
    if len(sets) == 1 and sets[0].target is not None:
        return sets[0]
    indexes = [name for name in names if is_index(name)]
    if len(indexes) == 1:
        return WeightSet(indexes[0], index=indexes[0])
    return sets[0] if len(sets) == 1 else None


def _read_set(folder: Folder, weights: WeightSet) -> Files:
    if weights.index is not None:
        return read_indexed(folder, weights.index)
    if weights.single is not None:
        return Files((read_files(folder, [weights.single]),))
    check_complete(folder, weights.shards)
    return Files((read_files(folder, weights.shards, ShardCheck(None)),))


def _read_unlisted(folder: Folder) -> Files:
    try:
        return read_indexed(folder, INDEX_NAME)
    except NotFoundError as error:
        if error.rule is not None:  # a shard is missing, and not the index
            raise
    try:
        return Files((read_files(folder, [SINGLE_NAME]),))
    except NotFoundError as error:
        raise NotFoundError(
            f"{folder.name} has neither {INDEX_NAME} nor {SINGLE_NAME}",
            path=folder.name,
            hint="Check the address. Servers do not list folders: give the address of a file of"
            " another name.",
        ) from error


def read_indexed(folder: Folder, name: str) -> Files:
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
    return Files((files,), index)


def _note_left_out(names: Sequence[str], files: Files, notes: list[str]) -> None:
    chosen = {file.name for file in files.all}
    left_out = [name for name in names if name.endswith(SUFFIX) and name not in chosen]
    if left_out:
        notes.append(
            f"not counted, for they are not among the checkpoint's files: {some(left_out)}"
        )


def some(names: Sequence[str]) -> str:
    """Return the first of some names for a note, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(quoted, names[:_MOST_NAMES])) + more


def _hint(folder: Folder, names: Sequence[str]) -> str | None:
    if other := other_weights(names):
        return f"{other} is not safetensors."
    if (inner := folder_with_weights(folder)) is not None:
        return f"The folder {inner} has some."
    return None


class ConfigFile:
    """The config.json of a folder, read when it is first asked for; ``notes`` gets its errors."""

    def __init__(self, folder: Folder, notes: list[str]) -> None:
        self._folder = folder
        self._notes = notes

    def __call__(self) -> SourceConfig | None:
        """Return the config; None when it is missing or can't be used."""
        return self._config

    @cached_property
    def _config(self) -> SourceConfig | None:
        try:
            return self._read()
        except NotFoundError:
            return None
        except BlobStoreError as error:
            self._notes.append(f"config.json is not used: {error.message}")
            return None

    def _read(self) -> SourceConfig:
        from blobstore.formats.checkpoint import SourceConfig

        raw = self._folder.read(_CONFIG_NAME, MAX_CONFIG)
        config = SourceConfig.parse(raw, self._folder.place(_CONFIG_NAME))
        text = config.text_config or {}
        inner = text.get("quantization_config")
        if config.quantization_config is None and isinstance(inner, dict):
            # As some models of several modalities have it.
            config = replace(config, quantization_config=inner)
        _ = config.mlx_quantization  # raises here, and not in the midst of counting
        return config
