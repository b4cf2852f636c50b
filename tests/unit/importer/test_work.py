"""Many workers make the blobs of a plan, and one commit publishes the model of a single import.

Whatever is lost, damaged, repeated or of another plan ends in that model or in a typed error.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.buckets import memory_store
from support.many import sharded_checkpoint

import blobstore
from blobstore.errors import BlobStoreError, DocumentError, UnfinishedPlanError
from blobstore.importer.planfile import write_plan
from blobstore.importer.run import import_model, plan_import
from blobstore.importer.worker import commit_plan, work_on_plan
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home

SHARDS = 3


@pytest.fixture
def home() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return written_plan(sharded_checkpoint(tmp_path / "m", 4), tmp_path)


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
    with pytest.raises(UnfinishedPlanError) as error:
        commit_plan(plan, "m", store=home)
    assert error.value.tasks == (1, 2, 3)
    assert not home.manifests.names()


def test_receipts_of_another_plan_are_made_again(plan: Path, home: MemoryStore) -> None:
    work_all(plan, home)
    written_plan(plan.parent / "m", plan.parent, "int8")
    with pytest.raises(DocumentError, match="task 0"):
        commit_plan(plan, "m", store=home)
    work_all(plan, home)
    assert commit_plan(plan, "m", store=home).manifest.raw == alone(plan.parent / "m", "int8")


def changed(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps({**json.loads(text), key: value}).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        changed("version", 1),
        changed("task", 3),
        changed("blobs", []),
        lambda text: re.sub(rb'"size": *[0-9]+', b'"size":1', text, count=1),
    ],
    ids=["cut", "version", "task", "blobs", "size"],
)
def test_a_damaged_receipt_is_an_error_of_commit_and_made_again_by_work(
    damage: Callable[[bytes], bytes], plan: Path, home: MemoryStore
) -> None:
    work_on_plan(plan, store=home)
    path = receipts(plan)[1]
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    with pytest.raises(DocumentError, match=r"000001.json") as error:
        commit_plan(plan, "m", store=home)
    assert error.value.rule == "P3"
    assert work_on_plan(plan, store=home).made == 1
    assert path.read_bytes() == sound


def test_a_receipt_that_is_a_link_is_not_read(
    plan: Path, home: MemoryStore, tmp_path: Path
) -> None:
    work_on_plan(plan, store=home)
    path = receipts(plan)[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlobStoreError):
        commit_plan(plan, "m", store=home)


def test_a_store_that_lost_blobs(plan: Path, store: Store) -> None:
    work_all(plan, store)
    kept = store.root / ".blobstore" / "kept"
    lost = json.loads(receipts(plan)[2].read_bytes())["blobs"][0]["digest"]
    (kept / lost.replace(":", "-")).unlink()
    with pytest.raises(UnfinishedPlanError) as error:
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
    with pytest.raises(UnfinishedPlanError):
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
