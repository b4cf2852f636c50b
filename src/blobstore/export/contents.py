"""Checkpoints: the files of an export, decided from a model's headers and documents. Pure.

A model may hold two checkpoints: itself, and its draft model. No weight is read. JSON documents are
exported as they were stored, but config.json must not describe what the folder does not hold.

The Modelfile contains the layers of a manifest apart from weights and JSON documents. Each command
is read back by the importer's own parser before it counts: some texts can't be written in a
Modelfile, and these are left out with a note. Files of the source are exported byte for byte; a
file that the export makes itself gives way to one of the same name.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blobstore.errors import (
    InvalidNameError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
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
    read_weights,
    shard_index,
    split_into_shards,
)
from blobstore.export.texts import MADE_MODELFILE, NAME, modelfile, text_layers
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import (
    CONFIG_NAME,
    DRAFT_FOLDER,
    DRAFT_PREFIX,
    FILE_TYPE,
    FILE_TYPES,
    group_of,
    parse_config,
)
from blobstore.formats.documents import OWN_DOCUMENT, Provenance
from blobstore.formats.dtypes import FLOATS, DType
from blobstore.names import file_name, relative_path
from blobstore.source.files import MAX_INDEX, MAX_INDEX_VALUES
from blobstore.store.stored_model import BlobFile, StoredModel

MODELOPT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt says how it quantized a checkpoint; mlx-lm and vLLM read it."""

_CLAIMS = frozenset({"quantization", "quantization_config", "compression_config"})
_DTYPES = ("dtype", "torch_dtype")
_WORDS = {dtype: str(dtype.array_name) for dtype in FLOATS}


# safetensors 0.8.0, tensor.rs `Dtype` and `prepare`: the largest alignment first, so that every
# array is aligned.
_RANK = {dtype: rank for rank, dtype in enumerate(reversed(DType))}


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
    removed = sorted(_CLAIMS.intersection(itertools.chain(*sections)))
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
        for name, weight in checkpoint.weights.items()
        for array in _arrays(weight, name, origin, dequantize)
    ]
    return sorted(arrays, key=lambda array: origin.place(array.weight) or (len(origin.files), 0))


def _arrays(
    weight: Weight, name: str, origin: Origin, dequantize: DType | None
) -> Iterator[OutputArray]:
    experts = _experts(weight, name, origin) or [name]
    is_other = weight.quantization is not None or weight.dtype in CONVERTED - {dequantize}
    for number, expert in enumerate(experts):
        if dequantize is not None and is_other:
            yield _values(weight, expert, (number, len(experts)), origin, dequantize)
        else:
            yield from _copies(weight, expert, (number, len(experts)))


def _experts(weight: Weight, name: str, origin: Origin) -> list[str]:
    """Return the names of the experts that the import stacked into the tensor; else nothing."""
    group, shape = group_of(name), weight.shape
    if group is None or origin.place(name) is not None or len(shape) < 3:  # noqa: PLR2004  # [experts, rows, cols]
        return []
    names = [f"{group}.{number}{name[len(group) :]}" for number in range(shape[0])]
    return names if all(origin.place(expert) is not None for expert in names) else []


def _values(
    weight: Weight, name: str, share: tuple[int, int], origin: Origin, dtype: DType
) -> OutputArray:
    from blobstore.export.values import value_piece  # and NumPy, which copies do not need

    number, count = share
    unpacked = origin.unpacked(name) if weight.quantization is not None else None
    transposed = weight.transposed or unpacked is not None
    values = math.prod(weight.shape) // count
    piece = value_piece(weight, dtype, number * values, values, transposed=transposed)
    shape = weight.shape[1:] if count > 1 else weight.shape
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return OutputArray(unpacked or name, dtype, shape, (piece,), name)


def _copies(weight: Weight, name: str, share: tuple[int, int]) -> Iterator[OutputArray]:
    number, count = share
    for suffix, entry in weight.entries.items():
        offset, shape, nbytes = weight.blob.offset(entry), entry.shape, entry.nbytes
        if count > 1 and suffix != ".global_scale":  # that of a stack is that of each expert
            shape, nbytes = shape[1:], nbytes // count
            offset += number * nbytes
        piece = BlobRange(weight.blob, offset, nbytes)
        yield OutputArray(
            name + suffix,
            entry.dtype,
            shape,
            (piece,),
            name,
            weight.quantization if not suffix else None,
            weight.transposed and not suffix,
        )


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
        names = Counter(array.name for array in arrays)
        for array in arrays:
            if names[array.name] > 1:
                raise UnsupportedSourceError(
                    f"two arrays would have the name {quoted(array.name)}", tensor=array.weight
                )
    return (
        _plan_shards(checkpoint, arrays, options)
        + _plan_documents(checkpoint, options, quantization)
        + ExportPlan(notes=notes)
    )


