"""Records of `quality` and `verify`: what the commands keep, and how it is read back."""

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.stores import blob_path, commit_model

import blobstore
from blobstore.cli.main import run
from blobstore.errors import DocumentError, StorageError
from blobstore.inspection.comparison import Errors
from blobstore.inspection.listing import BrokenModel, ListedModel
from blobstore.names import Digest, ModelName
from blobstore.store.care.verify import DamagedBlob
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.views.documents import document_of
from blobstore.views.quantities import count, size
from blobstore.views.records import keep_quality, kept_quality, kept_verify

M = ModelName.parse("m")


@pytest.fixture
def source(tmp_path: Path, store: Store) -> Path:
    """A checkpoint that is stored as ``m``."""
    folder = write_checkpoint(tmp_path / "tiny")
    blobstore.import_model(folder, "m", store=store, quant="int8")
    return folder


def quality(*words: object) -> None:
    assert run(["quality", "m", "--against", *map(str, words)]) == 0


def verify(store: Store, *words: str) -> None:
    assert run(["verify", *words, "--store", str(store.root)]) == 3


def test_quality_is_kept(store: Store, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = store.manifest("m").digest
    assert kept_quality(store, M, digest).result is None
    quality(source, "--store", store.root, "--json")
    printed = json.loads(capsys.readouterr().out)
    view = kept_quality(store, M, digest)
    assert (view.against, view.result) == ("tiny", printed)
    assert view.measured is not None
    assert document_of(view)["result"] == printed
    assert kept_quality(MemoryStore(), M, digest).result is None


def test_what_is_no_longer_true_is_dropped(store: Store) -> None:
    for name in (b"repaired", b"removed", b"damaged"):
        commit_model(store, name.decode(), name)
        blob_path(store, name).write_bytes(b"?")
    (store.root / "blobs" / "odd").touch()
    verify(store)
    view = kept_verify(store)
    assert (view.blobs, view.damaged, view.odd) == (3, 3, 1)
    other = store.root / "blobs" / "other"
    other.write_bytes(b"repaired")
    os.utime(other, (other.stat().st_mtime + 2,) * 2)
    other.replace(blob_path(store, b"repaired"))
    assert run(["rm", "removed", "--store", str(store.root)]) == 0
    (store.root / "blobs" / "odd").unlink()
    view = kept_verify(store)
    assert (view.blobs, view.damaged, view.odd) == (2, 1, 0)
    assert view.result is not None
    (blob,) = view.result["damaged"]
    assert blob["digest"] == str(Digest.of(b"damaged"))


def test_a_model_replaced_while_it_is_measured_gets_no_result(store: Store, source: Path) -> None:
    measured = store.manifest("m").digest
    found = blobstore.measure_quality("m", source, store=store)
    blobstore.import_model(source, "m", store=store, quant="int4")
    keep_quality(store, found, str(source))
    assert kept_quality(store, M, store.manifest("m").digest).result is None
    assert kept_quality(store, M, measured).result is not None


def test_a_damaged_record(store: Store, source: Path) -> None:
    quality(source, "--store", store.root)
    digest = store.manifest("m").digest
    path = store.root / ".blobstore/results/quality" / f"{digest.hex}.json"
    whole = path.read_bytes()
    damaged = (whole[:-9], b"[]", whole.replace(b'"rmse"', b'"rms"', 1))
    for data in (*damaged, whole.replace(b'"digest":"', b'"digest":"x', 1)):
        path.write_bytes(data)
        with pytest.raises(DocumentError, match="is damaged") as caught:
            kept_quality(store, M, digest)
        assert caught.value.path == str(path)
        assert caught.value.hint == "Run quality again: it is replaced."
    path.write_text('{"version": 1, "result": {}}')
    assert kept_quality(store, M, digest).result is None


def test_results_of_a_lower_store_are_read(store: Store, source: Path, tmp_path: Path) -> None:
    upper, digest = tmp_path / "upper", store.manifest("m").digest
    upper.mkdir()
    quality(source, "--store", upper, "--lower", store.root)
    assert not (store.root / ".blobstore/results").exists()
    assert not (upper / ".blobstore/results").exists()
    quality(source, "--store", store.root)
    layered = LayeredStore(Store(upper), [store])
    assert kept_quality(layered, M, digest).result is not None


def test_verify_of_all_models_is_kept(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    commit_model(store, "m", b"one")
    verify(store, "m")
    assert kept_verify(store).result is None
    capsys.readouterr()
    verify(store, "--quick", "--sample", "1/1", "--json")
    printed = json.loads(capsys.readouterr().out)
    view = kept_verify(store)
    assert (view.quick, view.sample, view.damaged, view.broken) == (True, "1/1", 1, 0)
    assert view.result == printed


DIGEST = Digest.of(b"")


def test_documents_of_views() -> None:
    figures = document_of(Errors(1, math.inf, 1.0, 1.0, math.nan, math.inf))
    assert figures["rmse"] is figures["max_error"] is figures["cosine"] is None  # JSON has no inf
    assert figures["weights"] == 1
    blob = document_of(DamagedBlob(DIGEST, "torn", (M,) * 1000, ("x",)))
    assert (len(blob["models"]), blob["model_count"]) == (100, 1000)
    assert (blob["digest"], blob["tensors"], blob["tensor_count"]) == (str(DIGEST), ["x"], 1)
    item = document_of(BrokenModel(M, StorageError("no disk")))
    assert {key for key, value in item.items() if value is not None} == {"name", "error"}


def test_moments_are_whole_seconds() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    listed = {"id": DIGEST, "size": 1, "parameters": 1, "quant_type": "int4"}
    listed |= {"bits_per_weight": 8.5, "store": "/there"}
    document = document_of(ListedModel(name=M, modified=moment, **listed))  # type: ignore[arg-type]
    assert document["modified"] == "2026-01-02T03:04:05Z"
    assert list(document)[-1] == "store"  # and not whether it is packed


def test_numbers_have_three_digits_and_a_unit() -> None:
    texts = {999: "999", 1000: "1K", 999_499: "999K", 999_500: "1M", 5_245_696: "5.25M"}
    for number, text in texts.items():
        assert count(number) == text
        unit = text.replace("K", " KB").replace("M", " MB") + " B" * (number < 1000)
        assert size(number) == unit
