"""A plan in a file gives the bytes of an import, wherever it is carried out, or a typed error."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.ollama_sources import write_source

from blobstore.errors import BlobStoreError, CorruptDataError, DocumentError, NotFoundError
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.planfile import read_plan, write_plan
from blobstore.importer.run import make_blob, plan_import, run_plan
from blobstore.importer.writing import entries_of
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store
from blobstore.store.memory import MemoryStore

M = ModelName.parse("m")


def mixture(folder: Path) -> Path:
    names = (f"model.layers.0.mlp.experts.{n}.{p}_proj.weight" for n in (0, 1) for p in ("up", "z"))
    return write_checkpoint(folder, small_tensors() | {n: normal(n, 64, 64) for n in names})


def made_and_said(plan: ImportPlan) -> list[object]:
    names = [layer.name for layer in plan.layers]
    said = (plan.coverage, plan.notes, plan.relative_errors, plan.stored_bytes)
    return [list(entries_of(plan.blobs)), plan.config.encode(), names, *said]


def travelled(plan: ImportPlan, folder: Path) -> ImportPlan:
    path = folder / "plan.json"
    write_plan(plan, path)
    again = read_plan(path)
    text = path.read_bytes()
    write_plan(again, path)
    assert path.read_bytes() == text
    assert made_and_said(again) == made_and_said(plan)
    return again


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "int4", "method": "search", "rules": ["*.up_proj.weight=int8/64"]},
        {"quant": "nvfp4", "global_scale": True, "experts": "stacked", "alignment": 4096},
        {"target_bpw": 6.0, "dtype": "float16"},
        {"profile": "ollama", "quant": "mxfp4", "system": "brief", "parameters": ["stop=x"]},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_import(mixture(tmp_path / "m"), **options)
    again = travelled(plan, tmp_path)
    assert run_plan(again, M, MemoryStore()).digest == run_plan(plan, M, MemoryStore()).digest


@pytest.mark.parametrize("name", ["e_fp8_moe", "f_ct_nvfp4"])
def test_sources_of_every_kind(name: str, tmp_path: Path) -> None:
    travelled(plan_import(write_source(tmp_path / "sources", name), profile="ollama"), tmp_path)


def test_a_source_that_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, file = write_checkpoint(tmp_path / "here"), tmp_path / "plan.json"
    (here / "notes.txt").write_text("kept")
    monkeypatch.chdir(tmp_path)
    plan = plan_import("here", quant="int8")
    digest = run_plan(plan, M, MemoryStore()).digest
    monkeypatch.chdir("/")
    write_plan(plan, file)
    shutil.copytree(here, tmp_path / "there")  # times stay
    shutil.rmtree(here)
    there = read_plan(file, source=tmp_path / "there")
    assert run_plan(there, M, MemoryStore()).digest == digest
    with pytest.raises(NotFoundError) as caught:
        read_plan(file)
    assert caught.value.hint is not None


def test_blobs_made_by_others_are_published_once(tmp_path: Path) -> None:
    store, file = Store(tmp_path / "store"), tmp_path / "plan.json"
    plan = plan_import(mixture(tmp_path / "m"), quant="int4")
    expected = run_plan(plan, M, MemoryStore())
    write_plan(plan, file)
    names = [blob.name for blob in plan.blobs]
    made = {str(make_blob(read_plan(file), name, open_store(store.root))) for name in names}
    assert (store.manifests.names(), store.blobs.digests()) == ([], set())
    result = run_plan(read_plan(file), M, store)
    assert (result.digest, result.recalled) == (expected.digest, len(names))
    assert made == {str(layer.digest) for layer in result.manifest.tensor_layers}


def rewritten(folder: Path) -> None:
    path = folder / "model.safetensors"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: os.utime(folder / "model.safetensors", (1, 1)), "model.safetensors"),
        (rewritten, "tensors"),
        (lambda folder: (folder / "notes.txt").unlink(), "notes.txt"),
        (lambda folder: (folder / "config.json").write_text("{ }"), "config.json"),
    ],
)
def test_a_changed_source(change: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "notes.txt").write_text("kept")
    write_plan(plan_import(folder), tmp_path / "plan.json")
    change(folder)
    with pytest.raises(CorruptDataError, match=says) as caught:
        read_plan(tmp_path / "plan.json")
    assert (caught.value.path, caught.value.hint) != (None, None)


def test_a_plan_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan_import(write_checkpoint(tmp_path / "m"), quant="int4"), path)
    document = json.loads(path.read_bytes())
    document["blobstore"] = "0.0.9"
    path.write_text(json.dumps(document))
    assert read_plan(path).blobs  # it decides as this one does
    path.write_text(json.dumps(document).replace("int4", "int8"))
    with pytest.raises(DocumentError, match=r"blobstore 0.0.9"):
        read_plan(path)
    path.write_text('{"version": 1, "quant_type": null}')
    with pytest.raises(DocumentError, match="version 1"):
        read_plan(path)


# Hostile plans


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hostile")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: small_tensors()[name], "model.norm.weight": normal("n", 64)}
    source = write_checkpoint(folder / "m", tensors)
    (source / "notes.txt").write_text("kept")
    (source / ".left").write_bytes(b"x")
    plan = plan_import(
        source,
        quant="int8",
        method="search",
        importance={name: np.ones(64, np.float32)},
        draft=write_checkpoint(folder / "draft", {"d.weight": normal("d", 64)}),
        system="be brief",
        parameters=["stop=x"],
    )
    write_plan(plan, folder / "plan.json")
    loaded: dict[str, Any] = json.loads((folder / "plan.json").read_bytes())
    return loaded


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = enumerate(value) if isinstance(value, list) else ()
    for key, child in value.items() if isinstance(value, dict) else children:
        yield from places(child, (*path, key))


EVIL = (None, "../../../../etc/passwd", 2**63, {"x": 1})
"""Each place of a plan gets two of them."""


def test_whatever_is_changed_ends_in_a_typed_error_or_in_a_plan_that_can_be_carried_out(
    document: dict[str, Any], tmp_path: Path
) -> None:
    refused = accepted = 0
    every = enumerate(list(places(document))[1:])
    for path, evil in ((path, evil) for number, path in every for evil in EVIL[number % 2 :: 2]):
        changed = copy.deepcopy(document)
        parent: Any = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = evil
        (tmp_path / "hostile.json").write_text(json.dumps(changed))
        try:
            run_plan(read_plan(tmp_path / "hostile.json"), M, MemoryStore())
        except BlobStoreError:
            refused += 1
        else:
            accepted += 1
    assert refused > 30
    assert accepted < refused / 2  # names of left out files, notes, the version may be anything


@pytest.mark.parametrize("text", ["", "[]", '{"version": 3}', '{"version": NaN}'])
def test_what_is_not_a_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DocumentError) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.rule == "P2"
