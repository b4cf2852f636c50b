"""The base of all views, and what several of them share.

A view is made of a result by ``model_validate``: fields take the attributes of their names, or of
those that their ``validation_alias`` lists.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
)


def _text(value: object) -> object:
    """Return the text of a name, a digest, a path or a member of an enum; None stays None."""
    return None if value is None else str(value.value if isinstance(value, enum.Enum) else value)


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _rfc3339(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _of_blobs(number: Callable[[Any], int]) -> BeforeValidator:
    """Return what takes a number of the blobs that a result lists; a number stays as it is."""
    return BeforeValidator(lambda value: value if isinstance(value, int) else number(value))


Text = Annotated[str, BeforeValidator(_text)]
"""Text of a name, a digest or a path."""
DigestText = Annotated[Text, BeforeValidator(lambda blob: getattr(blob, "digest", blob))]
"""The digest of a blob."""
OptionalText = Annotated[str | None, BeforeValidator(_text)]
Moment = Annotated[datetime | None, PlainSerializer(_rfc3339)]
"""A moment; in JSON in RFC 3339, whole seconds."""
Figure = Annotated[float | None, PlainSerializer(_finite)]
"""A number; in JSON null for infinity and NaN, which JSON does not have."""
Bytes = Annotated[int, Field(ge=0, description="bytes")]
Nbytes = Annotated[Bytes, Field(validation_alias=AliasChoices("bytes", "nbytes"))]
Size = Annotated[Bytes, Field(validation_alias=AliasChoices("size", "nbytes"))]
QuantTypeName = Annotated[
    OptionalText,
    BeforeValidator(lambda found: getattr(found, "quant_type", found)),
    Field(validation_alias=AliasChoices("quant_type", "quantization")),
]
GroupSize = Annotated[
    int | None,
    BeforeValidator(lambda found: getattr(found, "group_size", found)),
    Field(validation_alias=AliasChoices("group_size", "quantization")),
]
ONLY_SHOWN = Field(exclude=True)
"""Of a field that tables show and that is not in the JSON document."""
Count = Annotated[int, _of_blobs(len)]
"""The number of things that a result lists."""
Total = Annotated[Bytes, _of_blobs(lambda blobs: sum(blob.size for blob in blobs))]
"""The bytes of blobs that a result lists."""


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
    runs: Text = Field(description="yes, no or unknown")
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


class CoverageView(View):
    """How much of a source is stored."""

    tensors: TallyView
    files: TallyView
    heads: dict[str, int] = Field(description="tensors of heads and models beside the main one")
    kept_whole: list[str] = Field(description="files of weights that are kept as files")


class TensorView(View):
    """A tensor; ``shape`` is before packing."""

    name: str
    dtype: Text
    shape: list[int]
    quant_type: QuantTypeName
    group_size: GroupSize

    @property
    def type_name(self) -> str:
        """The type as people write it: ``int4/64``, or the dtype."""
        return self.dtype if self.quant_type is None else f"{self.quant_type}/{self.group_size}"
