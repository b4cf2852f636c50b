"""Results that a store keeps: replaced at once, limited, removed with the last model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.stores import commit_model, unprivileged

from blobstore.errors import LimitExceededError
from blobstore.names import Digest
from blobstore.store import hints as module
from blobstore.store.care.prune import prune
from blobstore.store.local.store import Store


def kept(store: Store) -> set[str]:
    """Return the files of results."""
    folder = store.root / ".blobstore" / "results"
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def with_results(store: Store, name: str, blob: bytes) -> Digest:
    """Store a model with results; return the digest of its manifest."""
    digest = commit_model(store, name, blob).digest
    store.results.keep(f"quality/{digest.hex}", b"quality")
    return digest


def test_a_result_is_read_back_and_replaced(store: Store) -> None:
    store.root.mkdir()
    digest = Digest.of(b"")
    assert store.results.read(f"quality/{digest.hex}") is None
    assert store.results.read("verify") is None
    store.results.keep(f"quality/{digest.hex}", b"old")
    store.results.keep(f"quality/{digest.hex}", b"new")
    store.results.keep("verify", b"sound")
    path, found = store.results.read(f"quality/{digest.hex}") or ("", b"")
    assert (Path(path).read_bytes(), found) == (b"new", b"new")
    assert (store.results.read("verify") or ("", b""))[1] == b"sound"
    assert kept(store) == {f"quality/{digest.hex}.json", "verify.json"}


def test_prune_removes_the_results_of_manifests_that_are_gone(store: Store) -> None:
    digest, other = with_results(store, "m", b"one"), with_results(store, "n", b"two")
    gone = Digest.of(b"gone")
    store.results.keep(f"quality/{gone.hex}", b"quality")
    store.results.keep("verify", b"sound")
    folder = store.root / ".blobstore/results/quality"
    (folder / f"{digest.hex}.json.0123456789abcdef").write_bytes(b"unfinished")
    (folder / "notes.txt").write_bytes(b"of another program")
    prune(store)
    found = {f"quality/{one.hex}.json" for one in (digest, other)}
    assert kept(store) == found | {"verify.json", "quality/notes.txt"}


def test_a_large_result_is_neither_kept_nor_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.root.mkdir()
    digest = Digest.of(b"")
    store.results.keep(f"quality/{digest.hex}", b"12345")
    monkeypatch.setattr(module, "MOST_BYTES", 4)
    store.results.keep("verify", b"12345")
    assert store.results.read("verify") is None
    with pytest.raises(LimitExceededError, match="has 5 bytes, at most 4"):
        store.results.read(f"quality/{digest.hex}")


def test_links_are_not_followed(store: Store, tmp_path: Path) -> None:
    (store.root / ".blobstore").mkdir(parents=True)
    (tmp_path / "other" / "quality").mkdir(parents=True)
    (store.root / ".blobstore" / "results").symlink_to(tmp_path / "other")
    digest = Digest.of(b"")
    (tmp_path / "other" / "quality" / f"{digest.hex}.json").write_bytes(b"not ours")
    store.results.keep("verify", b"sound")
    store.results.keep_only(set())
    assert [path.name for path in (tmp_path / "other").rglob("*.json")] == [f"{digest.hex}.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives the store to another user")
def test_only_the_owner_of_a_store_writes_results(store: Store, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    commit_model(store, "m", b"one")
    with unprivileged():
        store.results.keep("verify", b"sound")
    assert store.results.read("verify") is None
