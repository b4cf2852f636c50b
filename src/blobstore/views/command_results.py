"""Results of commands that combine several results of the library, or have none of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from blobstore.formats.documents import Manifest
from blobstore.formats.provenance import Coverage
from blobstore.inspection.listing import ModelDetails, ModelSummary
from blobstore.names import ModelName
from blobstore.store.ports import Removal
from blobstore.store.transfer import Transferred


@dataclass(frozen=True, slots=True)
class ShownModel:
    """A stored model."""

    KEYS = (
        "name=summary.name",
        "id=summary.id",
        "architecture=details.architecture",
        "parameters=summary.parameters",
        "quant_type=summary.quant_type",
        "context_length=details.context_length",
        "embedding_length=details.embedding_length",
        "capabilities=details.capabilities",
        "size=summary.size",
        "layers=summary.layers",
        "runs_in=details.runs_in",
        "tensors=summary.tensors",
        "coverage?",
        "packed?=summary.is_packed",
    )

    summary: ModelSummary
    details: ModelDetails
    coverage: Annotated[Coverage | None, "with --coverage"] = None


@dataclass(frozen=True, slots=True)
class RemovedModel:
    """A removed model: how many blobs went with it, and why others had to stay."""

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
    """A model that was copied; to another store, what came in which way."""

    KEYS = (
        "source=done.source",
        "name=done.name",
        "store?",
        "there?=done.there",
        "cloned?=done.cloned",
        "linked?=done.linked",
        "copied?=done.copied",
    )

    done: Transferred
    store: Annotated[str, "with --to: the other store"]


@dataclass(frozen=True, slots=True)
class SavedArchive:
    """An archive that was written."""

    KEYS = ("file", "bytes=nbytes", "models", "blobs", "blob_bytes")

    file: str
    nbytes: Annotated[int, "bytes of the file"]
    done: Sequence[Transferred]

    @property
    def models(self) -> list[ModelName]:
        """Their names in it."""
        return [one.name for one in self.done]

    @property
    def blobs(self) -> int:
        """Blobs in it, each counted once."""
        return sum(one.copied.blobs for one in self.done)

    @property
    def blob_bytes(self) -> int:
        """Bytes of these blobs."""
        return sum(one.copied.nbytes for one in self.done)


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

    done: Transferred


@dataclass(frozen=True, slots=True)
class ArchivedModel:
    """A model of an archive."""

    KEYS = ("name", "id=manifest.digest", "size=manifest.size", "blobs")

    name: ModelName
    manifest: Manifest

    @property
    def blobs(self) -> int:
        """Blobs of the model, each counted once."""
        return len({blob.digest for blob in self.manifest.descriptors})


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
