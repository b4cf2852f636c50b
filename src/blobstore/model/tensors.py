"""Tensor: one tensor of a mapped blob, as numpy, torch or mlx.

numpy and torch arrays are views of the map: no byte is copied, and they are read-only. MLX on a CPU
reads the file into its own memory when the array is evaluated; with Metal it wraps the map where it
can.
"""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from blobstore import kernels
from blobstore.errors import (
    InvalidIndexError,
    StorageError,
    UnsupportedSourceError,
    UsageError,
    from_os_error,
    quoted,
)
from blobstore.formats.dtypes import DType, fits_mlx
from blobstore.formats.quant import QuantType
from blobstore.formats.safetensors.header import Header, TensorEntry
from blobstore.io.ranges import FileIdentity, Identity, MappedFile
from blobstore.kernels.arrays import QuantizedArray, numpy_dtype
from blobstore.names import Digest
from blobstore.store.stored import SUFFIXES, StoredTensor

Library = Literal["numpy", "torch", "mlx"]
Array = np.ndarray[Any, Any]

_log = logging.getLogger("blobstore.model.loader")


@dataclass(slots=True, eq=False)
class Blob:
    """A mapped blob: ``data`` is the whole file, ``header`` its validated header."""

    digest: Digest
    path: str
    identity: Identity | None
    data: MappedFile
    header: Header
    mlx_arrays: dict[str, Any] = field(default_factory=dict)

    def view(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one stored array, without a copy.

        Raises: CorruptDataError when the file was cut.
        """
        start = self.header.data_start
        return self.data.view(start + entry.begin, start + entry.end)


class Tensor:
    """One tensor of a model. Cheap until its values are asked for."""

    __slots__ = ("_blob", "_stored")

    def __init__(self, stored: StoredTensor, blob: Blob) -> None:
        self._stored = stored
        self._blob = blob

    @property
    def name(self) -> str:
        """The name in the blob."""
        return self._stored.name

    @property
    def stored(self) -> StoredTensor:
        """What the blob's header says of the tensor."""
        return self._stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape before packing: ``[..., rows, cols]``."""
        return self._stored.shape

    @property
    def dtype(self) -> DType:
        """The stored dtype; U32 (the packed codes) for a quantized tensor."""
        return self._stored.dtype

    @property
    def quant_type(self) -> QuantType | None:
        """The quantized type, or None."""
        return (
            self._stored.quantization.quant_type if self._stored.quantization is not None else None
        )

    @property
    def group_size(self) -> int | None:
        """Values that share a scale, or None."""
        return (
            self._stored.quantization.group_size if self._stored.quantization is not None else None
        )

    @property
    def transposed(self) -> bool:
        """True when the checkpoint's tensor has the last two axes the other way round: `shape` is ``[..., out, in]``."""
        return self._stored.transposed

    @property
    def parameters(self) -> int:
        """Number of weights, before packing."""
        return self._stored.parameters

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales and biases included."""
        return self._stored.nbytes

    @property
    def blob(self) -> Digest:
        """The digest of the blob that holds the tensor."""
        return self._blob.digest

    def raw(self) -> memoryview:
        """Return the stored bytes of the weight: a read-only view."""
        return self._blob.view(self._stored.entries[""])

    def numpy(self) -> Array | QuantizedArray[Array]:
        """Return a read-only numpy view of the map.

        Of a quantized tensor, a QuantizedArray of such views.

        BF16 and FP8 arrays have ml_dtypes' types. Raises: UnsupportedSourceError for F4 and F6 (see
        `raw`).
        """
        array: Array | QuantizedArray[Array] = self._assemble(self._numpy_part)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: FBT001  # as NumPy calls it
        """Return the values for ``numpy.asarray``: a read-only view, or, of a quantized tensor, new float32 values.

        Raises: ValueError when ``copy`` is False and a copy is needed; as `numpy` and `dequantize`.
        """
        stored = self.numpy()
        values = self.dequantize() if isinstance(stored, QuantizedArray) else stored
        wanted = values.dtype if dtype is None else np.dtype(dtype)
        if copy is False and (values is not stored or wanted != values.dtype):
            raise UsageError(f"{self.name!r} can't be given without a copy", tensor=self.name)
        return values.astype(wanted, copy=bool(copy) and values is stored)

    def dequantize(self, dtype: str | DType = DType.F32) -> Array:
        """Return the values as a new array of `shape`, each computed in float32 and rounded to ``dtype``.

        ``dtype``: "float32", "bfloat16" (ml_dtypes) or "float16"; an unquantized tensor is
        converted.

        Raises: UnsupportedSourceError for complex values; UsageError for another dtype.
        """
        if self.dtype is DType.C64:
            raise UnsupportedSourceError(
                f"{quoted(self.name)} is complex: no float can hold it", tensor=self.name
            )
        array = self.numpy()
        if isinstance(array, QuantizedArray):
            return kernels.dequantize(array, dtype)
        wanted = dtype if isinstance(dtype, DType) else DType.parse_float(dtype)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a signalling NaN is a value here, not an accident
            return array.astype(numpy_dtype(wanted))

    def __getitem__(self, rows: Any) -> Array:
        """Return the rows that a numpy index of the leading dimensions selects.

        Of an unquantized tensor a view (where numpy makes one); of a quantized one, those rows
        dequantized to a new float32 array ``[..., cols]``, and only they are read.

        Raises: InvalidIndexError, which is an IndexError too, for what numpy refuses, whatever
        error it gives; UsageError for an index into quantized columns.
        """
        array = self.numpy()
        if not isinstance(array, QuantizedArray):
            return self._selected(array, rows)
        if self._reaches_columns(rows):
            raise UsageError(
                f"{quoted(self.name)} is quantized: index its rows, and the columns of the result"
            )
        return kernels.dequantize(
            QuantizedArray(
                self._selected(array.weight, rows),
                self._selected(array.scale, rows),
                self._selected(array.bias, rows) if array.bias is not None else None,
                array.global_scale,
                array.quantization,
            )
        )

    def _selected(self, array: Array, rows: Any) -> Array:
        with self._index_errors():
            selected: Array = array[rows]
        return selected

    def _reaches_columns(self, rows: Any) -> bool:
        """Return True when a numpy index says something about the last dimension.

        Raises: InvalidIndexError.
        """
        items = rows if isinstance(rows, tuple) else (rows,)
        if any(item is Ellipsis for item in items[:-1]):
            return True
        with self._index_errors():
            return sum(map(_dimensions_taken, items)) >= len(self.shape)

    @contextmanager
    def _index_errors(self) -> Iterator[None]:
        """Turn what numpy says of an index into our error: IndexError, ValueError (a step of zero), TypeError."""
        try:
            yield
        except (IndexError, ValueError, TypeError) as error:
            raise InvalidIndexError(
                f"invalid index of {quoted(self.name)}: {error}", tensor=self.name
            ) from error

    def torch(self) -> Any:
        """Return a torch tensor that shares the map's memory, or a QuantizedArray of them.

        Never write to it.

        An array at an odd address of its file, which blobs of ours have only behind odd-sized
        bytes, is copied.

        Raises: UnsupportedSourceError when torch has no such dtype.
        """
        return self._assemble(self._torch_part)

    def mlx(self) -> Any:
        """Return an mlx array, or a QuantizedArray of them.

        FP8 and E8M0 bytes are uint8, as MLX has them.

        Raises: UnsupportedSourceError for a dtype or a dimension that MLX has not.
        """
        return self._assemble(self._mlx_part)

    def array(self, library: Library) -> Any:
        """Return `numpy`, `torch` or `mlx` by name. Raises: UsageError for another word."""
        if library not in ("numpy", "torch", "mlx"):
            raise UsageError(
                f"unknown array library {library!r}", hint="Use one of: numpy, torch, mlx."
            )
        return getattr(self, library)()

    def _assemble(self, part: Any) -> Any:
        arrays = {suffix: part(suffix, entry) for suffix, entry in self._stored.entries.items()}
        if self._stored.quantization is None:
            return arrays[""]
        weight, scale, bias, global_scale = (arrays.get(suffix) for suffix in SUFFIXES)
        return QuantizedArray(weight, scale, bias, global_scale, self._stored.quantization)

    def _numpy_part(self, _: str, entry: TensorEntry) -> Array:
        return _numpy_view(self._blob, entry)

    def _torch_part(self, _: str, entry: TensorEntry) -> Any:
        torch = _library("torch", "Install the extra: pip install 'blobstore[torch]'.")
        name = entry.dtype.array_name
        dtype = getattr(torch, name, None) if name else None
        if dtype is None:
            raise UnsupportedSourceError(f"torch has no {entry.dtype}", tensor=self.name)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        view = self._blob.view(entry)
        if (self._blob.header.data_start + entry.begin) % max(1, entry.dtype.bits // 8):
            view = memoryview(
                bytearray(view)
            )  # torch needs aligned memory, and a foreign file may have it odd
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; the docstring does too.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(view, dtype=dtype).reshape(entry.shape)

    def _mlx_part(self, suffix: str, entry: TensorEntry) -> Any:
        if not fits_mlx(entry.dtype, entry.shape):
            raise UnsupportedSourceError(
                f"MLX has no {entry.dtype} arrays of shape {list(entry.shape)}",
                tensor=self.name,
                blob=str(self.blob),
            )
        wrapped = _mlx_wrapped(self._blob, entry)
        if wrapped is not None:
            return wrapped
        # mx.load takes all of a file or nothing, and by its path, which may lead to another one
        # since, or to none.
        fits = all(
            fits_mlx(other.dtype, other.shape) for other in self._blob.header.tensors.values()
        )
        if fits and (loaded := _mlx_loaded(self._blob)):
            return loaded[self.name + suffix]
        return _mlx_of(_numpy_view(self._blob, entry), copy=True)


def _numpy_view(blob: Blob, entry: TensorEntry) -> Array:
    return np.frombuffer(
        blob.view(entry), numpy_dtype(entry.dtype), math.prod(entry.shape)
    ).reshape(entry.shape)


def _dimensions_taken(item: Any) -> int:
    """Return how many dimensions of an array one item of a numpy index is about.

    Raises: ValueError for ragged lists.
    """
    if item is None or item is Ellipsis:
        return 0
    is_mask = (
        isinstance(item, bool | np.bool | np.ndarray | list) and np.asarray(item).dtype == bool
    )
    return np.asarray(item).ndim if is_mask else 1


def _library(name: str, hint: str) -> Any:
    """Return an optional library. Raises: UsageError with the hint when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name.split('.', maxsplit=1)[0]} is not installed", hint=hint) from error


