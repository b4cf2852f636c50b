"""``verify``, ``repair``, ``prune``, ``du``, ``pack`` and ``unpack``."""

import os
from pathlib import Path

from support.commands import Cli, cells, damage_largest_blob
from support.stores import blob_path, commit_model, layer_by_hand, manifest_path

from blobstore.views.records import kept_verify

ALL = ("--grace", "0", "--sole-owner")


def test_damage_is_named_with_exit_code_3_and_repaired(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m", "--quant", "int4")
    assert cli.text("verify").splitlines()[-1].endswith("all sound")
    path = damage_largest_blob(cli.store)
    found = cli.json("verify", code=3)
    (blob,) = found["damaged"]
    assert (blob["digest"], blob["models"]) == (path.name.replace("-", ":"), ["m:latest"])
    assert blob["tensors"][0] in ("lm_head.weight", "model.embed_tokens.weight")
    assert found["checked"] == len(list(path.parent.iterdir()))
    (cli.store.blobs.path / "\x1b[31mred").write_bytes(b"")
    out = cli.text("verify", code=3)
    assert "\\x1b[31mred" in out
    assert "  models: m:latest" in out
    assert sorted(cli("verify", "--sample", f"{part}/2")[0] for part in (1, 2)) == [0, 3]
    cli.text("verify", "--quick")
    kept = kept_verify(cli.store)
    assert (kept.quick, kept.damaged) == (False, 1)  # a quick one has not read what is damaged
    assert "1 rebuilt" in cli.text("repair", "m", "--from", source)
    cli.text("verify")


def test_prune_and_undo(cli: Cli) -> None:
    commit_model(cli.store, "m", b"one")
    for data in (b"orphan", b"young one"):
        layer_by_hand(cli.store, "", data)
    os.utime(blob_path(cli.store, b"orphan"), (0, 0))
    dry = cli.json("prune", "--dry-run")
    assert [(blob["size"], blob["kept"]) for blob in dry["blobs"]] == [(6, False), (9, True)]
    assert blob_path(cli.store, b"orphan").exists()
    moved, spared = cli.text("prune").splitlines()[-2:]
    assert moved.startswith("Moved 1 blob (6 B) to the trash: prune --undo restores it, the")
    assert spared == "Spared 1 blob (9 B) within the grace time"
    assert cli.json("prune", "--undo")["restored"] == 1
    assert "is empty" in cli.refused("prune", "--undo", code=1)
    assert cli.json("prune", *ALL)["removed"] == 2
    for options in ("--grace 0", "--grace soon", "--undo --dry-run", "--undo --forget"):
        cli.refused("prune", *options.split())


def test_models_without_manifests_are_forgotten_only_if_asked(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m")
    manifest_path(cli.store, "m").unlink()
    error = cli.refused("prune", *ALL, code=1)
    assert "1 of the 1 models that were stored here have no manifest: m:latest\nHint: " in error
    copies = "the copies of the manifests of 1 model (m:latest) to the trash as well"
    assert f"Would move {copies}" in cli.text("prune", *ALL, "--forget", "--dry-run")
    assert cli.json("prune", *ALL, "--forget")["forgotten"] == ["m:latest"]
    assert "Still without a manifest: 1 model (m:latest)" in cli.text("prune", "--undo")
    assert cli.text("repair", "m").startswith("Restored the manifest of m:latest")


def test_a_packed_model_is_shown_as_packed_and_needs_unpacking(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m", "--quant", "int4")
    cli.text("pack", "m")
    rows = [cells(line) for line in cli.text("list").splitlines()]
    assert (rows[0][-1], rows[1][-1]) == ("STATE", "packed")
    assert "m:latest (packed)" in cli.text("du")
    assert cli.refused("export", "m", source / "out", code=1) == (
        "Error: model m:latest is packed\nHint: blobstore unpack m:latest restores it.\n"
    )
    cli.text("cp", "m", "n")
    cli.text("mv", "n", "o")
    cli.text("rm", "m")
    cli.text("verify")
    cli.text("unpack", "o")
    assert "STATE" not in cli.text("list")
