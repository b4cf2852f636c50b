"""Answers of the API that no command prints: a model without its tensors, its tensors as columns.

A model of 50,000 tensors is 50,000 objects in what ``show`` prints, and four columns here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Manifest
from blobstore.inspection.listing import ListedModel, ModelDetails
from blobstore.inspection.quality import ValueDistribution
from blobstore.names import Digest, ModelName
from blobstore.store.stored_model import ModelOutline


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request has no answer."""

    error: str
    hint: Annotated[str | None, "one sentence: what to do about it"] = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer other than tensors: a document, a template, a licence, or a file."""

    kind: Annotated[str, "json, file, template, system, params, license, …"]
    name: Annotated[str | None, "its path in the checkpoint's folder"]
    size: int


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A stored model without its tensors."""

    KEYS = (
        "name=line.name",
        "id=line.id",
        "architecture=details.architecture",
        "parameters=line.parameters",
        "quant_type",
        "context_length=details.context_length",
        "embedding_length=details.embedding_length",
        "capabilities=details.capabilities",
        "size=line.size",
        "layers=len(manifest.layers)",
        "tensors",
        "runs_in=details.runs_in",
        "documents",
        "packed=line.is_packed",
    )

    line: ListedModel
    details: ModelDetails
    manifest: Manifest
    tensors: Annotated[int, "how many it has"]

    @property
    def quant_type(self) -> str | None:
        return self.line.quant_type or None

    @property
    def documents(self) -> Annotated[list[Layer], "layers other than tensors"]:
        return [
            Layer(layer.media_type.rpartition(".")[2], layer.name, layer.size)
            for layer in self.manifest.layers
            if layer.media_type != TENSOR_MEDIA_TYPE
        ]


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """The tensors of a model, as columns of one length, in the order of its manifest."""

    KEYS = ("model", "id", "names=outline.names", "types", "shapes", "sizes")

    model: ModelName
    id: Annotated[Digest, "the manifest's digest"]
    outline: ModelOutline

    @property
    def types(self) -> Annotated[list[str], "int4/64, or a dtype"]:
        return [form.type_text for form in self.outline.forms]

    @property
    def shapes(self) -> Annotated[list[Sequence[int]], "before packing"]:
        return [form.shape for form in self.outline.forms]

    @property
    def sizes(self) -> Annotated[list[int], "bytes, with scales and biases"]:
        return [form.nbytes for form in self.outline.forms]


@dataclass(frozen=True, slots=True)
class TensorDistribution:
    """How the values of a tensor, and its codes, are distributed."""

    KEYS = (
        "model",
        "id",
        "tensor=found.name",
        "type=found.type_name",
        "shape=found.shape",
        "size=found.size",
        "read=found.read",
        "values=found.values",
        "codes=found.codes",
        "code_values=found.code_values",
    )

    model: ModelName
    id: Annotated[Digest, "the manifest's digest"]
    found: ValueDistribution
