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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from blobstore.errors import CorruptDataError, DocumentError, UsageError, quoted
from blobstore.formats import strictjson
from blobstore.formats.coverage import Coverage, LeftOut, Tally
from blobstore.formats.documents import FILE_MEDIA_TYPE, TENSOR_MEDIA_TYPE, ModelConfig, validated
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.formats.safetensors.codec import header_of
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
    PlanTally,
    PlanTensor,
    PlanText,
    PlanWeight,
    state_of,
)
from blobstore.importer.planning.experts import check_names, check_readable
from blobstore.importer.planning.outputs import (
    ImportPlan,
    OutputTensor,
    PlannedBlob,
    PlannedCopy,
    PlannedFile,
)
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.policies.rules import Importance
from blobstore.io.ranges import FileReader, Identity
from blobstore.kernels.scales import check_method
from blobstore.names import relative_path
from blobstore.source.addresses import Source, open_folder
from blobstore.source.files import KeptFile, OtherFiles
from blobstore.source.folders import Folder, Found, SourceReader
from blobstore.source.inventory import Inventory, SourceFile, SourceTensor
from blobstore.source.weights import FP8_BLOCK, Form, SourceWeight

_UNKNOWN = {"mtime_ns": None, "version": None}
_MEDIA_TYPE = re.compile(r"[!-~]{1,255}", re.ASCII)


def read_plan(
    path: str | os.PathLike[str],
    *,
    source: Source | None = None,
    open_source: Callable[[str], Source | None] = open_folder,
) -> ImportPlan:
    """Return the plan in a file, to be carried out from its source, or from ``source``: the same files elsewhere.

    ``open_source`` opens an address that the plan names: with a token, perhaps.

    ``open_source`` opens an address that the plan names, with a token perhaps.

    Raises: DocumentError (rule P2); LimitExceededError; CorruptDataError when a file of the source
    is not the one that was planned; NotFoundError when one is missing; as `header_of`;
    StorageError.
    """
    with FileReader(path) as reader:
        raw = reader.read(0, min(reader.size, MAX_PLAN + 1))
    what = f"the plan {os.fspath(path)}"
    value = strictjson.parse_object(raw, what, rule=RULE, limit=MAX_PLAN)
    document = validated(PlanDocument, value, what, RULE)
    try:
        return _Reader(document, source, open_source).plan()
    except (UsageError, ValueError, KeyError, IndexError) as error:
        raise DocumentError(
            f"{what}: {error} (rule {RULE})", rule=RULE, path=os.fspath(path)
        ) from None


