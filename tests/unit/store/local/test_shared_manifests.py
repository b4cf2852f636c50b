"""Thousands of hard links to one manifest: it is parsed and its results kept once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from support.calls import note_calls
from support.checkpoints import safetensors_bytes
from support.stores import blob_path, commit_model, link_by_hand, manifest_path

from blobstore.errors import DocumentError
from blobstore.formats import documents, strictjson
from blobstore.formats.documents import JSON_MEDIA_TYPE
from blobstore.inspection.listing import BrokenModel, list_models
from blobstore.store.care import checks as blob_check
from blobstore.store.care.checks import BlobChecks
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

COUNT = 12
A, B = (
    safetensors_bytes({name: np.zeros((3, number), np.float16)})
    for number, name in enumerate("ab", 4)
)
READERS: dict[str, Callable[[Store], object]] = {
    "list": list_models,
    "verify": verify,
    "du": measure_usage,
    "prune": lambda store: prune(store, dry_run=True),
}


@pytest.fixture
def parsed(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a model, spelled as neither Ollama nor we do, and give it more names.

    Returns what is parsed from now on.
    """
    commit_model(store, "m", A, B)
    path = manifest_path(store, "m")
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    for number in range(1, COUNT):
        os.link(path, path.with_name(str(number)))
    parsed: list[str] = []
    real = strictjson.parse_object

    def note(raw: bytes, what: str, **options: Any) -> object:
        if "manifest" in what:
            parsed.append(what)
        return real(raw, what, **options)

    monkeypatch.setattr(documents, "parse_object", note)
    return parsed


@pytest.mark.parametrize("reader", READERS)
def test_one_that_is_sound(store: Store, parsed: list[str], reader: str) -> None:
    READERS[reader](store)
    assert len(parsed) == 1


@pytest.mark.parametrize("reader", READERS)
def test_one_that_is_no_manifest(store: Store, parsed: list[str], reader: str) -> None:
    manifest_path(store, "m").write_text('{"layers": 1}')
    with pytest.raises(DocumentError) if reader == "prune" else nullcontext():
        READERS[reader](store)
    assert len(parsed) == 1


def test_a_list_of_models_whose_blobs_are_missing_parses_once_each_time(
    store: Store, parsed: list[str]
) -> None:
    list_models(store)
    blob_path(store, B).unlink()
    parsed.clear()
    found = list_models(store)
    assert len(parsed) == 1
    errors = [model.error for model in found if isinstance(model, BrokenModel)]
    assert {str(error).endswith("is missing") for error in errors} == {True}
    assert [error.model for error in errors] == [str(model.name) for model in found]


def test_damage_refers_to_all_models_by_one_tuple(store: Store, parsed: list[str]) -> None:
    for data in (A, B):
        blob_path(store, data).unlink()
    first, second = verify(store).damaged
    assert len(first.models) == COUNT
    assert first.models is second.models
    assert parsed


def test_a_model_that_is_asked_for_twice_is_one(store: Store) -> None:
    commit_model(store, "m", A)
    blob_path(store, A).unlink()
    (damaged,) = verify(store, ["m", "m:latest"]).damaged
    assert [str(name) for name in damaged.models] == ["m:latest"]


def test_damage_refers_only_to_models_that_were_not_replaced_meanwhile(
    store: Store, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BlobChecks.run
    path = manifest_path(store, "m")
    other = json.loads(path.read_text())

    def meanwhile(self: BlobChecks, *arguments: Any) -> None:
        real(self, *arguments)
        for tag in ("latest", "1"):
            path.with_name(tag).unlink()
        path.write_text(json.dumps(other | {"layers": other["layers"][:1]}))

    monkeypatch.setattr(BlobChecks, "run", meanwhile)
    for data in (A, B):
        blob_path(store, data).unlink()
    counts = {str(blob.digest): len(blob.models) for blob in verify(store).damaged}
    assert sorted(counts.values()) == [COUNT - 2, COUNT - 2]
    assert parsed


def test_a_config_that_one_manifest_names_often_is_parsed_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = b'{"architectures": ["LlamaForCausalLM"]}'
    layers = [{"mediaType": JSON_MEDIA_TYPE, "name": "config.json"}] * COUNT
    link_by_hand(store, "m", {"config.json": config})
    path = manifest_path(store, "m")
    manifest = json.loads(path.read_text())
    manifest["layers"] = [manifest["layers"][0] | layer for layer in layers]
    path.write_text(json.dumps(manifest))
    parsed = note_calls(monkeypatch, blob_check, "parse_config")
    assert verify(store).is_sound
    assert parsed == [config]
