"""Views of what the pages ask for: a model without its tensors, and its tensors as columns.

A model of 50,000 tensors is 50,000 objects in `ModelView`, and four columns here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.views.view import Bytes, Text, VerdictView, View

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.formats.documents import Manifest
    from blobstore.inspection.listing import ModelDetails, ModelSummary
    from blobstore.names import ModelName
    from blobstore.store.stored import StoredTensor

_TENSOR_LAYERS = "application/vnd.ollama.image.tensor"


class ProblemView(View):
    """Why a request has no answer."""

    error: str
    hint: str | None = Field(description="one sentence: what to do about it")


class LayerView(View):
    """A layer other than tensors: a document, a template, a licence, or a file."""

    kind: str = Field(description="json, file, template, system, params, license, …")
    name: str | None = Field(description="its path in the checkpoint's folder")
    size: Bytes


class LookedModelView(View):
    """A stored model without its tensors."""

    name: Text
    id: Text = Field(description="the manifest's digest")
    architecture: str | None
    parameters: int
    quant_type: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: list[str]
    size: Bytes
    layers: int
    tensors: int = Field(description="how many it has")
    runs_in: list[VerdictView]
    documents: list[LayerView] = Field(description="layers other than tensors")
    packed: bool = Field(description="it has to be unpacked before its values are read")

    @classmethod
    def of(
        cls, summary: ModelSummary, details: ModelDetails, manifest: Manifest
    ) -> LookedModelView:
        """Return the view of a model."""
        documents = [
            LayerView(kind=layer.media_type.rpartition(".")[2], name=layer.name, size=layer.size)
            for layer in manifest.layers
            if layer.media_type != _TENSOR_LAYERS
        ]
        return cls(
            name=summary.name,
            id=summary.id,
            architecture=details.architecture,
            parameters=summary.parameters,
            quant_type=summary.quant_type or None,
            context_length=details.context_length,
            embedding_length=details.embedding_length,
            capabilities=list(details.capabilities),
            size=summary.size,
            layers=summary.layers,
            tensors=len(summary.tensors),
            runs_in=list(details.runs_in),
            documents=documents,
            packed=summary.is_packed,
        )


class TensorColumnsView(View):
    """The tensors of a model, as columns of one length, in the order of its manifest."""

    model: Text
    id: Text = Field(description="the manifest's digest")
    names: list[str]
    types: list[str] = Field(description="int4/64, or a dtype")
    shapes: list[list[int]] = Field(description="before packing")
    sizes: list[int] = Field(description="bytes, with scales and biases")

    @classmethod
    def of(cls, name: ModelName, digest: str, tensors: Iterable[StoredTensor]) -> TensorColumnsView:
        """Return the view of a model's tensors, which are not checked one by one."""
        found = list(tensors)
        return cls.model_construct(
            model=str(name),
            id=digest,
            names=[one.name for one in found],
            types=[type_text(one) for one in found],
            shapes=[list(one.shape) for one in found],
            sizes=[one.nbytes for one in found],
        )


def type_text(tensor: StoredTensor) -> str:
    """Return the type as people write it: ``int4/64``, or the dtype."""
    if tensor.quant_type is None:
        return str(tensor.dtype)
    return f"{tensor.quant_type}/{tensor.group_size}"
