"""Imports from servers with faults, and imports that are killed: the right blobs or a typed error.

After each fault the same import is done once more, from servers without faults, into the same
store: what the first one kept must not harm it. The long forms are 500 faults of each kind of
server, and 500 kills.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from random import Random

import pytest
from integration.far_rigs import KINDS, Blobs, FarRig, blobs_of, far_rig
from integration.server_faults import FAULTS, PASSING, UNSEEN, Faults, alarm
from support.many import expert_shards

from blobstore import import_model, open_store, verify
from blobstore.errors import BlobStoreError
from blobstore.source.addresses import Source
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab
SEED = int(os.environ.get("FAULT_SEED", "17"))
LONG = pytest.param(500, id="500", marks=[pytest.mark.long, pytest.mark.timeout(7200)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expert_shards(tmp_path_factory.mktemp("far") / "m", 3, 12_000_000)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    return imported(checkpoint, open_store(tmp_path_factory.mktemp("local")))


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[FarRig]:
    with far_rig(request.param, checkpoint) as running:
        yield running


def imported(source: Source, store: Store) -> Blobs:
    return blobs_of(import_model(source, "m", store=store, quant="int4", jobs=2).manifest)


def far(rig: FarRig, store: Store) -> Blobs:
    with rig.open() as folder:
        return imported(folder, store)


def check_sound(store: Store) -> None:
    """Check that nothing in a store is damaged; it may not exist yet."""
    assert not store.root.exists() or verify(store).is_sound


@pytest.mark.parametrize("times", [pytest.param(6, id="6"), LONG])
def test_faults_of_servers(rig: FarRig, expected: Blobs, times: int, tmp_path: Path) -> None:
    random = Random(SEED)
    names = [name for name in FAULTS if rig.address.startswith("hf:") or name not in UNSEEN]
    random.shuffle(names)
    figures: Counter[str] = Counter()
    for number in range(times):
        name, store = names[number % len(names)], open_store(tmp_path / f"store{number}")
        faults = Faults(name, random.randrange(10), random)
        rig.play(faults.around)
        try:
            assert far(rig, store) == expected, f"{name}: another model was made"
            outcome = "success"
        except BlobStoreError as error:
            outcome = type(error).__name__
        assert outcome == "success" or name not in PASSING, f"{name}: the import ended: {outcome}"
        assert bool(store.manifests.names()) is (outcome == "success")
        figures[f"{name}: {outcome}"] += 1
        figures["struck"] += faults.struck is not None
        check_sound(store)
        rig.play()
        assert far(rig, store) == expected, f"after {name}"
        check_sound(store)
    sys.stdout.writelines(f"{count:5} {what}\n" for what, count in sorted(figures.items()))
    assert figures["struck"] > times // 2


@pytest.mark.parametrize("times", [pytest.param(1, id="1"), LONG])
def test_kills(rig: FarRig, expected: Blobs, times: int, tmp_path: Path) -> None:
    """Imports are killed at any byte, and continued to their end."""
    random = Random(SEED)
    for number in range(times):
        store = open_store(tmp_path / f"store{number}")
        kill_import(rig, store, random.randrange(rig.nbytes * 9 // 10))
        check_sound(store)
        rig.play()
        process = started(rig, store)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert blobs_of(store.manifest("m")) == expected
        check_sound(store)
        sent = sum(script.sent for script in rig.scripts)
        sys.stdout.write(f"{sent / rig.nbytes:.2f} of the checkpoint was sent at last\n")


def kill_import(rig: FarRig, store: Store, after: int) -> None:
    """Kill an import when ``after`` bytes are on their way."""
    processes: Queue[subprocess.Popen[str]] = Queue()
    rig.play(alarm(after, lambda: processes.get(timeout=600).kill()))
    process = started(rig, store)
    processes.put(process)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -9, errors


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
