"""Missing models: those whose manifests are gone, though copies of the manifests are kept (copies.py).

Another program may have removed such a model, or the disk that its manifest lies on is not mounted: an unmounted disk looks
like an empty folder. An ``ollama rm`` deletes the blobs that only this model needs, together with its manifest. So a missing
model whose own blobs are still there is called *lost*: something other than a removal took its manifest.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from blobstore.names import ModelName
from blobstore.store.copies import ManifestCopies
from blobstore.store.references import KnownNeeds


@dataclass(frozen=True, slots=True)
class MissingModel:
    """A model without a manifest, and the hex digits of the blobs that the copies of its manifest name."""

    name: ModelName
    needs: AbstractSet[str]


@dataclass(frozen=True, slots=True)
class CopiedModels:
    """The models whose manifests have copies: those that are ``there``, with a manifest, and those that are ``missing``."""

    there: tuple[ModelName, ...]
    missing: tuple[MissingModel, ...]

    @classmethod
    def read(cls, copies: ManifestCopies, names: AbstractSet[ModelName]) -> CopiedModels:
        """Return the copied models of a store whose manifests have ``names``. Raises: StorageError."""
        copied = copies.names()
        known = KnownNeeds()
        missing = (MissingModel(name, copies.needs(name, known)) for name in copied if name not in names)
        return cls(tuple(name for name in copied if name in names), tuple(missing))

    def lost(self, unneeded: AbstractSet[str]) -> list[MissingModel]:
        """Return the lost models, given the hex digits of the blobs in the store that no manifest needs."""
        return [model for model in self.missing if not unneeded.isdisjoint(model.needs)]
