"""One tensor of a stored model: only the blob that it lies in is mapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blobstore.errors import TensorNotFoundError, quoted
from blobstore.formats.documents import Descriptor
from blobstore.io.ranges import MappedFile
from blobstore.model.tensors import MappedBlob, Tensor
from blobstore.store.stored_model import StoredModel, TensorBlob


@contextmanager
def opened_tensor(model: StoredModel, layer: Descriptor, name: str) -> Iterator[Tensor]:
    """Yield a tensor of the layer's blob; arrays taken from it stay valid.

    A blob in a bucket is brought into its cache. Raises: TensorNotFoundError; as
    `StoredModel.opened`.
    """
    prefetch = getattr(model.home, "prefetch", None)
    with model.home.lease():
        if prefetch is not None:
            prefetch([layer])
        with model.opened(layer, ()) as (reader, header, tensors):
            found = next((one for one in tensors if one.name == name), None)
            if found is None:
                message = f"blob {layer.digest} has no tensor {quoted(name)}"
                raise TensorNotFoundError(message, tensor=name, blob=str(layer.digest))
            blob = MappedBlob(TensorBlob.of(layer.digest, reader, header), MappedFile(reader))
    yield Tensor.of(found, blob)
