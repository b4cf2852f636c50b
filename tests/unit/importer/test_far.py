"""Streamed imports: the digests of a local import, from segments that come in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, write_checkpoint
from support.ollama_sources import write_source
from support.streaming import SMALL, TINY, Snapshots, streamed

import blobstore
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    NonFiniteWeightError,
    RemoteError,
    StorageError,
)
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home

Options = dict[str, Any]

FEW: list[tuple[str, Options]] = [
    ("c_sharded", {"quant": "int4"}),
    ("b_qwen3_moe", {"quant": "nvfp4", "experts": "stacked"}),
    ("e_fp8_moe", {}),
    ("f_ct_nvfp4", {}),
    ("x_truncated_data", {}),
]


def outcome(source: Path, home: Home, **options: Any) -> str:
    """Return the digest of an import, or its error."""
    try:
        return str(blobstore.import_model(source, "m", store=home, force=True, **options).digest)
    except BlobStoreError as error:
        return f"{type(error).__name__}: {error.message}"


def wide(folder: Path) -> Path:
    """Return a checkpoint with a matrix that several segments hold, and a small tensor."""
    tensors = {"model.a.weight": normal("a", 96, 512), "model.norm.weight": normal("n", 512)}
    return write_checkpoint(folder, tensors)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return wide(tmp_path / "m")


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Return a checkpoint of several blobs that have several segments each, and small ones."""
    tensors = {"model.a.norm.weight": normal("n", 512)}
    tensors |= {f"model.{name}.weight": normal(name, 96, 512) for name in "abcd"}
    return write_checkpoint(tmp_path / "several", tensors)


@pytest.fixture
def want(source: Path) -> str:
    return outcome(source, MemoryStore(), quant="int4")


@pytest.mark.parametrize(("name", "options"), FEW, ids=str)
def test_some_sources_have_the_digests_of_a_local_import(
    tmp_path: Path, name: str, options: Options
) -> None:
    folder = write_source(tmp_path, name)
    wanted = outcome(folder, MemoryStore(), **options)
    with streamed(SMALL, declared=True) as fetched:
        assert outcome(folder, MemoryStore(), **options) == wanted
    assert fetched.nbytes > 0 or "Error" in wanted


@pytest.mark.parametrize(("declared", "jobs"), [(False, 3), (True, 1)])
def test_a_store_in_a_folder(
    source: Path, store: Store, want: str, declared: bool, jobs: int
) -> None:
    with streamed(TINY, declared=declared) as fetched:
        assert outcome(source, store, quant="int4", jobs=jobs) == want
        assert len(fetched.ranges) > 5
        nbytes = fetched.nbytes
        assert outcome(source, store, quant="int4") == want
    assert fetched.nbytes == nbytes  # nothing is fetched again
    assert list(store.root.glob(".blobstore/tmp/*")) == []


def test_only_needed_bytes_are_fetched(tmp_path: Path) -> None:
    tensors = {f"model.t{n}.weight": normal(str(n), 64, 64) for n in range(8)}
    folder = write_checkpoint(tmp_path / "m", tensors)
    store = Store(tmp_path / "s")
    with streamed(TINY) as fetched:
        whole = blobstore.import_model(folder, "m", store=store, quant="int4")
    size = (folder / "model.safetensors").stat().st_size
    data = sum(one.nbytes for one in tensors.values())
    assert whole.coverage is not None
    assert fetched.nbytes == data < size
    blob = next(layer for layer in whole.manifest.layers if layer.name == "model.t5.weight")
    (store.root / "blobs" / blob.digest.file_name).unlink()
    for declared, again in ((False, tensors["model.t5.weight"].nbytes), (True, size)):
        with streamed(TINY, declared=declared) as fetched:
            result = blobstore.import_model(folder, "m", store=store, quant="int4")
        assert (result.digest, result.recalled, fetched.nbytes) == (whole.digest, 7, again)
        (store.root / "blobs" / blob.digest.file_name).unlink()


def cut_at(source: Path, store: Store, number: int, error: BaseException, **how: Any) -> int:
    """Import a source, whose fetching fails at a range; return the bytes that were fetched."""
    with streamed(TINY, **how) as fetched:

        def fail(_name: str, _begin: int) -> None:
            if len(fetched.ranges) >= number:
                raise error

        fetched.before = fail
        with pytest.raises(type(error)):
            blobstore.import_model(source, "m", store=store, quant="int4", jobs=2)
    return fetched.nbytes


def test_after_another_error_nothing_is_kept(source: Path, store: Store) -> None:
    cut_at(source, store, 5, StorageError("full"))
    assert list(store.root.glob(".blobstore/tmp/*")) == []


BLOB = 96 * 512 * 2
"""Bytes of the source of each large blob of ``several``."""


