"""Views of how far models are from each other, and from their sources: ``diff``, ``quality``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.views.view import Bytes, ErrorsView, Text, View

if TYPE_CHECKING:
    from blobstore.inspection.diff import ChangedTensor, ModelDiff, TensorFact
    from blobstore.inspection.quality import ModelQuality


class TensorFactView(View):
    """A tensor of one of two models."""

    name: str
    type: str
    shape: list[int]
    bytes: Bytes

    @classmethod
    def of(cls, fact: TensorFact) -> TensorFactView:
        """Return the view of a tensor."""
        return cls(name=fact.name, type=fact.type_name, shape=list(fact.shape), bytes=fact.nbytes)


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
        errors = change.errors
        figures = (
            None
            if errors is None
            else {**ErrorsView.figures(errors), "odd_values": change.odd_values}
        )
        error = None if figures is None else ChangeErrorsView.model_validate(figures)
        before, after = TensorFactView.of(change.before), TensorFactView.of(change.after)
        return cls(name=change.before.name, before=before, after=after, error=error)


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
        documents = found.documents
        return cls(
            a=str(found.a),
            b=str(found.b),
            added=list(map(TensorFactView.of, found.added)),
            removed=list(map(TensorFactView.of, found.removed)),
            changed=list(map(ChangedTensorView.of, found.changed)),
            equal=found.equal,
            documents=DocumentChangesView(
                added=list(documents.added),
                removed=list(documents.removed),
                changed=list(documents.changed),
            ),
            shared_bytes=found.shared_bytes,
            bytes=SidesView(a=found.nbytes[0], b=found.nbytes[1]),
        )


class QualityErrorsView(ErrorsView):
    """How far the stored weights are from the source's."""

    saturated: float = Field(description="share of codes at the ends of their range")


class StoredAsView(View):
    """A tensor, and what it is stored as."""

    name: str
    quant_type: str | None
    dtype: str | None
    kept: bool
    shape: list[int]


class TensorQualityView(QualityErrorsView, StoredAsView):  # whose keys come first
    """What quantization or conversion changed of a tensor."""


class QualityView(View):
    """What quantization changed."""

    name: Text
    tensors: list[TensorQualityView]
    model: QualityErrorsView

    @classmethod
    def of(cls, report: ModelQuality) -> QualityView:
        """Return the view of a report."""
        tensors = [
            TensorQualityView.model_validate(
                {
                    "name": tensor.name,
                    "quant_type": tensor.type_name if tensor.quantized else None,
                    "dtype": None if tensor.quantized else tensor.type_name,
                    "kept": tensor.kept,
                    "shape": list(tensor.shape),
                    **ErrorsView.figures(tensor.errors),
                    "saturated": tensor.errors.saturated,
                }
            )
            for tensor in report.tensors
        ]
        whole = QualityErrorsView.model_validate(
            {**ErrorsView.figures(report.errors), "saturated": report.errors.saturated}
        )
        return cls(name=str(report.name), tensors=tensors, model=whole)
