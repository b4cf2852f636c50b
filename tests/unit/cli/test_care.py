"""The commands that care for a store: their output, JSON and exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.checkpoints import small_tensors, write_checkpoint
from support.stores import HOLD, blob_path, commit_model, layer_by_hand, manifest_path, process

import blobstore
from blobstore.store.local.store import Store
from blobstore.views.verify_records import kept_verify

Run = Callable[..., tuple[int, str, str]]


def document(done: tuple[int, str, str], code: int = 0) -> Any:
    assert (done[0], done[2]) == (code, "")
    return json.loads(done[1])


def test_verify_says_what_is_damaged_and_exits_with_3(
    cli: Run, store: Store, tmp_path: Path
) -> None:
    assert cli("import", write_checkpoint(tmp_path / "s"), "m", "--quant", "int4")[0] == 0
    code, out, _ = cli("verify")
    assert (code, out.splitlines()[-1].split(": ")[1]) == (0, "all sound")
    found = document(cli("verify", "m", "--json"))
    assert found["damaged"] == found["broken"] == found["odd"] == []
    path = max((store.root / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 8
    path.write_bytes(data)
    found = document(cli("verify", "--json"), 3)
    (blob,) = found["damaged"]
    assert blob["digest"] == path.name.replace("-", ":")
    assert blob["models"] == ["m:latest"]
    assert blob["tensors"] == ["lm_head.weight"] or blob["tensors"] == ["model.embed_tokens.weight"]
    assert found["checked"] == len(list((store.root / "blobs").iterdir()))
    code, out, _ = cli("verify")
    assert code == 3
    assert out.splitlines()[-1].endswith(": 1 damaged")
    assert "  models: m:latest" in out
    parts = [cli("verify", "--sample", f"{number}/2")[0] for number in (1, 2)]
    assert sorted(parts) == [0, 3]
    assert cli("verify", "--quick")[0] == 0
    kept = kept_verify(store)
    assert (kept.quick, kept.damaged) == (False, 1)  # a quick one has not read what is damaged


def test_verify_prints_no_control_characters(cli: Run, store: Store) -> None:
    (store.root / "blobs").mkdir(parents=True)
    (store.root / "blobs" / "\x1b[31mred").write_bytes(b"")
    code, out, _ = cli("verify")
    assert (code, "\x1b" in out, "\\x1b[31mred" in out) == (0, False, True)


def test_prune_and_undo(cli: Run, store: Store) -> None:
    commit_model(store, "m", b"one")
    for data in (b"orphan", b"young one"):
        layer_by_hand(store, "", data)
    os.utime(blob_path(store, b"orphan"), (0, 0))
    dry = document(cli("prune", "--dry-run", "--json"))
    assert (dry["dry_run"], dry["removed"], dry["bytes"], dry["kept"], dry["kept_bytes"]) == (
        True,
        1,
        6,
        1,
        9,
    )
    assert [(blob["size"], blob["kept"]) for blob in dry["blobs"]] == [(6, False), (9, True)]
    assert blob_path(store, b"orphan").exists()
    code, out, _ = cli("prune")
    assert (code, out.splitlines()[-2:]) == (
        0,
        [
            (
                "Moved 1 blob (6 B) to the trash: prune --undo brings back what is there, the "
                "next prune deletes it"
            ),
            "Spared 1 blob (9 B) within the grace time",
        ],
    )
    assert document(cli("prune", "--undo", "--json"))["restored"] == 1
    code, _, err = cli("prune", "--undo")
    assert (code, "is empty" in err) == (1, True)
    assert cli("prune", "--grace", "0")[0] == 2
    assert cli("prune", "--grace", "soon")[0] == 2
    for option in (("--grace", "2h"), ("--dry-run",), ("--sole-owner",), ("--forget",)):
        assert cli("prune", "--undo", *option)[0] == 2
    assert document(cli("prune", "--grace", "0", "--sole-owner", "--json"))["removed"] == 2


def test_prune_refuses_while_a_manifest_can_not_be_read(cli: Run, store: Store) -> None:
    commit_model(store, "m", b"one")
    manifest_path(store, "m").write_bytes(b"{")
    code, out, err = cli("prune")
    assert (code, out) == (1, "")
    assert err.startswith(
        "Error: nothing is removed: the manifest of m:latest can't be read\nHint: "
    )


def test_prune_of_models_without_manifests_and_back(cli: Run, store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "source", small_tensors()), "m", store=store)
    manifest_path(store, "m").unlink()
    everything = ("prune", "--grace", "0", "--sole-owner")
    code, out, err = cli(*everything)
    assert (code, out) == (1, "")
    assert (
        "1 of the 1 models that were stored here have no manifest: m:latest\nHint: Is the disk of "
        in err
    )
    assert (
        "Would move the copies of the manifest of 1 model (m:latest) to the trash, too"
        in cli(*everything, "--forget", "--dry-run")[1]
    )
    assert document(cli(*everything, "--forget", "--json"))["forgotten"] == ["m:latest"]
    lines = cli("prune", "--undo")[1].splitlines()
    assert lines[1] == "Still without a manifest: 1 model (m:latest)"
    assert "blobstore repair NAME" in lines[2]
    assert cli("repair", "m")[1].startswith("Restored the manifest of m:latest")
    manifest_path(store, "m").unlink()
    assert (
        cli(*everything, "--forget")[1].splitlines()[-1]
        == "Moved the copies of the manifest of 1 model (m:latest) to the trash, too"
    )
    assert document(cli("prune", "--undo", "--json"))["without_manifest"] == ["m:latest"]


def test_du(cli: Run, store: Store) -> None:
    commit_model(store, "m", b"one", b"both")
    commit_model(store, "n", b"both")
    found = document(cli("du", "--json"))
    assert found == {
        "blobs": 2,
        "bytes": 7,
        "models": [
            {"name": "m:latest", "bytes": 7, "unique": 3, "shared": 4},
            {"name": "n:latest", "bytes": 4, "unique": 0, "shared": 4},
        ],
        "reclaimable": 0,
        "trash": 0,
    }
    assert cli("du", "m")[1].splitlines()[1].split() == ["m:latest", "7", "B", "3", "B", "4", "B"]
    manifest_path(store, "n").write_bytes(b"{")
    assert document(cli("du", "--json"))["models"][1]["error"]
    assert "broken" in cli("du")[1]


def test_diff(cli: Run, store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s")
    for name, kind in (("a", "int4"), ("b", "int8")):
        assert cli("import", source, name, "--quant", kind)[0] == 0
    found = document(cli("diff", "a", "b", "--error", "--json"))
    kinds = {
        change["name"]: (change["before"]["type"], change["after"]["type"])
        for change in found["changed"]
    }
    assert kinds["model.layers.0.mlp.up_proj.weight"] == ("int4/32", "int8/64")
    assert all(0 < change["error"]["relative_rmse"] < 0.2 for change in found["changed"])
    assert found["documents"]["changed"] == ["(config)", "blobstore.json"]
    assert found["shared_bytes"] < min(found["bytes"].values())
    code, out, _ = cli("diff", "a", "b")
    assert code == 0
    assert "int4/32 → int8/64" in out
    assert "%" in cli("diff", "a", "b", "--error")[1]
    assert cli("diff", "a", "a")[1].startswith("0 tensors added, 0 removed, 0 changed")


def test_mv(cli: Run, store: Store) -> None:
    commit_model(store, "m", b"one")
    commit_model(store, "n", b"two")
    assert cli("mv", "m", "o")[1] == "Moved m:latest to o:latest\n"
    assert cli("mv", "o", "n")[0] == 2
    assert document(cli("mv", "o", "n", "--force", "--json")) == {
        "source": "o:latest",
        "name": "n:latest",
    }
    assert [str(name) for name, _ in store.models()] == ["n:latest"]
    assert cli("mv", "o", "n")[0] == 1


def test_wait_and_who_is_waited_for(cli: Run, store: Store) -> None:
    commit_model(store, "m", b"one")
    with process(HOLD, store.root, "alone") as child:
        for words in (
            ("rm", "m"),
            ("cp", "m", "n"),
            ("mv", "m", "n"),
            ("prune",),
            ("prune", "--undo"),
        ):
            code, out, err = cli(*words, "--wait", "0")
            assert (code, out) == (1, "")
            assert f"process {child.pid} " in err
            assert "Hint: " in err
    assert cli("rm", "m", "--wait", "-1")[0] == 2
    assert cli("rm", "m", "--wait", "0.5")[0] == 0
