"""Views are made of results; JSON has null for infinity, and no keys that only tables show."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from blobstore.errors import StorageError
from blobstore.formats.documents import Descriptor
from blobstore.inspection.comparison import Errors
from blobstore.inspection.listing import BrokenModel, ListedModel
from blobstore.model.facts import Runs, Verdict
from blobstore.names import Digest, ModelName
from blobstore.store.care.usage import ModelUsage
from blobstore.store.care.verify import DamagedBlob
from blobstore.store.ports import Removal
from blobstore.views.checkpoints import QualityErrorsView
from blobstore.views.stores import DamagedBlobView, ListItemView, ModelUsageView, RemovalView
from blobstore.views.view import VerdictView

NAME = ModelName.parse("m")
DIGEST = Digest.of(b"")


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (Verdict("A", "1", Runs.YES, "llama"), "Runs in A 1 (llama)"),
        (Verdict("B", "2", Runs.NO, "no such model"), "Does not run in B 2: no such model"),
        (Verdict("C", "3", Runs.UNKNOWN, "who knows"), "Uncertain in C 3: who knows"),
    ],
)
def test_a_verdict_in_words(verdict: Verdict, sentence: str) -> None:
    view = VerdictView.model_validate(verdict)
    assert verdict.sentence == sentence
    assert view.document() == {
        "runtime": verdict.runtime,
        "version": verdict.version,
        "runs": verdict.runs.value,
        "reason": verdict.reason,
    }


def test_figures_that_json_does_not_have_are_null() -> None:
    errors = Errors(1, math.inf, 1.0, 1.0, math.nan, math.inf)
    view = QualityErrorsView.model_validate(errors)
    assert math.isinf(view.rmse or 0)
    document = view.document()
    assert document["rmse"] is document["max_error"] is document["cosine"] is None
    assert document["weights"] == 1


def test_blobs_are_counted_and_summed() -> None:
    blobs = tuple(Descriptor(media_type="x", digest=DIGEST, size=size) for size in (3, 4))
    view = RemovalView.of(NAME, Removal(blobs[:1], blobs, "why"))
    assert (view.removed, view.bytes, view.kept, view.kept_bytes) == (1, 3, 2, 7)
    assert list(view.document()) == ["name", "removed", "bytes", "kept", "reason"]


def test_a_damaged_blob_lists_a_hundred_models() -> None:
    view = DamagedBlobView.model_validate(DamagedBlob(DIGEST, "torn", (NAME,) * 1000, ("x",)))
    assert (len(view.models), view.model_count) == (100, 1000)
    assert (view.digest, view.tensors, view.tensor_count) == (str(DIGEST), ["x"], 1)


def test_broken_models_have_nulls_and_a_reason() -> None:
    error = StorageError("no disk")
    item = ListItemView.of(BrokenModel(NAME, error), None).document()
    assert {key for key, value in item.items() if value is not None} == {"name", "error"}
    usage = ModelUsageView.of(ModelUsage(NAME, 0, 0, error)).document()
    assert (usage["bytes"], usage["unique"], usage["error"]) == (None, None, "no disk")


def test_moments_are_whole_seconds() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    model = ListedModel(
        name=NAME, id=DIGEST, modified=moment, size=1, parameters=1, quant_type="int4"
    )
    view = ListItemView.of(model, "/there")
    assert view.modified == moment
    assert view.document()["modified"] == "2026-01-02T03:04:05Z"
    assert list(view.document())[-1] == "store"
