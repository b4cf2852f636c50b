"""StoredTensor: the logical tensors of a blob, read from its header. Pure.

A quantized tensor is stored as several arrays: ``NAME`` (U32 codes), ``NAME.scale``, for affine
types ``NAME.bias``, for double-scaled nvfp4 ``NAME.global_scale``. Its type is in the blob's
metadata: ``NAME.quant_type`` and ``NAME.group_size`` win over ``quant_type`` and ``group_size``;
without metadata it is inferred when the shapes allow only one answer, else it is that of the
model's config.json (docs/formats.md sections 3 and 7). ``NAME.transposed`` says that the last two
axes are swapped (section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.errors import (
    CorruptDataError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.dtypes import DType, parameters_of
from blobstore.formats.quant import Part, Quantization, QuantType
from blobstore.formats.safetensors.header import Header, TensorEntry

if TYPE_CHECKING:  # pydantic is loaded when a store is opened
    from blobstore.formats.checkpoint import QuantizationSettings

Settings = Callable[[], "QuantizationSettings | None"]
"""Reads how a model's config.json says that MLX quantized its weights (checkpoint.py `settings_of`), when that is needed."""
SUFFIXES = ("", ".scale", ".bias", ".global_scale")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One logical tensor of a blob: ``entries`` are its stored arrays by suffix, ``""`` being the weight.

    ``transposed``: the checkpoint's tensor has the last two axes the other way round. It is stored,
    and its `shape` is ``[..., out, in]``, so that groups run along the inputs.
    """

    name: str
    entries: Mapping[str, TensorEntry]
    quantization: Quantization | None
    transposed: bool = False

    @property
    def dtype(self) -> DType:
        """The stored dtype of the weight: U32 for quantized codes."""
        return self.entries[""].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before packing."""
        shape = self.entries[""].shape
        return shape if self.quantization is None else self.quantization.logical_shape(shape)

    @property
    def value_dtype(self) -> DType | None:
        """The dtype of the values before they were quantized; None for the fp types, whose arrays do not tell."""
        if self.quantization is None:
            return self.dtype
        return self.entries[".scale"].dtype if self.quantization.quant_type.is_affine else None

    @property
    def parameters(self) -> int:
        """Number of weights, before packing."""
        return parameters_of(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales and biases included."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def type_name(self) -> str:
        """The quantized type, else the dtype: what a person calls the tensor's type."""
        return str(self.quantization.quant_type if self.quantization is not None else self.dtype)


def _no_settings() -> None:
    """Return None: config.json is missing."""


def stored_tensors(header: Header, settings: Settings = _no_settings) -> Iterator[StoredTensor]:
    """Yield the logical tensors of a blob, in stored order; ``settings`` are those of its model's config.json.

    Raises: CorruptDataError with ``tensor`` when a quantized tensor lacks a companion or one has
    the wrong dtype or shape, or its type can't be told; UnsupportedSourceError for a type that does
    not exist here; as ``settings``, when they are needed.
    """
    companions = {
        name + suffix
        for name in header.tensors
        if _has_scale(header, name)
        for suffix in SUFFIXES[1:]
    }
    described = {
        key.removesuffix(".quant_type") for key in header.metadata if key.endswith(".quant_type")
    }
    if missing := sorted(described - header.tensors.keys()):
        raise CorruptDataError(
            f"the quantized tensor {quoted(missing[0])} is missing", tensor=missing[0]
        )
    quantized = False
    for name in sorted(
        header.tensors.keys() - companions, key=lambda name: header.tensors[name].begin
    ):
        entries = {suffix: header.tensors[name + suffix] for suffix in _suffixes(header, name)}
        quantization = _quantization(name, entries, header.metadata, settings)
        quantized = quantized or quantization is not None
        yield StoredTensor(
            name,
            entries,
            quantization,
            _is_transposed(name, entries, quantization, header.metadata),
        )
    if "quant_type" in header.metadata and not quantized:
        raise CorruptDataError(
            f"the blob is called {header.metadata['quant_type']}, but holds no quantized tensor"
        )


def _has_scale(header: Header, name: str) -> bool:
    return header.tensors[name].dtype is DType.U32 and name + ".scale" in header.tensors


def _suffixes(header: Header, name: str) -> Iterator[str]:
    yield ""
    if _has_scale(header, name):
        yield from (suffix for suffix in SUFFIXES[1:] if name + suffix in header.tensors)


def _quantization(
    name: str, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], settings: Settings
) -> Quantization | None:
    own = f"{name}.quant_type" in metadata
    if entries[""].dtype is not DType.U32 or not (
        own or "quant_type" in metadata or ".scale" in entries
    ):
        if own:
            raise CorruptDataError(
                f"tensor {name!r} is {entries[''].dtype}, but its metadata call it quantized",
                tensor=name,
            )
        return None
    if ".scale" not in entries:
        raise CorruptDataError(
            f"the scale of the quantized tensor {name!r} is missing", tensor=name
        )
    if own or "quant_type" in metadata:
        quantization = _described(name, metadata, f"{name}." if own else "")
    else:
        quantization = _inferred(name, entries, settings)
    _check_parts(name, entries, quantization)
    return quantization


