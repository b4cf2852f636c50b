"""Plan: which blobs an import writes, and what is in each. A pure value made by pure functions; no weight is read.

The writer (write.py) carries a plan out and decides nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from blobstore import strictjson
from blobstore.documents import CONFIG_NAME, MAX_LAYERS, ModelConfig
from blobstore.dtypes import DType
from blobstore.errors import CorruptDataError, LimitExceededError, UnsupportedSourceError, UsageError
from blobstore.importer.architectures import policy_for
from blobstore.importer.capabilities import describe_model
from blobstore.importer.classify import classify
from blobstore.importer.experts import group_of, packed_order, projections, stacked_group_of
from blobstore.importer.inventory import Inventory, SourceTensor
from blobstore.importer.options import Experts, ImportOptions
from blobstore.importer.policy import Policy, is_expert
from blobstore.quant import Part, Quantization, QuantType
from blobstore.safetensors import Header, TensorEntry, encode_header, lay_out
from blobstore.stored import stored_tensors

OWN_DOCUMENT = "blobstore.json"
OWN_DOCUMENT_VERSION = 1


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of a blob: its sources (more than one are stacked), its dtype and shape before quantization."""

    name: str
    sources: tuple[SourceTensor, ...]
    dtype: DType
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    global_scale: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """The arrays that are stored for it, in stored order."""
        if self.quantization is None:
            return (Part("", self.dtype, self.shape),)
        return tuple(self.quantization.parts(self.shape, self.dtype, global_scale=self.global_scale))

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales and biases included."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parameters(self) -> int:
        """Number of weights, before packing."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class PlannedBlob:
    """One blob: its layer name, its tensors in stored order, its metadata."""

    name: str
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]
    options: ImportOptions

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The header entries of all stored arrays."""
        return lay_out(
            (tensor.name + part.suffix, part.dtype, part.shape) for tensor in self.tensors for part in tensor.parts
        )

    @property
    def data_size(self) -> int:
        """Bytes of the data region."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def header(self) -> bytes:
        """The bytes before the data: length prefix, canonical JSON, padding."""
        return encode_header(self.entries, self.metadata, self.options.header_alignment(self.data_size))

    @property
    def size(self) -> int:
        """Bytes of the whole blob."""
        return len(self.header) + self.data_size

    @property
    def weighed_sources(self) -> Iterator[SourceTensor]:
        """The sources of its quantized tensors: those that importance may be given for."""
        return (source for tensor in self.tensors if tensor.quantization is not None for source in tensor.sources)

    @property
    def source_bytes(self) -> int:
        """Bytes that are read to make it."""
        return sum(source.nbytes for tensor in self.tensors for source in tensor.sources)


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What an import will write: tensor blobs in manifest order, JSON documents by name, the config."""

    inventory: Inventory
    options: ImportOptions
    blobs: tuple[PlannedBlob, ...]
    documents: Mapping[str, bytes]
    config: ModelConfig

    @property
    def tensors(self) -> Iterator[OutputTensor]:
        """All output tensors, in stored order."""
        return (tensor for blob in self.blobs for tensor in blob.tensors)

    @property
    def parameters(self) -> int:
        """Number of weights of the model, before packing."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all blobs, documents and config included."""
        documents = sum(len(data) for data in self.documents.values())
        return sum(blob.size for blob in self.blobs) + documents + len(self.config.encode())

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data a parameter, scales and biases included, headers not."""
        return 8 * sum(blob.data_size for blob in self.blobs) / max(1, self.parameters)


def make_plan(inventory: Inventory, options: ImportOptions) -> ImportPlan:
    """Return the plan for importing ``inventory`` with ``options``.

    Raises: UnsupportedSourceError (a kind that is not imported, weights that can't be quantized, experts that don't fit
    together, two tensors of one name, no config.json in the ollama profile); UsageError when nothing can be quantized.
    """
    blobs = plan_blobs(inventory, options)
    documents = _documents(inventory, options)
    if len(blobs) + len(documents) > MAX_LAYERS:
        layers = len(blobs) + len(documents)
        raise LimitExceededError(f"limit exceeded: {inventory.path} needs {layers:,} layers, at most {MAX_LAYERS:,}")
    return ImportPlan(inventory, options, blobs, documents, describe_model(inventory, options))


def plan_blobs(inventory: Inventory, options: ImportOptions) -> tuple[PlannedBlob, ...]:
    """Return the tensor blobs of a plan. Raises: as `make_plan`, but for documents."""
    classify(inventory)
    policy = None
    if options.quant_type is not None:
        policy = policy_for(inventory.config, options.quant_type, options)
    planner = _plan_stacked if options.experts is Experts.STACKED else _plan_packed
    blobs = tuple(planner(inventory, options, policy))
    _check_names(blobs)
    _check_readable(blobs)
    _check_quantizable(blobs, options, policy)
    if options.importance is not None:
        options.importance.check({source.name: source.shape for blob in blobs for source in blob.weighed_sources})
    return blobs


def _plan_packed(inventory: Inventory, options: ImportOptions, policy: Policy | None) -> Iterator[PlannedBlob]:
    plain, groups = _split(inventory, group_of)
    yield from (_plan_single(tensor, options, policy) for tensor in plain)
    for group, members in sorted(groups.items()):
        projections(group, members)  # for its checks: gaps and unequal experts are errors in both forms
        tensors = [_output(tensor, options) for tensor in packed_order(group, members)]
        yield _blob(group, _quantize_group(tensors, options, policy), options)


def _quantize_group(tensors: list[OutputTensor], options: ImportOptions, policy: Policy | None) -> list[OutputTensor]:
    """Give a packed group one type: the asked one when groups divide the rows of every weight, else none."""
    asked = options.quant_type
    if policy is None or asked is None:
        return tensors
    weights = {tensor.name for tensor in tensors if is_expert(tensor.name) and policy.wants(tensor.name, tensor.shape)}
    if not all(options.fits(asked, tensor.shape) for tensor in tensors if tensor.name in weights):
        return tensors
    quantization = options.quantization(asked)
    return [_quantized(tensor, quantization, options) if tensor.name in weights else tensor for tensor in tensors]


def _plan_stacked(inventory: Inventory, options: ImportOptions, policy: Policy | None) -> Iterator[PlannedBlob]:
    plain, groups = _split(inventory, stacked_group_of)
    yield from (_plan_single(tensor, options, policy) for tensor in plain)
    for group, members in sorted(groups.items()):
        tensors = []
        for projection in projections(group, members):
            first = _output(projection.tensors[0], options)
            shape = (len(projection.tensors), *first.shape)
            stacked = replace(first, name=f"{group}.{projection.name}", sources=projection.tensors, shape=shape)
            tensors.append(_decide(stacked, options, policy))
        if len({tensor.quantization for tensor in tensors}) == 1:
            yield _blob(group, tensors, options)
        else:
            yield from (_blob(tensor.name, [tensor], options) for tensor in tensors)


def _split(
    inventory: Inventory, find_group: Callable[[str], str | None]
) -> tuple[list[SourceTensor], dict[str, list[SourceTensor]]]:
    plain: list[SourceTensor] = []
    groups: dict[str, list[SourceTensor]] = defaultdict(list)
    for tensor in inventory.tensors.values():
        group = find_group(tensor.name)
        (plain if group is None else groups[group]).append(tensor)
    return plain, groups


def _plan_single(tensor: SourceTensor, options: ImportOptions, policy: Policy | None) -> PlannedBlob:
    return _blob(tensor.name, [_decide(_output(tensor, options), options, policy)], options)


def _output(tensor: SourceTensor, options: ImportOptions) -> OutputTensor:
    casts = options.dtype is not None and (tensor.dtype.is_float or tensor.dtype is DType.F64)
    return OutputTensor(tensor.name, (tensor,), options.dtype if casts and options.dtype else tensor.dtype, tensor.shape)


def _decide(tensor: OutputTensor, options: ImportOptions, policy: Policy | None) -> OutputTensor:
    quantization = policy.quantization(tensor.name, tensor.shape) if policy is not None else None
    return tensor if quantization is None else _quantized(tensor, quantization, options)


def _quantized(tensor: OutputTensor, quantization: Quantization, options: ImportOptions) -> OutputTensor:
    if not tensor.dtype.is_float:
        raise UnsupportedSourceError(
            f"{tensor.name!r} is {tensor.dtype}: only BF16, F16 and F32 weights are quantized",
            tensor=tensor.name,
            hint="Import it without --quant, or convert it with --dtype."
            if tensor.dtype is DType.F64
            else "Import it without --quant.",
        )
    return replace(
        tensor,
        quantization=quantization,
        global_scale=options.global_scale and quantization.quant_type is QuantType.NVFP4,
    )


def _blob(name: str, tensors: Iterable[OutputTensor], options: ImportOptions) -> PlannedBlob:
    members = tuple(tensors)
    return PlannedBlob(name, members, _metadata(members), options)


def _metadata(tensors: tuple[OutputTensor, ...]) -> dict[str, str]:
    """Return the blob's metadata: its quantization when all quantized tensors agree, else each tensor's.

    The first form would claim an unquantized U32 tensor too, so beside one each tensor has its own.
    """
    quantized = {tensor.name: tensor.quantization for tensor in tensors if tensor.quantization is not None}
    plain_words = any(tensor.quantization is None and tensor.dtype is DType.U32 for tensor in tensors)
    if len(set(quantized.values())) == 1 and not plain_words:
        return _described(next(iter(quantized.values())), "")
    return {key: value for name, one in quantized.items() for key, value in _described(one, f"{name}.").items()}


def _described(quantization: Quantization, prefix: str) -> dict[str, str]:
    return {
        f"{prefix}quant_type": quantization.quant_type.value,
        f"{prefix}group_size": str(quantization.group_size),
    }


def _check_names(blobs: Iterable[PlannedBlob]) -> None:
    blob_names: set[str] = set()
    array_names: set[str] = set()
    for blob in blobs:
        if blob.name in blob_names:
            raise UnsupportedSourceError(f"two blobs would have the name {blob.name!r}", blob=blob.name)
        blob_names.add(blob.name)
        for name in (tensor.name + part.suffix for tensor in blob.tensors for part in tensor.parts):
            if name in array_names:
                raise UnsupportedSourceError(f"two tensors would have the name {name!r}", tensor=name)
            array_names.add(name)


def _check_readable(blobs: Iterable[PlannedBlob]) -> None:
    """Raise when a blob would be read back as other tensors: U32 values beside a ``.scale`` look like quantized codes."""
    for blob in blobs:
        planned = {tensor.name: tensor.quantization for tensor in blob.tensors}
        try:
            header = Header(blob.entries, blob.metadata, len(blob.header))
            header.check_limits(f"blob {blob.name[:80]}")
            read = {tensor.name: tensor.quantization for tensor in stored_tensors(header)}
        except CorruptDataError as error:
            raise UnsupportedSourceError(f"{blob.name!r} could not be read back: {error}", tensor=error.tensor) from None
        if read != planned:
            name = min(name for name in planned | read if planned.get(name) != read.get(name))
            raise UnsupportedSourceError(f"{name!r} would be read back as part of a quantized tensor", tensor=name)


def _check_quantizable(blobs: tuple[PlannedBlob, ...], options: ImportOptions, policy: Policy | None) -> None:
    """Raise when quantization was asked, some tensor is of the kind that gets it, and the groups divide none."""
    tensors = [tensor for blob in blobs for tensor in blob.tensors]
    if policy is None or options.quant_type is None or any(tensor.quantization is not None for tensor in tensors):
        return
    for tensor in tensors:
        quant_type = policy.base_type(tensor.name)
        if policy.wants(tensor.name, tensor.shape) and not options.fits(quant_type, tensor.shape):
            raise UsageError(
                f"nothing can be quantized to {options.quant_type}: the rows of {tensor.name!r} {list(tensor.shape)} are no "
                f"multiple of {options.row_divisor(quant_type)}",
                tensor=tensor.name,
            )


def _documents(inventory: Inventory, options: ImportOptions) -> dict[str, bytes]:
    if not options.profile.own_document:
        if CONFIG_NAME not in inventory.documents:
            raise UnsupportedSourceError(
                f"{inventory.path} has no config.json", hint="Only --profile default can do without."
            )
        return dict(inventory.documents)
    if OWN_DOCUMENT in inventory.documents:
        raise UnsupportedSourceError(
            f"{inventory.path} has a {OWN_DOCUMENT} of its own, which is our name", path=inventory.path
        )
    return {**inventory.documents, OWN_DOCUMENT: _own_document(inventory, options)}


def _own_document(inventory: Inventory, options: ImportOptions) -> bytes:
    """Return ``blobstore.json``: what is needed to repeat the import and to give the files back. No times, no paths."""
    quantization = options.quantization(options.quant_type) if options.quant_type is not None else None
    document = {
        "version": OWN_DOCUMENT_VERSION,
        "options": {
            "quant": quantization.quant_type.value if quantization else None,
            "group_size": quantization.group_size if quantization else None,
            "method": options.method if quantization else None,
            "importance": str(options.importance.digest) if options.importance else None,
            "global_scale": options.global_scale,
            "dtype": options.dtype.value if options.dtype else None,
            "profile": options.profile.name,
            "experts": options.experts.value,
            "alignment": options.alignment,
        },
        "sources": [
            {
                "name": file.name,
                "size": file.size,
                "metadata": dict(sorted(file.metadata.items())),
                "tensors": file.tensor_names,
            }
            for file in inventory.files
        ],
    }
    return strictjson.encode(document) + b"\n"
