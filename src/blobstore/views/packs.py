"""Views of models that are packed and unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.views.view import Bytes, Nbytes, Text, View

if TYPE_CHECKING:
    from blobstore.store.packing import PackedModel


class PackView(View):
    """A model that is packed."""

    name: Text
    blobs: int
    size: Bytes = Field(description="bytes of its blobs")
    stored: Bytes = Field(description="bytes of their packed form")
    freed: Bytes = Field(description="bytes of the plain blobs that were removed")
    kept: Bytes = Field(description="bytes of the plain blobs that could not be removed")
    reason: str | None = Field(description="why they could not")

    @classmethod
    def of(cls, done: PackedModel) -> PackView:
        """Return the view of a packed model."""
        return cls(
            name=done.name,
            blobs=done.blobs,
            size=done.nbytes,
            stored=done.stored,
            freed=sum(blob.size for blob in done.removal.removed),
            kept=sum(blob.size for blob in done.removal.kept),
            reason=done.removal.reason,
        )


class UnpackView(View):
    """A model that is whole again."""

    name: Text
    blobs: int = Field(description="blobs that were unpacked")
    bytes: Nbytes
