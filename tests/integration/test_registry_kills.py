"""Pushes and pulls that are killed at any moment: the next one completes, with what is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
from support.registries import Registry, registry
from support.relay import Relay, relay
from support.shared_models import commit_tensors, finish, pulling, pushing, same

from blobstore import open_store, verify
from blobstore.formats.documents import Manifest
from blobstore.names import ModelName
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab
LARGEST = 3_000_000
SIZES = (LARGEST, *(100_000 + number for number in range(60)))
AT_ONCE = 32 * 2**10
"""Bytes that pass the relay at once: more would still be counted after the client's death."""
OVERHEAD = 4000 * 5 * len(SIZES)
"""Bytes of heads of requests, at most."""
TIMES = [
    pytest.param(3, id="3"),
    pytest.param(100, id="100", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


def killed(process: subprocess.Popen[str], between: Relay, nbytes: int) -> bool:
    """Kill a process when so many bytes have passed from now on; return False if it was faster."""
    between.after(nbytes, process.kill)
    _, errors = process.communicate(timeout=240)
    assert process.returncode in (0, -9), errors
    return process.returncode != 0


@pytest.mark.parametrize("times", TIMES)
def test_pushes(times: int, tmp_path: Path) -> None:
    """Each time from a store that does not know where else the blobs are."""
    random = Random(times)
    deaths = 0
    with registry(tmp_path / "registry") as server, relay(server.port, most=AT_ONCE) as between:
        for number in range(times):
            store = open_store(tmp_path / "store")
            manifest = commit_tensors(store, "m", SIZES)
            target = f"{between.host}/library/m{number}:t"
            moment = random.randrange(manifest.size)
            process = pushing(store.root, "m", target)
            deaths += killed(process, between, moment)
            assert server.incomplete() == []
            left = remaining(server, f"library/m{number}", manifest)
            between.reset()
            finish(pushing(store.root, "m", target))
            assert between.up <= left + LARGEST + OVERHEAD
            assert server.tags()[f"library/m{number}:t"] == manifest.raw
            shutil.rmtree(store.root)
        assert server.incomplete() == []
    assert deaths > times // 2


def remaining(server: Registry, repository: str, manifest: Manifest) -> int:
    """Return the bytes of the blobs that a repository lacks."""
    there = server.linked(repository)
    return sum(
        size
        for digest, size in {blob.digest: blob.size for blob in manifest.descriptors}.items()
        if digest.hex not in there
    )


@pytest.mark.parametrize("times", TIMES)
def test_pulls(times: int, store: Store, tmp_path: Path) -> None:
    """corpus: registry-kill-client-mid-pull."""
    manifest = commit_tensors(store, "m", SIZES)
    random = Random(times)
    deaths = 0
    with registry(tmp_path / "registry") as server, relay(server.port, most=AT_ONCE) as between:
        target = f"{between.host}/library/m:t"
        finish(pushing(store.root, "m", target))
        for number in range(times):
            root = tmp_path / f"pulled{number}"
            moment = random.randrange(manifest.size)
            between.reset()
            deaths += killed(pulling(root, "m", target), between, moment)
            check_nothing_partial(root, store)
            came = between.down
            between.reset()
            finish(pulling(root, "m", target))
            assert between.down <= manifest.size - came + LARGEST + OVERHEAD
            assert same(store.root, root, "m")
            assert verify(open_store(root)).is_sound
    assert deaths > times // 2


def test_many_pull_at_once(store: Store, tmp_path: Path) -> None:
    """corpus: registry-concurrent-same-pull."""
    commit_tensors(store, "m", SIZES[:20])
    with registry(tmp_path / "registry") as server:
        target = f"{server.host}/library/m:t"
        finish(pushing(store.root, "m", target))
        for process in [pulling(tmp_path / "pulled", "m", target) for _ in range(6)]:
            finish(process)
    assert same(store.root, tmp_path / "pulled", "m")
    assert verify(open_store(tmp_path / "pulled")).is_sound


def check_nothing_partial(root: Path, source: Store) -> None:
    """A model is there with all its bytes, or not at all."""
    pulled = open_store(root)
    names = pulled.manifests.names()
    assert names in ([], [ModelName.parse("m")])
    assert not names or same(source.root, root, "m")
    if root.exists():
        assert verify(pulled).is_sound
