"""A plan that travels: an `ImportPlan` as a JSON document, and back.

Written by ``plan -o plan.json``, carried out by ``import --plan plan.json``, on this machine or on
another one that sees the source. It gives the same bytes as an import from the source, and needs
neither its options nor, for a target, the weights to be measured again.

Rule P2: a strict JSON object of version 1 without unknown keys, at most 512 MiB. Files are named by
plain relative paths below ``source``. Sizes, dtypes and shapes fit each other, as a plan that was
made here has them: what would be read lies in its file, every blob has the size that its header
says. Before anything is made, each file of weights has the size, the time of its last write and the
tensors that it had, and each other file the size and the time.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blobstore.errors import (
    CorruptDataError,
    DocumentError,
    NotFoundError,
    UsageError,
    quoted,
)
from blobstore.formats import strictjson
from blobstore.formats.documents import FILE_MEDIA_TYPE, TENSOR_MEDIA_TYPE, ModelConfig
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.formats.safetensors.header import Header
from blobstore.importer.planning.document import (
    MAX_PLAN,
    RULE,
    PlanBlob,
    PlanCopy,
    PlanDocument,
    PlanFile,
    PlanInventory,
    PlanOutput,
    PlanQuantization,
    PlanTensor,
    PlanText,
    PlanWeight,
    parse_plan,
    state_of,
)
from blobstore.importer.planning.experts import check_names, check_readable
from blobstore.importer.planning.outputs import (
    ImportPlan,
    OutputTensor,
    PlannedBlob,
    PlannedCopy,
    PlannedFile,
    PlannedLayer,
)
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.policies.roles import MATRIX
from blobstore.importer.policies.rules import Importance
from blobstore.io.ranges import FileReader, Identity
from blobstore.kernels.scales import check_method
from blobstore.names import relative_path
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.source.files import KeptFile, OtherFiles
from blobstore.source.folders import Folder, Found
from blobstore.source.inventory import Inventory, read_files
from blobstore.source.weights import FP8_BLOCK, Form, SourceFile, SourceTensor, SourceWeight

_UNKNOWN = {"mtime_ns": None, "version": None}
_AGAIN = "Make the plan again."
_MEDIA_TYPE = re.compile(r"[!-~]{1,255}", re.ASCII)


def read_plan(
    path: str | os.PathLike[str],
    *,
    source: Source | None = None,
    open_source: OpenSource = open_folder,
) -> ImportPlan:
    """Return the plan in a file, to be carried out from its source, or from a copy at ``source``.

    ``open_source`` opens an address that the plan names: with a token, perhaps.

    Raises: DocumentError (rule P2); LimitExceededError; CorruptDataError when a file of the source
    is not the one that was planned; NotFoundError when one is missing; as `header_of`;
    StorageError.
    """
    return decode_plan(plan_bytes(path), path, source=source, open_source=open_source)


def plan_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a plan's file, one more than allowed of a larger one.

    Raises: NotFoundError; StorageError.
    """
    try:
        reader = FileReader(path)
    except NotFoundError as error:
        error.hint = "blobstore plan SOURCE -o PLAN writes a plan."
        raise
    with reader:
        return reader.read(0, min(reader.size, MAX_PLAN + 1))


def decode_plan(
    raw: bytes,
    path: str | os.PathLike[str],
    *,
    source: Source | None = None,
    open_source: OpenSource = open_folder,
) -> ImportPlan:
    """Return the plan in the bytes of a file, as `read_plan`; ``path`` is for messages."""
    what = f"the plan {os.fspath(path)}"
    value = strictjson.parse_object(raw, what, rule=RULE, limit=MAX_PLAN)
    document = parse_plan(value, what)
    try:
        return _plan(document, source, open_source)
    except (UsageError, ValueError, KeyError, IndexError) as error:
        raise DocumentError(
            f"{what}: {error} (rule {RULE})", rule=RULE, path=os.fspath(path)
        ) from None


def _plan(document: PlanDocument, elsewhere: Source | None, open_source: OpenSource) -> ImportPlan:
    copies = [layer for layer in document.layers if isinstance(layer, PlanCopy)]
    inventories = []
    for number, one in enumerate(document.inventories):
        named = elsewhere if number == 0 and elsewhere is not None else one.source
        kept = [copy.file for copy in copies if copy.inventory == number]
        try:
            source = open_source(named) if isinstance(named, str) else named
            inventories.append(_inventory(one, source, kept))
        except NotFoundError as error:
            error.hint = error.hint or "If the source was moved, name its new place."
            raise
    tensors = [list(inventory.tensors.values()) for inventory in inventories]
    weights = [_weight(one, tensors[one.inventory]) for one in document.weights]
    files = [{file.name: file for file in inventory.kept} for inventory in inventories]
    options = _options(document)
    layers = [_layer(layer, weights, files, options) for layer in document.layers]
    _check_blobs([layer for layer in layers if isinstance(layer, PlannedBlob)], options)
    _check_uses(document)
    return ImportPlan(
        tuple(inventories),
        options,
        tuple(layers),
        ModelConfig.parse(document.config.encode(), "the config of the plan"),
        document.coverage,
        document.relative_errors,
        tuple(document.notes),
    )


