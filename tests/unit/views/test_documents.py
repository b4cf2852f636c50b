"""Results as documents: null for infinity, texts for names, and no keys that say nothing."""

import math
from datetime import UTC, datetime

from blobstore.errors import StorageError
from blobstore.inspection.comparison import Errors
from blobstore.inspection.listing import BrokenModel, ListedModel
from blobstore.names import Digest, ModelName
from blobstore.store.care.verify import DamagedBlob
from blobstore.views.documents import document_of

NAME = ModelName.parse("m")
DIGEST = Digest.of(b"")


def test_figures_that_json_does_not_have_are_null() -> None:
    document = document_of(Errors(1, math.inf, 1.0, 1.0, math.nan, math.inf))
    assert document["rmse"] is document["max_error"] is document["cosine"] is None
    assert document["weights"] == 1


def test_a_damaged_blob_lists_a_hundred_models() -> None:
    blob = document_of(DamagedBlob(DIGEST, "torn", (NAME,) * 1000, ("x",)))
    assert (len(blob["models"]), blob["model_count"]) == (100, 1000)
    assert (blob["digest"], blob["tensors"], blob["tensor_count"]) == (str(DIGEST), ["x"], 1)


def test_broken_models_have_nulls_and_a_reason() -> None:
    item = document_of(BrokenModel(NAME, StorageError("no disk")))
    assert {key for key, value in item.items() if value is not None} == {"name", "error"}


def test_moments_are_whole_seconds() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    listed = {"id": DIGEST, "size": 1, "parameters": 1, "quant_type": "int4"}
    listed |= {"bits_per_weight": 8.5, "store": "/there"}
    document = document_of(ListedModel(name=NAME, modified=moment, **listed))  # type: ignore[arg-type]
    assert document["modified"] == "2026-01-02T03:04:05Z"
    assert list(document)[-1] == "store"  # and not whether it is packed
