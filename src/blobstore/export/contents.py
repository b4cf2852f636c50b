"""Checkpoints: the files of an export, decided from a model's headers and documents. Pure.

A model may hold two checkpoints: itself, and its draft model. No weight is read. JSON documents are
exported as they were stored, but config.json must not describe what the folder does not hold.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blobstore.errors import InvalidNameError, UnsupportedSourceError, UsageError, quoted
from blobstore.export import texts
from blobstore.export.planned_files import (
    INDEX_NAME,
    BlobRange,
    Checkpoint,
    CopiedBlob,
    ExportOptions,
    ExportPlan,
    Origin,
    OutputArray,
    PlannedDocument,
    PlannedShard,
    Weight,
    check_array_names,
    in_library_order,
    read_weights,
    shard_index,
    split_into_shards,
)
from blobstore.formats.checkpoint import (
    CONFIG_NAME,
    DRAFT_FOLDER,
    DRAFT_PREFIX,
    FILE_TYPE,
    FILE_TYPES,
    SourceConfig,
    group_of,
    parse_config,
)
from blobstore.formats.documents import (
    FILE_MEDIA_TYPE,
    JSON_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    TEXT_LAYERS,
)
from blobstore.formats.dtypes import FLOATS, DType
from blobstore.formats.provenance import OWN_DOCUMENT, Provenance
from blobstore.formats.strictdocument import validated
from blobstore.names import file_name
from blobstore.store.stored_model import BlobFile, StoredModel

MODELOPT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt says how it quantized a checkpoint; mlx-lm and vLLM read it."""

_CLAIMS = frozenset({"quantization", "quantization_config", "compression_config"})
_DTYPES = ("dtype", "torch_dtype")
_WORDS = {dtype: str(dtype.array_name) for dtype in FLOATS}


def exported_config(
    raw: bytes, dtype: DType | None, quantization: Mapping[str, Any] | None
) -> tuple[bytes, list[str]]:
    """Return the config.json of the export, and the names of the settings that were left out.

    Settings of a quantization are removed, also from the sections; ``quantization`` is added, and
    with ``dtype`` the dtype of the weights. Without a change the bytes are the stored ones.

    Raises: as `parse_config`.
    """
    config = parse_config(raw)
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    removed = sorted({key for section in sections for key in section if key in _CLAIMS})
    changed = _without_claims({key: _without_claims(value) for key, value in config.items()})
    if dtype is not None:
        changed = _with_dtype(changed, _WORDS[dtype])
        if not any(key in changed for key in _DTYPES):
            changed["torch_dtype"] = _WORDS[dtype]
    if quantization is not None:
        changed["quantization"] = dict(quantization)
    if changed == config and list(changed) == list(config):
        return raw, []
    return f"{json.dumps(changed, indent=2, ensure_ascii=False)}\n".encode(), removed


def _without_claims(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if key not in _CLAIMS}


