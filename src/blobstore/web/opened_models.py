"""Opened models: their answers, and their tensors as a table: columns, not 50,000 objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

from blobstore.errors import TensorNotFoundError, quoted
from blobstore.store.stored import StoredTensor

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
