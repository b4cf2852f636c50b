"""Loader: a stored model as a mapping of tensors, memory-mapped, and these as arrays.

Opening reads and validates every header and maps every blob, documents too; weights are read when
they are touched. Small blobs are read instead of being mapped (`is_mapped`). The maps are private
to the process and read-only, and they stay valid when the model is removed from the store
meanwhile. While they are made, no process of ours removes a blob (`Store.lease`). Where a lease is
not possible, a model whose blob is missing is opened again.
Blobs are immutable files: one that another program truncates while its values are being read ends
the process with SIGBUS; the size is checked whenever a view is handed out.

This is the one place where the bytes of a stored tensor become arrays. numpy and torch arrays are
views of the blob's map: no byte is copied, and they are read-only. MLX on a CPU copies them to its
own memory; with Metal it wraps the map where it can.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import ml_dtypes
import numpy as np

from blobstore import kernels
from blobstore.errors import (
    InvalidIndexError,
    NotFoundError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
    install_hint,
    quoted,
)
from blobstore.formats.documents import (
    OWN_DOCUMENT,
    TENSOR_MEDIA_TYPE,
    Descriptor,
    Manifest,
    ModelConfig,
)
from blobstore.formats.dtypes import DType, fits_mlx
from blobstore.formats.safetensors.header import TensorEntry
from blobstore.io.budget import allow_open_files
from blobstore.io.ranges import BytesReader, Closing, MappedFile, OpenReader, is_mapped
from blobstore.kernels.arrays import Array, QuantizedArray, map_parts, numpy_dtype
from blobstore.names import Digest, ModelName
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Readable, check_document_size, checked_bytes
from blobstore.store.stored import SUFFIXES, StoredTensor
from blobstore.store.stored_model import StoredModel, TensorBlob

Library = Literal["numpy", "torch", "mlx"]
Names = Literal["ollama", "mlx"]
StoredArray = Array | QuantizedArray[Array]

_SUFFIXES = {
    "ollama": {".scale": "_scale", ".bias": "_qbias"},
    "mlx": {".scale": ".scales", ".bias": ".biases"},
}


@dataclass(frozen=True, slots=True, eq=False)
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


def assemble(stored: StoredTensor, array_of: Callable[[TensorEntry], Any]) -> Any:
    """Return a tensor made of its stored arrays: one array, or a QuantizedArray."""
    arrays = {suffix: array_of(entry) for suffix, entry in stored.entries.items()}
    if stored.quantization is None:
        return arrays[""]
    weight, scale, bias, global_scale = map(arrays.get, SUFFIXES)
    return QuantizedArray(weight, scale, bias, global_scale, stored.quantization)


def parts_of(array: Any) -> dict[str, Any]:
    """Return the stored arrays of a tensor by suffix: the inverse of `assemble`."""
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


def _library(name: str, hint: str | None = None) -> Any:
    """Return an optional library. Raises: UsageError with the hint if it is not installed.

    ``hint``: None if the library is an extra of its name.
    """
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name.partition('.')[0]} is not installed", hint=hint or install_hint(name)
        ) from error


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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
        array: StoredArray = assemble(self, self._blob.array)
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
            raise UsageError(f"{self.name!r} can't be returned without a copy", tensor=self.name)
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
            map_parts(array, lambda part: part.reshape(-1, part.shape[-1])[numbers])
        )

    def torch(self) -> Any:
        """Return a torch tensor that shares the map's memory, or a QuantizedArray of them.

        The caller must not write to it. An array at an odd address of its file, which blobs of ours
        have only after odd-sized bytes, is copied.

        Raises: UnsupportedSourceError when torch has no such dtype.
        """
        return assemble(self, self._torch_array)

    def _torch_array(self, entry: TensorEntry) -> Any:
        torch = _library("torch")
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
        return assemble(self, self._mlx_array)

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


class Model(Mapping[str, Tensor], Closing):
    """The tensors of a stored model by logical name, in manifest order.

    Companions are part of their tensor. Use it as a context manager, or call `close`: arrays taken
    from it stay valid, new ones can't be taken.
    """

    def __init__(self, name: ModelName, manifest: Manifest, store: Readable) -> None:
        self.name = name
        self.manifest = manifest
        self._model = StoredModel(name, manifest, store, self._bytes_of)
        self._tensors: dict[str, Tensor] = {}
        self._blobs: dict[Digest, MappedBlob] = {}
        self._documents: dict[Digest, MappedFile] = {}
        layers = self._model.weight_layers
        # Python's maps keep a descriptor each, and so do MLX's arrays.
        allow_open_files(2 * sum(is_mapped(blob.size) for blob in manifest.descriptors))
        for descriptor in manifest.descriptors:
            if descriptor.media_type != TENSOR_MEDIA_TYPE or descriptor is manifest.config:
                with self._model.naming(descriptor), store.blobs.open(descriptor) as reader:
                    self._documents[descriptor.digest] = MappedFile(reader)
        for layer in layers:
            with self._model.open_layer(layer, self._tensors) as (reader, header, tensors):
                file = TensorBlob.of(layer.digest, reader, header)
                blob = self._blobs[layer.digest] = MappedBlob(file, MappedFile(reader))
            self._tensors.update((stored.name, Tensor.of(stored, blob)) for stored in tensors)

    def __repr__(self) -> str:
        return f"Model({str(self.name)!r}, {len(self._tensors):,} tensors)"

    def _bytes_of(self, descriptor: Descriptor) -> bytes:
        check_document_size(descriptor)
        return checked_bytes(bytes(self._documents[descriptor.digest].view()), descriptor.digest)

    def verify(self) -> None:
        """Hash every blob.

        Raises: DigestMismatchError with ``model``, ``blob`` and ``tensor``; UsageError when closed;
        as `document`.
        """
        self._require_open()
        blobs = self._blobs
        self._model.verify(self._model.weight_layers, lambda layer: blobs[layer.digest].reader())
        for descriptor in self.manifest.descriptors:
            if descriptor.digest not in blobs:
                self._model.read(descriptor)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. Raises: TensorNotFoundError, which is a KeyError too."""
        if name in self._tensors:
            return self._tensors[name]
        reason = f"has no tensor {quoted(name)}" if self._blobs else "is closed"
        raise TensorNotFoundError(f"model {self.name} {reason}", tensor=name, model=str(self.name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def config(self) -> ModelConfig:
        """The model's config blob. Raises: NotFoundError, CorruptDataError."""
        return ModelConfig.parse(
            self._found(self.manifest.config, "config"), f"the config of {self.name}"
        )

    @property
    def parameters(self) -> int:
        """Number of weights, before packing."""
        return sum(tensor.parameters for tensor in self.values())

    def document(self, name: str) -> bytes:
        """Return a JSON document of the model, such as ``config.json``.

        Raises: NotFoundError, CorruptDataError.
        """
        return self._found(self.manifest.document(name), quoted(name))

    def documents(self) -> list[str]:
        """Return the file names of the model's JSON documents, in manifest order."""
        return [layer.name for layer in self.manifest.json_layers if layer.name]

    def file(self, name: str) -> bytes:
        """Return a file of the checkpoint that was imported, by its path in the folder.

        It is a JSON document or another file. Raises: NotFoundError, CorruptDataError.
        """
        return self._found(self.manifest.file(name), f"file {quoted(name)}")

    def layer(self, media_type: str) -> bytes | None:
        """Return the last layer of that type, or None. The last counts in Ollama too.

        Raises: NotFoundError, CorruptDataError.
        """
        layers = [layer for layer in self.manifest.layers if layer.media_type == media_type]
        return self._model.read(layers[-1]) if layers else None

    def _found(self, layer: Descriptor | None, what: str) -> bytes:
        if layer is None:
            raise NotFoundError(f"model {self.name} has no {what}", model=str(self.name))
        return self._model.read(layer)

    def files(self) -> list[str]:
        """Return the paths of the checkpoint's files that are stored with its weights.

        JSON documents come first, then all others. ``blobstore.json`` is not a file of the
        checkpoint. A draft model's files begin with ``draft/``.
        """
        return [
            layer.name
            for layer in (*self.manifest.json_layers, *self.manifest.file_layers)
            if layer.name and layer.name != OWN_DOCUMENT
        ]

    def arrays(self, library: Library = "numpy", *, names: Names = "ollama") -> dict[str, Any]:
        """Return every stored array, companions included, by its name.

        ``names="ollama"`` (as Ollama's runner sees them): NAME, NAME_scale, NAME_qbias,
        NAME.global_scale, for tensors of the source that are called NAME.scale (and NAME.bias
        beside one) too; ``names="mlx"`` (as mlx-lm): ….weight, ….scales, ….biases, ….global_scale.
        Views or copies: as in `Tensor`.

        Raises: UsageError for an unknown word, or when the model is closed; UnsupportedSourceError
        when the library has no such dtype, or two arrays would have one name.
        """
        self._require_open()
        if names not in _SUFFIXES:
            raise UsageError(f"unknown names {names!r}", hint="Use one of: ollama, mlx.")
        arrays: dict[str, Any] = {}
        for tensor in self.values():
            plain = names == "ollama" and tensor.quant_type is None
            name, own_suffix = _split_companion(tensor.name, self) if plain else (tensor.name, "")
            for suffix, array in parts_of(tensor.array(library)).items():
                ending = own_suffix + suffix
                base = name.removesuffix(".weight") if names == "mlx" and ending else name
                key = base + _SUFFIXES[names].get(ending, ending)
                if key in arrays:
                    raise UnsupportedSourceError(
                        f"model {self.name}: two arrays would have the name {key!r}",
                        tensor=tensor.name,
                        model=str(self.name),
                    )
                arrays[key] = array
        return arrays

    def _require_open(self) -> None:
        if not self._blobs:  # it would look like a model without tensors
            raise UsageError(f"model {self.name} is closed")

    def close(self) -> None:
        """Release the tensors' maps; each is freed with the last array taken from it.

        Documents can still be read.
        """
        self._tensors.clear()
        self._blobs.clear()


def open_model(
    name: str | ModelName, *, store: Readable | StorePlace = None, verify: bool = False
) -> Model:
    """Return a stored model, every blob of it validated and mapped.

    ``verify`` also reads and hashes every blob. A packed model is unpacked first, into the store:
    weights are used from the page cache, by any number of processes, and Ollama finds them too.

    A soft limit of open files that is too low for the model is raised, as far as the hard limit
    allows. The model is opened again while its blobs are missing because another model replaced it.

    Raises: InvalidNameError; UnsupportedSourceError (no tensor blobs: a GGUF model); NotFoundError
    (no such model, a missing blob), CorruptDataError (a blob that is short, long, or no valid file;
    companions that don't fit; with ``verify``, bytes that are not the digest's), StorageError: each
    with ``model``, ``blob`` and, where there is one, ``tensor``, which the message names too.
    """
    store = opened_store(store)
    full, before = store.whole(name), None
    while True:
        with store.lease():
            manifest = store.manifests.read(full)
            try:
                store.prefetch(manifest.descriptors)
                model = Model(full, manifest, store)
                break
            except NotFoundError:
                if manifest.raw == before:
                    raise
        before = manifest.raw
    if verify:
        model.verify()
    return model


def _split_companion(name: str, names: Container[str]) -> tuple[str, str]:
    """Return the base and the suffix of a name that Ollama's runner takes for a companion's.

    Of another name, return it and "". Source: ollama/ollama@fb307609 x/mlxrunner, where tensors are
    loaded: it reads names only. Gemma 4's ``router.scale`` becomes ``router_scale``
    (fixtures/ollama-records, h_gemma4_moe8).
    """
    stem, dot, last = name.rpartition(".")
    is_companion = dot and last in ("scale", "bias") and f"{stem}.scale" in names
    return (stem, dot + last) if is_companion else (name, "")


@contextmanager
def opened_tensor(model: StoredModel, layer: Descriptor, name: str) -> Iterator[Tensor]:
    """Yield a tensor of the layer's blob; arrays taken from it stay valid.

    A blob in a bucket is copied into its cache. Raises: TensorNotFoundError; as
    `StoredModel.opened`.
    """
    with model.home.lease():
        model.home.prefetch([layer])
        with model.open_layer(layer, ()) as (reader, header, tensors):
            stored = next((tensor for tensor in tensors if tensor.name == name), None)
            if stored is None:
                raise TensorNotFoundError(
                    f"blob {layer.digest} has no tensor {quoted(name)}",
                    tensor=name,
                    blob=str(layer.digest),
                )
            blob = MappedBlob(TensorBlob.of(layer.digest, reader, header), MappedFile(reader))
    yield Tensor.of(stored, blob)
