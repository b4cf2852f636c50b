"""MLX sources without a ``mode``: Ollama's blobs have no metadata.

They are read by the settings of config.json.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.ollama_cases import Case, Cases, case_maker
from support.stores import manifest_path

import blobstore
from blobstore.errors import CorruptDataError, NotFoundError
from blobstore.export.folder import export_model
from blobstore.formats.safetensors.header import header_of as read_header
from blobstore.inspection.comparison import diff_models
from blobstore.inspection.listing import ListedModel, list_models, summarize
from blobstore.names import Digest
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

SOURCES = {"d_mlx_int4": "int4/64", "d_mlx_int4_g32": "int4/32"}
NAME = "ollamas"

unquantized = pytest.mark.parametrize("quant", ["none"])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Cases in a small store, which each test copies; the session's has all the other cases."""
    return case_maker(tmp_path_factory.mktemp("copied-records"))


@pytest.fixture
def beside(case: Case, tmp_path: Path) -> Case:
    """A copy of the case's store that also contains the model as Ollama stored it.

    Our data are under its headers.
    """
    copy = replace(case, store=open_store(shutil.copytree(case.store.root, tmp_path / "copy")))
    blobs = copy.store.root / "blobs"
    for ours, theirs in zip(case.result.manifest.tensor_layers, case.recorded_layers, strict=False):
        header = case.record["headers"][str(theirs.digest)].encode()
        with copy.store.blobs.open(ours) as reader:
            start = read_header(reader).data_start
            data = reader.read(start, reader.size - start)
        (blobs / theirs.digest.file_name).write_bytes(
            len(header).to_bytes(8, "little") + header + data
        )
    config = case.record["config"].encode()
    (blobs / Digest.of(config).file_name).write_bytes(config)
    write_manifest(copy.store, NAME, case.record["manifest"])
    return copy


def write_manifest(store: Store, name: str, text: str) -> None:
    path = manifest_path(store, name)
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize("source", SOURCES)
@unquantized
def test_its_tensors_are_those_of_our_import(beside: Case, source: str, tmp_path: Path) -> None:
    store = beside.store
    result = verify(store, [NAME])  # so every blob is what Ollama's digest says
    assert (result.damaged, result.broken) == ((), ())
    with blobstore.open_model(NAME, store=store) as theirs, beside.open() as ours:
        assert list(theirs) == list(ours)
        for name, tensor in theirs.items():
            assert (tensor.quant_type, tensor.group_size) == (
                ours[name].quant_type,
                ours[name].group_size,
            )
        quantized = {
            f"{tensor.quant_type}/{tensor.group_size}"
            for tensor in theirs.values()
            if tensor.quant_type
        }
    assert quantized == {SOURCES[source]}
    diff = diff_models(NAME, beside.result.name, store=store)
    assert (diff.added, diff.removed, diff.changed) == ((), (), ())
    (listed,) = [model for model in list_models(store) if model.name.model == NAME]
    assert isinstance(listed, ListedModel)
    assert listed.quant_type == "int4"
    found = store.find(NAME)
    parameters = summarize(store, beside.result.name, beside.result.manifest)[0].parameters
    assert {summarize(store, found, store.manifest(found))[0].parameters, listed.parameters} == {
        parameters
    }
    assert blobstore.inspect(str(found), store=store).parameters == parameters
    assert export_model(NAME, tmp_path / "out", store=store).files


@pytest.mark.parametrize("settings", [None, {"bits": 4, "group_size": 128}])
@pytest.mark.parametrize("source", ["d_mlx_int4"])
@unquantized
def test_settings_that_do_not_fit_are_not_believed(
    beside: Case, settings: dict[str, int] | None
) -> None:
    store = beside.store
    layer = store.manifest(store.find(NAME)).document("config.json")
    assert layer is not None
    document = json.loads(store.blobs.read(layer))
    assert document.pop("quantization")
    document.pop("quantization_config", None)
    config = json.dumps(
        {**document, **({"quantization": settings} if settings is not None else {})}
    ).encode()
    (store.root / "blobs" / Digest.of(config).file_name).write_bytes(config)
    old, new = (
        f'"digest":"{layer.digest}","size":{layer.size}',
        f'"digest":"{Digest.of(config)}","size":{len(config)}',
    )
    write_manifest(store, "other", beside.record["manifest"].replace(old, new))
    with pytest.raises(CorruptDataError, match="can't be inferred"):
        blobstore.open_model("other", store=store)
    result = verify(store, ["other"])
    assert result.is_sound
    assert all("can't be inferred" in file.reason for file in result.odd)
    assert result.odd


@pytest.mark.parametrize("source", ["d_mlx_int4"])
@unquantized
def test_a_config_that_is_missing_is_what_is_said(beside: Case) -> None:
    layer = beside.store.manifest(beside.store.find(NAME)).document("config.json")
    assert layer is not None
    beside.store.blobs.remove(layer.digest)
    with pytest.raises(NotFoundError, match=str(layer.digest)):
        blobstore.open_model(NAME, store=beside.store)
