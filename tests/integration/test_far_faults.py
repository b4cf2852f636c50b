"""Imports from servers with faults, and imports that are killed: the right blobs or a typed error.

After each fault the same import is done once more, from servers without faults, into the same
store: what the first one kept must not harm it. The long forms are 500 faults of each kind of
server, and 500 kills.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from random import Random

import pytest
from support.far_rigs import KINDS, Blobs, FarRig, blobs_of, far_rig, write_far_checkpoint
from support.server_faults import FAULTS, PASSING, UNSEEN, Alarm, Faults

from blobstore import import_model, open_store, verify
from blobstore.errors import BlobStoreError
from blobstore.names import ModelName
from blobstore.source.addresses import Source
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab
SEED = int(os.environ.get("FAULT_SEED", "17"))
LONG = pytest.param(500, id="500", marks=[pytest.mark.long, pytest.mark.timeout(7200)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two shards."""
    return write_far_checkpoint(tmp_path_factory.mktemp("far") / "m")


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    """What an import from the disk makes."""
    return imported(checkpoint, open_store(tmp_path_factory.mktemp("local")))


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[FarRig]:
    """Servers of the checkpoint."""
    with far_rig(request.param, checkpoint) as running:
        yield running


def imported(source: Source, store: Store) -> Blobs:
    """Import the checkpoint."""
    return blobs_of(import_model(source, "m", store=store, quant="int4", jobs=2).manifest)


def far(rig: FarRig, store: Store) -> Blobs:
    """Import the checkpoint from its servers."""
    with rig.open() as folder:
        return imported(folder, store)


def far_or_error(rig: FarRig, store: Store) -> Blobs | BlobStoreError:
    """Import the checkpoint; return its blobs, or the error if it is one of ours."""
    try:
        return far(rig, store)
    except BlobStoreError as error:
        return error


def is_sound(store: Store) -> bool:
    """Return True if nothing in a store is damaged; it may not exist yet."""
    return not store.root.exists() or verify(store).is_sound


@pytest.mark.parametrize("times", [pytest.param(8, id="8"), LONG])
def test_faults_of_servers(rig: FarRig, expected: Blobs, times: int, tmp_path: Path) -> None:
    random = Random(SEED)
    names = [name for name in FAULTS if rig.address.startswith("hf:") or name not in UNSEEN]
    random.shuffle(names)
    figures: Counter[str] = Counter()
    for number in range(times):
        name, store = names[number % len(names)], open_store(tmp_path / f"store{number}")
        lasts = name not in PASSING and random.random() < 0.3
        faults = Faults(name, random.randrange(10), random, lasts=lasts)
        rig.play(faults.around)
        outcome = far_or_error(rig, store)
        is_made = not isinstance(outcome, BlobStoreError)
        assert not is_made or outcome == expected, f"{name}: another model was made"
        assert is_made or name not in PASSING, f"{name}: the import ended: {outcome!r}"
        figures[f"{name}: {'success' if is_made else type(outcome).__name__}"] += 1
        figures["struck"] += faults.struck > 0
        assert list(store.manifests.names()) == ([ModelName.parse("m")] if is_made else [])
        assert is_sound(store)
        rig.play()
        assert far(rig, store) == expected, f"after {name}"
        assert is_sound(store)
        shutil.rmtree(store.root)
    sys.stdout.writelines(f"{count:5} {what}\n" for what, count in sorted(figures.items()))
    assert figures["struck"] > times // 2


@pytest.mark.parametrize("times", [pytest.param(3, id="3"), LONG])
def test_kills(rig: FarRig, expected: Blobs, times: int, tmp_path: Path) -> None:
    """Each import is killed one to three times, at any byte, and continued to its end."""
    random = Random(SEED)
    kills = imports = again = 0
    while kills < times:
        store = open_store(tmp_path / f"store{imports}")
        sent = 0
        for _ in range(random.randint(1, 3)):
            kills += was_killed(rig, store, random.randrange(rig.nbytes))
            sent += rig.sent
            assert is_sound(store)
        rig.play()
        assert run(started(rig, store)) == 0
        assert blobs_of(store.manifest("m")) == expected
        assert is_sound(store)
        imports, again = imports + 1, again + max(0, sent + rig.sent - rig.nbytes)
        shutil.rmtree(store.root)
    said = f"{kills} kills of {imports} imports: {again / kills / 1e6:.2f} MB sent again a kill"
    sys.stdout.write(f"{said}, of {rig.nbytes / 1e6:.1f}\n")


def was_killed(rig: FarRig, store: Store, after: int) -> bool:
    """Kill an import when ``after`` bytes are on their way; return False if it ended before."""
    processes: Queue[subprocess.Popen[str]] = Queue()
    rig.play(Alarm(after, lambda: processes.get(timeout=600).kill()).around)
    process = started(rig, store)
    processes.put(process)
    return run(process) == -9


def started(rig: FarRig, store: Store) -> subprocess.Popen[str]:
    """Start ``blobstore import``."""
    line = [sys.executable, "-m", "blobstore", "import", rig.address, "m", "--quant", "int4"]
    return subprocess.Popen(
        [*line, "--store", str(store.root), "--jobs", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=rig.environment,
    )


def run(process: subprocess.Popen[str]) -> int:
    """Wait for an import that succeeds or is killed; return its exit code."""
    _, errors = process.communicate(timeout=600)
    assert process.returncode in (0, -9), errors
    return process.returncode
