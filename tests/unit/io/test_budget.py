"""Budget: the limit for reading one checkpoint or stored model, however its files are cut."""

import json
import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, raw_safetensors, safetensors_bytes, write_checkpoint
from support.stores import commit_model

from blobstore import open_model
from blobstore.errors import HeaderError, LimitExceededError
from blobstore.importer import plan
from blobstore.importer.run import plan_import
from blobstore.inspection.inspect import inspect
from blobstore.inspection.listing import BrokenModel, list_models
from blobstore.io import budget as limits
from blobstore.io.budget import Budget
from blobstore.source.inventory import read_inventory
from blobstore.store.local.store import Store

ONE = safetensors_bytes({"a": np.arange(8.0)}, {"note": "x" * 1000})
EMPTY = raw_safetensors({"__metadata__": {"note": "x" * 1000}})


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_limits(**values: int) -> None:
        for name, value in values.items():
            monkeypatch.setitem(Budget.__init__.__kwdefaults__ or {}, name, value)
        monkeypatch.setattr(limits, "MAX_STORED_TEXT", values.get("text", limits.MAX_STORED_TEXT))

    return set_limits


def refused(call: Callable[[], object]) -> LimitExceededError:
    with pytest.raises(LimitExceededError) as caught:
        call()
    return caught.value


def test_text_is_refused_before_it_is_read() -> None:
    budget = Budget("m", text=100)
    budget.take_text(60, "a")
    error = str(refused(lambda: budget.take_text(50, "the header")))
    assert "the header has 50 bytes" in error
    assert "110" in error
    budget.take_text(40, "b")  # what was refused does not count
    budget.give_back_text(10)
    budget.take_text(10, "c")


def test_servers_get_more_time_while_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = Budget("m")
    assert budget.seconds_left() == limits.SECONDS
    budget.receive(10_000_000)
    now += limits.SECONDS - 1
    assert 0 < budget.seconds_left() <= 1  # ten megabytes buy no second more
    budget.receive(10_000_000)
    assert budget.seconds_left() > 30
    now += 60
    error = refused(budget.seconds_left)
    assert "20,000,000 bytes for m in 119 seconds" in str(error)
    refused(lambda: budget.receive(limits.MAX_RECEIVED))
    assert pickle.loads(pickle.dumps(error)).hint == error.hint


# Checkpoints


def shards(folder: Path, count: int, data: bytes = EMPTY) -> Path:
    """Write a checkpoint whose first shard has a tensor, and whose others are links to one file."""
    folder.mkdir()
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    (folder / names[0]).write_bytes(ONE)
    (folder / names[1]).write_bytes(data)
    for name in names[2:]:
        os.link(folder / names[1], folder / name)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    return folder


def test_the_headers_of_a_checkpoint_together(tmp_path: Path, least: Callable[..., None]) -> None:
    folder = shards(tmp_path / "m", 30)
    readers: tuple[Callable[[Path], object], ...] = (inspect, read_inventory)
    for read in readers:
        read(folder)
    least(text=20_000)
    for read in readers:
        error = refused(partial(read, folder))
        assert str(folder) in str(error)
        assert str(error.path).endswith("-of-00030.safetensors")


def test_tensors_and_documents_together(tmp_path: Path, least: Callable[..., None]) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "a.json").write_bytes(bytes(150_000))
    least(text=250_000, tensors=6)
    read_inventory(folder)
    os.link(folder / "a.json", folder / "b.json")
    assert refused(lambda: read_inventory(folder)).path == str(folder / "b.json")
    (folder / "b.json").unlink()
    least(tensors=5)
    assert "6 tensors" in str(refused(lambda: read_inventory(folder)))


def test_links_to_one_file_are_counted_once(tmp_path: Path) -> None:
    """Without an index and a usual name each file counts for itself, but no file twice."""
    (tmp_path / "a.safetensors").write_bytes(ONE)
    os.link(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (tmp_path / "d.safetensors").symlink_to("a.safetensors")
    (tmp_path / "e.safetensors").write_bytes(ONE)
    found = inspect(tmp_path)
    assert [file.name for file in found.files] == ["a.safetensors", "e.safetensors"]
    assert "'b.safetensors', 'd.safetensors'" in found.notes[1]


@pytest.mark.parametrize("most", [3, 6])
def test_documents_are_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A manifest may name only so many; six blobs and a document are too many for six."""
    monkeypatch.setattr(plan, "MAX_LAYERS", most)
    source = write_checkpoint(tmp_path / "m")
    assert "layers" in str(refused(lambda: plan_import(source, profile="ollama")))


# Stored models


def test_the_headers_of_a_stored_model_together(store: Store, least: Callable[..., None]) -> None:
    blobs = [safetensors_bytes({f"t{number}": np.arange(8.0)}) for number in range(9)]
    commit_model(store, "m", *blobs)
    least(text=500, tensors=8)
    (listed,) = list_models(store)
    assert isinstance(listed, BrokenModel)
    assert isinstance(listed.error, LimitExceededError)
    for read in (lambda: inspect("m", store=store), lambda: open_model("m", store=store)):
        error = refused(read)
        assert "m:latest" in f"{error} {error.model}"


def test_a_header_that_is_a_hole_takes_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 10_000_000) + b'{"')
        file.truncate(10_000_008)
    tracemalloc.start()
    with pytest.raises(HeaderError):
        inspect(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 30_000_000
    tracemalloc.stop()
