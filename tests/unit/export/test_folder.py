"""The folder of an export is whole or missing; what was in its place stays; damage is found."""

from pathlib import Path

import pytest
from support.checkpoints import safetensors_bytes, small_tensors, write_checkpoint
from support.exports import raw_tensors
from support.stores import commit_model, link_by_hand

import blobstore
from blobstore.errors import (
    BlobStoreError,
    BusyError,
    CorruptDataError,
    DigestMismatchError,
    NotFoundError,
    StorageError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.export import folder as files
from blobstore.store.local.store import Store

STAGING = ".out.blobstore-export"


@pytest.fixture
def model(store: Store, tmp_path: Path) -> Path:
    """The folder that model ``m`` of the store was imported from."""
    source = write_checkpoint(tmp_path / "in")
    blobstore.import_model(source, "m", store=store)
    return source


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name not in ("in", "store"))


def test_an_empty_folder_is_filled_and_links_stay(
    model: Path, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    (tmp_path / "dangling").symlink_to("nowhere")
    result = blobstore.export_model("m", tmp_path / "link", store=store)
    assert result.folder == tmp_path / "out"
    blobstore.export_model("m", tmp_path / "dangling", store=store)
    for name in ("link", "nowhere"):
        assert raw_tensors(tmp_path / name) == raw_tensors(model)
    assert names(tmp_path) == ["dangling", "link", "nowhere", "out"]


@pytest.mark.usefixtures("model")
def test_a_file_or_a_folder_with_files_stays(store: Store, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("y")
    for name in ("full", "file"):
        with pytest.raises(StorageError, match="not an empty folder") as caught:
            blobstore.export_model("m", tmp_path / name, store=store)
        assert caught.value.hint
    assert (names(tmp_path / "full"), (tmp_path / "file").read_text()) == (["mine"], "y")
    assert names(tmp_path) == ["file", "full"]


@pytest.mark.usefixtures("model")
def test_bad_folders(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "loop").symlink_to("loop")
    for place, kind in (
        *(("store/new/deep", UsageError), ("link/x", UsageError)),  # in the store
        *(("in/config.json/x", StorageError), ("a\0b", StorageError), ("loop/x", StorageError)),
    ):
        with pytest.raises(kind):
            blobstore.export_model("m", tmp_path / place, store=store)
    assert names(tmp_path) == ["link", "loop"]


@pytest.mark.usefixtures("model")
def test_a_folder_that_was_filled_meanwhile_stays(store: Store, tmp_path: Path) -> None:
    def fill(_: int, __: str) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").write_text("x")

    with pytest.raises(StorageError, match="not empty"):
        blobstore.export_model("m", tmp_path / "out", store=store, progress=fill)
    assert names(tmp_path / "out") == ["mine"]
    assert names(tmp_path) == ["out"]


def test_of_two_exports_at_once_one_is_refused(model: Path, store: Store, tmp_path: Path) -> None:
    def export_too(_: int, __: str) -> None:
        with pytest.raises(BusyError, match="another export"):
            blobstore.export_model("m", tmp_path / "out", store=store)

    blobstore.export_model("m", tmp_path / "out", store=store, progress=export_too)
    assert raw_tensors(tmp_path / "out") == raw_tensors(model)
    assert names(tmp_path) == ["out"]


@pytest.mark.usefixtures("model")
def test_what_a_killed_export_left_is_removed(store: Store, tmp_path: Path) -> None:
    left = tmp_path / STAGING
    (left / "draft").mkdir(parents=True)
    (left / "draft" / "half").write_text("x")
    (left / "stray.safetensors").symlink_to("nowhere")
    blobstore.export_model("m", tmp_path / "out", store=store)
    assert names(tmp_path / "out") == ["config.json", "model.safetensors"]
    assert names(tmp_path) == ["out"]


@pytest.mark.usefixtures("model")
def test_a_link_in_the_staging_folders_place_is_not_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "mine").write_text("x")
    (tmp_path / STAGING).symlink_to("victim")
    with pytest.raises(StorageError):
        blobstore.export_model("m", tmp_path / "out", store=store)
    assert (tmp_path / "victim" / "mine").read_text() == "x"


@pytest.mark.usefixtures("model")
def test_a_damaged_blob_is_named(store: Store, tmp_path: Path) -> None:
    """Without `verify` only an export of bytes that are missing is refused."""
    with blobstore.open_model("m", store=store) as opened:
        path = store.root / "blobs" / opened["lm_head.weight"].blob.file_name
    raw = path.read_bytes()
    damage: list[tuple[bytes | None, type[BlobStoreError]]] = [
        *((raw[:-1] + b"\xff", DigestMismatchError), (raw[:-1], CorruptDataError)),
        (None, NotFoundError),
    ]
    for left, kind in damage:
        path.unlink()
        if left is not None:
            path.write_bytes(left)
        verify = kind is DigestMismatchError
        with pytest.raises(kind) as caught:
            blobstore.export_model("m", tmp_path / "out", store=store, verify=verify)
        assert caught.value.blob == path.name.replace("-", ":")
    assert names(tmp_path) == []


@pytest.mark.usefixtures("model")
def test_a_blob_that_is_replaced_while_it_is_copied(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BATCH_PIECES", 1)
    with blobstore.open_model("m", store=store) as opened:
        blob = opened["model.layers.0.self_attn.q_proj.weight"].blob
    path = store.root / "blobs" / blob.file_name

    def replace(_: int, name: str) -> None:
        if name == "model.safetensors":
            raw = path.read_bytes()
            path.unlink()
            path.write_bytes(raw)

    with pytest.raises(CorruptDataError, match="changed while") as caught:
        blobstore.export_model("m", tmp_path / "out", store=store, progress=replace, jobs=4)
    assert path.name in str(caught.value)
    assert names(tmp_path) == []


def test_models_that_can_not_be_exported(store: Store, tmp_path: Path) -> None:
    link_by_hand(store, "empty", {})
    with pytest.raises(UnsupportedSourceError, match="no tensor blobs"):
        blobstore.export_model("empty", tmp_path / "out", store=store)
    with pytest.raises(NotFoundError, match="'nope:latest' not found"):
        blobstore.export_model("nope", tmp_path / "out", store=store)
    commit_model(store, "foreign", safetensors_bytes(small_tensors()))
    with pytest.raises(UnsupportedSourceError, match=r"no config\.json"):
        blobstore.export_model("foreign", tmp_path / "out", store=store, format="mlx")
    assert names(tmp_path) == []
    blobstore.export_model("foreign", tmp_path / "out", store=store)
    assert names(tmp_path / "out") == ["model.safetensors"]
