"""Views of stored models: ``list``, ``show``, ``rm``, ``cp``, ``mv``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.errors import BlobStoreError
from blobstore.views.view import Bytes, CoverageView, Text, VerdictView, View

if TYPE_CHECKING:
    from blobstore.formats.coverage import Coverage
    from blobstore.inspection.listing import BrokenModel, ListedModel, ModelDetails, ModelSummary
    from blobstore.names import ModelName
    from blobstore.store.ports import Removal
    from blobstore.store.transfer import Transferred


def rfc3339(moment: datetime | None) -> str | None:
    """Return a UTC moment in RFC 3339, whole seconds."""
    return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class ListItemView(View):
    """A model of a store; of one that can't be read only the name and why."""

    name: Text
    id: str | None = Field(description="the manifest's digest")
    size: int | None = Field(description="bytes of its blobs")
    modified: str | None = Field(description="RFC 3339")
    quant_type: str | None
    parameters: int | None
    error: str = Field(default="", description="why it can't be read")
    store: str = Field(default="", description="where it lies, when there are lower stores")

    @classmethod
    def of(cls, model: ListedModel | BrokenModel, place: str | None) -> ListItemView:
        """Return the view of a model, which lies in the store ``place`` where there are several."""
        where = {} if place is None else {"store": place}
        if isinstance(error := getattr(model, "error", None), BlobStoreError):
            nothing = dict.fromkeys(("id", "size", "modified", "quant_type", "parameters"))
            return cls.model_validate(
                {"name": model.name, **nothing, "error": error.message, **where}
            )
        known = {key: getattr(model, key) for key in ("size", "quant_type", "parameters")}
        times = {
            "id": str(getattr(model, "id", "")),
            "modified": rfc3339(getattr(model, "modified", None)),
        }
        return cls.model_validate({"name": model.name, **known, **times, **where})


class StoredTensorView(View):
    """A tensor of a stored model; ``shape`` is before packing."""

    name: str
    dtype: str
    shape: list[int]
    quant_type: str | None
    group_size: int | None
    size: Bytes


class ModelView(View):
    """A stored model."""

    name: Text
    id: Text
    architecture: str | None
    parameters: int
    quant_type: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: list[str]
    size: Bytes
    layers: int
    runs_in: list[VerdictView]
    tensors: list[StoredTensorView]
    coverage: CoverageView | None = Field(default=None, description="with --coverage")

    @classmethod
    def of(
        cls, summary: ModelSummary, details: ModelDetails, coverage: Coverage | None
    ) -> ModelView:
        """Return the view of a model; ``coverage`` where it is asked for."""
        tensors = [
            StoredTensorView(
                name=tensor.name,
                dtype=tensor.dtype.value,
                shape=list(tensor.shape),
                quant_type=tensor.quantization.quant_type.value if tensor.quantization else None,
                group_size=tensor.quantization.group_size if tensor.quantization else None,
                size=tensor.nbytes,
            )
            for tensor in summary.tensors
        ]
        fields = {
            "name": summary.name,
            "id": summary.id,
            "architecture": details.architecture,
            "parameters": summary.parameters,
            "quant_type": summary.quant_type,
            "context_length": details.context_length,
            "embedding_length": details.embedding_length,
            "capabilities": list(details.capabilities),
            "size": summary.size,
            "layers": summary.layers,
            "runs_in": [VerdictView(**verdict.document()) for verdict in details.runs_in],
            "tensors": tensors,
        }
        covered = {} if coverage is None else {"coverage": CoverageView.of(coverage)}
        return cls.model_validate(fields | covered)


class RemovalView(View):
    """A removed model: how many blobs went with it, and why others had to stay."""

    name: Text
    removed: int
    bytes: Bytes
    kept: int
    reason: str | None

    @classmethod
    def of(cls, name: ModelName, removal: Removal) -> RemovalView:
        """Return the view of a removal."""
        freed = sum(blob.size for blob in removal.removed)
        return cls(
            name=str(name),
            removed=len(removal.removed),
            bytes=freed,
            kept=len(removal.kept),
            reason=removal.reason,
        )


class NewNameView(View):
    """A model and the name that it got."""

    source: Text
    name: Text


class WayView(View):
    """How much came in one way."""

    blobs: int
    bytes: Bytes


class CopyView(NewNameView):
    """A model that was copied; to another store, what came in which way."""

    store: str = Field(default="", description="with --to: the other store")
    there: WayView = Field(
        default=WayView(blobs=0, bytes=0), description="with --to: blobs that the store had"
    )
    cloned: WayView = Field(
        default=WayView(blobs=0, bytes=0), description="with --to: blobs that share their blocks"
    )
    linked: WayView = Field(
        default=WayView(blobs=0, bytes=0), description="with --to: blobs that are the same file"
    )
    copied: WayView = Field(
        default=WayView(blobs=0, bytes=0), description="with --to: blobs that were copied"
    )

    @classmethod
    def of(cls, done: Transferred, store: str) -> CopyView:
        """Return the view of a model that was copied to another store."""
        ways = {
            how.value: WayView(blobs=done.blobs[how], bytes=done.nbytes[how]) for how in done.blobs
        }
        return cls.model_validate(
            {"source": done.source, "name": done.name, "store": store, **ways}
        )
