"""Tensors: stored arrays as arrays of numpy, torch or MLX, and a tensor of an open model.

This is the one place where the bytes of a stored tensor become arrays. numpy and torch arrays are
views of the blob's map: no byte is copied, and they are read-only. MLX on a CPU copies them to its
own memory; with Metal it wraps the map where it can.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import ml_dtypes
import numpy as np

from blobstore import kernels
from blobstore.errors import InvalidIndexError, UnsupportedSourceError, UsageError, quoted
from blobstore.formats.dtypes import DType, fits_mlx
from blobstore.formats.safetensors.header import TensorEntry
from blobstore.io.ranges import BytesReader, MappedFile, OpenReader
from blobstore.kernels.arrays import Array, QuantizedArray, mapped, numpy_dtype
from blobstore.names import Digest
from blobstore.store.stored import SUFFIXES, StoredTensor
from blobstore.store.stored_model import TensorBlob

Library = Literal["numpy", "torch", "mlx"]
StoredArray = Array | QuantizedArray[Array]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MappedBlob:
    """A blob of tensors whose file is mapped: ``data`` is the whole file."""

    file: TensorBlob
    data: MappedFile

    def view(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one stored array, without a copy.

        Raises: CorruptDataError when the file was cut.
        """
        start = self.file.offset(entry)
        return self.data.view(start, start + entry.nbytes)

    def reader(self) -> OpenReader:
        return BytesReader(self.data.view(), self.file.path)

    def array(self, entry: TensorEntry) -> Array:
        """Return a numpy view of one stored array. Raises: as `view` and `numpy_dtype`."""
        count = math.prod(entry.shape)
        return np.frombuffer(self.view(entry), numpy_dtype(entry.dtype), count).reshape(entry.shape)


def assembled(stored: StoredTensor, array_of: Callable[[TensorEntry], Any]) -> Any:
    """Return a tensor made of its stored arrays: one array, or a QuantizedArray."""
    arrays = {suffix: array_of(entry) for suffix, entry in stored.entries.items()}
    if stored.quantization is None:
        return arrays[""]
    weight, scale, bias, global_scale = map(arrays.get, SUFFIXES)
    return QuantizedArray(weight, scale, bias, global_scale, stored.quantization)


def parts_of(array: Any) -> dict[str, Any]:
    """Return the stored arrays of a tensor by suffix: the inverse of `assembled`."""
    if not isinstance(array, QuantizedArray):
        return {"": array}
    parts = (array.weight, array.scale, array.bias, array.global_scale)
    return {suffix: part for suffix, part in zip(SUFFIXES, parts, strict=True) if part is not None}


def fill_values(out: Array, stored: StoredArray) -> None:
    """Write the values into ``out``, each computed in float32 and rounded to its dtype."""
    if isinstance(stored, QuantizedArray):
        kernels.dequantize_into(stored, out)
        return
    # A signalling NaN is a value here, not an accident.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, stored, casting="unsafe")


def run_of(stored: StoredArray, start: int, count: int) -> StoredArray:
    """Return ``count`` values from index ``start`` on, whole groups of a quantized array.

    They are flat views.
    """
    if isinstance(stored, QuantizedArray):
        return kernels.group_range(
            stored, start // stored.group_size, (start + count) // stored.group_size
        )
    return stored.reshape(-1)[start : start + count]


def values_of(stored: StoredArray) -> Array:
    """Return the values of an array: itself, or those of a quantized one as float32."""
    return kernels.dequantize(stored) if isinstance(stored, QuantizedArray) else stored


def mlx_of(values: Array) -> Any:
    """Return an mlx array of a numpy array, FP8 as uint8; memory is shared where MLX can."""
    mx = _library("mlx.core", "MLX exists for macOS on Apple silicon and for Linux.")
    if values.dtype == ml_dtypes.bfloat16:
        return mx.asarray(values.view(np.uint16)).view(mx.bfloat16)
    return mx.asarray(values.view(np.uint8) if values.dtype.kind == "V" else values)


def _library(name: str, hint: str) -> Any:
    """Return an optional library. Raises: UsageError with the hint when it is not installed."""
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name.partition('.')[0]} is not installed", hint=hint) from error


