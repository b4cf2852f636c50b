"""The values that plots show: tensors with their sizes, errors of tensors, models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from blobstore.inspection.diff import ChangedTensor


class Weighed(NamedTuple):
    """A tensor: its name, its type in words (``int4/64``), shape before packing, stored bytes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorError:
    """The error of a tensor against the one that it was made from.

    ``relative_rmse``: None if all weights are zero and the stored ones are not. ``kept``: it is
    stored as it was.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    relative_rmse: float | None
    kept: bool = False

    @property
    def weights(self) -> int:
        """The number of its weights."""
        return math.prod(self.shape)

    @classmethod
    def of_document(cls, tensor: Mapping[str, Any]) -> TensorError:
        """Return the error that a store kept, as ``quality --json`` prints it."""
        kind, shape = tensor["quant_type"] or tensor["dtype"] or "", tuple(tensor["shape"])
        return cls(tensor["name"], kind, shape, tensor["relative_rmse"], tensor["kept"])

    @classmethod
    def of_change(cls, change: ChangedTensor) -> TensorError:
        """Return the error of a tensor against that of another model; None if not measured."""
        relative = None if change.errors is None else change.errors.relative_rmse
        after = change.after
        return cls(after.name, after.type_name, after.shape, relative)


class ModelPoint(NamedTuple):
    """A model among others: its bytes, and its error against one source for all of them.

    ``type_name``: the type of most of its weights. ``relative_rmse``: of all its weights.
    """

    name: str
    type_name: str
    nbytes: int
    relative_rmse: float


class ModelBytes(NamedTuple):
    """The bytes of a model's blobs: those that no other model needs, and those that others do."""

    name: str
    unique: int
    shared: int

    @property
    def nbytes(self) -> int:
        """All its bytes."""
        return self.unique + self.shared
