"""Results of commands and answers of the API that combine results of the library, or have none.

A model of 50,000 tensors is 50,000 objects in what ``show`` prints, and four columns in the API.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Coverage, Manifest
from blobstore.inspection.listing import ModelDetails
from blobstore.names import Digest, ModelName
from blobstore.store.ports import Removal
from blobstore.store.stored import StoredTensor
from blobstore.store.transfer import TransferResult


@dataclass(frozen=True, slots=True)
class ShownModel:
    """A stored model."""

    KEYS = (
        "name=details.name",
        "id=details.id",
        "architecture=details.architecture",
        "parameters=details.parameters",
        "quant_type=details.quant_type",
        "bits_per_weight=details.bits_per_weight",
        "context_length=details.context_length",
        "embedding_length=details.embedding_length",
        "capabilities=details.capabilities",
        "size=details.size",
        "layers=len(manifest.layers)",
        "runs_in=details.runs_in",
        "tensors",
        "coverage?",
        "packed?=details.is_packed",
    )

    details: ModelDetails
    manifest: Manifest
    tensors: Sequence[StoredTensor]
    coverage: Annotated[Coverage | None, "with --coverage"] = None


@dataclass(frozen=True, slots=True)
class RemovedModel:
    """A removed model: how many blobs were removed with it, and why others were kept."""

    KEYS = (
        "name",
        "removed=len(removal.removed)",
        "bytes=removal.removed_bytes",
        "kept=len(removal.kept)",
        "reason=removal.reason",
    )

    name: ModelName
    removal: Removal


@dataclass(frozen=True, slots=True)
class RenamedModel:
    """A model and the name that it got."""

    source: ModelName
    name: ModelName


@dataclass(frozen=True, slots=True)
class CopiedModel:
    """A copied model; for another store, how each blob was copied."""

    KEYS = (
        "source=done.source",
        "name=done.name",
        "store?",
        "there?=done.there",
        "cloned?=done.cloned",
        "linked?=done.linked",
        "copied?=done.copied",
    )

    done: TransferResult
    store: Annotated[str, "with --to: the other store"]


@dataclass(frozen=True, slots=True)
class SavedArchive:
    """An archive that was written."""

    KEYS = ("file", "bytes=nbytes", "models", "blobs", "blob_bytes")

    file: str
    nbytes: Annotated[int, "bytes of the file"]
    models: Annotated[list[ModelName], "Their names in it"]
    blobs: Annotated[int, "Blobs in it, each counted once"]
    blob_bytes: Annotated[int, "Bytes of these blobs"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that was loaded."""

    KEYS = (
        "source=done.source",
        "name=done.name",
        "there=done.there",
        "copied=done.copied",
        "replaced=done.replaced",
    )

    done: TransferResult


@dataclass(frozen=True, slots=True)
class ArchivedModel:
    """A model of an archive."""

    KEYS = ("name", "id=manifest.digest", "size=manifest.size", "blobs")

    name: ModelName
    manifest: Manifest
    blobs: Annotated[int, "Blobs of the model, each counted once"]


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """A report that was written."""

    KEYS = ("name", "page", "bytes=nbytes", "plots", "pictures")

    name: str
    page: Annotated[str | None, "its file; null without -o"]
    nbytes: Annotated[int | None, "of the page"]
    plots: Annotated[Sequence[str], "what is drawn"]
    pictures: Annotated[Sequence[str], "the files of --png"]


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """What a model wrote, how fast, and with which seed."""

    text: str
    tokens: int
    prompt_tokens: int
    seconds: float
    tokens_per_second: float | None
    finish_reason: str | None
    seed: int | None


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
        "name=details.name",
        "id=details.id",
        "modified=details.modified",
        "architecture=details.architecture",
        "parameters=details.parameters",
        "quant_type",
        "bits_per_weight=details.bits_per_weight",
        "context_length=details.context_length",
        "embedding_length=details.embedding_length",
        "capabilities=details.capabilities",
        "size=details.size",
        "layers=len(manifest.layers)",
        "tensors",
        "runs_in=details.runs_in",
        "documents",
        "packed=details.is_packed",
    )

    details: ModelDetails
    manifest: Manifest
    tensors: Annotated[int, "how many it has"]

    @property
    def quant_type(self) -> str | None:
        return self.details.quant_type or None

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

    model: ModelName
    id: Annotated[Digest, "the manifest's digest"]
    names: list[str]
    types: Annotated[list[str], "int4/64, or a dtype"]
    shapes: Annotated[list[Sequence[int]], "before packing"]
    sizes: Annotated[list[int], "bytes, with scales and biases"]
