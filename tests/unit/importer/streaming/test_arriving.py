"""What came of unfinished segments is not fetched again, and not believed without its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from support.checkpoints import normal, write_checkpoint
from support.streaming import TINY, Snapshots, streamed

import blobstore
from blobstore.errors import RemoteError
from blobstore.importer.streaming.segments import SegmentSizes
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore

_COMES, _STEP, _AT_ONCE = 1000, 2000, 4
SIZES = replace(TINY, step=_STEP)


def digest(source: Path, store: Store | MemoryStore) -> str:
    return str(blobstore.import_model(source, "m", store=store, quant="int4", jobs=2).digest)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", {"model.a.weight": normal("a", 96, 512)})


@pytest.fixture
def want(source: Path) -> str:
    return digest(source, MemoryStore())


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("number", [4, 30, 60, 90])
def test_what_came_is_not_fetched_again(
    source: Path, store: Store, want: str, number: int, declared: bool
) -> None:
    with streamed(SIZES, declared=declared) as fetched:
        fetched.most = _COMES

        def fail(_name: str, _begin: int) -> None:
            if len(fetched.ranges) >= number:
                raise RemoteError("cut")

        fetched.before = fail
        with pytest.raises(RemoteError):
            digest(source, store)
        before = fetched.nbytes
    with streamed(SIZES, declared=declared) as fetched:
        assert digest(source, store) == want
    size = (source / "model.safetensors").stat().st_size
    assert before + fetched.nbytes <= size + _AT_ONCE * (_STEP + _COMES)
    assert list(store.root.glob(".blobstore/tmp/*")) == []


@pytest.fixture
def killed(source: Path, store: Store, tmp_path: Path) -> Iterator[list[Store]]:
    """Give what kills leave."""
    snapshots = Snapshots(store, tmp_path / "killed")
    with streamed(SIZES) as fetched:
        fetched.most = _COMES

        calls = count()

        def take(name: str, begin: int) -> None:
            if next(calls) % 12 == 6:
                snapshots.take(name, begin)

        fetched.before = take
        digest(source, store)
    assert list(store.root.glob(".blobstore/tmp/*")) == []
    with streamed(SIZES):
        yield snapshots.stores


@pytest.mark.parametrize("damage", ["lost", "cut", "changed"])
def test_parts_that_are_not_as_the_log_says_are_fetched_again(
    killed: list[Store], source: Path, want: str, damage: str
) -> None:
    damaged = 0
    for left in killed:
        for path in left.root.glob(".blobstore/tmp/*/work-*/part-*"):
            data = bytearray(path.read_bytes())
            damaged += len(data) > 0
            match damage:
                case "lost":
                    path.unlink()
                case "cut":
                    path.write_bytes(data[: len(data) // 2])
                case _ if data:
                    data[len(data) // 2] ^= 1
                    path.write_bytes(data)
        assert digest(source, left) == want
    assert damaged > 3


def test_only_small_sources_have_steps() -> None:
    assert SegmentSizes.of(500_000_000).step is None
    for nbytes in (50_000_000, 350_000_000):
        sizes = SegmentSizes.of(nbytes)
        assert sizes.step is not None
        assert sizes.step * (sizes.window // sizes.aim) <= nbytes // 25
