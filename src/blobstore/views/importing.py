"""Views of what comes in, goes out and is looked at: ``import``, ``plan``, ``inspect``, ``export``, ``run``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from blobstore.views.view import Bytes, CoverageView, Text, VerdictView, View

if TYPE_CHECKING:
    from blobstore.export.run import ExportResult
    from blobstore.importer.planning.outputs import ImportPlan, OutputTensor
    from blobstore.importer.run import ImportResult
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

    @classmethod
    def of(cls, result: ImportResult) -> ImportView:
        """Return the view of a result."""
        plain = (
            "blobs",
            "created",
            "reused",
            "recalled",
            "source_bytes",
            "stored_bytes",
            "new_bytes",
            "saved_bytes",
        )
        fields = {key: getattr(result, key) for key in (*plain, "bits_per_weight", "seconds")}
        runs_in = [VerdictView(**verdict.document()) for verdict in result.runs_in]
        known = {"name": result.name, "digest": result.digest, "runs_in": runs_in}
        return cls.model_validate(known | fields | {"coverage": CoverageView.of(result.coverage)})


class PlannedTensorView(View):
    """A tensor as it would be stored."""

    name: str
    dtype: str
    shape: list[int]
    quant_type: str | None
    group_size: int | None
    transposed: bool
    kept: str | None = Field(description="why it is not quantized")
    sources: list[str] = Field(description="the tensors that it is made of")
    relative_error: float | None = Field(
        default=None, description="with a target: what was measured"
    )

    @classmethod
    def of(cls, tensor: OutputTensor, plan: ImportPlan) -> PlannedTensorView:
        """Return the view of a tensor of a plan."""
        fields: dict[str, Any] = {
            "name": tensor.name,
            "dtype": tensor.dtype.value,
            "shape": list(tensor.shape),
            "quant_type": tensor.quantization.quant_type.value if tensor.quantization else None,
            "group_size": tensor.quantization.group_size if tensor.quantization else None,
            "transposed": tensor.transposed,
            "kept": tensor.kept,
            "sources": tensor.source_names,
        }
        if plan.options.target is not None:
            fields["relative_error"] = plan.relative_errors.get(tensor.name)
        return cls.model_validate(fields)


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
                metadata=dict(blob.metadata),
                tensors=[PlannedTensorView.of(tensor, plan) for tensor in blob.tensors],
            )
            for blob in plan.blobs
        ]
        return cls(
            blobs=blobs,
            stored_bytes=plan.stored_bytes,
            bits_per_weight=plan.bits_per_weight,
            coverage=CoverageView.of(plan.coverage),
            runs_in=[VerdictView(**verdict.document()) for verdict in runs_in],
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

    @classmethod
    def of(cls, result: ExportResult) -> ExportView:
        """Return the view of a result."""
        files = [ExportedFileView(name=name, size=nbytes) for name, nbytes in result.files.items()]
        return cls(
            name=str(result.name),
            folder=str(result.folder),
            files=files,
            bytes=result.nbytes,
            notes=list(result.notes),
            seconds=result.seconds,
        )


class RunView(View):
    """What a model wrote."""

    text: str
    tokens: int
    seconds: float
