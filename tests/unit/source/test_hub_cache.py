"""The Hugging Face cache as a source: folders of links, the snapshot, the model's name."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.errors import BlobStoreError, NotFoundError, StorageError, UnsupportedSourceError
from blobstore.importer.run import default_name, plan_import
from blobstore.source.inventory import read_inventory
from blobstore.store.local.store import Store

COMMIT, OTHER = "c1899de289a04d12100db370d81485cdf75e47ca", "1" * 40


def write_snapshot(repository: Path, commit: str, tmp_path: Path) -> Path:
    """Write a snapshot as huggingface_hub does: links to ``../../blobs``, named by hash."""
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(write_checkpoint(tmp_path / commit).iterdir())):
        file.rename(blobs / f"{commit}{number}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{commit}{number}"))
    return snapshot


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"


def test_a_snapshot_has_the_repositorys_name(
    store: Store, tmp_path: Path, repository: Path
) -> None:
    snapshot = write_snapshot(repository, COMMIT, tmp_path)
    result = blobstore.import_model(snapshot, store=store, quant="int4")
    assert str(result.name) == "Qwen3-0.6B:int4"
    with blobstore.open_model("Qwen3-0.6B:int4", store=store, verify=True) as model:
        assert model.documents() == ["config.json", "blobstore.json"]


def test_the_snapshot_that_main_names(tmp_path: Path, repository: Path) -> None:
    snapshot = write_snapshot(repository, COMMIT, tmp_path)
    write_snapshot(repository, OTHER, tmp_path)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert read_inventory(repository).path == str(snapshot)
    assert str(default_name(plan_import(repository))) == "Qwen3-0.6B:latest"


def test_several_snapshots_and_no_main(tmp_path: Path, repository: Path) -> None:
    found = [write_snapshot(repository, commit, tmp_path) for commit in (OTHER, COMMIT)]
    with pytest.raises(UnsupportedSourceError, match="2 snapshots") as caught:
        read_inventory(repository)
    assert f"{found[0]}, {found[1]}" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "make",
    [
        *[partial(Path.write_bytes, data=ref) for ref in (b"", b"../../..", b"\xff", b"x" * 2000)],
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
    ],
)
def test_a_main_that_is_not_a_commit(
    tmp_path: Path, repository: Path, make: Callable[[Path], object]
) -> None:
    write_snapshot(repository, COMMIT, tmp_path)
    (repository / "refs").mkdir()
    make(repository / "refs" / "main")
    with pytest.raises(BlobStoreError):
        read_inventory(repository)


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, repository: Path) -> None:
    snapshot = write_snapshot(repository, COMMIT, tmp_path)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    with pytest.raises(NotFoundError, match=r"tokenizer\.json .*\.\./\.\./blobs/1"):
        read_inventory(snapshot)
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="loop"):
        read_inventory(snapshot)
