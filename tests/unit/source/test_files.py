"""Files beside a checkpoint's weights: kept, or left out with a reason, within limits."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_checkpoint
from support.layouts import write

import blobstore
from blobstore.source import files
from blobstore.source.files import other_files
from blobstore.source.folders import LocalFolder
from blobstore.store.local.store import Store

OWN = {"model.safetensors", "config.json"}
TRAINING = "training state"
FORMAT = "weights in another format"


def kept(folder: Path) -> list[str]:
    return [file.name for file in other_files(LocalFolder(folder), OWN)[0]]


def reasons(folder: Path) -> dict[str, str]:
    return {one.name: one.reason for one in other_files(LocalFolder(folder), OWN)[1]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


LEFT_OUT = {
    "pytorch_model.bin": FORMAT,
    "onnx/model_q4.onnx": FORMAT,
    "flax_model.msgpack": FORMAT,
    "coreml/x.mlpackage/": FORMAT,
    "optimizer.pt": TRAINING,
    "optimizer.safetensors": files.NOT_NAMED,
    "sub/optimizer.safetensors": TRAINING,
    "checkpoint-500/": TRAINING,
    "runs/events.out.tfevents.1": TRAINING,
    "__pycache__/": "a cache",
    "consolidated.safetensors": files.NOT_NAMED,
    ".git/": files.HIDDEN,
    "sub/.DS_Store": files.HIDDEN,
    "a:b": "its name can't be stored ('a:b' contains an invalid character)",
}


def test_left_out_with_a_reason(folder: Path) -> None:
    write(folder, {f"{name}x.txt" if name.endswith("/") else name: "x" for name in LEFT_OUT})
    assert (kept(folder), reasons(folder)) == ([], LEFT_OUT)


def test_kept(folder: Path) -> None:
    names = (
        *("tokenizer.model", "qwen.tiktoken", "chat_template.jinja", "LICENSE", "a/b/c/d.png"),
        *("2_Dense/model.safetensors", "1_Pooling/config.json", "model.safetensors.index.json"),
        *(".gitattributes", "checkpoint-notes.md"),
    )
    write(folder, dict.fromkeys(names, "x"))
    assert (kept(folder), reasons(folder)) == (sorted(names), {})


def test_a_name_that_is_not_utf_8_is_left_out_and_can_be_said(folder: Path, store: Store) -> None:
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff"))).write_bytes(b"x")
    result = blobstore.import_model(folder, "m", store=store)
    assert [one.name for one in result.coverage.left_out] == ["'\\udcff'"]


OUT = "a link to a place outside of the checkpoint's folder"


def test_what_is_not_a_file_of_the_folder(folder: Path) -> None:
    neighbour = folder.with_name(f"{folder.name}-other")  # whose name begins as the folder's does
    write(neighbour, {"x": "x"})
    os.mkfifo(folder / "fifo")
    (folder / "outside").symlink_to("/etc/hostname")
    (folder / "neighbour").symlink_to(neighbour / "x")
    (folder / "loop").symlink_to(folder)
    write(folder, {"a/x.txt": "x"})
    (folder / "y.txt").symlink_to("a/x.txt")
    assert kept(folder) == ["a/x.txt", "y.txt"]
    links = {"outside": OUT, "neighbour": OUT, "loop": "a link to a folder"}
    assert reasons(folder) == {"fifo": "not a regular file", **links}


def test_a_snapshot_may_link_into_its_repository_and_no_other(tmp_path: Path) -> None:
    repository, other = tmp_path / "models--a--b", tmp_path / "models--c--d"
    snapshot = write_checkpoint(repository / "snapshots" / "0123")
    for one in (repository, other):
        write(one, {"blobs/12ab": "x"})
    (snapshot / "own.txt").symlink_to("../../blobs/12ab")
    (snapshot / "others.txt").symlink_to("../../../models--c--d/blobs/12ab")
    assert (kept(snapshot), reasons(snapshot)) == (["own.txt"], {"others.txt": OUT})


def test_deep_folders(folder: Path) -> None:
    names = ["/".join([*"abcdefgh"[:depth], "x"]) for depth in range(9)]
    write(folder, dict.fromkeys(["a/b/c/d/e/f/g/h/i/x", *names], "x"))
    assert kept(folder) == sorted(names)
    assert reasons(folder) == {"a/b/c/d/e/f/g/h/i/": "more than 8 folders deep"}


def test_many_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 5)
    write(folder, dict.fromkeys(("b/1", "b/2", "c/1", "c/2", "1", "2"), "x"))
    assert kept(folder) == ["1", "2"]  # four entries of the folder, and no room for two more
    assert list(reasons(folder)) == ["b/", "c/"]
    write(folder, dict.fromkeys(("3", "4", "5", "6"), "x"))
    assert kept(folder) == ["1", "2", "3", "4", "5"]
    (left,) = other_files(LocalFolder(folder), OWN)[1]
    assert (left.name, left.count) == ("6 and what follows", 3)


def test_large_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE", 2**20)
    monkeypatch.setattr(files, "MAX_BYTES", 2**30)
    write(folder, {"a": b"x" * 2**20, "b": b"x" * (2**20 + 1)})
    assert (kept(folder), reasons(folder)) == (["a"], {"b": "larger than 1 MiB"})
    monkeypatch.setattr(files, "MAX_BYTES", 2**20 + 4)
    write(folder, {"c/x": b"12345", "c/y": b"1234"})
    assert kept(folder) == ["a", "c/y"]
    assert reasons(folder)["c/x"].startswith("beyond the ")


def test_a_store_in_the_folder_is_not_part_of_the_checkpoint(folder: Path) -> None:
    for place in (folder / "models", folder):
        store = blobstore.open_store(place)
        one, other = (blobstore.import_model(folder, n, store=store) for n in ("one", "other"))
        assert one.digest == other.digest
    own = {"blobs/": files.STORE, "manifests/": files.STORE, ".blobstore/": files.HIDDEN}
    assert reasons(folder) == own | {f"models/{name}": reason for name, reason in own.items()}


def test_an_unlistable_folder_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"lost+found/x": "x", "a": "x"})
    scandir = os.scandir

    def refusing(path: Path) -> Any:
        if Path(path).name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert kept(folder) == ["a"]
    assert "permission denied" in reasons(folder)["lost+found/"]
