"""Opened models: the answers about the models that were asked for last, by manifest.

A manifest names its blobs by digest, so an answer never becomes wrong. Finished answers are kept,
and the facts of tensors in columns, not 50,000 objects a model.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

from blobstore.errors import TensorNotFoundError, quoted
from blobstore.store.stored import StoredTensor

_MOST_BYTES = 32 * 2**20
"""Of all models together. One of 50,000 tensors takes 11 MB."""
_MOST_MODELS = 8
_NAME_BYTES = 60
"""Of a text in memory, beside its characters."""


class TensorRow(NamedTuple):
    """A tensor in short; ``layer`` is the number of its layer of tensors in the manifest."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int
    layer: int


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors of a model, in columns. Equal types and shapes are one object."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: array[int]
    layers: array[int]

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor], layers: Iterable[int]) -> Self:
        """Return the table of tensors, each with the number of its layer."""
        once: dict[object, object] = {}
        found = list(tensors)
        types = [one.type_text for one in found]
        shapes = [one.shape for one in found]
        return cls(
            tuple(one.name for one in found),
            tuple(str(once.setdefault(one, one)) for one in types),
            tuple(once.setdefault(one, one) for one in shapes),  # type: ignore[misc]
            array("Q", [one.nbytes for one in found]),
            array("L", layers),
        )

    def __iter__(self) -> Iterator[TensorRow]:
        columns = (self.names, self.types, self.shapes, self.sizes, self.layers)
        return map(TensorRow._make, zip(*columns, strict=True))

    def row(self, name: str) -> TensorRow:
        """Return a tensor. Raises: TensorNotFoundError."""
        try:
            place = self.names.index(name)
        except ValueError:
            message = f"the model has no tensor {quoted(name)}"
            raise TensorNotFoundError(message, tensor=name) from None
        columns = (self.names, self.types, self.shapes, self.sizes, self.layers)
        return TensorRow._make(column[place] for column in columns)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return sum(map(len, self.names)) + (_NAME_BYTES + 40) * len(self.names)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's answers without and with its tensors, and its tensors."""

    facts: bytes
    columns: bytes
    table: TensorTable

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return len(self.facts) + len(self.columns) + self.table.nbytes


class OpenedModels:
    """A few opened models, the least recently used of which is dropped first.

    A model that several threads ask for is opened once, while the others wait.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES, most_models: int = _MOST_MODELS) -> None:
        self._most_bytes = most_bytes
        self._most_models = most_models
        self._lock = threading.Lock()
        self._models: OrderedDict[Hashable, OpenedModel] = OrderedDict()
        self._opening: dict[Hashable, tuple[threading.Lock, int]] = {}

    def get(self, key: Hashable, make: Callable[[], OpenedModel]) -> OpenedModel:
        """Return the model of that key; ``make`` opens it. Raises: as ``make``."""
        if (found := self._found(key)) is not None:
            return found
        with self._alone(key):
            if (found := self._found(key)) is not None:
                return found
            made = make()
            self._keep(key, made)
            return made

    def __len__(self) -> int:
        return len(self._models)

    @contextmanager
    def _alone(self, key: Hashable) -> Iterator[None]:
        with self._lock:
            lock, users = self._opening.get(key, (threading.Lock(), 0))
            self._opening[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._opening.pop(key)
                if users > 1:
                    self._opening[key] = (lock, users - 1)

    def _found(self, key: Hashable) -> OpenedModel | None:
        with self._lock:
            if (found := self._models.get(key)) is not None:
                self._models.move_to_end(key)
            return found

    def _keep(self, key: Hashable, model: OpenedModel) -> None:
        with self._lock:
            self._models[key] = model
            total = sum(one.nbytes for one in self._models.values())
            while self._models and (
                total > self._most_bytes or len(self._models) > self._most_models
            ):
                _, dropped = self._models.popitem(last=False)
                total -= dropped.nbytes
