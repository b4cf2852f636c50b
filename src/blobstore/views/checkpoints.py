"""Views of checkpoints: imported, inspected and exported ones; differences between models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, AliasPath, Field

from blobstore.views.view import (
    Bytes,
    CoverageView,
    Figure,
    Nbytes,
    TensorView,
    Text,
    VerdictView,
    View,
)

if TYPE_CHECKING:
    from blobstore.export.folder import ExportResult
    from blobstore.importer.planning.outputs import ImportPlan, OutputTensor
    from blobstore.inspection.diff import ChangedTensor, ModelDiff
    from blobstore.inspection.quality import ModelQuality, TensorQuality
    from blobstore.model.facts import Verdict


class ImportView(View):
    """What an import did."""

    name: Text
    digest: Text = Field(description="of the manifest")
    blobs: int
    created: int
    reused: int
    recalled: int = Field(description="tensor blobs that an earlier import had made")
    source_bytes: Bytes
    stored_bytes: Bytes
    new_bytes: Bytes
    saved_bytes: Bytes
    bits_per_weight: float
    seconds: float
    runs_in: list[VerdictView]
    coverage: CoverageView
    replaced: Text | None = Field(description="the ID of the model that had the name before")


class PlannedTensorView(TensorView):
    """A tensor as it would be stored."""

    transposed: bool
    kept: str | None = Field(description="why it is not quantized")
    sources: list[str] = Field(
        description="the tensors that it is made of",
        validation_alias=AliasChoices("source_names", "sources"),
    )
    relative_error: float | None = Field(
        default=None, description="with a target: what was measured"
    )

    @classmethod
    def of(cls, tensor: OutputTensor, plan: ImportPlan) -> PlannedTensorView:
        """Return the view of a tensor of a plan."""
        view = cls.model_validate(tensor)
        if plan.options.target is None:
            return view
        return view.model_copy(update={"relative_error": plan.relative_errors.get(tensor.name)})


class PlannedBlobView(View):
    """A blob as it would be stored."""

    name: str
    size: Bytes
    metadata: dict[str, str]
    tensors: list[PlannedTensorView]


class PlanView(View):
    """What an import would write."""

    blobs: list[PlannedBlobView]
    stored_bytes: Bytes
    bits_per_weight: float
    coverage: CoverageView
    runs_in: list[VerdictView]

    @classmethod
    def of(cls, plan: ImportPlan, runs_in: Iterable[Verdict]) -> PlanView:
        """Return the view of a plan."""
        blobs = [
            PlannedBlobView(
                name=blob.name,
                size=blob.size,
                metadata=blob.metadata,
                tensors=[PlannedTensorView.of(tensor, plan) for tensor in blob.tensors],
            )
            for blob in plan.blobs
        ]
        return cls(
            blobs=blobs,
            stored_bytes=plan.stored_bytes,
            bits_per_weight=plan.bits_per_weight,
            coverage=plan.coverage,
            runs_in=list(runs_in),
        )


class InspectedFileView(View):
    """A file, or a blob by its layer's name."""

    name: str
    bytes: Bytes


class FoundQuantizationView(View):
    """A type of quantization, and how much of it there is."""

    type: str
    bits: float | None
    group_size: int | None
    format: str | None
    tensors: int
    parameters: int


class InspectionView(View):
    """What a checkpoint or a stored model holds; huggingface.js's keys come first.

    Headers are those of the files: `__metadata__`, and tensors with `dtype`, `shape` and
    `data_offsets`. It is one line.
    """

    sharded: bool
    header: dict[str, Any] = Field(default={}, description="when it is one file")
    index: dict[str, Any] = Field(
        default={}, description="when it is sharded: the index, or one made of the files"
    )
    headers: dict[str, Any] = Field(default={}, description="when it is sharded: by file name")
    parameter_count: dict[str, int] = Field(description="by dtype")
    parameters: int
    name: str
    kind: str
    files: list[InspectedFileView]
    tensors: int
    bytes: Bytes
    bits_per_weight: float | None
    quantization: list[FoundQuantizationView]
    notes: list[str]


class ExportedFileView(View):
    """A file that was written."""

    name: str
    size: Bytes