def _plan_documents(
    checkpoint: Checkpoint, options: ExportOptions, quantization: Mapping[str, Any] | None
) -> ExportPlan:
    documents: list[PlannedDocument] = []
    notes: list[str] = []
    for name, stored in checkpoint.documents.items():
        path, data = checkpoint.folder + _check_name(file_name, name, "document"), stored
        if name == MODELOPT_CONFIG:
            notes.append(f"{path} was left out: it describes tensors that are stored differently")
            continue
        if name == CONFIG_NAME:
            data, removed = exported_config(stored, options.dequantize, quantization)
            if removed:
                notes.append(f"{path}: {' and '.join(removed)} of the source left out")
        documents.append(PlannedDocument(path, data))
    return ExportPlan(documents=tuple(documents), notes=tuple(notes))


def _check_name(check: Callable[[object], str], name: str, what: str) -> str:
    try:
        return check(name)
    except InvalidNameError as error:
        raise UnsupportedSourceError(
            f"a {what} of the model can't become a file: {error}", rule=error.rule
        ) from None


def _plan_shards(
    checkpoint: Checkpoint, arrays: Sequence[OutputArray], options: ExportOptions
) -> ExportPlan:
    by_name = {array.name: array for array in arrays}
    files = _split(checkpoint.origin, arrays, options)
    shards: list[PlannedShard] = []
    unequal: set[str] = set()
    for name, names in files.items():
        members = [by_name[name] for name in names]
        metadata, differing = _metadata(checkpoint, members, options)
        unequal |= differing
        shards.append(
            PlannedShard.of(
                checkpoint.folder + name, _in_order(checkpoint.origin, members), metadata
            )
        )
    notes = (
        f"the metadata {quoted(key)} differs between the source's files and was left out"
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
        files[_check_name(file_name, origin.files[place[0]].name, "document")].append(array.name)
    return files


def _in_order(origin: Origin, arrays: Sequence[OutputArray]) -> list[OutputArray]:
    """Return the arrays in the order of the source's file of the same ones, else the library's."""
    by_name = {array.name: array for array in arrays}
    place = origin.place(arrays[0].name)
    names = origin.files[place[0]].tensors if place is not None else ()
    if by_name.keys() != set(names):
        return sorted(arrays, key=lambda array: (_RANK[array.dtype], array.name.encode()))
    return [by_name[name] for name in names]


def _metadata(
    checkpoint: Checkpoint, arrays: Sequence[OutputArray], options: ExportOptions
) -> tuple[dict[str, str], set[str]]:
    if options.is_mlx:
        return {"format": "mlx"}, set()
    metadata, unequal = checkpoint.origin.metadata_of(array.weight for array in arrays)
    described = dict(_array_metadata(arrays))
    if described and checkpoint.file_type in FILE_TYPES:
        described[FILE_TYPE] = checkpoint.file_type
    # transformers 4 refuses a file whose metadata have no format (modeling_utils.py
    # `load_state_dict`).
    if not checkpoint.origin.files or (described and not metadata):
        metadata = {"format": "pt"}
    return {**metadata, **described}, unequal


def _array_metadata(arrays: Iterable[OutputArray]) -> Iterator[tuple[str, str]]:
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
        try:
            plan += plan_checkpoint(draft, options)
        except UnsupportedSourceError as error:
            if not options.is_mlx:
                raise
            # Ollama knows architectures of drafts that mlx-lm does not.
            plan += ExportPlan(notes=(f"the draft model was left out: {error}",))
    has_draft = any(shard.path.startswith(DRAFT_FOLDER) for shard in plan.shards)
    text, notes = modelfile(
        text_layers(model), model.config, main.documents.get(CONFIG_NAME), draft=has_draft
    )
    plan += ExportPlan(notes=tuple(notes))
    # A draft that is left out takes its files with it; without one the folder is like any other.
    files = [
        file
        for file in _stored_files(model)
        if has_draft or not drafts or not file.path.startswith(DRAFT_FOLDER)
    ]
    is_cast = options.dequantize is not None or (provenance is not None and provenance.is_cast)
    folders = [one.folder for one in (main, *drafts)]
    plan = with_files(plan, text, files, folders, same_weights=not is_cast)
    _check_paths(plan, model)
    return plan


def _checkpoints(
    model: StoredModel, provenance: Provenance | None, *, verify: bool
) -> list[Checkpoint]:
    config, weights = model.config, read_weights(model, verify=verify)
    documents = {
        layer.name: model.read(layer)
        for layer in model.manifest.json_layers
        if layer.name and layer.name != OWN_DOCUMENT
    }
    origin = Origin(provenance.sources if provenance is not None else ())
    main = Checkpoint(str(model.name), "", weights, documents, origin, config.file_type or "")
    own, of_draft = _partition(documents, DRAFT_FOLDER)
    if config.draft is None and not of_draft:
        return [main]
    prefix = (config.draft.tensor_prefix if config.draft is not None else None) or DRAFT_PREFIX
    kept, drafted = _partition(weights, prefix)
    recorded = provenance.draft if provenance is not None else None
    origin = Origin(recorded.sources if recorded is not None else ())
    return [
        replace(main, weights=kept, documents=own),
        Checkpoint(f"{model.name} (draft)", DRAFT_FOLDER, drafted, of_draft, origin),
    ]


def _partition(items: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the items whose names do not begin with ``prefix``, and the others without it."""
    rest = {name: item for name, item in items.items() if not name.startswith(prefix)}
    return rest, {
        name.removeprefix(prefix): item for name, item in items.items() if name not in rest
    }


def _stored_files(model: StoredModel) -> Iterator[CopiedBlob]:
    for layer in model.manifest.file_layers:
        if layer.name is not None:
            with model.naming(layer), model.home.blobs.open(layer) as reader:
                blob = BlobFile(layer.digest, reader.name, reader.identity)
                blob.require_file()
                yield CopiedBlob(layer.name, blob, reader.size)


def _check_paths(plan: ExportPlan, model: StoredModel) -> None:
    paths = [file.path for file in plan.files]
    folders = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    if twice := [path for path, count in Counter([*paths, *folders]).items() if count > 1]:
        raise UnsupportedSourceError(
            f"two files of {model.name} would have the name {quoted(min(twice))}",
            model=str(model.name),
        )


def with_files(
    plan: ExportPlan,
    text: bytes | None,
    files: Sequence[CopiedBlob],
    folders: Collection[str],
    *,
    same_weights: bool,
) -> ExportPlan:
    """Return the plan with the export's Modelfile ``text`` and the model's ``files`` in it.

    ``folders``: where checkpoints lie in the export, "" and perhaps "draft/": their shard indexes
    come back as they were while they are right, which can only be with ``same_weights``, those of
    the source. A Modelfile of the source keeps its name; ours gets one that no other file has, and
    is left out where the source has the same one. Raises: UnsupportedSourceError for a name that
    can't be a path; as `BlobFile.read`.
    """
    documents, copies, notes = list(plan.documents), [], list(plan.notes)
    for file in files:
        path = _check_name(relative_path, file.path, "file")
        if path not in {folder + INDEX_NAME for folder in folders}:
            copies.append(file)
            continue
        made = next((document for document in documents if document.path == path), None)
        if not isinstance(made, PlannedDocument):
            notes.append(f"{file.path} was left out: there is one file of weights")
        elif same_weights and _weight_map(file.blob.read()) == _weight_map(made.data):
            documents[documents.index(made)] = file
    if text is not None:
        theirs = {file.path: file.blob for file in files}
        others = (f"{MADE_MODELFILE}-{number}" for number in itertools.count(2))
        path = next(
            name
            for name in itertools.chain((NAME, MADE_MODELFILE), others)
            if name not in theirs or theirs[name].read() == text
        )
        if path not in theirs:
            documents.append(PlannedDocument(path, text))
        if path != NAME:
            notes.append(
                f"{NAME} is the source's; what the model has besides its weights is in"
                f" {quoted(path)}"
            )
    return replace(plan, documents=(*documents, *copies), notes=tuple(notes))


def _weight_map(raw: bytes) -> Any:
    return strictjson.parse_object(
        raw, INDEX_NAME, rule="I1", limit=MAX_INDEX, values=MAX_INDEX_VALUES
    ).get("weight_map")
