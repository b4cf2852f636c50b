"""A layered store: lower stores are read and never written; what they have is not written again."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.checkpoints import write_checkpoint
from support.commands import Cli

import blobstore
from blobstore.errors import RemoteError, UsageError
from blobstore.names import Digest, ModelName
from blobstore.store.care.verify import verify
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import blobs_of, commit

M = ModelName.parse("m")


def files_below(*folders: Path) -> dict[Path, int]:
    """Return every file with its time, to see that nothing changed."""
    paths = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {path: path.lstat().st_mtime_ns for path in paths}


@pytest.fixture
def lower(tmp_path: Path) -> Store:
    store = Store(tmp_path / "lower")
    commit(store, "m", b"one", b"two")
    return store


@pytest.fixture
def upper(tmp_path: Path) -> Store:
    return Store(tmp_path / "upper")


def test_what_lies_below_is_found_and_not_written(lower: Store, upper: Store) -> None:
    before = files_below(lower.root)
    layers = LayeredStore(upper, [lower])
    assert layers.manifests.names() == [M]
    assert blobs_of(layers, "m") == [b"one", b"two"]
    assert layers.home_of("m") is lower
    assert commit(layers, "n", b"one", b"three") == {Digest.of(b"three")}
    assert upper.blobs.digests() == {Digest.of(b"three").hex}
    assert blobs_of(layers, "n") == [b"one", b"three"]
    assert layers.home_of("n") is upper
    assert files_below(lower.root) == before
    commit(LayeredStore(upper, [lower], copies_up=True), "whole", b"one", b"three")
    assert blobs_of(upper, "whole") == [b"one", b"three"]


def test_the_upper_model_hides_the_lower_one(lower: Store, upper: Store) -> None:
    layers = LayeredStore(upper, [lower])
    commit(layers, "M", b"four")
    assert layers.manifests.names() == [M]
    assert blobs_of(layers, "m") == [b"four"]
    assert blobs_of(lower, "m") == [b"one", b"two"]
    layers.remove("m")
    assert blobs_of(layers, "m") == [b"one", b"two"]
    with pytest.raises(UsageError, match="read-only"):
        layers.remove("m")
    with pytest.raises(UsageError, match="twice"):
        LayeredStore(upper, [lower, Store(lower.root)])


def test_the_first_wins_and_damage_is_passed_by(lower: Store, upper: Store, tmp_path: Path) -> None:
    third = Store(tmp_path / "third")
    commit(third, "m", b"five")
    assert blobs_of(LayeredStore(upper, [third, lower]), "m") == [b"five"]
    assert blobs_of(LayeredStore(upper, [lower, third]), "m") == [b"one", b"two"]
    (lower.blobs.path / Digest.of(b"one").file_name).write_bytes(b"short!")
    commit(third, "n", b"one")
    assert blobs_of(LayeredStore(upper, [lower, third]), "m") == [b"one", b"two"]


def test_verify_looks_below(lower: Store, upper: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(LayeredStore(upper, [lower]), "n", b"one", b"three")
    assert verify(upper, lower=[lower]).is_sound
    assert [str(blob.digest) for blob in verify(upper).damaged] == [str(Digest.of(b"one"))]
    lower.remove("m")
    assert not verify(upper, lower=[lower]).is_sound
    monkeypatch.setattr(lower.blobs, "missing", Mock(side_effect=RemoteError("no answer")))
    with pytest.raises(RemoteError):  # no damage of the upper one
        verify(upper, lower=[lower])


def test_commands_over_a_lower_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, low, up = write_checkpoint(tmp_path / "tiny"), tmp_path / "low", tmp_path / "up"
    layers, cli = ("--store", up, "--lower", low), Cli(Store(up), capsys)
    made = cli.json("import", source, "a", "--store", low)
    before = files_below(low / "blobs", low / "manifests")
    again = cli.json("import", source, "b", *layers)
    assert (again["digest"], again["created"], made["created"] > 0) == (made["digest"], 0, True)
    assert "read-only" in cli.refused("rm", "a", *layers)
    assert cli.json("import", source, "c", "--copy-up", *layers)["created"] > 0
    assert cli.json("verify", "--store", up, "c")["damaged"] == []
    monkeypatch.setenv("BLOBSTORE_LOWER", f"{low}{os.pathsep}")
    stores = {item["name"]: item["store"] for item in cli.json("list", "--store", up)}
    assert stores == {"a:latest": str(low), "b:latest": str(up), "c:latest": str(up)}
    assert files_below(low / "blobs", low / "manifests") == before


def test_a_transfer_that_fails_goes_on_where_it_stopped(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    blobs = [bytes([number]) * 5000 for number in range(8)]
    commit(here, "m", *blobs, with_config=False)
    bad = here.blobs.path / Digest.of(blobs[-1]).file_name
    bad.write_bytes(b"!" * 5000)
    with pytest.raises(blobstore.errors.DigestMismatchError):
        transfer("m", here, there, jobs=1)
    assert there.blobs.digests() == set()
    bad.write_bytes(blobs[-1])
    (done,) = transfer("m", here, there)
    assert done.there.blobs == 7
    assert verify(there).is_sound
    assert list((there.root / ".blobstore" / "tmp").iterdir()) == []


def test_a_file_that_others_may_write_is_not_linked(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    commit(here, "m", b"x" * 5000, with_config=False)
    (here.blobs.path / Digest.of(b"x" * 5000).file_name).chmod(0o664)
    (done,) = transfer("m", here, there)
    assert not done.linked
    assert verify(there).is_sound


def test_a_linked_blob_that_is_used_again_keeps_its_times(lower: Store, upper: Store) -> None:
    for path in lower.blobs.path.iterdir():
        os.utime(path, (1, 1))
    layers = LayeredStore(upper, [lower], copies_up=True)
    for name in ("n", "o", "p"):
        transfer({"m": name}, lower, layers)
        with layers.session() as session:
            session.recall(Digest.of(b"one").hex, 3, verify=False)
    assert {path.stat().st_mtime for path in lower.blobs.path.iterdir()} == {1}


def test_second_and_new_names_over_a_lower_store(lower: Store, upper: Store) -> None:
    layers = LayeredStore(upper, [lower])
    commit(layers, "n", b"one", b"three")
    assert str(layers.copy("n", "o")) == "o:latest"
    assert str(layers.copy("m", "mine")) == "mine:latest"
    assert str(layers.move("o", "p")) == "p:latest"
    with pytest.raises(UsageError, match="read-only"):
        layers.move("m", "q")
    with pytest.raises(UsageError, match="already exists"):
        layers.move("p", "mine")
    layers.move("p", "mine", replace=True)
    assert layers.copy("mine", "mine") == layers.move("mine", "mine")
    assert " ".join(map(str, layers.manifests.names())) == "m:latest mine:latest n:latest"
    assert blobs_of(layers, "mine") == [b"one", b"three"]
    assert upper.blobs.digests() == {Digest.of(b"three").hex}