def _mlx() -> Any:
    return _library("mlx.core", "MLX exists for macOS on Apple silicon and for Linux.")


def _mlx_of(view: Array, *, copy: bool) -> Any:
    """Return an mlx array of a numpy view: FP8 as uint8, as `mx.load` gives it.

    Raises: ValueError when it has to copy.
    """
    mx = _mlx()
    if view.dtype == ml_dtypes.bfloat16:
        return mx.asarray(view.view(np.uint16), copy=copy).view(mx.bfloat16)
    return mx.asarray(view.view(np.uint8) if view.dtype.kind == "V" else view, copy=copy)


def _mlx_wrapped(blob: Blob, entry: TensorEntry) -> Any:
    """Return an mlx array over the map without a copy, or None where MLX can't: without Metal, or for an odd address."""
    mx = _mlx()
    if not mx.metal.is_available() or entry.nbytes == 0:
        return None
    try:
        return _mlx_of(_numpy_view(blob, entry), copy=False)
    except (ValueError, BufferError) as error:
        _log.debug("MLX copies blob %s instead of wrapping it: %s", blob.digest, error)
        return None


def _mlx_loaded(blob: Blob) -> dict[str, Any]:
    """Return the blob's arrays as `mx.load` gives them, lazily read from the file that was validated and mapped.

    None of them when that file is not the one of its path any more: it was removed from the store,
    or made again.
    """
    mx = _mlx()
    if not blob.mlx_arrays:
        try:
            now = FileIdentity(Path(blob.path).stat(follow_symlinks=False))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise from_os_error(error, "load", blob.path) from error
        if now != blob.identity:
            return {}
        try:
            blob.mlx_arrays = mx.load(blob.path, format="safetensors")
        except RuntimeError as error:  # what MLX says when it can't open the file
            raise StorageError(
                f"MLX can't load blob {blob.digest}: {error}", blob=str(blob.digest)
            ) from error
    return blob.mlx_arrays
