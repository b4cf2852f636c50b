"""Workers make the blobs of plans and of lists of models; what is lost is a typed error."""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.buckets import memory_store
from support.checkpoints import normal, safetensors_bytes
from support.many import sharded_checkpoint
from support.streaming import SMALL, streamed

import blobstore
from blobstore import errors
from blobstore.cli.main import run
from blobstore.importer.batch import work_on_batch
from blobstore.importer.planfile import write_plan
from blobstore.importer.run import import_model, plan_import
from blobstore.importer.worker import commit_plan, shard_of, tasks_of, work_on_plan
from blobstore.names import Digest
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home

SHARDS = 3


@pytest.fixture
def home() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sharded_checkpoint(tmp_path / "m", 4)


@pytest.fixture
def plan(source: Path, tmp_path: Path) -> Path:
    return written_plan(source, tmp_path)


def written_plan(source: Path, folder: Path, quant: str = "int4") -> Path:
    write_plan(plan_import(source, quant=quant), folder / "plan.json")
    return folder / "plan.json"


def alone(source: Path, quant: str = "int4") -> bytes:
    return import_model(source, "m", store=MemoryStore(), quant=quant).manifest.raw


def receipts(plan: Path) -> list[Path]:
    return sorted(Path(f"{plan}.receipts").iterdir())


def work_all(plan: Path, home: Home) -> None:
    for index in (2, 0, 1):
        work_on_plan(plan, shard=(index, SHARDS), store=home, jobs=2)


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_the_manifest_is_that_of_one_machine(plan: Path, store: Store, kind: str) -> None:
    home = store if kind == "local" else memory_store()
    work_all(plan, home)
    assert not home.manifests.names()  # nothing is visible before
    result = commit_plan(plan, "m", store=home)
    assert result.manifest.raw == alone(plan.parent / "m")
    assert home.manifests.read(result.name).raw == result.manifest.raw
    assert commit_plan(plan, "m", store=home, verify=True).created == 0  # again


def test_tasks_that_are_not_done(plan: Path, home: MemoryStore) -> None:
    work_on_plan(plan, shard=(0, 4), store=home)
    with pytest.raises(errors.UnfinishedPlanError) as error:
        commit_plan(plan, "m", store=home)
    assert error.value.tasks == (1, 2, 3)
    assert not home.manifests.names()


def test_receipts_of_another_plan_are_made_again(plan: Path, home: MemoryStore) -> None:
    work_all(plan, home)
    written_plan(plan.parent / "m", plan.parent, "int8")
    with pytest.raises(errors.DocumentError, match="task 0"):
        commit_plan(plan, "m", store=home)
    work_all(plan, home)
    assert commit_plan(plan, "m", store=home).manifest.raw == alone(plan.parent / "m", "int8")