class ExportView(View):
    """What an export wrote."""

    name: Text
    folder: Text
    files: list[ExportedFileView]
    bytes: Bytes
    notes: list[str]
    seconds: float
    loads_in: list[str] = Field(description="programs that read the folder")

    @classmethod
    def of(cls, result: ExportResult) -> ExportView:
        """Return the view of a result."""
        files = [ExportedFileView(name=name, size=nbytes) for name, nbytes in result.files.items()]
        return cls(
            name=result.name,
            folder=result.folder,
            files=files,
            bytes=result.nbytes,
            notes=result.notes,
            seconds=result.seconds,
            loads_in=list(result.loads_in),
        )


def _error(name: str, attribute: str | None = None, description: str | None = None) -> Any:
    """Return a field of `Errors`, which a result is, or has as ``errors``."""
    found = attribute or name
    places = AliasChoices(name, found, AliasPath("errors", found))
    return Field(description=description, validation_alias=places)


class ErrorsView(View):
    """How far two sets of values are from each other."""

    weights: int = _error("weights", "count")
    rmse: Figure = _error("rmse")
    relative_rmse: Figure = _error(
        "relative_rmse", description="relative to the weights' root mean square"
    )
    max_error: Figure = _error("max_error")
    cosine: Figure = _error("cosine")


class TensorFactView(View):
    """A tensor of one of two models."""

    name: str
    type: str = Field(validation_alias=AliasChoices("type", "type_name"))
    shape: list[int]
    bytes: Nbytes


class ChangeErrorsView(ErrorsView):
    """How far a tensor's values in one model are from those in the other."""

    odd_values: int = Field(description="values that are infinite or NaN on one side only")


class ChangedTensorView(View):
    """A tensor that differs."""

    name: str
    before: TensorFactView
    after: TensorFactView
    error: ChangeErrorsView | None = Field(description="with --error")

    @classmethod
    def of(cls, change: ChangedTensor) -> ChangedTensorView:
        """Return the view of a change."""
        error = None if change.errors is None else ChangeErrorsView.model_validate(change)
        return cls(name=change.before.name, before=change.before, after=change.after, error=error)


class DocumentChangesView(View):
    """Documents that differ, by name."""

    added: list[str]
    removed: list[str]
    changed: list[str]


class SidesView(View):
    """A number for each of two models."""

    a: Bytes
    b: Bytes


class DiffView(View):
    """How model b differs from a."""

    a: Text
    b: Text
    added: list[TensorFactView]
    removed: list[TensorFactView]
    changed: list[ChangedTensorView]
    equal: int = Field(description="tensors")
    documents: DocumentChangesView
    shared_bytes: Bytes
    bytes: SidesView

    @classmethod
    def of(cls, found: ModelDiff) -> DiffView:
        """Return the view of a comparison."""
        changed = list(map(ChangedTensorView.of, found.changed))
        sides = SidesView(a=found.nbytes[0], b=found.nbytes[1])
        fields = {name: getattr(found, name) for name in cls.model_fields if name != "bytes"}
        return cls.model_validate(fields | {"changed": changed, "bytes": sides})


class QualityErrorsView(ErrorsView):
    """How far the stored weights are from the source's."""

    saturated: float = _error("saturated", description="share of codes at the ends of their range")


class StoredAsView(View):
    """A tensor, and what it is stored as."""

    name: str
    quant_type: str | None = Field(validation_alias=AliasChoices("quant_type", "type_name"))
    dtype: str | None = Field(validation_alias=AliasChoices("dtype", "type_name"))
    kept: bool
    shape: list[int]


class TensorQualityView(QualityErrorsView, StoredAsView):  # whose keys come first
    """What quantization or conversion changed of a tensor."""

    @classmethod
    def of(cls, tensor: TensorQuality) -> TensorQualityView:
        """Return the view of a tensor."""
        other = "dtype" if tensor.quantized else "quant_type"
        return cls.model_validate(tensor).model_copy(update={other: None})


class QualityView(View):
    """What quantization changed."""

    name: Text
    tensors: list[TensorQualityView]
    model: QualityErrorsView

    @classmethod
    def of(cls, report: ModelQuality) -> QualityView:
        """Return the view of a report."""
        tensors = list(map(TensorQualityView.of, report.tensors))
        return cls(name=report.name, tensors=tensors, model=report.errors)
