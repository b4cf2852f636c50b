"""Stored tensors: the logical tensors of a blob, read from its header. Pure.

A quantized tensor is stored as several arrays: ``NAME`` (U32 codes), ``NAME.scale``, for affine
types ``NAME.bias``, for double-scaled nvfp4 ``NAME.global_scale``. Its type is in the blob's
metadata: ``NAME.quant_type`` and ``NAME.group_size`` win over ``quant_type`` and ``group_size``;
without metadata it is inferred when the shapes allow only one answer, else it is that of the
model's config.json (docs/formats.md sections 3 and 7). ``NAME.transposed`` says that the last two
axes are swapped (section 3).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blobstore.errors import CorruptDataError, UnsupportedSourceError, UsageError, quoted
from blobstore.formats.checkpoint import QuantizationSettings
from blobstore.formats.dtypes import DType, Quantization, QuantType, parameters_of
from blobstore.formats.safetensors.header import Header, TensorEntry

Settings = Callable[[], QuantizationSettings | None]
"""Reads from config.json how MLX quantized the weights (`settings_of` in checkpoint.py)."""
SUFFIXES = ("", ".scale", ".bias", ".global_scale")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One logical tensor of a blob. What follows from its arrays is computed once.

    ``entries`` are its stored arrays by suffix, ``""`` being the weight. ``transposed``: the
    checkpoint's tensor has the last two axes the other way round. It is stored, and its `shape` is
    ``[..., out, in]``, so that groups run along the inputs.
    """

    KEYS = ("name", "dtype", "shape", "quant_type", "group_size", "size=nbytes")

    name: str
    entries: Mapping[str, TensorEntry]
    quantization: Quantization | None
    transposed: bool

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.type_text}, {list(self.shape)})"

    @property
    def dtype(self) -> DType:
        """The stored dtype of the weight: U32 for quantized codes."""
        return self.entries[""].dtype

    @property
    def quant_type(self) -> QuantType | None:
        """The quantized type, or None."""
        return None if self.quantization is None else self.quantization.quant_type

    @property
    def group_size(self) -> int | None:
        """Values that share a scale, or None."""
        return None if self.quantization is None else self.quantization.group_size

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape before packing: ``[..., rows, cols]``."""
        shape = self.entries[""].shape
        return shape if self.quantization is None else self.quantization.logical_shape(shape)

    @cached_property
    def value_dtype(self) -> DType | None:
        """The dtype of the values before they were quantized.

        None for the fp types, whose arrays do not say it.
        """
        if self.quantization is None:
            return self.dtype
        return self.entries[".scale"].dtype if self.quantization.quant_type.is_affine else None

    @property
    def has_global_scale(self) -> bool:
        """True for double-scaled nvfp4."""
        return ".global_scale" in self.entries

    @cached_property
    def parameters(self) -> int:
        """Number of weights, before packing."""
        return parameters_of(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Stored bytes, scales and biases included."""
        return sum(entry.nbytes for entry in self.entries.values())

    @cached_property
    def type_name(self) -> str:
        """The quantized type, else the dtype: what a person calls the tensor's type."""
        return str(self.quant_type or self.dtype)

    @cached_property
    def type_text(self) -> str:
        """The type with its group size, as people write it: ``int4/64``, or the dtype."""
        return str(self.quantization or self.dtype)


def weights_by_type(tensors: Iterable[Any]) -> Counter[str]:
    """Return the numbers of weights of objects with ``type_name`` and ``parameters``, by type."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.type_name] += tensor.parameters
    return weights


def bytes_by_type(tensors: Iterable[Any]) -> Counter[str]:
    """Return the bytes of objects with ``type_name`` and ``nbytes`` by type: int4, BF16."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.type_name.partition("/")[0]] += tensor.nbytes
    return sizes


def bits_per_weight(nbytes: int, parameters: int) -> float | None:
    """Return the bits of tensor data per weight, with scales and biases; None without weights."""
    return 8 * nbytes / parameters if parameters else None


class UnclearTypeError(CorruptDataError):
    """A tensor's arrays are whole, but its metadata name another type, or none where two fit.

    Ollama's importer writes both (fixtures/ollama-records): the first for the head of
    d_mlx_mixed_4_8, the second for d_mlx_int4, whose config.json is needed then.
    """


def stored_tensors(header: Header, settings: Settings = lambda: None) -> Iterator[StoredTensor]:
    """Yield the logical tensors of a blob, in stored order.

    ``settings`` are those of its model's config.json.

    Raises: CorruptDataError with ``tensor`` when a quantized tensor lacks a companion or one has
    the wrong dtype or shape, or its type can't be inferred; UnsupportedSourceError for a type that
    does not exist here; as ``settings``, when they are needed.
    """
    tensors, metadata = header.tensors, header.metadata
    if metadata:
        _check_described(tensors, metadata)
    items = tensors.items()
    scaled = {
        name: {one: tensors[name + one] for one in SUFFIXES if name + one in tensors}
        for name, entry in items
        if entry.dtype is DType.U32 and name + ".scale" in tensors
    }
    companions = {name + entry for name, entries in scaled.items() for entry in entries if entry}
    quantized = False
    for name, entry in sorted(items, key=lambda item: item[1].begin):
        if name in companions:
            continue
        entries, quantization, transposed = scaled.get(name) or {"": entry}, None, False
        if metadata or name in scaled:
            quantization = _quantization(name, entries, metadata, settings)
            quantized = quantized or quantization is not None
            transposed = f"{name}.transposed" in metadata
        tensor = StoredTensor(name, entries, quantization, transposed)
        if transposed:
            _check_transposed(tensor, metadata)
        yield tensor
    if "quant_type" in metadata and not quantized:
        raise CorruptDataError(
            f"the blob's type is {metadata['quant_type']}, but it holds no quantized tensor"
        )


