"""Streamed imports: the digests of a local import, from segments that come in any order."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import normal, write_checkpoint
from support.ollama_sources import write_source
from support.streaming import SMALL, TINY, Fetched, Snapshots, streamed

import blobstore
from blobstore.errors import BlobStoreError, DigestMismatchError, RemoteError
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home

BLOB = 96 * 512 * 2
"""Bytes of the source of each large blob of ``several``."""


def outcome(source: Path, home: Home, **options: Any) -> str:
    try:
        return str(blobstore.import_model(source, "m", store=home, force=True, **options).digest)
    except BlobStoreError as error:
        return f"{type(error).__name__}: {error.message}"


def int4(source: Path, home: Home) -> str:
    return outcome(source, home, quant="int4")


def unfinished(store: Store) -> list[Path]:
    return list(store.root.glob(".blobstore/tmp/*"))


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A checkpoint of several blobs that have several segments each, and a small one."""
    tensors = {"model.a.norm.weight": normal("n", 512)}
    tensors |= {f"model.{name}.weight": normal(name, 96, 512) for name in "abcd"}
    return write_checkpoint(tmp_path / "several", tensors)


@pytest.fixture
def want(several: Path) -> str:
    return int4(several, MemoryStore())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("e_fp8_block_bf16scale", {}),
        ("f_ct_nvfp4", {"rules": ["*.0.*proj*=int4"], "requantize": True}),
    ],
)
def test_digests_of_a_local_import(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    folder = write_source(tmp_path, name)
    wanted = outcome(folder, MemoryStore(), **options)
    with streamed(SMALL, declared=True) as fetched:
        assert outcome(folder, MemoryStore(), **options) == wanted
    assert fetched.nbytes > 0


@pytest.mark.parametrize("declared", [False, True])
def test_needed_bytes_are_fetched_once(
    several: Path, store: Store, want: str, declared: bool
) -> None:
    size = (several / "model.safetensors").stat().st_size
    with streamed(TINY, declared=declared) as fetched:
        whole = blobstore.import_model(several, "m", store=store, quant="int4")
        assert str(whole.digest) == want
        assert fetched.nbytes == (size if declared else whole.source_bytes)
        fetched.ranges.clear()
        assert int4(several, store) == want
        assert fetched.ranges == []
        blob = next(layer for layer in whole.manifest.layers if layer.name == "model.b.weight")
        (store.root / "blobs" / blob.digest.file_name).unlink()
        again = blobstore.import_model(several, "m", store=store, quant="int4")
        assert (again.digest, again.recalled) == (whole.digest, 4)
        assert fetched.nbytes == (size if declared else BLOB)
    assert unfinished(store) == []


def fail_after(fetched: Fetched, number: int) -> None:
    def fail(_name: str, _begin: int) -> None:
        if len(fetched.ranges) >= number:
            raise RemoteError("cut")

    fetched.before = fail


@pytest.mark.parametrize(("declared", "number"), [(False, 0), (False, 20), (True, 43)])
def test_finished_blobs_are_not_fetched_again(
    several: Path, store: Store, want: str, number: int, declared: bool
) -> None:
    size = (several / "model.safetensors").stat().st_size
    with streamed(TINY, declared=declared) as fetched:
        fail_after(fetched, number)
        assert int4(several, store).startswith("RemoteError")
        before = fetched.nbytes
    told: list[int] = []
    with streamed(TINY, declared=declared) as fetched:
        result = blobstore.import_model(
            several, "m", store=store, quant="int4", progress=lambda n, _: told.append(n)
        )
    assert (str(result.digest), sum(told)) == (want, result.source_bytes)
    assert before + fetched.nbytes <= size + BLOB + 5 * TINY
    assert unfinished(store) == []


@pytest.mark.parametrize("declared", [False, True])
def test_killed_imports_go_on_after_damage(
    several: Path, store: Store, tmp_path: Path, want: str, declared: bool
) -> None:
    snapshots = Snapshots(store, tmp_path / "killed", every=5)
    with streamed(TINY, declared=declared) as fetched:
        fetched.before = snapshots.take
        int4(several, store)
    assert len(snapshots.stores) >= 4
    for number, left in enumerate(snapshots.stores):
        for path in left.root.glob(".blobstore/*/**/sha256-*"):
            match number % 4:
                case 0:
                    os.truncate(path, path.stat().st_size // 2)
                case 1:
                    data = bytearray(path.read_bytes() or b"?")
                    data[len(data) // 2] ^= 1
                    path.write_bytes(data)
                case 2:
                    path.unlink()
        with streamed(TINY, declared=declared):
            assert int4(several, left) == want


@pytest.mark.parametrize("stop", [40, 10**6])
def test_wrong_bytes_never_become_a_model(
    several: Path, store: Store, want: str, stop: int
) -> None:
    """Also if the import that fetched them was cut, and another one goes on after them."""

    def damage(_name: str, begin: int, data: memoryview) -> None:
        if begin == 0:
            data[-1] ^= 1

    with streamed(TINY, declared=True) as fetched:
        fetched.change = damage
        fail_after(fetched, stop)
        assert int4(several, store).startswith("RemoteError" if stop == 40 else "DigestMismatch")
    if stop == 40:
        with streamed(TINY, declared=True) as fetched, pytest.raises(DigestMismatchError) as raised:
            blobstore.import_model(several, "m", store=store, quant="int4")
        assert raised.value.path == str(several / "model.safetensors")
        assert min(begin for _, begin, _ in fetched.ranges) > 0
    assert (store.manifests.names(), store.blobs.digests()) == ([], set())
    with streamed(TINY, declared=True) as fetched:  # that error has ended what was wrong
        assert int4(several, store) == want
    assert min(begin for _, begin, _ in fetched.ranges) == 0