@pytest.mark.parametrize(("declared", "number"), [(False, 0), (False, 20), (True, 43)])
def test_finished_blobs_are_not_fetched_again(
    several: Path, store: Store, number: int, declared: bool
) -> None:
    want = outcome(several, MemoryStore(), quant="int4")
    size = (several / "model.safetensors").stat().st_size
    before = cut_at(several, store, number, RemoteError("cut"), declared=declared)
    told: list[int] = []
    with streamed(TINY, declared=declared) as fetched:
        result = blobstore.import_model(
            several, "m", store=store, quant="int4", progress=lambda n, _: told.append(n)
        )
    assert (str(result.digest), sum(told)) == (want, result.source_bytes)
    assert before + fetched.nbytes <= size + BLOB + 5 * TINY
    assert list(store.root.glob(".blobstore/tmp/*")) == []


@pytest.fixture(params=[False, True], ids=["plain", "declared"])
def killed(
    several: Path, store: Store, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[Store]]:
    """Give what is left of an import that is killed before each range."""
    snapshots = Snapshots(store, tmp_path / "killed")
    with streamed(TINY, declared=request.param) as fetched:
        fetched.before = snapshots.take
        blobstore.import_model(several, "m", store=store, quant="int4", jobs=2)
    with streamed(TINY, declared=request.param) as fetched:
        yield snapshots.stores


def test_killed_imports_go_on_also_after_damage(killed: list[Store], several: Path) -> None:
    assert len(killed) > 20
    want = outcome(several, MemoryStore(), quant="int4")
    for number, left in enumerate(killed[::7]):
        for path in left.root.glob(".blobstore/*/**/sha256-*"):
            match number % 4:
                case 0:
                    path.unlink()
                case 1:
                    os.truncate(path, path.stat().st_size // 2)
                case 2:
                    data = bytearray(path.read_bytes() or b"?")
                    data[len(data) // 2] ^= 1
                    path.write_bytes(data)
        assert outcome(several, left, quant="int4") == want


def test_wrong_bytes_before_a_cut_are_found_after_it(several: Path, store: Store) -> None:
    def damage(_name: str, begin: int, data: memoryview) -> None:
        if begin == 0:
            data[-1] ^= 1

    with streamed(TINY, declared=True) as fetched:

        def fail(_name: str, _begin: int) -> None:
            if len(fetched.ranges) >= 40:
                raise RemoteError("cut")

        fetched.change, fetched.before = damage, fail
        with pytest.raises(RemoteError):
            blobstore.import_model(several, "m", store=store, quant="int4")
    with streamed(TINY, declared=True) as fetched, pytest.raises(DigestMismatchError):
        blobstore.import_model(several, "m", store=store, quant="int4")
    assert min(begin for _, begin, _ in fetched.ranges) > 0
    want = outcome(several, MemoryStore(), quant="int4")
    with streamed(TINY, declared=True) as fetched:  # the second error has ended what was wrong
        assert outcome(several, store, quant="int4") == want
    assert min(begin for _, begin, _ in fetched.ranges) == 0


def test_wrong_bytes_never_become_a_model(source: Path, store: Store, want: str) -> None:
    with streamed(TINY, declared=True) as fetched:

        def damage(_name: str, begin: int, data: memoryview) -> None:
            if begin <= 20_000 < begin + len(data):
                data[20_000 - begin] ^= 1

        fetched.change = damage
        with pytest.raises(DigestMismatchError) as raised:
            blobstore.import_model(source, "m", store=store, quant="int4")
        assert raised.value.path == str(source / "model.safetensors")
    assert store.manifests.names() == []
    assert store.blobs.digests() == set()
    with streamed(TINY, declared=True):
        assert outcome(source, store, quant="int4") == want


def test_a_source_that_changes_meanwhile(source: Path, store: Store) -> None:
    weights = source / "model.safetensors"
    with streamed(TINY) as fetched:
        changed: list[bool] = []

        def change(_name: str, _begin: int) -> None:
            if len(fetched.ranges) >= 3 and not changed:
                changed.append(True)
                with weights.open("r+b") as file:  # it is never shorter
                    file.write(weights.read_bytes())

        fetched.before = change
        with pytest.raises(CorruptDataError, match="changed"):
            blobstore.import_model(source, "m", store=store, quant="int4")
    assert list(store.root.glob(".blobstore/tmp/*")) == []


def test_the_error_is_that_of_a_local_import(tmp_path: Path, store: Store) -> None:
    array = normal("a", 96, 512)
    array[70, 3] = np.nan
    folder = write_checkpoint(tmp_path / "m", {"model.a.weight": array})
    wanted = outcome(folder, MemoryStore(), quant="int4")
    assert wanted.startswith(NonFiniteWeightError.__name__)
    with streamed(TINY):
        assert outcome(folder, store, quant="int4") == wanted
    assert list(store.root.glob(".blobstore/tmp/*")) == []
