"""Views of what the pages ask for: a model without its tensors, and its tensors as columns.

A model of 50,000 tensors is 50,000 objects in `ModelView`, and four columns here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.formats.documents import TENSOR_MEDIA_TYPE
from blobstore.views.view import Bytes, Figure, Text, VerdictView, View

if TYPE_CHECKING:
    from blobstore.formats.documents import Manifest
    from blobstore.inspection.distributions import ValueDistribution
    from blobstore.inspection.listing import ListedModel, ModelDetails
    from blobstore.names import ModelName
    from blobstore.store.outlines import ModelOutline


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
        cls, line: ListedModel, details: ModelDetails, manifest: Manifest, tensors: int
    ) -> LookedModelView:
        """Return the view of a model of so many tensors."""
        documents = [
            LayerView(kind=layer.media_type.rpartition(".")[2], name=layer.name, size=layer.size)
            for layer in manifest.layers
            if layer.media_type != TENSOR_MEDIA_TYPE
        ]
        return cls(
            name=line.name,
            id=line.id,
            architecture=details.architecture,
            parameters=line.parameters,
            quant_type=line.quant_type or None,
            context_length=details.context_length,
            embedding_length=details.embedding_length,
            capabilities=list(details.capabilities),
            size=line.size,
            layers=len(manifest.layers),
            tensors=tensors,
            runs_in=list(details.runs_in),
            documents=documents,
            packed=line.is_packed,
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
    def of(cls, name: ModelName, digest: str, tensors: ModelOutline) -> TensorColumnsView:
        """Return the view of a model's tensors, which are not checked one by one."""
        shapes = {form: list(form.shape) for form in set(tensors.forms)}
        return cls.model_construct(
            model=str(name),
            id=digest,
            names=tensors.names,
            types=[one.type_text for one in tensors.forms],
            shapes=[shapes[one] for one in tensors.forms],
            sizes=[one.nbytes for one in tensors.forms],
        )


class HistogramView(View):
    """Values counted in bins of one width; one bin if all finite values are equal."""

    low: Figure
    high: Figure
    counts: list[int] = Field(description="by bin")
    infinite: int
    nan: int
    rms: Figure = Field(description="root mean square of the finite values")


class DistributionView(View):
    """How the values of a tensor, and its codes, are distributed."""

    model: Text
    id: Text = Field(description="the manifest's digest")
    tensor: str
    type: str = Field(description="int4/64, or a dtype")
    shape: list[int] = Field(description="before packing")
    size: int = Field(description="values of the tensor")
    read: int = Field(description="values that were read: all, or a sample")
    values: HistogramView
    codes: list[int] | None = Field(description="how often each code occurs; null if not quantized")
    code_values: list[Figure] | None = Field(description="what each code stands for, unscaled")

    @classmethod
    def of(cls, name: ModelName, digest: str, found: ValueDistribution) -> DistributionView:
        """Return the view of a tensor's distribution."""
        return cls(
            model=name,
            id=digest,
            tensor=found.name,
            type=found.type_name,
            shape=list(found.shape),
            size=found.size,
            read=found.read,
            values=HistogramView.model_validate(found.values),
            codes=None if found.codes is None else list(found.codes),
            code_values=None if found.code_values is None else list(found.code_values),
        )
