"""Kept blobs: what one session keeps, another finds by its digest, from any machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.stores import blob_path

from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import Digest, ModelName
from blobstore.store.local.store import Store

ONE = Digest.of(b"one")
M = ModelName.parse("m")
KEY = "1" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def keep(store: Store, data: bytes = b"one") -> Path:
    """Keep a blob as a worker does; return its path."""
    with store.session() as session:
        session.note(KEY, session.put(data))
        session.keep()
    return store.kept.path / Digest.of(data).file_name


def forget(store: Store) -> None:
    """Remove the journal: another machine's may be lost."""
    (store.root / ".blobstore/hints/journal").unlink()


def test_a_kept_blob_is_found_without_a_journal_and_published(store: Store) -> None:
    path = keep(store)
    assert path.read_bytes() == b"one"
    assert not list((store.root / ".blobstore" / "tmp").iterdir())
    assert not store.blobs.digests()
    forget(store)
    with store.session() as session:
        found = session.recall(ONE.hex, 3, verify=True)
        assert found is not None
        blob = Descriptor(media_type="x/y", digest=found.digest, size=found.size)
        session.publish(M, Manifest(config=None, layers=(blob,)))
    assert blob_path(store, b"one").read_bytes() == b"one"
    assert not path.exists()


def test_what_is_not_there_is_not_found(store: Store) -> None:
    kept = keep(store)
    with store.session() as session:
        assert session.recall(KEY, 3, verify=False) is not None
    kept.unlink(missing_ok=True)
    with store.session() as session:
        for key in (KEY, ONE.hex, "x", "../../blobs/x"):
            assert session.recall(key, 3, verify=False) is None


def test_another_size_and_a_link_are_not_found(store: Store) -> None:
    path = keep(store)
    forget(store)
    with store.session() as session:
        assert session.recall(ONE.hex, 4, verify=False) is None
        path.rename(store.root / "moved")
        path.symlink_to(store.root / "moved")
        assert session.recall(ONE.hex, 3, verify=False) is None


def test_damage_is_found_by_verify(store: Store) -> None:
    keep(store).write_bytes(b"0ne")
    forget(store)
    with store.session() as session:
        assert session.recall(ONE.hex, 3, verify=True) is None


def test_two_sessions_publish_one_kept_blob(store: Store) -> None:
    keep(store)
    blob = Descriptor(media_type="x/y", digest=ONE, size=3)
    with store.session() as one, store.session() as other:
        for session in (one, other):
            assert session.recall(ONE.hex, 3, verify=False) is not None
        assert one.publish(M, Manifest(config=None, layers=(blob,))) == {ONE}
        assert other.publish(M, Manifest(config=None, layers=(blob,))) == set()


def test_a_clean_up_removes_it_after_a_week(store: Store) -> None:
    path = keep(store)
    now = path.stat().st_mtime
    for days, is_stale in ((0, False), (6, False), (8, True)):
        os.utime(path, (now - days * 86_400,) * 2)
        found = {left.path for left in store.kept.stale(3600)}
        assert (path in found) is is_stale
    os.utime(path, (now - 60,) * 2)
    assert path in {left.path for left in store.kept.stale(0)}