def _options(document: PlanDocument) -> ImportOptions:
    importance, quant = None, document.quant_type
    if document.importance is not None:
        vectors = {name: _decoded(text) for name, text in document.importance.items()}
        importance = Importance.parse(vectors)
    quant_type = None if quant is None else QuantType.parse(quant)
    return ImportOptions(quant_type=quant_type, importance=importance)


def _decoded(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4")


def _check_blobs(blobs: Sequence[PlannedBlob], options: ImportOptions) -> None:
    """Raise unless the model can be read again: the checks of a plan that is made here."""
    if not blobs:
        raise ValueError("it has no tensors")
    check_names(blobs)
    check_readable(blobs)
    if options.importance is not None:
        weighed = (blob for blob in blobs if blob.options.importance is not None)
        shapes = {source.name: source.shape for blob in weighed for source in blob.sources}
        options.importance.check(shapes)


def _check_uses(document: PlanDocument) -> None:
    """Raise ValueError when a weight is in two outputs, or a tensor in two weights."""
    blobs = (layer for layer in document.layers if isinstance(layer, PlanBlob))
    weights = [number for blob in blobs for one in blob.tensors for number in one.weights]
    tensors = [(one.inventory, one.parts[""]) for one in document.weights]
    for use, kind in ((weights, "weight"), (tensors, "tensor")):
        if len(set(use)) < len(use):
            raise ValueError(f"a {kind} is used twice")


def _weight(one: PlanWeight, tensors: Sequence[SourceTensor]) -> SourceWeight:
    form = Form(one.form)
    if "" not in one.parts:
        raise ValueError(f"the weight {quoted(one.name)} has no tensor")
    weight = SourceWeight(
        one.name,
        DType(one.dtype) if form is Form.PLAIN else DType.parse_float(one.dtype),
        tuple(one.shape),
        tensors[one.parts[""]],
        {suffix: tensors[number] for suffix, number in one.parts.items() if suffix},
        form,
        one.producer,
        _quantization(one.quantization),
        one.inverse_global_scale,
        one.transposed,
    )
    _check_weight(weight)
    return weight


def _quantization(given: PlanQuantization | None) -> Quantization | None:
    return None if given is None else Quantization(QuantType.parse(given.type), given.group_size)


def _layer(
    layer: PlanBlob | PlanText | PlanCopy,
    weights: Sequence[SourceWeight],
    files: Sequence[Mapping[str, KeptFile]],
    options: ImportOptions,
) -> PlannedLayer:
    match layer:
        case PlanText():
            is_other = layer.media_type not in (TENSOR_MEDIA_TYPE, FILE_MEDIA_TYPE)
            if not (is_other and _MEDIA_TYPE.fullmatch(layer.media_type)):
                raise ValueError(f"a text can't be of the type {quoted(layer.media_type)}")
            name = None if layer.name is None else relative_path(layer.name)
            data = base64.b64decode(layer.data, validate=True)
            return PlannedFile(name, data, layer.media_type)
        case PlanCopy():
            return PlannedCopy(relative_path(layer.name), files[layer.inventory][layer.file.path])
        case PlanBlob():
            own = replace(
                options,
                alignment=layer.alignment,
                method=check_method(layer.method),
                importance=options.importance if layer.is_weighed else None,
            )
            outputs = tuple(_output(one, weights) for one in layer.tensors)
            blob = PlannedBlob(layer.name, outputs, layer.metadata, own)
            if blob.size != layer.size:
                raise ValueError(
                    f"the blob {quoted(layer.name)} has {blob.size:,} bytes, not {layer.size:,}"
                )
            return blob


def _output(one: PlanOutput, weights: Sequence[SourceWeight]) -> OutputTensor:
    output = OutputTensor(
        one.name,
        tuple(weights[number] for number in one.weights),
        DType(one.dtype),
        tuple(one.shape),
        _quantization(one.quantization),
        None if one.global_scale is None else tuple(one.global_scale),
        one.copies_codes,
        one.kept,
    )
    _check_output(output)
    return output


def _check_weight(weight: SourceWeight) -> None:
    """Raise ValueError unless a weight's tensors are what its form, dtype and shape say."""
    if weight.transposed and len(weight.shape) < MATRIX:
        raise ValueError(f"the weight {quoted(weight.name)} has no two axes to swap")
    fits = {
        Form.PLAIN: _fits_plain,
        Form.BLOCK_FP8: _fits_block_fp8,
        Form.CODES: _fits_codes,
    }[weight.form]
    held = {suffix: (part.dtype, math.prod(part.shape)) for suffix, part in weight.parts.items()}
    if not fits(weight, held):
        raise ValueError(f"the tensors of the weight {quoted(weight.name)} do not fit it")


def _fits_plain(weight: SourceWeight, held: Mapping[str, tuple[DType, int]]) -> bool:
    shape = weight.tensor.shape
    if weight.transposed:
        shape = (*shape[:-2], *reversed(shape[-2:]))
    return held.keys() == {""} and held[""][0] is weight.dtype and weight.shape == shape


def _fits_block_fp8(weight: SourceWeight, held: Mapping[str, tuple[DType, int]]) -> bool:
    rows, cols = (1, 1, *weight.shape)[-2:]
    matrices = weight.elements // max(1, rows * cols)
    blocks = matrices * math.ceil(rows / FP8_BLOCK) * math.ceil(cols / FP8_BLOCK)
    if held.keys() != {"", ".scale"} or held[".scale"][1] != blocks:
        return False
    return held[""][0].bits == 8 and held[""][1] == weight.elements  # noqa: PLR2004


def _fits_codes(weight: SourceWeight, held: Mapping[str, tuple[DType, int]]) -> bool:
    """Return True when the parts have the bytes of those that are stored, or as many scales."""
    quantization = weight.quantization
    if quantization is None or not quantization.divides(weight.shape):
        return False
    parts = list(quantization.parts(weight.shape, weight.dtype))
    if held.keys() - {".global_scale"} != {part.suffix for part in parts}:
        return False
    for part in parts:
        dtype, count = held[part.suffix]
        same_count = part.suffix != "" and count == math.prod(part.shape)
        if dtype.nbytes((count,)) != part.nbytes and not same_count:
            return False
    return ".global_scale" not in held or held[".global_scale"][1] == 1


def _check_output(output: OutputTensor) -> None:
    """Raise ValueError unless an output's weights are what its dtype, shape and type say."""
    first, *others = output.sources
    stacked = (len(output.sources), *first.shape)
    shapes = [stacked] if others else [stacked, first.shape]
    kind, is_float = output.quantization, output.dtype.is_float
    must_hold = [
        output.shape in shapes,
        all((one.shape, one.transposed) == (first.shape, first.transposed) for one in others),
    ]
    if kind is not None:
        must_hold += [kind.divides(output.shape), is_float]
    elif any(one.form is not Form.PLAIN or one.dtype is not output.dtype for one in output.sources):
        must_hold += [is_float, first.dtype.is_float]
    if output.copies_codes:
        own = (Form.CODES, kind, output.dtype)
        must_hold += [(one.form, one.quantization, one.dtype) == own for one in output.sources]
    if output.global_scale is not None:
        is_nvfp4 = kind is not None and kind.quant_type is QuantType.NVFP4
        must_hold.append(is_nvfp4 and output.global_scale in ((), (1,)))
    if not all(must_hold):
        raise ValueError(f"the weights of the tensor {quoted(output.name)} do not fit it")


def _inventory(one: PlanInventory, source: Source, kept: Sequence[PlanFile]) -> Inventory:
    """Return the source as it is now. Raises: CorruptDataError unless it is what it was."""
    folder = open_folder(source)
    names = [relative_path(file.path) for file in one.files]
    if len(set(names)) < len(names):
        raise ValueError("a file is named twice")

    files, headers = [], []
    for file, (now, header) in zip(one.files, read_files(folder, names), strict=True):
        _check_unchanged(file, now.size, now.identity, now.path)
        files.append(now)
        headers.append(header)
    tensors = {
        tensor.name: _tensor(tensor, files[tensor.file], headers[tensor.file])
        for tensor in one.tensors
    }
    path = folder.name if folder.file is None else folder.place(folder.file)
    others = OtherFiles(tuple(_kept_file(folder, file) for file in kept))
    return Inventory(path, folder, tuple(files), tensors, {}, None, others)


def _tensor(tensor: PlanTensor, file: SourceFile, header: Header) -> SourceTensor:
    entry = header.tensors.get(tensor.name)
    there = entry and (entry.dtype.value, list(entry.shape), header.data_start + entry.begin)
    if entry is None or there != (tensor.dtype, tensor.shape, tensor.offset):
        raise CorruptDataError(
            f"{file.path}: the tensor {quoted(tensor.name)} is not what was planned",
            tensor=tensor.name,
            path=file.path,
            hint=_AGAIN,
        )
    return SourceTensor(tensor.name, file, entry.dtype, entry.shape, tensor.offset, entry.nbytes)


def _kept_file(folder: Folder, file: PlanFile) -> KeptFile:
    with folder.open(relative_path(file.path)) as reader:
        _check_unchanged(file, reader.size, reader.identity, reader.name)
        return KeptFile(file.path, folder, Found(reader.size, reader.identity))


def _check_unchanged(file: PlanFile, size: int, identity: Identity, place: str) -> None:
    planned = {"mtime_ns": file.mtime_ns, "version": file.version}
    if size != file.size or {**_UNKNOWN, **state_of(identity)} != planned:
        raise CorruptDataError(
            f"{place} was written to since the plan was made", path=place, hint=_AGAIN
        )
