"""Loader: a stored model as a mapping of tensors, memory-mapped.

Opening reads and validates every header and maps every blob, documents too; weights are read when
they are touched. The maps are private to the process and read-only, and they stay valid when the
model is removed from the store meanwhile. While they are made nothing of ours removes a blob
(`Store.lease`), and where that can't be had, a model whose blob is missing is looked at again.
Blobs are immutable files: one that another program truncates while its values are being read ends
the process with SIGBUS; the size is checked whenever a view is handed out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    NotFoundError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.checkpoint import settings_of
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest, ModelConfig
from blobstore.formats.provenance import OWN_DOCUMENT
from blobstore.formats.safetensors.codec import header_of
from blobstore.io.budget import Budget
from blobstore.io.ranges import MappedFile, OpenReader, allow_open_files
from blobstore.kernels.arrays import QuantizedArray
from blobstore.model.tensors import Blob, Library, Tensor
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Home, check_document_size, checked_bytes
from blobstore.store.stored import stored_tensors

Names = Literal["ollama", "mlx"]

_LOOKS = 5
"""How often a model is opened that another program replaces meanwhile, before its missing blob is an error."""


class Model(Mapping[str, Tensor]):
    """The tensors of a stored model by logical name (companions are part of their tensor), in manifest order.

    Use it as a context manager, or call `close`: arrays taken from it stay valid, new ones can't be
    taken.
    """

    def __init__(self, name: ModelName, manifest: Manifest, store: Home) -> None:
        self.name = name
        self.manifest = manifest
        self._store = store
        self._settings = settings_of(store.blobs.read, manifest)
        self._tensors: dict[str, Tensor] = {}
        self._closed = False
        if not manifest.tensor_layers:
            message = f"model {name} has no tensor blobs: it is of another kind, GGUF perhaps"
            raise UnsupportedSourceError(message, model=str(name))
        # Python's maps keep a descriptor each, and so do MLX's arrays.
        allow_open_files(2 * len(manifest.layers))
        self._blobs: dict[Digest, Blob] = {}
        self._documents = {
            descriptor.digest: self._held(descriptor)
            for descriptor in manifest.descriptors
            if descriptor.media_type != TENSOR_MEDIA_TYPE or descriptor is manifest.config
        }
        budget = Budget.of_stored(f"model {name}")
        for layer in manifest.tensor_layers:
            for tensor in self._open(layer, budget):
                if tensor.name in self._tensors:
                    error = CorruptDataError(
                        f"another blob holds the tensor {tensor.name!r} too", tensor=tensor.name
                    )
                    raise located(error, name, layer)
                self._tensors[tensor.name] = tensor

    def _open(self, layer: Descriptor, budget: Budget) -> list[Tensor]:
        try:
            with self._store.blobs.open(layer) as reader:
                blob = open_blob(reader, layer.digest, budget)
            self._blobs[layer.digest] = blob
            return [Tensor(stored, blob) for stored in stored_tensors(blob.header, self._settings)]
        except BlobStoreError as error:
            raise located(error, self.name, layer) from error

    def _held(self, descriptor: Descriptor) -> MappedFile | BlobStoreError:
        """Return a document's map, or the error that reading it shall raise: the weights can be used without it."""
        try:
            with self._store.blobs.open(descriptor) as reader:
                return MappedFile(reader)
        except BlobStoreError as error:
            return error.kept()

    def _read(self, descriptor: Descriptor) -> bytes:
        held = self._documents[descriptor.digest]
        try:
            if isinstance(held, BlobStoreError):
                raise held
            check_document_size(descriptor)
            return checked_bytes(bytes(held.view()), descriptor)
        except BlobStoreError as error:
            raise located(error, self.name, descriptor) from error

    @property
    def missing(self) -> NotFoundError | None:
        """The error of a document whose blob was not there when the model was opened, if there is one."""
        return next(
            (held for held in self._documents.values() if isinstance(held, NotFoundError)), None
        )

    def verify(self) -> None:
        """Hash every blob.

        Raises: DigestMismatchError with ``model``, ``blob`` and ``tensor``; UsageError when closed;
        as `document`.
        """
        self._require_open()
        for descriptor in self.manifest.descriptors:
            blob = self._blobs.get(descriptor.digest)
            if blob is None:
                self._read(descriptor)
            elif Digest.of(blob.data.view()) != descriptor.digest:
                error = DigestMismatchError(
                    "its bytes are damaged: they do not match its digest",
                    blob=str(descriptor.digest),
                )
                raise located(error, self.name, descriptor)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. Raises: TensorNotFoundError, which is a KeyError too."""
        try:
            return self._tensors[name]
        except KeyError:
            reason = "is closed" if self._closed else f"has no tensor {quoted(name)}"
            message = f"model {self.name} {reason}"
            raise TensorNotFoundError(message, tensor=name, model=str(self.name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def config(self) -> ModelConfig:
        """The model's config blob. Raises: NotFoundError, CorruptDataError."""
        if self.manifest.config is None:
            raise NotFoundError(f"model {self.name} has no config", model=str(self.name))
        return ModelConfig.parse(self._read(self.manifest.config), f"the config of {self.name}")

    @property
    def parameters(self) -> int:
        """Number of weights, before packing."""
        return sum(tensor.parameters for tensor in self.values())

    def document(self, name: str) -> bytes:
        """Return a JSON document of the model, such as ``config.json``.

        Raises: NotFoundError, CorruptDataError.
        """
        layer = self.manifest.document(name)
        if layer is None:
            raise NotFoundError(f"model {self.name} has no {name}", model=str(self.name))
        return self._read(layer)

    def documents(self) -> list[str]:
        """Return the file names of the model's JSON documents, in manifest order."""
        return [layer.name for layer in self.manifest.json_layers if layer.name]

    def file(self, name: str) -> bytes:
        """Return a file of the checkpoint that was imported, a JSON document or another one, by its path in the folder.

        Raises: NotFoundError, CorruptDataError.
        """
        layer = self.manifest.file(name)
        if layer is None:
            raise NotFoundError(
                f"model {self.name} has no file {quoted(name)}", model=str(self.name)
            )
        return self._read(layer)

    def files(self) -> list[str]:
        """Return the paths of the checkpoint's files that are stored beside its weights: documents, then all others.

        ``blobstore.json`` was not among them. A draft model's begin with ``draft/``.
        """
        layers = (*self.manifest.json_layers, *self.manifest.file_layers)
        return [layer.name for layer in layers if layer.name and layer.name != OWN_DOCUMENT]

    def arrays(self, library: Library = "numpy", *, names: Names = "ollama") -> dict[str, Any]:
        """Return every stored array, companions included, as a flat dictionary of numpy, torch or mlx arrays.

        ``names="ollama"`` (as Ollama's runner sees them): NAME, NAME_scale, NAME_qbias,
        NAME.global_scale, for tensors of the source that are called NAME.scale (and NAME.bias
        beside one) too; ``names="mlx"`` (as mlx-lm): ….weight, ….scales, ….biases, ….global_scale.
        Views or copies: as in `Tensor`.

        Raises: UsageError for another word, or when the model is closed; UnsupportedSourceError
        when the library has no such dtype, or two arrays would have one name.
        """
        self._require_open()
        if names not in _ARRAY_NAMES:
            raise UsageError(f"unknown names {names!r}", hint="Use one of: ollama, mlx.")
        arrays: dict[str, Any] = {}
        for tensor in self.values():
            plain = names == "ollama" and tensor.quant_type is None
            name, own_suffix = _split_companion(tensor.name, self) if plain else (tensor.name, "")
            for suffix, array in _parts(tensor.array(library)):
                key = _ARRAY_NAMES[names](name, own_suffix + suffix)
                if key in arrays:
                    message = f"model {self.name}: two arrays would have the name {key!r} in a flat dictionary"
                    raise UnsupportedSourceError(message, tensor=tensor.name, model=str(self.name))
                arrays[key] = array
        return arrays

    def _require_open(self) -> None:
        if self._closed:  # it would seem to be a model without tensors
            raise UsageError(f"model {self.name} is closed")

    def close(self) -> None:
        """Let go of the tensors' maps; each is freed with the last array taken from it.

        Documents can still be read.
        """
        self._tensors.clear()
        self._blobs.clear()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_model(name: str | ModelName, *, store: Home, verify: bool = False) -> Model:
    """Return a stored model, every blob of it validated and mapped.

    ``verify`` also reads and hashes every blob.

    A soft limit of open files that is too low for the model is raised, as far as the hard limit
    allows.

    Raises: InvalidNameError; UnsupportedSourceError (no tensor blobs: a GGUF model); NotFoundError
    (no such model, a missing blob), CorruptDataError (a blob that is short, long, or no valid file;
    companions that don't fit; with ``verify``, bytes that are not the digest's), StorageError: each
    with ``model``, ``blob`` and, where there is one, ``tensor``, which the message names too.
    """
    model = _whole(store.find(name), store)
    if verify:
        model.verify()
    return model