@dataclass(frozen=True, slots=True, eq=False)
class Tensor(StoredTensor):
    """One tensor of a model. Cheap until its values are asked for."""

    _blob: MappedBlob = field(repr=False)

    @classmethod
    def of(cls, stored: StoredTensor, blob: MappedBlob) -> Self:
        """Return a tensor of a mapped blob."""
        return cls(stored.name, stored.entries, stored.quantization, stored.transposed, blob)

    @property
    def blob(self) -> Digest:
        """The digest of the blob that holds the tensor."""
        return self._blob.file.digest

    def raw(self) -> memoryview:
        """Return the stored bytes of the weight: a read-only view."""
        return self._blob.view(self.entries[""])

    def numpy(self) -> StoredArray:
        """Return a read-only numpy view of the map, or a QuantizedArray of views.

        BF16 and FP8 arrays have ml_dtypes' types. Raises: UnsupportedSourceError for F4 and F6 (see
        `raw`).
        """
        array: StoredArray = assembled(self, self._blob.array)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: FBT001  # as NumPy calls it
        """Return the values for ``numpy.asarray``.

        That is a read-only view, or, of a quantized tensor, new float32 values.

        Raises: ValueError when ``copy`` is False and a copy is needed; as `numpy` and `dequantize`.
        """
        stored = self.numpy()
        values = values_of(stored)
        wanted = values.dtype if dtype is None else np.dtype(dtype)
        if copy is False and (values is not stored or wanted != values.dtype):
            raise UsageError(f"{self.name!r} can't be given without a copy", tensor=self.name)
        return values.astype(wanted, copy=bool(copy) and values is stored)

    def dequantize(self, dtype: str | DType = DType.F32) -> Array:
        """Return the values in a new array, each computed in float32 and rounded to ``dtype``.

        ``dtype``: "float32", "bfloat16" (ml_dtypes) or "float16"; an unquantized tensor is
        converted.

        Raises: UnsupportedSourceError for complex values; UsageError for another dtype.
        """
        if self.dtype is DType.C64:
            raise UnsupportedSourceError(
                f"{quoted(self.name)} is complex: it has no float values", tensor=self.name
            )
        array = self.numpy()
        if isinstance(array, QuantizedArray):
            return kernels.dequantize(array, dtype)
        wanted = dtype if isinstance(dtype, DType) else DType.parse_float(dtype)
        values = np.empty(array.shape, numpy_dtype(wanted))
        fill_values(values, array)
        return values

    def __getitem__(self, rows: Any) -> Array:
        """Return the rows that a numpy index of the leading dimensions selects.

        Of an unquantized tensor they are a view (where numpy makes one); of a quantized one they
        are dequantized to a new float32 array ``[..., cols]``, and only these rows are read.

        Raises: InvalidIndexError, which is an IndexError too, for an index that numpy refuses, and
        for one into quantized columns.
        """
        array = self.numpy()
        try:
            if not isinstance(array, QuantizedArray):
                selected: Array = array[rows]
                return selected
            if isinstance(rows, tuple) and any(item is Ellipsis for item in rows[:-1]):
                raise IndexError("index its rows, and the columns of the result")  # noqa: TRY301
            lead = self.shape[:-1]
            numbers = np.arange(math.prod(lead)).reshape(lead)[rows]
        except (IndexError, ValueError, TypeError) as error:  # ValueError: a step of zero
            raise InvalidIndexError(
                f"invalid index of {quoted(self.name)}: {error}", tensor=self.name
            ) from error
        return kernels.dequantize(
            mapped(array, lambda part: part.reshape(-1, part.shape[-1])[numbers])
        )

    def torch(self) -> Any:
        """Return a torch tensor that shares the map's memory, or a QuantizedArray of them.

        The caller must not write to it. An array at an odd address of its file, which blobs of ours
        have only behind odd-sized bytes, is copied.

        Raises: UnsupportedSourceError when torch has no such dtype.
        """
        return assembled(self, self._torch_array)

    def _torch_array(self, entry: TensorEntry) -> Any:
        torch = _library("torch", "Install the extra: pip install 'blobstore[torch]'.")
        dtype = getattr(torch, entry.dtype.array_name or "", None)
        if dtype is None:
            raise UnsupportedSourceError(f"torch has no {entry.dtype}", tensor=self.name)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        view = self._blob.view(entry)
        if self._blob.file.offset(entry) % max(1, entry.dtype.bits // 8):
            view = memoryview(bytearray(view))  # torch needs aligned memory
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; the docstring does too.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(view, dtype=dtype).reshape(entry.shape)

    def mlx(self) -> Any:
        """Return an mlx array, or a QuantizedArray of them.

        FP8 and E8M0 bytes are uint8, as MLX has them.

        Raises: UnsupportedSourceError for a dtype or a dimension that MLX does not have.
        """
        return assembled(self, self._mlx_array)

    def _mlx_array(self, entry: TensorEntry) -> Any:
        if not fits_mlx(entry.dtype, entry.shape):
            raise UnsupportedSourceError(
                f"MLX has no {entry.dtype} arrays of shape {list(entry.shape)}",
                tensor=self.name,
                blob=str(self.blob),
            )
        return mlx_of(self._blob.array(entry))

    def array(self, library: Library) -> Any:
        """Return `numpy`, `torch` or `mlx` by name. Raises: UsageError for another word."""
        if library not in ("numpy", "torch", "mlx"):
            raise UsageError(
                f"unknown array library {library!r}", hint="Use one of: numpy, torch, mlx."
            )
        return getattr(self, library)()