def changed(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps({**json.loads(text), key: value}).encode()


DAMAGE = (
    lambda text: text[: len(text) // 2],
    changed("version", 1),
    changed("task", 3),
    changed("blobs", []),
    lambda text: re.sub(rb'"size": *[0-9]+', b'"size":1', text, count=1),
)


def test_a_damaged_receipt_is_an_error_of_commit_and_made_again_by_work(
    plan: Path, home: MemoryStore
) -> None:
    work_on_plan(plan, store=home)
    path = receipts(plan)[1]
    sound = path.read_bytes()
    for damage in DAMAGE:
        path.write_bytes(damage(sound))
        with pytest.raises(errors.DocumentError, match=r"000001.json") as error:
            commit_plan(plan, "m", store=home)
        assert error.value.rule == "P3"
        assert work_on_plan(plan, store=home).made == 1
        assert path.read_bytes() == sound


def test_a_receipt_that_is_a_link_is_unread(plan: Path, home: MemoryStore, tmp_path: Path) -> None:
    work_on_plan(plan, store=home)
    path = receipts(plan)[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.BlobStoreError):
        commit_plan(plan, "m", store=home)


def test_a_store_that_lost_blobs(plan: Path, store: Store) -> None:
    work_all(plan, store)
    kept = store.root / ".blobstore" / "kept"
    lost = json.loads(receipts(plan)[2].read_bytes())["blobs"][0]["digest"]
    (kept / lost.replace(":", "-")).unlink()
    with pytest.raises(errors.UnfinishedPlanError) as error:
        commit_plan(plan, "m", store=store)
    assert error.value.tasks == (2,)
    assert work_on_plan(plan, store=store).made == 1
    assert commit_plan(plan, "m", store=store).manifest.raw == alone(plan.parent / "m")
    assert not list(kept.iterdir())


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_swapped_digests_are_found_by_verify(plan: Path, store: Store, kind: str) -> None:
    home = store if kind == "local" else memory_store()
    work_all(plan, home)
    texts = {receipt: receipt.read_text() for receipt in receipts(plan)}
    blobs = [blob for text in texts.values() for blob in json.loads(text)["blobs"]]
    one, other = next(
        (one["digest"], other["digest"])
        for one, other in itertools.combinations(blobs, 2)
        if one["size"] == other["size"] and one["digest"] != other["digest"]
    )
    for receipt, text in texts.items():
        receipt.write_text(text.replace(one, "?").replace(other, one).replace("?", other))
    with pytest.raises(errors.UnfinishedPlanError):
        commit_plan(plan, "n", store=home, verify=True)
    assert home.manifests.names() == []


def test_a_clean_up_spares_what_waits_for_its_commit(plan: Path, store: Store) -> None:
    work_all(plan, store)
    two_days_ago = plan.stat().st_mtime - 2 * 86_400
    for path in (store.root / ".blobstore" / "kept").iterdir():
        os.utime(path, (two_days_ago, two_days_ago))
    assert not blobstore.prune(store).leftovers
    assert commit_plan(plan, "m", store=store).created > 0
    assert all(path.stat().st_mtime > two_days_ago + 86_400 for path in store.blobs.path.iterdir())


def test_each_blob_is_in_one_task_and_files_stay_whole_if_possible(tmp_path: Path) -> None:
    plan = plan_import(sharded_checkpoint(tmp_path / "m", 5), quant="int4")
    whole = tasks_of(plan)
    names = [blob.name for task in whole for blob in task.blobs]
    assert sorted(names) == sorted(blob.name for blob in plan.blobs)
    for count in (1, 2, 5, 100):
        shards = [shard_of(whole, index, count) for index in range(count)]
        assert [task for shard in shards for task in shard] == list(whole)
        owners = {(task.file, index) for index, shard in enumerate(shards) for task in shard}
        assert len(owners) == 5 or count > 5


def test_a_file_is_read_once_by_all_workers(tmp_path: Path) -> None:
    checkpoint, path, home = tmp_path / "m", tmp_path / "plan.json", MemoryStore()
    checkpoint.mkdir()
    experts = [f"model.layers.{n // 8}.mlp.experts.{n % 8}.up_proj.weight" for n in range(32)]
    for number, names in enumerate((experts[:11], experts[11:22], experts[22:]), 1):
        tensors = {name: normal(name, 64, 64) for name in names}  # each file ends in a layer
        file = checkpoint / f"model-0000{number}-of-00003.safetensors"
        file.write_bytes(safetensors_bytes(tensors))
    with streamed(SMALL, declared=True) as fetched:
        write_plan(plan_import(checkpoint), path)
        for index in range(3):
            work_on_plan(path, shard=(index, 3), store=home)
        made = commit_plan(path, "m", store=home)
    nbytes: Counter[str] = Counter()
    for name, _, size in fetched.ranges:
        nbytes[name] += size
    assert nbytes == {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    assert made.digest == import_model(checkpoint, "m", store=MemoryStore()).digest


def test_a_worker_to_which_the_server_declares_another_digest(tmp_path: Path) -> None:
    """It would not hash a file that the others take for hashed."""
    path = tmp_path / "plan.json"
    with streamed(declared=True):
        write_plan(plan_import(sharded_checkpoint(tmp_path / "m", 2)), path)
        document = json.loads(path.read_bytes())
        files = document["source"]["files"]
        name = next(name for name in files if name.endswith(".safetensors"))
        state = files[name].rpartition(" sha256:")[0]
        for declared in ("", f" {Digest.of(b'')}"):
            files[name] = state + declared
            path.write_text(json.dumps(document))
            with pytest.raises(errors.CorruptDataError, match="since the plan"):
                work_on_plan(path, store=MemoryStore())


# Lists of models, worked on by one worker or several, each error by itself


def listed(folder: Path, *models: str) -> Path:
    path = folder / "models.toml"
    path.write_text("".join(f"[[model]]\n{model}\n" for model in models))
    return path


def test_two_workers_import_all_models(source: Path, tmp_path: Path) -> None:
    home = MemoryStore()
    path = listed(
        tmp_path,
        f'source = "{source}"\nname = "a:int4"\nquant = "int4"',
        f'source = "{source}"\nname = "b"\nrules = ["*.up_proj.*=int8"]',
    )
    first = work_on_batch(path, shard=(0, 2), store=home)
    assert [one.waits_for > 0 for one in first] == [True, True]
    second = work_on_batch(path, shard=(1, 2), store=home)
    assert [one.waits_for for one in second] == [0, 0]
    peer = MemoryStore()
    digests = [
        import_model(source, "a:int4", store=peer, quant="int4").digest,
        import_model(source, "b", store=peer, rules=["*.up_proj.*=int8"]).digest,
    ]
    assert [one.digest for one in second] == digests
    again = work_on_batch(path, store=home)
    assert [(one.made, one.digest) for one in again] == [(0, digest) for digest in digests]
    with pytest.raises(errors.UsageError, match="2/2"):
        work_on_batch(path, shard=(2, 2), store=home)


def test_the_error_of_one_model_stops_no_other(source: Path, tmp_path: Path) -> None:
    home = MemoryStore()
    path = listed(
        tmp_path,
        f'source = "{tmp_path / "missing"}"\nname = "a"',
        f'source = "{source}"\nname = "b:int8"\nquant = "int4"',
        f'source = "{source}"\nname = "c"',
        f'source = "{source}"\nname = "d"\nquant = "int5"',
    )
    found = work_on_batch(path, store=home)
    assert [one.error is None for one in found] == [False, False, True, False]
    assert [str(name) for name in home.manifests.names()] == ["c:latest"]
    (tmp_path / "m").rename(tmp_path / "missing")  # the first is mended, the third has gone
    again = work_on_batch(path, store=home)
    assert [one.error is None for one in again] == [True, False, False, False]


USUAL = "source = 's'\nname = 'a'\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[model]", "TOML"),
        ("[[model]]\nsource = 's'\nname = '../a'", "model.0.name:"),
        (f"[[model]]\n{USUAL}quantt = 'int4'", "model.0.quantt:"),
        (f"[[model]]\n{USUAL}rules = [1]", "model.0.rules.0:"),
        (f"[[model]]\n{USUAL}target_bpw = inf", "target_bpw:"),
        (f"[[model]]\n{USUAL}" * 2, "model.1.name:"),
    ],
)
def test_what_is_not_a_list_of_models(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(errors.DocumentError, match=named) as error:
        work_on_batch(path, store=MemoryStore())
    assert error.value.rule == "P4"


def test_the_command_reports_fails_and_shows_no_secrets(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ['source = "http://me:SECRET@localhost:1/m.safetensors?sig=SECRET"\nname = "b"']
    path = listed(tmp_path, f'source = "{source}"\nname = "a"', *models)
    line = ["work", "--batch", str(path), "--store", str(tmp_path / "store")]
    assert run([*line, "--json"]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert [model["state"] for model in report["models"]] == ["imported", "failed"]
    assert report["models"][1]["source"] == "http://localhost:1/m.safetensors"
    assert run(line) == 1
    again = capsys.readouterr()
    assert "failed" in again.out
    assert "SECRET" not in shown.out + shown.err + again.out + again.err
