"""Views of work on plans: the outcome of a shard, and of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from blobstore.views.view import Bytes, OptionalText, Text, View

if TYPE_CHECKING:
    from blobstore.importer.work.batch import BatchResult

ShardText = Annotated[
    str, BeforeValidator(lambda one: one if isinstance(one, str) else f"{one[0]}/{one[1]}")
]


class WorkView(View):
    """What a worker did of a plan."""

    plan: Text = Field(description="digest of the plan's file")
    shard: ShardText = Field(description="I/N, counted from 0")
    tasks: int = Field(description="tasks of the shard")
    made: int = Field(description="tasks that were done now")
    blobs: int = Field(description="blobs of these")
    source_bytes: Bytes
    stored_bytes: Bytes
    seconds: float


class BatchModelView(View):
    """What became of a model of a list."""

    name: Text
    source: str
    state: Literal["imported", "waiting", "failed"]
    made: int = Field(description="tasks that were done now")
    digest: OptionalText = Field(description="of the manifest, if the model was published")
    waits_for: int = Field(description="tasks that other workers have to do")
    error: str | None


class BatchView(View):
    """What a worker did of a list of models."""

    imported: int
    waiting: int
    failed: int
    models: list[BatchModelView]

    @classmethod
    def of(cls, results: Iterable[BatchResult]) -> BatchView:
        """Return the view of the outcome of each model."""
        models = [
            BatchModelView(
                name=one.name,
                source=one.source,
                state=_state(one),
                made=one.made,
                digest=one.digest,
                waits_for=one.waits_for,
                error=one.error,
            )
            for one in results
        ]
        states = [model.state for model in models]
        return cls(
            imported=states.count("imported"),
            waiting=states.count("waiting"),
            failed=states.count("failed"),
            models=models,
        )


def _state(result: BatchResult) -> Literal["imported", "waiting", "failed"]:
    if result.error is not None:
        return "failed"
    return "imported" if result.digest is not None else "waiting"
