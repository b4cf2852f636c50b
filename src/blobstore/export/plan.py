"""Plan: the files of an export, decided from a model's headers and documents. No weight is read.

Checkpoints: the files of one checkpoint folder. A model may hold two: itself, and its draft model.
No weight is read.

The JSON documents of an exported folder: as they were stored, but for a config.json that would
claim what is not there.

Pure.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.errors import (
    InvalidNameError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.export import texts
from blobstore.export.arrays import MappedWeights, mlx_arrays, output_arrays
from blobstore.export.options import ExportOptions, Form, Origin, origins_of
from blobstore.export.outputs import (
    INDEX_NAME,
    ExportPlan,
    OutputArray,
    PlannedDocument,
    PlannedShard,
    Split,
    check_names,
    in_library_order,
    split_into_shards,
)
from blobstore.export.texts import with_files
from blobstore.formats.checkpoint import CONFIG_NAME, SourceConfig, parse_config
from blobstore.formats.documents import (
    FILE_MEDIA_TYPE,
    JSON_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    TEXT_LAYERS,
    validated,
)
from blobstore.formats.dtypes import FLOATS, DType
from blobstore.formats.provenance import OWN_DOCUMENT, Provenance
from blobstore.importer.planning.notes import DRAFT_FOLDER
from blobstore.importer.planning.plan import DRAFT_PREFIX
from blobstore.model.parts import StoredModel, Weight
from blobstore.names import file_name
from blobstore.source.weights import FILE_TYPE, FILE_TYPES

MODELOPT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt says how it quantized a checkpoint; mlx-lm and vLLM read it."""

_CLAIMS = frozenset({"quantization", "quantization_config", "compression_config"})
_DTYPES = ("dtype", "torch_dtype")
_WORDS = {dtype: str(dtype.array_name) for dtype in FLOATS}


def exported_config(
    raw: bytes, dtype: DType | None, quantization: Mapping[str, Any] | None
) -> tuple[bytes, list[str]]:
    """Return the config.json of the export and the names of the settings that were taken out of it.

    What speaks of a quantization is removed, also from the configs in it; ``quantization`` is put
    in, and with ``dtype`` the dtype of the weights. When there is nothing to change the bytes are
    the stored ones. Raises: as `parse_config`.
    """
    config = parse_config(raw)
    changed = {key: _without_claims(value) for key, value in config.items() if key not in _CLAIMS}
    if dtype is not None:
        changed = _with_dtype(changed, _WORDS[dtype])
        if not any(key in changed for key in _DTYPES):
            changed["torch_dtype"] = _WORDS[dtype]
    removed = sorted(
        {
            key
            for part in (config, *config.values())
            if isinstance(part, dict)
            for key in part
            if key in _CLAIMS
        }
    )
    if quantization is not None:
        changed["quantization"] = dict(quantization)
    if changed == config and list(changed) == list(config):
        return raw, []
    return f"{json.dumps(changed, indent=2, ensure_ascii=False)}\n".encode(), removed


def _without_claims(value: Any) -> Any:
    return (
        {key: item for key, item in value.items() if key not in _CLAIMS}
        if isinstance(value, dict)
        else value
    )