def open_blob(reader: OpenReader, digest: Digest, budget: Budget | None = None) -> Blob:
    """Return the blob of an open file, mapped, its header validated; ``budget``: its model's.

    Raises: CorruptDataError, LimitExceededError, StorageError.
    """
    header = header_of(reader, budget)
    header.check_limits(reader.name)
    return Blob(digest, reader.name, reader.identity, MappedFile(reader), header)


def read_document(store: Home, name: ModelName, manifest: Manifest, document: str) -> bytes:
    """Return a JSON document of a model.

    Raises: NotFoundError when it has none of that name; CorruptDataError.
    """
    layer = manifest.document(document)
    if layer is None:
        raise NotFoundError(f"model {name} has no {document}", model=str(name))
    try:
        return store.blobs.read(layer)
    except BlobStoreError as error:
        raise located(error, name, layer) from error


def _whole(name: ModelName, store: Home) -> Model:
    """Return the model, opened while its manifest stayed the same: a blob that is missing then is missing.

    Raises: as `open_model`.
    """
    for last in (*[False] * (_LOOKS - 1), True):
        with store.lease():
            manifest = store.manifests.read(name)
            try:
                model = Model(name, manifest, store)
                missing = model.missing
            except NotFoundError as error:
                model, missing = None, error
        if missing is None or last or store.manifests.read(name).raw == manifest.raw:
            break  # else it was replaced meanwhile, and an older model's blobs do not matter
    if model is None:
        raise missing or AssertionError("a model that is not there has an error")
    return model