def _with_dtype(config: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return the config with that dtype wherever it, or a section of it, names one."""
    changed = dict(config)
    for key, value in config.items():
        if key in _DTYPES and isinstance(value, str):
            changed[key] = word
        elif isinstance(value, dict):
            changed[key] = _with_dtype(value, word)
    return changed


CONVERTED = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64})
"""Stored dtypes that become the requested one when an export is dequantized."""


def output_arrays(checkpoint: Checkpoint, dequantize: DType | None) -> list[OutputArray]:
    """Return the arrays of a checkpoint, in the order of its source.

    With ``dequantize`` quantized weights and floats become values of that dtype, everything else
    stays. Tensors that the source's files do not name come last, in stored order.
    """
    origin = checkpoint.origin
    arrays = [
        array
        for name, weight in checkpoint.named.items()
        for array in _arrays(weight, name, origin, dequantize)
    ]
    last = (len(origin.files), 0)
    return sorted(arrays, key=lambda array: origin.place(array.weight) or last)


def _arrays(
    weight: Weight, name: str, origin: Origin, dequantize: DType | None
) -> Iterator[OutputArray]:
    experts = _experts(weight, name, origin) or [name]
    is_converted = dequantize is not None and (
        weight.stored.quantization is not None or weight.stored.dtype in CONVERTED - {dequantize}
    )
    for number, expert in enumerate(experts):
        if dequantize is not None and is_converted:
            yield _values(weight, expert, (number, len(experts)), origin, dequantize)
        else:
            yield from _copies(weight, expert, (number, len(experts)))


def _experts(weight: Weight, name: str, origin: Origin) -> list[str]:
    """Return the names of the experts that the import stacked into the tensor; else nothing."""
    group, shape = group_of(name), weight.stored.shape
    if group is None or origin.place(name) is not None or len(shape) < 3:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [f"{group}.{number}{name[len(group) :]}" for number in range(shape[0])]
    return names if all(origin.place(expert) is not None for expert in names) else []


def _values(
    weight: Weight, name: str, share: tuple[int, int], origin: Origin, dtype: DType
) -> OutputArray:
    from blobstore.export.values import value_piece  # and NumPy, which copies do not need

    number, count = share
    unpacked = origin.unpacked(name) if weight.stored.quantization is not None else None
    transposed = weight.stored.transposed or unpacked is not None
    values = math.prod(weight.stored.shape) // count
    piece = value_piece(weight, dtype, number * values, values, transposed=transposed)
    shape = weight.stored.shape[1:] if count > 1 else weight.stored.shape
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return OutputArray(unpacked or name, dtype, shape, (piece,), name)


def _copies(weight: Weight, name: str, share: tuple[int, int]) -> Iterator[OutputArray]:
    number, count = share
    for suffix, entry in weight.stored.entries.items():
        offset, shape, nbytes = weight.blob.offset(entry), entry.shape, entry.nbytes
        if count > 1 and suffix != ".global_scale":  # that of a stack is that of each expert
            shape, nbytes = shape[1:], nbytes // count
            offset += number * nbytes
        piece = BlobRange(weight.blob, offset, nbytes)
        array = OutputArray(name + suffix, entry.dtype, shape, (piece,), name)
        if not suffix:
            stored = weight.stored
            array = replace(array, quantization=stored.quantization, transposed=stored.transposed)
        yield array


def plan_checkpoint(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Return the files of a checkpoint: shards, their index when there are several, documents.

    Raises: DocumentError for an invalid config.json; UnsupportedSourceError for a document whose
    name is not a file name, for mlx-lm without config.json, and as `mlx_arrays`; UsageError when
    the source's files are asked for and not known.
    """
    quantization: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    if options.is_mlx:
        from blobstore.export.values import mlx_arrays  # and NumPy, which copies do not need

        raw = checkpoint.documents.get(CONFIG_NAME)
        if raw is None:
            raise UnsupportedSourceError(
                f"model {checkpoint.model} has no config.json, which mlx-lm needs"
            )
        arrays, quantization, notes = mlx_arrays(checkpoint, parse_config(raw), options.dequantize)
    else:
        arrays = output_arrays(checkpoint, options.dequantize)
        check_array_names(arrays)
    shards = _plan_shards(checkpoint, arrays, options)
    documents = _plan_documents(checkpoint, options, quantization)
    return shards + documents + ExportPlan(notes=notes)


def _plan_documents(
    checkpoint: Checkpoint, options: ExportOptions, quantization: Mapping[str, Any] | None
) -> ExportPlan:
    documents: list[PlannedDocument] = []
    notes: list[str] = []
    for name, stored in checkpoint.documents.items():
        path, data = checkpoint.folder + _file_name(name), stored
        if name == MODELOPT_CONFIG:
            notes.append(f"{path} was left out: it describes tensors that are stored otherwise")
            continue
        if name == CONFIG_NAME:
            data, removed = exported_config(stored, options.dequantize, quantization)
            if removed:
                notes.append(f"{path}: {' and '.join(removed)} of the source left out")
        documents.append(PlannedDocument(path, data))
    return ExportPlan(documents=tuple(documents), notes=tuple(notes))


def _file_name(name: str) -> str:
    try:
        return file_name(name)
    except InvalidNameError as error:
        raise UnsupportedSourceError(
            f"a document of the model can't be a file: {error}", rule=error.rule
        ) from None


def _plan_shards(
    checkpoint: Checkpoint, arrays: Sequence[OutputArray], options: ExportOptions
) -> ExportPlan:
    by_name = {array.name: array for array in arrays}
    files = _split(checkpoint.origin, arrays, options)
    shards: list[PlannedShard] = []
    unequal: set[str] = set()
    for name, names in files.items():
        members = [by_name[one] for one in names]
        metadata, differing = _metadata(checkpoint, members, options)
        unequal |= differing
        ordered = _in_order(checkpoint.origin, members)
        shards.append(PlannedShard.of(checkpoint.folder + name, ordered, metadata))
    notes = (
        f"the metadata {quoted(key)} differ between the source's files and were left out"
        for key in sorted(unequal)
    )
    plan = ExportPlan(tuple(shards), notes=tuple(notes))
    if len(shards) > 1:
        index = shard_index(files, sum(array.nbytes for array in arrays))
        plan += ExportPlan(documents=(PlannedDocument(checkpoint.folder + INDEX_NAME, index),))
    return plan


def _split(
    origin: Origin, arrays: Iterable[OutputArray], options: ExportOptions
) -> dict[str, list[str]]:
    if options.max_shard_size is not None:
        return split_into_shards(
            {array.name: array.nbytes for array in arrays}, options.max_shard_size
        )
    if not origin.files:
        raise UsageError(
            "the files that the model was imported from are not known",
            hint="Give max_shard_size=SIZE.",
        )
    files: dict[str, list[str]] = defaultdict(list)
    for array in arrays:  # they are in the order of the files
        place = origin.place(array.weight)
        if place is None:
            raise UnsupportedSourceError(
                f"no file of the source is known for {quoted(array.weight)}", tensor=array.weight
            )
        files[_file_name(origin.files[place[0]].name)].append(array.name)
    return files


def _in_order(origin: Origin, arrays: Sequence[OutputArray]) -> list[OutputArray]:
    """Return the arrays in the order of the source's file of the same ones, else the library's."""
    by_name = {array.name: array for array in arrays}
    place = origin.place(arrays[0].name)
    names = origin.files[place[0]].tensors if place is not None else ()
    if by_name.keys() != set(names):
        return in_library_order(arrays)
    return [by_name[name] for name in names]


def _metadata(
    checkpoint: Checkpoint, arrays: Sequence[OutputArray], options: ExportOptions
) -> tuple[dict[str, str], set[str]]:
    """Return a file's metadata, and the keys of the source's files that had to be left out."""
    if options.is_mlx:
        return {"format": "mlx"}, set()
    found, unequal = checkpoint.origin.metadata_of(array.weight for array in arrays)
    described = dict(_described(arrays))
    if described and checkpoint.file_type in FILE_TYPES:
        described[FILE_TYPE] = checkpoint.file_type
    # transformers 4 refuses a file whose metadata have no format (modeling_utils.py
    # `load_state_dict`).
    if not checkpoint.origin.files or (described and not found):
        found = {"format": "pt"}
    return {**found, **described}, unequal


def _described(arrays: Iterable[OutputArray]) -> Iterator[tuple[str, str]]:
    """Yield the type, group size and layout of each quantized weight, as in a blob's metadata."""
    for array in arrays:
        if array.quantization is not None:
            yield f"{array.name}.quant_type", array.quantization.quant_type.value
            yield f"{array.name}.group_size", str(array.quantization.group_size)
        if array.transposed:
            yield f"{array.name}.transposed", "true"


def plan_export(model: StoredModel, options: ExportOptions, *, verify: bool = False) -> ExportPlan:
    """Return the files that an export of ``model`` writes; ``verify`` hashes its blobs.

    Raises: NotFoundError or CorruptDataError for a missing or damaged blob; DocumentError
    (config.json, blobstore.json); UnsupportedSourceError for two files of one name; as
    `plan_checkpoint`.
    """
    provenance = model.provenance
    main, *drafts = _checkpoints(model, provenance, verify=verify)
    plan = plan_checkpoint(main, options)
    for draft in drafts:
        plan += _plan_draft(draft, options)
    has_draft = any(shard.path.startswith(DRAFT_FOLDER) for shard in plan.shards)
    text, notes = texts.modelfile(
        list(_text_layers(model)), model.config, _architecture(main), draft=has_draft
    )
    modelfile = (PlannedDocument(texts.NAME, text),) if text is not None else ()
    plan += ExportPlan(documents=modelfile, notes=tuple(notes))
    # A draft that is left out takes its files with it; without one the folder is like any other.
    files = [
        file
        for file in _stored_files(model)
        if has_draft or not drafts or not file.path.startswith(DRAFT_FOLDER)
    ]
    is_cast = options.dequantize is not None or (provenance is not None and provenance.is_cast)
    folders = [one.folder for one in (main, *drafts)]
    plan = texts.with_files(plan, files, folders, same_weights=not is_cast)
    _check_paths(plan, model)
    return plan


def _checkpoints(
    model: StoredModel, provenance: Provenance | None, *, verify: bool
) -> list[Checkpoint]:
    """Return the model's checkpoint, and that of its draft if it has one."""
    config, weights, documents = model.config, read_weights(model, verify=verify), {}
    for layer in model.manifest.json_layers:
        if layer.name and layer.name != OWN_DOCUMENT:
            documents[layer.name] = model.read(layer)
    origin = Origin(tuple(provenance.sources)) if provenance is not None else Origin()
    main = Checkpoint(str(model.name), "", "", weights, documents, origin, config.file_type or "")
    if config.draft is None and not any(name.startswith(DRAFT_FOLDER) for name in documents):
        return [main]
    prefix = (config.draft.tensor_prefix if config.draft is not None else None) or DRAFT_PREFIX
    recorded = provenance.draft if provenance is not None else None
    draft = Checkpoint(
        f"{model.name} (draft)",
        DRAFT_FOLDER,
        prefix,
        tuple(weight for weight in weights if weight.stored.name.startswith(prefix)),
        {
            name.removeprefix(DRAFT_FOLDER): data
            for name, data in documents.items()
            if name.startswith(DRAFT_FOLDER)
        },
        Origin(tuple(recorded.sources)) if recorded is not None else Origin(),
    )
    own = tuple(weight for weight in weights if not weight.stored.name.startswith(prefix))
    kept = {name: data for name, data in documents.items() if not name.startswith(DRAFT_FOLDER)}
    return [replace(main, weights=own, documents=kept), draft]


def _plan_draft(draft: Checkpoint, options: ExportOptions) -> ExportPlan:
    try:
        return plan_checkpoint(draft, options)
    except UnsupportedSourceError as error:
        if not options.is_mlx:
            raise
        # Ollama knows architectures of drafts that mlx-lm does not.
        return ExportPlan(notes=(f"the draft model was left out: {error}",))


def _architecture(checkpoint: Checkpoint) -> SourceConfig | None:
    if CONFIG_NAME not in checkpoint.documents:
        return None
    config = parse_config(checkpoint.documents[CONFIG_NAME])
    named: dict[str, object] = {
        key: config[key] for key in ("architectures", "model_type") if key in config
    }
    return validated(SourceConfig, named, CONFIG_NAME, "Q1")


def _text_layers(model: StoredModel) -> Iterator[texts.TextLayer]:
    """Yield the layers beside tensors, documents and files; unknown types without their bytes."""
    for layer in model.manifest.layers:
        is_file = layer.media_type in (JSON_MEDIA_TYPE, FILE_MEDIA_TYPE) and layer.name is not None
        if layer.media_type != TENSOR_MEDIA_TYPE and not is_file:
            is_known = layer.media_type in TEXT_LAYERS
            yield layer.media_type, model.read(layer) if is_known else b""


def _stored_files(model: StoredModel) -> Iterator[CopiedBlob]:
    """Yield the other files of the checkpoint, in manifest order; no bytes are read."""
    for layer in model.manifest.file_layers:
        if layer.name is not None:
            with model.located(layer), model.home.blobs.open(layer) as reader:
                blob = BlobFile(layer.digest, reader.name, reader.identity)
                blob.require_file()
                yield CopiedBlob(layer.name, blob, reader.size)


def _check_paths(plan: ExportPlan, model: StoredModel) -> None:
    """Raise UnsupportedSourceError when two files have one path, or one is the other's folder."""
    paths: Sequence[str] = [file.path for file in plan.files]
    folders = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    taken: set[str] = set()
    for path in (*paths, *sorted(folders)):
        if path in taken:
            raise UnsupportedSourceError(
                f"two files of {model.name} would be called {quoted(path)}", model=str(model.name)
            )
        taken.add(path)
