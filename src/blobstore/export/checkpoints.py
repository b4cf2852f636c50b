"""Checkpoints: the files of one checkpoint folder. A model may hold two: itself, and its draft model. No weight is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.checkpoint import CONFIG_NAME, parse_config
from blobstore.errors import InvalidNameError, UnsupportedSourceError, UsageError, quoted
from blobstore.export.arrays import output_arrays
from blobstore.export.documents import MODELOPT_CONFIG, exported_config
from blobstore.export.mlx_folder import MappedWeights, mlx_arrays
from blobstore.export.options import ExportOptions, Form
from blobstore.export.origin import Origin
from blobstore.export.outputs import ExportPlan, OutputArray, PlannedDocument, PlannedShard, check_names, in_library_order
from blobstore.export.sharding import INDEX_NAME, Split, split_into_shards
from blobstore.export.stored_model import Weight
from blobstore.names import file_name
from blobstore.source.classify import FILE_TYPE, FILE_TYPES


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint is made of: weights whose names begin with ``prefix``, its documents, what is known of its source.

    ``model`` is its name for messages, ``folder`` its place in the export: "", or "draft/". ``file_type``: the type that was
    asked for when it was imported, as its config blob has it.
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

    Raises: DocumentError for an invalid config.json; UnsupportedSourceError for a document whose name is not a file name,
    for mlx-lm without config.json, and as `mlx_arrays`; UsageError when the source's files are asked for and not known.
    """
    if options.form is Form.MLX:
        return _plan_for_mlx(checkpoint, options)
    arrays = output_arrays(checkpoint.weights, checkpoint.prefix, checkpoint.origin, options.dequantize)
    check_names(arrays)
    return _plan_shards(checkpoint, arrays, options) + _plan_documents(checkpoint, options, None)


def _plan_for_mlx(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    raw = checkpoint.documents.get(CONFIG_NAME)
    if raw is None:
        raise UnsupportedSourceError(f"model {checkpoint.model} has no config.json, which mlx-lm needs")
    weights = MappedWeights(checkpoint.weights, checkpoint.prefix)
    arrays, quantization, notes = mlx_arrays(weights, parse_config(raw), checkpoint, options.dequantize)
    files = _plan_shards(checkpoint, arrays, options) + _plan_documents(checkpoint, options, quantization)
    return files + ExportPlan((), (), notes)


def _plan_documents(checkpoint: Checkpoint, options: ExportOptions, quantization: Mapping[str, Any] | None) -> ExportPlan:
    documents: list[PlannedDocument] = []
    notes: list[str] = []
    for name, data in checkpoint.documents.items():
        path = checkpoint.folder + _file_name(name)
        if name == MODELOPT_CONFIG:
            notes.append(f"{path} was left out: it speaks of tensors that are stored in another way")
            continue
        changed, removed = exported_config(data, options.dequantize, quantization) if name == CONFIG_NAME else (data, [])
        documents.append(PlannedDocument(path, changed))
        if removed:
            notes.append(f"{path}: {' and '.join(removed)} of the source left out")
    return ExportPlan((), tuple(documents), tuple(notes))


def _file_name(name: str) -> str:
    try:
        return file_name(name)
    except InvalidNameError as error:
        raise UnsupportedSourceError(f"a document of the model can't be a file: {error}", rule=error.rule) from None


def _plan_shards(checkpoint: Checkpoint, arrays: Sequence[OutputArray], options: ExportOptions) -> ExportPlan:
    by_name = {array.name: array for array in arrays}
    split = _split(checkpoint.origin, arrays, options)
    shards: list[PlannedShard] = []
    unequal: set[str] = set()
    for name, names in split.files.items():
        members = [by_name[one] for one in names]
        metadata, differ = _metadata(checkpoint, members, options)
        unequal |= differ
        shards.append(PlannedShard.of(checkpoint.folder + name, _in_order(checkpoint.origin, members), metadata))
    index = (PlannedDocument(checkpoint.folder + INDEX_NAME, split.index),) if len(shards) > 1 else ()
    notes = (f"the metadata {quoted(key)} differ between the source's files and were left out" for key in sorted(unequal))
    return ExportPlan(tuple(shards), index, tuple(notes))


def _split(origin: Origin, arrays: Iterable[OutputArray], options: ExportOptions) -> Split:
    if options.max_shard_size is not None:
        return split_into_shards({array.name: array.nbytes for array in arrays}, options.max_shard_size)
    if not origin.files:
        raise UsageError(
            "nothing is known of the files that the model was imported from", hint="Give --max-shard-size a size."
        )
    files: dict[str, list[str]] = defaultdict(list)
    total = 0
    for array in arrays:  # they are in the order of the files
        place = origin.place(array.weight)
        if place is None:
            raise UnsupportedSourceError(f"no file of the source is known for {quoted(array.weight)}", tensor=array.weight)
        files[_file_name(origin.files[place[0]].name)].append(array.name)
        total += array.nbytes
    return Split(files, total)


def _in_order(origin: Origin, arrays: Sequence[OutputArray]) -> list[OutputArray]:
    """Return the arrays in the order of the source's file that holds the same ones; without such a file in the library's."""
    by_name = {array.name: array for array in arrays}
    place = origin.place(arrays[0].name)
    names = origin.files[place[0]].tensors if place is not None else ()
    return [by_name[name] for name in names] if by_name.keys() == set(names) else in_library_order(arrays)


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
    # transformers 4 refuses a file whose metadata have no format (modeling_utils.py `load_state_dict`).
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
