"""A home that is served: models by name, opened when they are asked for."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from blobstore.errors import (
    StorageError,
    TensorNotFoundError,
    UnsupportedSourceError,
    quoted,
)
from blobstore.formats.documents import Manifest
from blobstore.inspection.listing import describe, line_of
from blobstore.model.loader import opened_tensor
from blobstore.model.tensors import Tensor
from blobstore.names import Digest, ModelName
from blobstore.plots.subjects import Weighed
from blobstore.plots.treemap import treemap
from blobstore.store.holders import holder_of
from blobstore.store.outlines import ModelOutline
from blobstore.store.ports import Readable
from blobstore.store.stored_model import StoredModel
from blobstore.views.api_documents import ModelAnswer, TensorColumns
from blobstore.views.documents import encoded, to_json

_OPENED = 4
"""Models whose answers are kept. Those of one with 50,000 tensors take 4 MB."""
_LOCKS = 32


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, the part of the home that has it, and the bytes of its manifest."""

    name: ModelName
    holder: Readable
    raw: bytes
    digest: Digest
    is_packed: bool

    def stored(self) -> StoredModel:
        """Return what the manifest means. Raises: DocumentError."""
        manifest = Manifest.parse(self.raw, f"the manifest of {self.name}")
        return StoredModel(self.name, manifest, self.holder)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's answers without and with its tensors, both without its name, and its treemap.

    Only these bytes are kept, because 50,000 tensors take 4 MB in them, and much more as objects.
    ``counts``: how many tensors each layer of tensors of the manifest has, as JSON.
    """

    facts: bytes
    columns: bytes
    counts: bytes
    treemap: bytes

    def document(self) -> dict[str, Any]:
        """Return the answer without tensors, but for name and state."""
        document: dict[str, Any] = json.loads(self.facts)
        return document

    def columns_of(self, name: ModelName, digest: Digest) -> bytes:
        """Return the answer with tensors, with the model's name and ID."""
        head = json.dumps({"model": str(name), "id": str(digest)}, separators=(",", ":"))
        return head[:-1].encode() + b"," + self.columns[1:]

    def layer_of(self, tensor: str) -> int:
        """Return the number of a tensor's layer. Raises: TensorNotFoundError."""
        try:
            place = json.loads(self.columns)["names"].index(tensor)
        except ValueError:
            message = f"the model has no tensor {quoted(tensor)}"
            raise TensorNotFoundError(message, tensor=tensor) from None
        return bisect_right(list(accumulate(json.loads(self.counts))), place)


class Served:
    """A home, and the models of it that were asked for last."""

    def __init__(self, home: Readable) -> None:
        self.home = home
        self._opened: dict[Digest, OpenedModel] = {}
        self._lock = threading.Lock()
        # A page asks for several answers at once: the first opens the model, the others wait.
        # Models share these locks, so two may wait for each other, which is rare.
        self._opening = [threading.Lock() for _ in range(_LOCKS)]

    @property
    def upper(self) -> Any:
        """The home that is not a lower one."""
        return self.home.upper

    def require(self) -> None:
        """Raise StorageError if the folder of the store is gone: its disk is not mounted, perhaps.

        Without its folder a store is a new one, and has no models.
        """
        root = self.upper.root
        if root is not None and not os.path.isdir(root):  # noqa: PTH112  # False for any error
            raise StorageError("the folder of the store is gone", hint="Is its disk mounted?")

    def without_folders(self, text: str) -> str:
        """Return a message without the folders of the stores: it may name a file in them."""
        for home in (self.upper, *self.home.lower):
            if (root := home.root) is not None:
                text = text.replace(f"{root}/", "").replace(str(root), "the store")
        return text

    def find(self, name: str) -> ServedModel:
        """Return a model. Raises: InvalidNameError; NotFoundError; StorageError."""
        parsed = ModelName.parse(name)
        holder = holder_of(parsed, self.home)
        full = holder.find(parsed)
        raw = holder.manifests.text(full)
        is_packed = holder is self.home.packed
        return ServedModel(full, holder, raw, Digest.of(raw), is_packed)

    def open(self, model: ServedModel) -> OpenedModel:
        """Return a model's answers. Raises: as `StoredModel.opened`; DocumentError."""
        with self._opening[hash(model.digest) % _LOCKS]:
            opened = self._opened.get(model.digest) or _read(model)
            with self._lock:
                self._opened.pop(model.digest, None)
                self._opened[model.digest] = opened
                if len(self._opened) > _OPENED:
                    del self._opened[next(iter(self._opened))]
            return opened

    @contextmanager
    def tensor(self, model: ServedModel, name: str) -> Iterator[Tensor]:
        """Yield a tensor, whose blob alone is mapped.

        Raises: TensorNotFoundError; UnsupportedSourceError for a packed model; as `opened_tensor`.
        """
        layer = self.open(model).layer_of(name)
        if model.is_packed:
            hint = f"blobstore unpack {model.name} restores it."
            message = f"model {model.name} is packed: its values are not read"
            raise UnsupportedSourceError(message, model=str(model.name), hint=hint)
        stored = model.stored()
        with opened_tensor(stored, stored.manifest.tensor_layers[layer], name) as tensor:
            yield tensor


def _read(model: ServedModel) -> OpenedModel:
    """Return a model's answers, made of the headers of its blobs."""
    stored = model.stored()
    manifest = stored.manifest
    with model.holder.lease():
        tensors = ModelOutline.of(stored, stored.tensor_layers)
        line = line_of(model.holder, model.name, manifest, tensors.forms)
        details = describe(model.holder, manifest, tensors)
    columns = encoded(TensorColumns(model.name, model.digest, tensors))
    facts = encoded(ModelAnswer(line, details, manifest, len(tensors)))
    for whose, key in ((columns, "model"), (columns, "id"), (facts, "name"), (facts, "packed")):
        del whose[key]  # they belong to a name, not to the manifest
    drawn = treemap(map(Weighed, *(columns[key] for key in ("names", "types", "shapes", "sizes"))))
    return OpenedModel(*map(in_json, (facts, columns, tensors.counts, drawn)))


def in_json(document: Any) -> bytes:
    """Return results as one JSON document, in ASCII as ``--json`` prints it."""
    return to_json(document).encode("ascii")
