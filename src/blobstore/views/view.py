"""The base of all views, and what several of them share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

if TYPE_CHECKING:
    from blobstore.formats.coverage import Coverage, Tally
    from blobstore.inspection.diff import Errors

Text = Annotated[str, BeforeValidator(str)]
"""Text of a name, a digest or a path."""
Figure = Annotated[
    float | None,
    AfterValidator(lambda value: value if value is None or math.isfinite(value) else None),
]
"""A number; null for infinity and NaN, which JSON does not have."""
Bytes = Annotated[int, Field(ge=0, description="bytes")]


class View(BaseModel):
    """A document.

    Keys without a value in one kind of result are left out of it: their fields are not set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, from_attributes=True)

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return self.model_dump(mode="json", exclude_unset=True)


class VerdictView(View):
    """Where a model runs: a runtime, and whether it reads the model."""

    runtime: str
    version: str
    runs: str = Field(description="yes, no or unknown")
    reason: str


class LeftOutView(View):
    """What is not stored, and why."""

    name: str
    reason: str
    count: int


class TallyView(View):
    """How many tensors, or files, a source has, and what became of them."""

    source: int | None = Field(description="null when it was not recorded")
    stored: int
    derived: dict[str, int] = Field(description="how many, by how they were made")
    left_out: list[LeftOutView]

    @classmethod
    def of(cls, tally: Tally) -> TallyView:
        """Return the view of a tally."""
        left_out = [LeftOutView.model_validate(one) for one in tally.left_out]
        return cls(
            source=tally.source, stored=tally.stored, derived=dict(tally.derived), left_out=left_out
        )


class CoverageView(View):
    """How much of a source is stored."""

    tensors: TallyView
    files: TallyView
    heads: dict[str, int] = Field(description="tensors of heads and models beside the main one")
    kept_whole: list[str] = Field(description="files of weights that are kept as files")

    @classmethod
    def of(cls, coverage: Coverage) -> CoverageView:
        """Return the view of a coverage."""
        return cls(
            tensors=TallyView.of(coverage.tensors),
            files=TallyView.of(coverage.files),
            heads=dict(coverage.heads),
            kept_whole=list(coverage.kept_whole),
        )


class ErrorsView(View):
    """How far two sets of values are from each other."""

    weights: int
    rmse: Figure
    relative_rmse: Figure = Field(description="relative to the weights' root mean square")
    max_error: Figure
    cosine: Figure

    @classmethod
    def figures(cls, errors: Errors) -> dict[str, Any]:
        """Return the fields for errors."""
        return {
            "weights": errors.count,
            "rmse": errors.rmse,
            "relative_rmse": errors.relative_rmse,
            "max_error": errors.max_error,
            "cosine": errors.cosine,
        }

    @classmethod
    def of(cls, errors: Errors) -> ErrorsView:
        """Return the view of errors."""
        return cls(**cls.figures(errors))
