"""Reading: what lies at a path, or under a stored model's name, as an inspection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from blobstore.errors import (
    BlobStoreError,
    NotFoundError,
    UnsupportedSourceError,
)
from blobstore.formats.safetensors.codec import header_of
from blobstore.inspection.counting import InspectedFile, LogicalTensor, count_tensors, stored_tensor
from blobstore.inspection.inspection import Inspection, TargetKind
from blobstore.inspection.places import (
    ConfigFile,
    Files,
    InspectTarget,
    missing,
    some,
)
from blobstore.io.budget import Budget
from blobstore.source.folders import Folder
from blobstore.source.shards import ShardIndex
from blobstore.store.stored import Settings, StoredTensor, stored_tensors

if TYPE_CHECKING:
    from blobstore.formats.documents import Descriptor, Manifest
    from blobstore.names import ModelName
    from blobstore.store.ports import Home


def inspection_of(
    name: str, kind: TargetKind, files: Files, folder: Folder, notes: list[str]
) -> Inspection:
    """Return the inspection of files that were read from ``folder``, whose config.json says what headers don't.

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


def inspect_model(target: InspectTarget, store: Home) -> Inspection:
    """Return what a stored model holds.

    Raises: NotFoundError (no such model, a missing blob); UnsupportedSourceError (no tensors: a
    GGUF model); CorruptDataError, StorageError: with ``model`` and ``blob``.
    """
    if target.model is None:
        raise missing(target)
    try:
        name = store.find(target.model)
        manifest = store.manifests.read(name)
    except NotFoundError as error:
        raise missing(target, error.hint) from None
    if not manifest.tensor_layers:
        message = f"model {name} has no tensor blobs: it is of another kind, GGUF perhaps"
        raise UnsupportedSourceError(message, model=str(name))
    from blobstore.formats.checkpoint import settings_of

    settings, budget = settings_of(store.blobs.read, manifest), Budget.of_stored(f"model {name}")
    files: dict[str, InspectedFile] = {}
    tensors: list[LogicalTensor] = []
    for layer in manifest.tensor_layers:
        file, weights = _read_blob(store, name, layer, settings, budget)
        if file.name in files:
            file = replace(file, name=str(layer.digest))
        files[file.name] = file
        tensors += (stored_tensor(weight, file.name) for weight in weights)
    notes: list[str] = []
    return Inspection(
        name=str(name),
        kind=TargetKind.MODEL,
        files=tuple(files.values()),
        index=None,
        tensors=tuple(tensors),
        metadata=_common(_source_metadata(store, manifest), notes),
        notes=tuple(notes),
    )


def _read_blob(
    store: Home, model: ModelName, layer: Descriptor, settings: Settings, budget: Budget
) -> tuple[InspectedFile, list[StoredTensor]]:
    """Return a blob under its layer's name, and its tensors."""
    try:
        with store.blobs.open(layer) as reader:
            header = header_of(reader, budget)
            weights = list(stored_tensors(header, settings))
            return InspectedFile(
                layer.name or str(layer.digest), reader.name, reader.size, header
            ), weights
    except BlobStoreError as error:
        place = f"model {model}: blob {layer.digest} ({layer.name})"
        raise error.at(
            place, model=str(model), blob=str(layer.digest), tensor=layer.name
        ) from error


def _source_metadata(store: Home, manifest: Manifest) -> list[Mapping[str, str]]:
    """Return the metadata of the files that a model was imported from.

    None where nothing says them.
    """
    from blobstore.formats.provenance import OWN_DOCUMENT, Provenance

    layer = manifest.document(OWN_DOCUMENT)
    if layer is None:
        return []
    return [source.metadata for source in Provenance.parse(store.blobs.read(layer)).sources]


def _common(maps: Sequence[Mapping[str, str]], notes: list[str]) -> dict[str, str]:
    """Return the metadata of files where they do not contradict each other; ``notes`` says where they do."""
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
