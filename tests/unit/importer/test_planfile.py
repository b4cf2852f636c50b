"""A plan in a file gives the bytes of an import from its source, wherever it is carried out.

A changed source and a hostile plan are typed errors.
"""

from __future__ import annotations

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
from support.many import Forgetful
from support.ollama_sources import write_source

import blobstore
from blobstore.cli.main import run
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DocumentError,
    NotFoundError,
    UsageError,
)
from blobstore.importer import planfile
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.planfile import read_plan, write_plan
from blobstore.importer.run import make_blob, plan_import, run_plan
from blobstore.importer.writing import entries_of
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store
from blobstore.store.memory import MemoryStore

M = ModelName.parse("m")


def mixture(folder: Path) -> Path:
    """Write a checkpoint with experts."""
    names = (f"model.layers.0.mlp.experts.{n}.{p}_proj.weight" for n in (0, 1) for p in ("up", "z"))
    return write_checkpoint(
        folder, small_tensors() | {name: normal(name, 64, 64) for name in names}
    )


def travelled(plan: ImportPlan, folder: Path) -> ImportPlan:
    write_plan(plan, folder / "plan.json")
    return read_plan(folder / "plan.json")


# Every plan that is tested elsewhere


def facts(plan: ImportPlan) -> list[Any]:
    """Return what a plan makes and says."""
    layers = [
        (layer.name, layer.media_type, getattr(layer, "data", layer.size)) for layer in plan.layers
    ]
    return [
        *(list(entries_of(plan.blobs)), layers, plan.config.encode(), plan.coverage, plan.notes),
        *(plan.relative_errors, plan.source_bytes, plan.stored_bytes, plan.runs_in),
    ]


def assert_same(one: ImportPlan, other: ImportPlan) -> None:
    for here, there in zip(facts(one), facts(other), strict=True):
        assert here == there


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "int4", "method": "search", "rules": ["*.up_proj.weight=int8/64"]},
        {"quant": "nvfp4", "global_scale": True, "experts": "stacked", "alignment": 4096},
        {"target_bpw": 6.0, "dtype": "float16"},
        {
            "profile": "ollama",
            "quant": "mxfp4",
            "system": "be brief",
            "parameters": ["temperature=0.5"],
        },
    ],
)
def test_every_option(options: dict[str, Any], tmp_path: Path) -> None:
    source = mixture(tmp_path / "m")
    plan = plan_import(source, **options)
    again = travelled(plan, tmp_path)
    assert_same(again, plan)
    assert run_plan(again, M, MemoryStore()).digest == run_plan(plan, M, MemoryStore()).digest


@pytest.mark.parametrize("name", ["b_qwen3_moe", "c_sharded", "e_fp8_moe", "f_ct_nvfp4"])
def test_sources_of_every_kind(name: str, tmp_path: Path) -> None:
    plan = plan_import(write_source(tmp_path / "sources", name), profile="ollama")
    assert_same(travelled(plan, tmp_path), plan)


def test_the_same_plan_is_the_same_text(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    for number in range(2):
        write_plan(plan_import(source, quant="int4"), tmp_path / str(number))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    write_plan(read_plan(tmp_path / "0"), tmp_path / "2")
    assert (tmp_path / "2").read_bytes() == (tmp_path / "0").read_bytes()


# Elsewhere, and by others


def test_a_source_that_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = write_checkpoint(tmp_path / "here")
    (here / "notes.txt").write_text("kept")
    monkeypatch.chdir(tmp_path)
    plan = plan_import("here", quant="int8")
    digest = run_plan(plan, M, MemoryStore()).digest
    monkeypatch.chdir("/")
    write_plan(plan, tmp_path / "plan.json")
    shutil.copytree(here, tmp_path / "there")  # times stay
    shutil.rmtree(here)
    assert (
        run_plan(
            read_plan(tmp_path / "plan.json", source=tmp_path / "there"), M, MemoryStore()
        ).digest
        == digest
    )
    with pytest.raises(NotFoundError) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.hint == "If the source was moved, name its new place."


def test_blobs_made_by_others_are_published_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    plan = plan_import(mixture(tmp_path / "m"), quant="int4")
    expected = run_plan(plan, M, MemoryStore())
    write_plan(plan, tmp_path / "plan.json")
    names = [blob.name for blob in plan.blobs]
    made = {
        str(make_blob(read_plan(tmp_path / "plan.json"), name, open_store(store.root)))
        for name in names
    }
    assert store.manifests.names() == []
    assert store.blobs.digests() == set()
    result = run_plan(read_plan(tmp_path / "plan.json"), M, store)
    assert (result.digest, result.recalled) == (expected.digest, len(names))
    assert made == {str(layer.digest) for layer in result.manifest.tensor_layers}
    with blobstore.open_model("m", store=store, verify=True) as model:
        assert len(model) > 0


def test_what_can_not_be_made(tmp_path: Path) -> None:
    plan = plan_import(write_checkpoint(tmp_path / "m"))
    with pytest.raises(NotFoundError, match="no blob 'x'"):
        make_blob(plan, "x", Store(tmp_path / "store"))
    with pytest.raises(UsageError, match="does not remember"):
        make_blob(plan, plan.blobs[0].name, Forgetful())


# What has changed


def _touched(folder: Path) -> None:
    os.utime(folder / "model.safetensors", (1, 1))


def _rewritten(folder: Path) -> None:
    path = folder / "model.safetensors"
    status = path.stat()
    data = path.read_bytes().replace(b'"BF16"', b'"F16" ', 1)
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _removed(folder: Path) -> None:
    (folder / "notes.txt").unlink()


def _other_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(path.read_bytes().replace(b"1000", b"1001", 1) + b" ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_touched, r"model.safetensors was written to since the plan"),
        (_rewritten, "other tensors than when the plan was made"),
        (_removed, r"notes.txt was removed since the plan"),
        (_other_config, r"config.json was written to since the plan"),
    ],
)
def test_a_source_that_has_changed(
    change: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "notes.txt").write_text("kept")
    write_plan(plan_import(folder), tmp_path / "plan.json")
    change(folder)
    with pytest.raises(CorruptDataError, match=says) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.path is not None
    assert caught.value.hint == "Make the plan again."


