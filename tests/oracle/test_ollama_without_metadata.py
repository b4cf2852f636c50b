"""MLX sources without a ``mode``: Ollama's blobs lack metadata; config.json's settings count."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from oracle.ollama_cases import Case, Cases, case_maker
from support.stores import manifest_path

import blobstore
from blobstore.export.folder import export_model
from blobstore.formats.safetensors.header import header_of as read_header
from blobstore.inspection.comparison import diff_models
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
    """A copy of the case's store that also has Ollama's model: our data under its headers."""
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
        kinds, wanted = (
            [(tensor.quant_type, tensor.group_size) for tensor in model.values()]
            for model in (theirs, ours)
        )
    assert kinds == wanted
    assert {f"{quant}/{size}" for quant, size in kinds if quant} == {SOURCES[source]}
    diff = diff_models(NAME, beside.result.name, store=store)
    assert (diff.added, diff.removed, diff.changed) == ((), (), ())
    found = [blobstore.inspect(name, store=store) for name in (NAME, str(beside.result.name))]
    assert found[0].parameters == found[1].parameters
    assert export_model(NAME, tmp_path / "out", store=store).files