def _with_dtype(config: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return the config with that dtype wherever it, or one in it, names one."""
    return {
        key: word
        if key in _DTYPES and isinstance(value, str)
        else _with_dtype(value, word)
        if isinstance(value, dict)
        else value
        for key, value in config.items()
    }


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint is made of: weights whose names begin with ``prefix``, its documents, what is known of its source.

    ``model`` is its name for messages, ``folder`` its place in the export: "", or "draft/".
    ``file_type``: the type that was asked for when it was imported, as its config blob has it.
    """

    model: str
    folder: str
    prefix: str
    weights: tuple[Weight, ...]
    documents: Mapping[str, bytes]
    origin: Origin
    file_type: str = ""


def plan_checkpoint(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Return the files of a checkpoint: shards, their index when there are several, documents.

    Raises: DocumentError for an invalid config.json; UnsupportedSourceError for a document whose
    name is not a file name, for mlx-lm without config.json, and as `mlx_arrays`; UsageError when
    the source's files are asked for and not known.
    """
    if options.form is Form.MLX:
        return _plan_for_mlx(checkpoint, options)
    arrays = output_arrays(
        checkpoint.weights, checkpoint.prefix, checkpoint.origin, options.dequantize
    )
    check_names(arrays)
    return _plan_shards(checkpoint, arrays, options) + _plan_documents(checkpoint, options, None)


def _plan_for_mlx(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    raw = checkpoint.documents.get(CONFIG_NAME)
    if raw is None:
        raise UnsupportedSourceError(
            f"model {checkpoint.model} has no config.json, which mlx-lm needs"
        )
    weights = MappedWeights(checkpoint.weights, checkpoint.prefix)
    arrays, quantization, notes = mlx_arrays(
        weights, parse_config(raw), checkpoint, options.dequantize
    )
    files = _plan_shards(checkpoint, arrays, options) + _plan_documents(
        checkpoint, options, quantization
    )
    return files + ExportPlan((), (), notes)


def _plan_documents(
    checkpoint: Checkpoint, options: ExportOptions, quantization: Mapping[str, Any] | None
) -> ExportPlan:
    documents: list[PlannedDocument] = []
    notes: list[str] = []
    for name, data in checkpoint.documents.items():
        path = checkpoint.folder + _file_name(name)
        if name == MODELOPT_CONFIG:
            notes.append(
                f"{path} was left out: it speaks of tensors that are stored in another way"
            )
            continue
        changed, removed = (
            exported_config(data, options.dequantize, quantization)
            if name == CONFIG_NAME
            else (data, [])
        )
        documents.append(PlannedDocument(path, changed))
        if removed:
            notes.append(f"{path}: {' and '.join(removed)} of the source left out")
    return ExportPlan((), tuple(documents), tuple(notes))


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
    split = _split(checkpoint.origin, arrays, options)
    shards: list[PlannedShard] = []
    unequal: set[str] = set()
    for name, names in split.files.items():
        members = [by_name[one] for one in names]
        metadata, differ = _metadata(checkpoint, members, options)
        unequal |= differ
        shards.append(
            PlannedShard.of(
                checkpoint.folder + name, _in_order(checkpoint.origin, members), metadata
            )
        )
    index = (
        (PlannedDocument(checkpoint.folder + INDEX_NAME, split.index),) if len(shards) > 1 else ()
    )
    notes = (
        f"the metadata {quoted(key)} differ between the source's files and were left out"
        for key in sorted(unequal)
    )
    return ExportPlan(tuple(shards), index, tuple(notes))


def _split(origin: Origin, arrays: Iterable[OutputArray], options: ExportOptions) -> Split:
    if options.max_shard_size is not None:
        return split_into_shards(
            {array.name: array.nbytes for array in arrays}, options.max_shard_size
        )
    if not origin.files:
        raise UsageError(
            "nothing is known of the files that the model was imported from",
            hint="Give max_shard_size=SIZE.",
        )
    files: dict[str, list[str]] = defaultdict(list)
    total = 0
    for array in arrays:  # they are in the order of the files
        place = origin.place(array.weight)
        if place is None:
            raise UnsupportedSourceError(
                f"no file of the source is known for {quoted(array.weight)}", tensor=array.weight
            )
        files[_file_name(origin.files[place[0]].name)].append(array.name)
        total += array.nbytes
    return Split(files, total)


def _in_order(origin: Origin, arrays: Sequence[OutputArray]) -> list[OutputArray]:
    """Return the arrays in the order of the source's file that holds the same ones.

    Without such a file in the library's.
    """
    by_name = {array.name: array for array in arrays}
    place = origin.place(arrays[0].name)
    names = origin.files[place[0]].tensors if place is not None else ()
    return (
        [by_name[name] for name in names]
        if by_name.keys() == set(names)
        else in_library_order(arrays)
    )


def _metadata(
    checkpoint: Checkpoint, arrays: Sequence[OutputArray], options: ExportOptions
) -> tuple[dict[str, str], set[str]]:
    """Return a file's metadata, and the keys of the source's that had to be left out."""
    if options.form is Form.MLX:
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
    """Yield the type, the group size and the layout of each quantized weight, as the metadata of a blob have them."""
    for array in arrays:
        if array.quantization is not None:
            yield f"{array.name}.quant_type", array.quantization.quant_type.value
            yield f"{array.name}.group_size", str(array.quantization.group_size)
        if array.transposed:
            yield f"{array.name}.transposed", "true"


def make_plan(model: StoredModel, options: ExportOptions) -> ExportPlan:
    """Return the files that an export of ``model`` writes.

    Raises: NotFoundError or CorruptDataError for a missing or damaged document; DocumentError
    (config.json, blobstore.json); UnsupportedSourceError for two files of one name; as
    `plan_checkpoint`.
    """
    documents = model.documents()
    own = documents.pop(OWN_DOCUMENT, None)
    provenance = Provenance.parse(own) if own is not None else None
    main, *drafts = _checkpoints(model, documents, provenance)
    plan = plan_checkpoint(main, options)
    for draft in drafts:
        plan += _plan_draft(draft, options)
    has_draft = any(shard.path.startswith(DRAFT_FOLDER) for shard in plan.shards)
    text, notes = texts.modelfile(
        list(_texts(model)), model.config, _architecture(main), draft=has_draft
    )
    plan += ExportPlan(
        (), (PlannedDocument(texts.NAME, text),) if text is not None else (), tuple(notes)
    )
    # A draft that is left out takes its files with it; without one the folder is like any other.
    files = [
        file
        for file in model.files()
        if has_draft or not drafts or not file.name.startswith(DRAFT_FOLDER)
    ]
    is_cast = options.dequantize is not None or (provenance is not None and provenance.is_cast)
    plan = with_files(
        plan, files, [one.folder for one in (main, *drafts)], same_weights=not is_cast
    )
    _check_paths(plan, model)
    return plan


def _checkpoints(
    model: StoredModel, documents: dict[str, bytes], provenance: Provenance | None
) -> list[Checkpoint]:
    """Return the model's checkpoint, and its draft's when there is one.

    Its documents are taken out of ``documents``.
    """
    config = model.config
    origin, draft_origin = (
        origins_of(provenance) if provenance is not None else (Origin(), Origin())
    )
    of_draft = {
        name: documents.pop(name) for name in list(documents) if name.startswith(DRAFT_FOLDER)
    }
    name = str(model.name)
    if config.draft is None and not of_draft:
        return [Checkpoint(name, "", "", model.weights, documents, origin, config.file_type or "")]
    prefix = (config.draft.tensor_prefix if config.draft is not None else None) or DRAFT_PREFIX
    drafted = tuple(weight for weight in model.weights if weight.name.startswith(prefix))
    own = tuple(weight for weight in model.weights if not weight.name.startswith(prefix))
    in_folder = {name.removeprefix(DRAFT_FOLDER): data for name, data in of_draft.items()}
    return [
        Checkpoint(name, "", "", own, documents, origin, config.file_type or ""),
        Checkpoint(f"{name} (draft)", DRAFT_FOLDER, prefix, drafted, in_folder, draft_origin),
    ]


def _plan_draft(draft: Checkpoint, options: ExportOptions) -> ExportPlan:
    try:
        return plan_checkpoint(draft, options)
    except UnsupportedSourceError as error:
        if options.form is not Form.MLX:
            raise
        # Ollama knows architectures of drafts that mlx-lm does not.
        return ExportPlan((), (), (f"the draft model was left out: {error}",))


def _architecture(checkpoint: Checkpoint) -> SourceConfig | None:
    if CONFIG_NAME not in checkpoint.documents:
        return None
    config = parse_config(checkpoint.documents[CONFIG_NAME])
    named: dict[str, object] = {
        key: config[key] for key in ("architectures", "model_type") if key in config
    }
    return validated(SourceConfig, named, CONFIG_NAME, "Q1")


def _texts(model: StoredModel) -> Iterator[texts.Layer]:
    """Yield what the manifest has beside tensors, documents and files.

    Of layers of unknown types only that.
    """
    for layer in model.manifest.layers:
        is_file = layer.media_type in (JSON_MEDIA_TYPE, FILE_MEDIA_TYPE) and layer.name is not None
        if layer.media_type != TENSOR_MEDIA_TYPE and not is_file:
            is_known = layer.media_type in TEXT_LAYERS
            yield texts.Layer(layer.media_type, model.store.blobs.read(layer) if is_known else b"")


def _check_paths(plan: ExportPlan, model: StoredModel) -> None:
    """Raise UnsupportedSourceError when two files would have one path, or one would be the other's folder."""
    paths: Sequence[str] = [file.path for file in plan.files]
    folders = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    taken: set[str] = set()
    for path in (*paths, *sorted(folders)):
        if path in taken:
            raise UnsupportedSourceError(
                f"two files of {model.name} would be called {quoted(path)}", model=str(model.name)
            )
        taken.add(path)