def located(error: BlobStoreError, model: ModelName, layer: Descriptor) -> BlobStoreError:
    """Return the error with the model and the blob in its message and fields."""
    place = f"model {model}: blob {layer.digest} ({layer.name})"
    return error.at(place, model=str(model), blob=str(layer.digest), tensor=layer.name)


def _parts(array: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(array, QuantizedArray):
        yield "", array
        return
    parts = (
        ("", array.weight),
        (".scale", array.scale),
        (".bias", array.bias),
        (".global_scale", array.global_scale),
    )
    yield from ((suffix, part) for suffix, part in parts if part is not None)


def _split_companion(name: str, names: Container[str]) -> tuple[str, str]:
    """Return a name that Ollama's runner takes for a companion's as (what it belongs to, suffix), else (name, "").

    Source: ollama/ollama@fb307609 x/mlxrunner, where tensors are loaded: it reads names only. Gemma
    4's ``router.scale`` becomes ``router_scale`` (fixtures/ollama-records, h_gemma4_moe8).
    """
    stem, dot, last = name.rpartition(".")
    return (
        (stem, dot + last)
        if dot and last in ("scale", "bias") and f"{stem}.scale" in names
        else (name, "")
    )


def _ollama_name(name: str, suffix: str) -> str:
    return name + {".scale": "_scale", ".bias": "_qbias"}.get(suffix, suffix)


def mlx_name(name: str, suffix: str) -> str:
    """Return the name that mlx-lm has for the stored array of that suffix, of the tensor of that name."""
    if not suffix:
        return name
    return name.removesuffix(".weight") + {".scale": ".scales", ".bias": ".biases"}.get(
        suffix, suffix
    )


_ARRAY_NAMES = {"ollama": _ollama_name, "mlx": mlx_name}
