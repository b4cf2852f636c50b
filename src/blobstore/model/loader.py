"""Loader: a stored model as a mapping of tensors, memory-mapped.

Opening reads and validates every header and maps every blob, documents too; weights are read when
they are touched. Small blobs are read instead of being mapped (`is_mapped`). The maps are private
to the process and read-only, and they stay valid when the model is removed from the store
meanwhile. While they are made, no process of ours removes a blob (`Store.lease`). Where a lease is
not possible, a model whose blob is missing is opened again.
Blobs are immutable files: one that another program truncates while its values are being read ends
the process with SIGBUS; the size is checked whenever a view is handed out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self

from blobstore.errors import (
    NotFoundError,
    TensorNotFoundError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest, ModelConfig
from blobstore.formats.provenance import OWN_DOCUMENT
from blobstore.io.budget import allow_open_files
from blobstore.io.ranges import MappedFile, is_mapped
from blobstore.model.tensors import Library, MappedBlob, Tensor, parts_of
from blobstore.names import Digest, ModelName
from blobstore.store.packing import unpacked
from blobstore.store.ports import Readable, check_document_size, checked_bytes
from blobstore.store.stored_model import StoredModel, TensorBlob

Names = Literal["ollama", "mlx"]

_SUFFIXES = {
    "ollama": {".scale": "_scale", ".bias": "_qbias"},
    "mlx": {".scale": ".scales", ".bias": ".biases"},
}


class Model(Mapping[str, Tensor]):
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
                with self._model.located(descriptor), store.blobs.open(descriptor) as reader:
                    self._documents[descriptor.digest] = MappedFile(reader)
        for layer in layers:
            with self._model.opened(layer, self._tensors) as (reader, header, tensors):
                file = TensorBlob.of(layer.digest, reader, header)
                blob = self._blobs[layer.digest] = MappedBlob(file, MappedFile(reader))
            self._tensors.update((stored.name, Tensor.of(stored, blob)) for stored in tensors)

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
        weights = [layer for layer in self.manifest.descriptors if layer.digest in blobs]
        self._model.verify(weights, lambda layer: blobs[layer.digest].reader())
        for descriptor in self.manifest.descriptors:
            if descriptor.digest not in blobs:
                self._model.read(descriptor)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. Raises: TensorNotFoundError, which is a KeyError too."""
        try:
            return self._tensors[name]
        except KeyError:
            reason = "is closed" if not self._blobs else f"has no tensor {quoted(name)}"
            message = f"model {self.name} {reason}"
            raise TensorNotFoundError(message, tensor=name, model=str(self.name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def config(self) -> ModelConfig:
        """The model's config blob. Raises: NotFoundError, CorruptDataError."""
        raw = self._found(self.manifest.config, "config")
        return ModelConfig.parse(raw, f"the config of {self.name}")

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
        found = [layer for layer in self.manifest.layers if layer.media_type == media_type]
        return self._model.read(found[-1]) if found else None

    def _found(self, layer: Descriptor | None, what: str) -> bytes:
        if layer is None:
            raise NotFoundError(f"model {self.name} has no {what}", model=str(self.name))
        return self._model.read(layer)

    def files(self) -> list[str]:
        """Return the paths of the checkpoint's files that are stored beside its weights.

        JSON documents come first, then all others. ``blobstore.json`` is not a file of the
        checkpoint. A draft model's files begin with ``draft/``.
        """
        layers = (*self.manifest.json_layers, *self.manifest.file_layers)
        return [layer.name for layer in layers if layer.name and layer.name != OWN_DOCUMENT]

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_model(name: str | ModelName, *, store: Readable, verify: bool = False) -> Model:
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
    full, before = unpacked(name, store), None
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

    A blob in a bucket is brought into its cache. Raises: TensorNotFoundError; as
    `StoredModel.opened`.
    """
    with model.home.lease():
        model.home.prefetch([layer])
        with model.opened(layer, ()) as (reader, header, tensors):
            found = next((one for one in tensors if one.name == name), None)
            if found is None:
                message = f"blob {layer.digest} has no tensor {quoted(name)}"
                raise TensorNotFoundError(message, tensor=name, blob=str(layer.digest))
            blob = MappedBlob(TensorBlob.of(layer.digest, reader, header), MappedFile(reader))
    yield Tensor.of(found, blob)