def _check_described(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
    described = {key.removesuffix(".quant_type") for key in metadata if key.endswith(".quant_type")}
    if missing := sorted(described - tensors.keys()):
        raise CorruptDataError(
            f"the quantized tensor {quoted(missing[0])} is missing", tensor=missing[0]
        )


def _quantization(
    name: str, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], settings: Settings
) -> Quantization | None:
    prefix = f"{name}." if f"{name}.quant_type" in metadata else ""
    is_described = f"{prefix}quant_type" in metadata
    if entries[""].dtype is not DType.U32 or not (is_described or ".scale" in entries):
        if prefix:
            raise CorruptDataError(
                f"tensor {name!r} is {entries[''].dtype}, but its metadata call it quantized",
                tensor=name,
            )
        return None
    if ".scale" not in entries:
        raise CorruptDataError(
            f"the scale of the quantized tensor {name!r} is missing", tensor=name
        )
    if not is_described:
        return _infer(name, entries, settings)
    quantization = _quantization_in(name, metadata, prefix)
    if wrong := next(_faults(entries, quantization), None):
        kind = UnclearTypeError if _possible(entries) else CorruptDataError
        raise kind(f"tensor {name!r} of type {quantization}: {wrong}", tensor=name)
    return quantization


def _check_transposed(tensor: StoredTensor, metadata: Mapping[str, str]) -> None:
    is_matrix = tensor.quantization is not None and len(tensor.shape) > 1
    value = metadata[f"{tensor.name}.transposed"]
    if not (is_matrix and value == "true"):
        raise CorruptDataError(
            f"the metadata of tensor {tensor.name!r} contain transposed={value!r}: only a quantized"
            " matrix can be transposed, and only the value 'true' is defined",
            tensor=tensor.name,
        )


def _quantization_in(name: str, metadata: Mapping[str, str], prefix: str) -> Quantization:
    try:
        return Quantization.from_metadata(metadata, prefix)
    except UsageError as error:
        text, size = metadata[f"{prefix}quant_type"], metadata.get(f"{prefix}group_size", "")
        raise UnsupportedSourceError(
            f"tensor {name!r} is of type {text!r} in groups of {size!r}: {error}", tensor=name
        ) from None


def _infer(name: str, entries: Mapping[str, TensorEntry], settings: Settings) -> Quantization:
    """Return the only type that the shapes allow, else the one of those that config.json names."""
    possible = _possible(entries)
    if len(possible) > 1 and (named := _config_type(name, settings())) in possible:
        return named
    if len(possible) != 1:
        answers = ", ".join(map(str, possible)) or "none"
        kind = UnclearTypeError if possible else CorruptDataError
        raise kind(
            f"the type of {name!r} can't be inferred: its blob has no metadata, and its shapes fit "
            f"{answers}",
            tensor=name,
        )
    return possible[0]


def _possible(entries: Mapping[str, TensorEntry]) -> list[Quantization]:
    return [
        quantization
        for quant_type in QuantType
        if quant_type.is_affine == (".bias" in entries)
        for quantization in (Quantization(quant_type, size) for size in quant_type.group_sizes)
        if next(_faults(entries, quantization), None) is None
    ]


def _config_type(name: str, settings: QuantizationSettings | None) -> Quantization | None:
    """Return the type that config.json names for a weight; None for none or an unknown one."""
    module = settings.of(name.removesuffix(".weight")) if settings is not None else None
    try:
        return module.quantization if module is not None else None
    except UsageError:
        return None


def _faults(entries: Mapping[str, TensorEntry], quantization: Quantization) -> Iterator[str]:
    """Yield what is wrong with the stored arrays; only the first fault means something.

    The weight itself is U32, and every shape of it holds whole words of codes.
    """
    weight, scale, is_affine = entries[""], entries[".scale"], quantization.quant_type.is_affine
    if not weight.shape:
        yield "its weight has rank 0"
    if is_affine and not scale.dtype.is_float:
        yield f"its scale is {scale.dtype}"
    *lead, cols = quantization.logical_shape(weight.shape)
    if cols % quantization.group_size:
        yield f"rows of {cols} are not whole groups"
    dtype, groups = scale.dtype if is_affine else DType.U8, (*lead, cols // quantization.group_size)
    for suffix, entry in entries.items():
        if suffix == ".global_scale":
            is_scalar = entry.dtype is DType.F32 and math.prod(entry.shape) == 1
            if quantization.quant_type is not QuantType.NVFP4 or not is_scalar:
                yield f"its global scale is {entry.dtype} {list(entry.shape)}"
        elif suffix == ".bias" and not is_affine:
            yield "it has a bias"
        elif suffix and (entry.dtype is not dtype or entry.shape != groups):
            shown, what = f"{entry.dtype} {list(entry.shape)}", suffix[1:]
            yield f"its {what} is {shown}, not {dtype} {list(groups)}"
    if is_affine and ".bias" not in entries:
        yield "its bias is missing"
