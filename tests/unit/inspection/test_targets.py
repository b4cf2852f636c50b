"""What a text names: a path, an address, a repository by the Hub's grammar, a stored model."""

from pathlib import Path

import huggingface_hub
import pytest
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.inspection.inspect import inspect, model_named
from blobstore.inspection.inspection import TargetKind
from blobstore.source.addresses import open_folder
from blobstore.source.web import HubTarget, parse_hub, parse_hub_page
from blobstore.store.local.store import Store


def test_hub_addresses_are_those_of_huggingface_hub() -> None:
    for text in (
        *("org/name", "models/org/na-me.2_x/folder/b.safetensors", "org/name@v1.0/a"),
        *("org/name@refs/pr/1/a/b.safetensors", "org/name@refs/convert/parquet"),
        "org/name@branch%2Fof/a",
    ):
        theirs, ours = huggingface_hub.parse_hf_uri(f"hf://{text}"), parse_hub(f"hf://{text}")
        assert (ours.repository, ours.path) == (theirs.id, theirs.path_in_repo)
        assert ours.revision == (theirs.revision or "main")


def test_pages_of_the_hub_are_its_repositories() -> None:
    hub = "https://huggingface.co/org/name"
    for page, target in {
        f"{hub}/": HubTarget("org/name", "main", ""),
        "https://HuggingFace.co/org/name/tree/v1/sub": HubTarget("org/name", "v1", "sub"),
        f"{hub}/blob/refs%2Fpr%2F2/a.b": HubTarget("org/name", "refs/pr/2", "a.b"),
        f"{hub}/resolve/main/x?download=true": HubTarget("org/name", "main", "x"),
        f"{hub}/discussions/1": None,
        "https://huggingface.co/datasets/org/name": None,
        "http://huggingface.co/org/name": None,
        "https://example.org/org/name": None,
    }.items():
        assert parse_hub_page(page) == target
        assert model_named(page) is None


def test_invalid_addresses_are_wrong_use() -> None:
    for text in (
        *("hf://org/name@", "hf://org/name@/x", "hf://datasets/org/name", "hf://org/name/../x"),
        *("hf://", "hf://a b/c", "hf://org/name@a..b", "hf://org/name/a//b"),
        *("http://", "http://user:pw@host/x", "https://\0/"),
    ):
        with pytest.raises(UsageError):
            open_folder(text)
        with pytest.raises(UsageError):
            inspect(text)


def test_a_path_that_exists_wins_over_a_stored_model(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    blobstore.import_model(source, "tiny", store=store, quant="int8")
    assert inspect("tiny", store=store).kind is TargetKind.MODEL
    monkeypatch.chdir(tmp_path)
    assert inspect("tiny", store=store).kind is TargetKind.FOLDER
    assert inspect("tiny:latest", store=store).kind is TargetKind.MODEL


def test_nothing_of_that_name(store: Store) -> None:
    for target in ("missing", "./missing", Path("missing"), "a\0b", "\udcff"):
        with pytest.raises((NotFoundError, StorageError)) as caught:
            inspect(target, store=store)
        assert ("stored model" in caught.value.message) == (target == "missing")