def _is_transposed(
    name: str,
    entries: Mapping[str, TensorEntry],
    quantization: Quantization | None,
    metadata: Mapping[str, str],
) -> bool:
    value = metadata.get(f"{name}.transposed")
    if value is None:
        return False
    if value != "true" or quantization is None or len(entries[""].shape) < 2:  # noqa: PLR2004  # a matrix, or several
        raise CorruptDataError(
            f"the metadata of tensor {name!r} contain transposed={value!r}: only a quantized matrix can be transposed, "
            "and only the value 'true' is defined",
            tensor=name,
        )
    return True


def _described(name: str, metadata: Mapping[str, str], prefix: str) -> Quantization:
    try:
        return Quantization.described(metadata, prefix)
    except UsageError as error:
        text, size = metadata[f"{prefix}quant_type"], metadata.get(f"{prefix}group_size", "")
        raise UnsupportedSourceError(
            f"tensor {name!r} is of type {text!r} in groups of {size!r}: {error}", tensor=name
        ) from None


def _inferred(name: str, entries: Mapping[str, TensorEntry], settings: Settings) -> Quantization:
    possible = [
        quantization
        for quant_type in QuantType
        if quant_type.is_affine == (".bias" in entries)
        for quantization in (Quantization(quant_type, size) for size in quant_type.group_sizes)
        if not _wrong_part(entries, quantization)
    ]
    if len(possible) > 1 and (said := _said(name, settings())) in possible:
        return said
    if len(possible) != 1:
        answers = ", ".join(str(quantization) for quantization in possible) or "none"
        raise CorruptDataError(
            f"the type of {name!r} can't be told: its blob has no metadata, and its shapes fit {answers}",
            tensor=name,
        )
    return possible[0]


def _said(name: str, settings: QuantizationSettings | None) -> Quantization | None:
    """Return how config.json says that a weight was quantized; None where it does not, or where no type of ours is that."""
    module = settings.of(name.removesuffix(".weight")) if settings is not None else None
    try:
        return module.quantization if module is not None else None
    except UsageError:
        return None


def _check_parts(name: str, entries: Mapping[str, TensorEntry], quantization: Quantization) -> None:
    if wrong := _wrong_part(entries, quantization):
        raise CorruptDataError(f"tensor {name!r} of type {quantization}: {wrong}", tensor=name)


def _wrong_part(entries: Mapping[str, TensorEntry], quantization: Quantization) -> str | None:
    """Say what is wrong with the stored arrays of a tensor of that type, or return None."""
    weight, scale = entries[""], entries[".scale"]
    if not weight.shape or (quantization.quant_type.is_affine and not scale.dtype.is_float):
        return f"its scale is {scale.dtype}" if weight.shape else "its weight has rank 0"
    shape = quantization.logical_shape(weight.shape)
    if not quantization.divides(shape):
        return f"rows of {shape[-1]} are not whole groups"
    wanted = {part.suffix: part for part in quantization.parts(shape, scale.dtype)}
    for suffix, entry in entries.items():
        if suffix == ".global_scale":
            if (
                quantization.quant_type is not QuantType.NVFP4
                or entry.dtype is not DType.F32
                or math.prod(entry.shape) != 1
            ):
                return f"its global scale is {entry.dtype} {list(entry.shape)}"
        elif suffix not in wanted:
            return f"it has a {suffix[1:]}"
        elif (entry.dtype, entry.shape) != (wanted[suffix].dtype, wanted[suffix].shape):
            return _mismatch(entry, wanted[suffix])
    missing = wanted.keys() - entries.keys()
    return f"its {min(missing)[1:]} is missing" if missing else None


def _mismatch(entry: TensorEntry, part: Part) -> str:
    what = part.suffix[1:] or "weight"
    return f"its {what} is {entry.dtype} {list(entry.shape)}, not {part.dtype} {list(part.shape)}"