@dataclass
class _Reader:
    """Turns a document into a plan, and checks that it is one."""

    document: PlanDocument
    elsewhere: Source | None
    open_source: Callable[[str], Source | None]
    inventories: list[Inventory] = field(default_factory=list)
    weights: list[SourceWeight] = field(default_factory=list)
    _tensors: list[list[SourceTensor]] = field(default_factory=list)
    _copies: list[dict[str, KeptFile]] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    _parts: list[tuple[int, int]] = field(default_factory=list)

    def plan(self) -> ImportPlan:
        document = self.document
        kept = self._kept()
        for number, one in enumerate(document.inventories):
            elsewhere = self.elsewhere if number == 0 else None
            source = elsewhere or self.open_source(one.source) or one.source
            self.inventories.append(_inventory(one, source, kept[number]))
        self._tensors = [list(inventory.tensors.values()) for inventory in self.inventories]
        self._copies = [
            {file.name: file for file in inventory.kept} for inventory in self.inventories
        ]
        self.weights = [self._weight(one) for one in document.weights]
        options = self._options()
        layers = tuple(self._layer(layer, options) for layer in document.layers)
        self._check(layers, options)
        coverage = document.coverage
        return ImportPlan(
            tuple(self.inventories),
            options,
            layers,
            ModelConfig.parse(document.config.encode(), "the config of the plan"),
            Coverage(
                _tally(coverage.tensors),
                _tally(coverage.files),
                coverage.heads,
                tuple(coverage.kept_whole),
            ),
            document.relative_errors,
            tuple(document.notes),
        )

    def _check(
        self, layers: Sequence[PlannedBlob | PlannedFile | PlannedCopy], options: ImportOptions
    ) -> None:
        """Raise, as a plan that is made here is checked, unless the model can be read again."""
        blobs = [layer for layer in layers if isinstance(layer, PlannedBlob)]
        if not blobs:
            raise ValueError("it has no tensors")
        check_names(blobs)
        check_readable(blobs)
        if options.importance is not None:
            weighed = (blob for blob in blobs if blob.options.importance is not None)
            options.importance.check(
                {source.name: source.shape for blob in weighed for source in blob.sources}
            )
        for use, kind in ((self._used, "weight"), (self._parts, "tensor")):
            if len(set(use)) < len(use):
                raise ValueError(f"a {kind} is used twice")

    def _options(self) -> ImportOptions:
        given = self.document.importance
        importance = (
            None
            if given is None
            else Importance.parse({name: _decoded(text) for name, text in given.items()})
        )
        quant = self.document.quant_type
        return ImportOptions(
            quant_type=None if quant is None else QuantType.parse(quant), importance=importance
        )

    def _kept(self) -> list[list[PlanFile]]:
        copies = [layer for layer in self.document.layers if isinstance(layer, PlanCopy)]
        return [[copy.file for copy in copies if copy.inventory == number] for number in range(2)]

    def _weight(self, one: PlanWeight) -> SourceWeight:
        tensors = self._tensors[one.inventory]
        self._parts += (
            (one.inventory, number) for suffix, number in one.parts.items() if suffix == ""
        )
        weight = SourceWeight(
            one.name,
            DType.parse_float(one.dtype) if one.form != Form.PLAIN.value else DType(one.dtype),
            tuple(one.shape),
            {suffix: tensors[number] for suffix, number in one.parts.items()},
            Form(one.form),
            one.producer,
            _quantization(one.quantization),
            one.inverse_global_scale,
            one.transposed,
        )
        _check_weight(weight)
        return weight

    def _layer(
        self, layer: PlanBlob | PlanText | PlanCopy, options: ImportOptions
    ) -> PlannedBlob | PlannedFile | PlannedCopy:
        match layer:
            case PlanText():
                if layer.media_type in (
                    TENSOR_MEDIA_TYPE,
                    FILE_MEDIA_TYPE,
                ) or not _MEDIA_TYPE.fullmatch(layer.media_type):
                    raise ValueError(f"a text can't be of the type {quoted(layer.media_type)}")
                name = None if layer.name is None else relative_path(layer.name)
                return PlannedFile(
                    name, base64.b64decode(layer.data, validate=True), layer.media_type
                )
            case PlanCopy():
                file = self._copies[layer.inventory][layer.file.path]
                return PlannedCopy(relative_path(layer.name), file)
            case PlanBlob():
                importance = options.importance if layer.is_weighed else None
                method = check_method(layer.method)
                own = replace(
                    options, alignment=layer.alignment, method=method, importance=importance
                )
                outputs = tuple(map(self._output, layer.tensors))
                blob = PlannedBlob(layer.name, outputs, layer.metadata, own)
                if blob.size != layer.size:
                    raise ValueError(
                        f"the blob {quoted(layer.name)} has {blob.size:,} bytes, not {layer.size:,}"
                    )
                return blob

    def _output(self, one: PlanOutput) -> OutputTensor:
        self._used += one.weights
        output = OutputTensor(
            one.name,
            tuple(self.weights[number] for number in one.weights),
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
    held = {suffix: (part.dtype, math.prod(part.shape)) for suffix, part in weight.parts.items()}
    if weight.transposed and len(weight.shape) < 2:  # noqa: PLR2004  # rows and columns
        raise ValueError(f"the weight {quoted(weight.name)} has no two axes to swap")
    main = held.pop("", None)
    if main is None:
        raise ValueError(f"the weight {quoted(weight.name)} has no tensor")
    rows, cols = (1, 1, *weight.shape)[-2:]
    match weight.form:
        case Form.PLAIN:
            shape = weight.tensor.shape
            swapped = (*shape[:-2], *reversed(shape[-2:]))
            fits = (
                main[0] is weight.dtype
                and weight.shape == (swapped if weight.transposed else shape)
                and not held
            )
        case Form.BLOCK_FP8:
            blocks = (
                weight.elements
                // max(1, rows * cols)
                * math.ceil(rows / FP8_BLOCK)
                * math.ceil(cols / FP8_BLOCK)
            )
            scale = held.pop(".scale", (None, 0))
            fits = (
                main[0].bits == 8 and main[1] == weight.elements and scale[1] == blocks and not held  # noqa: PLR2004
            )
        case Form.CODES:
            quantization = weight.quantization
            fits = quantization is not None and quantization.divides(weight.shape)
            wanted = (
                list(quantization.parts(weight.shape, weight.dtype))
                if quantization is not None and fits
                else []
            )
            for part in wanted:
                dtype, count = main if part.suffix == "" else held.pop(part.suffix, (None, -1))
                nbytes = dtype.nbytes((count,)) if dtype is not None else -1
                fits = fits and (
                    nbytes == part.nbytes or (part.suffix != "" and count == math.prod(part.shape))
                )
            fits = fits and held.pop(".global_scale", (None, 1))[1] == 1 and not held
    if not fits:
        raise ValueError(f"the tensors of the weight {quoted(weight.name)} do not fit it")


def _check_output(output: OutputTensor) -> None:
    """Raise ValueError unless an output's weights are what its dtype, shape and type say."""
    first, *others = output.sources
    shapes = {source.shape for source in output.sources}
    stacked = (len(output.sources), *first.shape)
    fits = len(shapes) == 1 and output.shape == (
        stacked if others or output.shape != first.shape else first.shape
    )
    fits = fits and all(source.transposed == first.transposed for source in others)
    if output.quantization is not None:
        fits = fits and output.quantization.divides(output.shape) and output.dtype.is_float
    elif any(
        source.form is not Form.PLAIN or source.dtype is not output.dtype
        for source in output.sources
    ):
        fits = fits and output.dtype.is_float and first.dtype.is_float
    if output.copies_codes:
        same = all(
            source.form is Form.CODES and source.quantization == output.quantization
            for source in output.sources
        )
        fits = fits and same and all(source.dtype is output.dtype for source in output.sources)
    if output.global_scale is not None:
        is_nvfp4 = (
            output.quantization is not None and output.quantization.quant_type is QuantType.NVFP4
        )
        fits = fits and is_nvfp4 and output.global_scale in ((), (1,))
    if not fits:
        raise ValueError(f"the weights of the tensor {quoted(output.name)} do not fit it")


def _inventory(one: PlanInventory, source: Source, kept: Sequence[PlanFile]) -> Inventory:
    """Return the source as it is now. Raises: CorruptDataError unless it is what it was."""
    folder = open_folder(source)
    names = [relative_path(file.path) for file in one.files]
    if len(set(names)) < len(names):
        raise ValueError("a file is named twice")

    def read(reader: SourceReader) -> tuple[Identity, int, Header]:
        return reader.identity, reader.size, header_of(reader, folder.budget)

    files, headers = [], []
    with folder.sources(names, read) as found:
        for file, (identity, size, header) in zip(one.files, found, strict=True):
            place = folder.place(file.path)
            _check_unchanged(file, size, identity, place)
            tensor_names = tuple(header.tensors)
            files.append(
                SourceFile(folder, file.path, place, identity, size, tensor_names, header.metadata)
            )
            headers.append(header)
    tensors = {}
    for tensor in one.tensors:
        file_of, header = files[tensor.file], headers[tensor.file]
        tensors[tensor.name] = _tensor(tensor, file_of, header)
    path = folder.name if folder.file is None else folder.place(folder.file)
    others = OtherFiles(tuple(_kept_file(folder, file) for file in kept))
    return Inventory(path, folder, tuple(files), tensors, {}, None, others)


def _tensor(tensor: PlanTensor, file: SourceFile, header: Header) -> SourceTensor:
    entry = header.tensors.get(tensor.name)
    there = (
        (entry.dtype.value, list(entry.shape), header.data_start + entry.begin)
        if entry is not None
        else None
    )
    if entry is None or there != (tensor.dtype, tensor.shape, tensor.offset):
        message = f"{file.path}: the tensor {quoted(tensor.name)} is not what was planned"
        raise CorruptDataError(
            message, tensor=tensor.name, path=file.path, hint="Make the plan again."
        )
    return SourceTensor(tensor.name, file, entry.dtype, entry.shape, tensor.offset, entry.nbytes)


def _kept_file(folder: Folder, file: PlanFile) -> KeptFile:
    with folder.open(relative_path(file.path)) as reader:
        _check_unchanged(file, reader.size, reader.identity, reader.name)
        return KeptFile(file.path, folder, Found(reader.size, reader.identity))


def _check_unchanged(file: PlanFile, size: int, identity: Identity, place: str) -> None:
    planned = {"mtime_ns": file.mtime_ns, "version": file.version}
    if size != file.size or {**_UNKNOWN, **state_of(identity)} != planned:
        message = f"{place} was written to since the plan was made"
        raise CorruptDataError(message, path=place, hint="Make the plan again.")


def _quantization(given: PlanQuantization | None) -> Quantization | None:
    return None if given is None else Quantization(QuantType.parse(given.type), given.group_size)


def _tally(one: PlanTally) -> Tally:
    return Tally(
        one.source,
        one.stored,
        one.derived,
        tuple(LeftOut(left.name, left.reason, left.count) for left in one.left_out),
    )


def _decoded(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4")
