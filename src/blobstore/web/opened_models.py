"""Opened models: the answers of the models that were asked for last, by their manifests' digests.

A manifest names its blobs by digest, so an answer never becomes wrong. Kept are finished answers
and the blob of each tensor, not 50,000 objects a model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MOST_BYTES = 24 * 2**20
"""Of all models together. One of 50,000 tensors takes 10 MB."""
_MOST_MODELS = 8


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """The answers of a model, and in which of its layers each tensor lies.

    ``names``: tensors in the order of ``columns``; ``layers``: the number of each one's layer.
    """

    facts: bytes
    columns: bytes
    names: tuple[str, ...]
    layers: memoryview

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        texts = sum(map(len, self.names)) + 60 * len(self.names)
        return len(self.facts) + len(self.columns) + texts + self.layers.nbytes


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
