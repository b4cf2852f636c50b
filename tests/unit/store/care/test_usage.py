"""du: what each model takes alone and with others, in bytes of files."""

from __future__ import annotations

from pathlib import Path

from support.stores import blob_path, commit_model, layer_by_hand, manifest_path

from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.local.store import Store


def figures(store: Store, *names: str) -> dict[str, tuple[int | None, ...]]:
    return {
        str(model.name): (model.nbytes, model.unique, model.shared)
        for model in measure_usage(store, names).models
    }


def test_unique_and_shared_bytes(store: Store) -> None:
    commit_model(store, "m", b"one", b"shared", b"one")
    commit_model(store, "n", b"shared", b"three")
    layer_by_hand(store, "", b"orphan!")
    assert figures(store) == {"m:latest": (9, 3, 6), "n:latest": (11, 5, 6)}
    for name in ("n", "n:latest", "http://registry.ollama.ai/library/n"):
        assert figures(store, name, name) == {"n:latest": (11, 5, 6)}
    usage = measure_usage(store)
    assert (usage.blobs, usage.nbytes, usage.reclaimable, usage.trash) == (4, 21, 7, 0)
    prune(store, grace_s=0, sole_owner=True)
    usage = measure_usage(store)
    assert (usage.blobs, usage.nbytes, usage.reclaimable, usage.trash) == (3, 14, 0, 7)


def test_what_is_no_file_or_only_named_like_a_blob_takes_nothing(
    store: Store, tmp_path: Path
) -> None:
    commit_model(store, "m", b"one", b"four")
    blob_path(store, b"one").unlink()
    blob_path(store, b"four").unlink()
    blob_path(store, b"four").symlink_to(tmp_path)
    for name in ("sha256-", "sha256-" + "g" * 64, "sha256-" + "a" * 63, "sha256:" + "A" * 64):
        (store.root / "blobs" / name).write_bytes(b"odd")
    (store.root / "blobs" / ("sha256-" + "a" * 64)).mkdir()
    assert figures(store) == {"m:latest": (0, 0, 0)}
    usage = measure_usage(store)
    assert (usage.blobs, usage.nbytes, usage.reclaimable) == (0, 0, 0)


def test_a_broken_model_is_shown_and_nothing_is_called_reclaimable_then(store: Store) -> None:
    commit_model(store, "m", b"one")
    commit_model(store, "n", b"two")
    manifest_path(store, "n").write_bytes(b"{")
    usage = measure_usage(store)
    assert [model.error is None for model in usage.models] == [True, False]
    assert (usage.nbytes, usage.reclaimable) == (6, 0)
