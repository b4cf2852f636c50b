"""Thousands of hard links to one manifest: it is parsed and its results kept once."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.stores import blob_path, commit_model, manifest_path

from blobstore.errors import DocumentError
from blobstore.formats import documents, strictjson
from blobstore.inspection.listing import list_models
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

COUNT = 12
A, B = (
    safetensors_bytes({name: np.zeros((3, number), np.float16)})
    for number, name in enumerate("ab", 4)
)


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


@pytest.mark.parametrize("is_sound", [True, False])
def test_each_command_parses_it_once(store: Store, parsed: list[str], *, is_sound: bool) -> None:
    if not is_sound:
        manifest_path(store, "m").write_text('{"layers": 1}')
    for reader in (list_models, verify, measure_usage, prune):
        parsed.clear()
        with suppress(DocumentError):  # prune
            reader(store)
        assert len(parsed) == 1


def test_a_model_that_is_asked_for_twice_is_one(store: Store) -> None:
    commit_model(store, "m", A)
    blob_path(store, A).unlink()
    (damaged,) = verify(store, ["m", "m:latest"]).damaged
    assert [str(name) for name in damaged.models] == ["m:latest"]
