"""Pushes and pulls that are killed at any byte: the next one completes, with what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from integration.relay import Relay, relay
from integration.shared_models import commit_tensors, same
from support.registries import registry

from blobstore import open_store, verify
from blobstore.store.local.store import Store
from blobstore.store.registry.store import pull, push

pytestmark = pytest.mark.lab
SIZES = (2_000_000, *(100_000 + number for number in range(40)))
TOTAL = sum(SIZES)
TIMES = [
    pytest.param(2, id="2"),
    pytest.param(100, id="100", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "blobstore", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"DOCKER_CONFIG": "/there/is/none"},
    )


def kill(between: Relay, nbytes: int, *words: str) -> None:
    process = started(*words)
    between.after(nbytes, process.kill)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -9, errors


@pytest.mark.parametrize("times", TIMES)
def test_pushes(times: int, store: Store, tmp_path: Path) -> None:
    """Each time from a store that does not know where else the blobs are."""
    random = Random(times)
    manifest = commit_tensors(store, "m", SIZES)
    with registry(tmp_path / "registry") as server, relay(server.port) as between:
        for number in range(times):
            shutil.rmtree(store.root / ".blobstore" / "hints", ignore_errors=True)
            name = f"library/m{number}"
            words = ("push", "m", "--to", f"{between.host}/{name}:t", "--store", str(store.root))
            kill(between, random.randrange(TOTAL), *words)
            assert server.incomplete() == []
            there = len(server.linked(name))
            done = push("m", store, to=f"{between.host}/{name}:t")
            assert done.there.blobs >= there
            assert server.tags()[f"{name}:t"] == manifest.raw
        assert server.incomplete() == []


@pytest.mark.parametrize("times", TIMES)
def test_pulls(times: int, store: Store, tmp_path: Path) -> None:
    """corpus: registry-kill-client-mid-pull."""
    random = Random(times)
    commit_tensors(store, "m", SIZES)
    with registry(tmp_path / "registry") as server, relay(server.port) as between:
        place = f"{between.host}/library/m:t"
        push("m", store, to=place)
        for number in range(times):
            pulled = open_store(tmp_path / f"pulled{number}")
            words = ("pull", place, "--as", "m", "--store", str(pulled.root))
            kill(between, random.randrange(TOTAL), *words)
            there = 0
            if pulled.root.exists():
                assert verify(pulled).is_sound  # no model lacks a blob
                there = len(pulled.blobs.digests())
            done = pull(place, pulled, name="m")
            assert done.there.blobs >= there
            assert same(store, pulled, "m")
            assert verify(pulled).is_sound


def test_many_pull_at_once(store: Store, tmp_path: Path) -> None:
    """corpus: registry-concurrent-same-pull."""
    commit_tensors(store, "m", SIZES[:20])
    with registry(tmp_path / "registry") as server:
        place = f"{server.host}/library/m:t"
        push("m", store, to=place)
        words = ("pull", place, "--as", "m", "--store", str(tmp_path / "pulled"))
        for process in [started(*words) for _ in range(4)]:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    assert same(store, open_store(tmp_path / "pulled"), "m")