def test_files_that_the_plan_does_not_name_are_ignored(tmp_path: Path) -> None:
    """The plan itself may lie in its source, and so may its receipts."""
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").rename(tmp_path / "config.json")
    plan = plan_import(folder, quant="int8")
    write_plan(plan, folder / "plan.json")
    (folder / "plan.json.receipts").mkdir()
    (folder / "plan.json.receipts" / "000000.json").write_text("{}")
    (tmp_path / "config.json").rename(folder / "config.json")
    assert_same(read_plan(folder / "plan.json"), plan)


def test_a_plan_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    monkeypatch.setattr(planfile, "__version__", "0.0.9")
    write_plan(plan_import(write_checkpoint(tmp_path / "m"), quant="int4"), path)
    monkeypatch.undo()
    assert read_plan(path).blobs  # it decides as this one does
    path.write_text(path.read_text().replace("int4", "int8"))
    with pytest.raises(DocumentError, match=r"was made by blobstore 0.0.9, and .* differently"):
        read_plan(path)
    path.write_text('{"version": 1, "quant_type": null}')
    with pytest.raises(DocumentError, match="of version 1, which earlier versions"):
        read_plan(path)


# Hostile plans


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small plan with everything in it, as JSON."""
    folder = tmp_path_factory.mktemp("hostile")
    source = write_checkpoint(folder / "m")
    (source / "notes.txt").write_text("kept")
    (source / "left.bin").write_bytes(b"x")
    name, array = next((name, array) for name, array in small_tensors().items() if array.ndim == 2)
    plan = plan_import(
        source,
        quant="int8",
        method="search",
        importance={name: np.ones(array.shape[1], np.float32)},
        draft=write_checkpoint(folder / "draft"),
        system="be brief",
        parameters=["stop=x", "temperature=0.5"],
    )
    write_plan(plan, folder / "plan.json")
    loaded: dict[str, Any] = json.loads((folder / "plan.json").read_bytes())
    return loaded


def read(document: Any, folder: Path) -> ImportPlan:
    (folder / "hostile.json").write_text(json.dumps(document))
    return read_plan(folder / "hostile.json")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in a document."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from places(child, (*path, key))


EVIL: tuple[Any, ...] = (None, 2**63, 1.5, "../../../../etc/passwd", {"x": 1})


def test_whatever_is_changed_ends_in_a_typed_error_or_in_a_plan_that_can_be_carried_out(
    document: dict[str, Any], tmp_path: Path
) -> None:
    refused = accepted = 0
    for path in list(places(document))[1:]:
        for evil in EVIL:
            changed = copy.deepcopy(document)
            parent: Any = changed
            for key in path[:-1]:
                parent = parent[key]
            if type(parent[path[-1]]) is type(evil) and parent[path[-1]] == evil:
                continue
            parent[path[-1]] = evil
            try:
                run_plan(read(changed, tmp_path), M, MemoryStore())
            except BlobStoreError:
                refused += 1
            else:
                accepted += 1
    assert refused > 200
    assert accepted < refused / 10  # names of left out files, notes, the version may be anything


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"version": 3}', '{"version": 1, "version": 1}', '{"version": NaN}']
)
def test_what_is_not_a_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DocumentError, match="P2"):
        read_plan(tmp_path / "plan.json")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, plan = str(write_checkpoint(tmp_path / "tiny")), str(tmp_path / "plan.json")
    store = ["--store", str(tmp_path / "store"), "--json"]
    assert run(["plan", source, "--quant", "int8", "-o", plan, "--json"]) == 0
    capsys.readouterr()
    results = []
    for line in ([source, "one", "--quant", "int8"], ["--plan", plan, "two"], ["--plan", plan]):
        assert run(["import", *line, *store]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert [result["name"] for result in results] == ["one:latest", "two:latest", "tiny:int8"]
    assert len({result["digest"] for result in results}) == 1
    assert run(["import", "--plan", plan, "x", "--quant", "int4", *store]) == 2
    assert "--quant can't be used with --plan" in capsys.readouterr().err
    assert run(["import", "--plan", str(tmp_path / "none.json"), "x", *store]) == 1
