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
from support.far_rigs import KINDS, FarRig, blobs_of, far_rig, write_far_checkpoint
from support.server_faults import FAULTS, PASSING, UNSEEN, Alarm, Faults

from blobstore import import_model, open_store, verify
from blobstore.errors import BlobStoreError
from blobstore.importer.run import ImportResult
from blobstore.names import ModelName
from blobstore.source.addresses import Source
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab
SEED = int(os.environ.get("FAULT_SEED", "17"))
TIMES = [
    pytest.param(20, id="20"),
    pytest.param(500, id="500", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
]
Blobs = dict[str | None, tuple[str, int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two shards."""
    return write_far_checkpoint(tmp_path_factory.mktemp("far") / "m")


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    """What an import from the disk makes."""
    return blobs_of(imported(checkpoint, open_store(tmp_path_factory.mktemp("local"))).manifest)


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[FarRig]:
    """Servers of the checkpoint."""
    with far_rig(request.param, checkpoint) as running:
        yield running


def imported(source: Source, store: Store) -> ImportResult:
    """Import the checkpoint."""
    return import_model(source, "m", store=store, quant="int4", jobs=2)


def far(rig: FarRig, store: Store) -> Blobs:
    """Import the checkpoint from its servers."""
    with rig.open() as folder:
        return blobs_of(imported(folder, store).manifest)


@pytest.mark.parametrize("times", TIMES)
def test_faults_of_servers(rig: FarRig, expected: Blobs, times: int, tmp_path: Path) -> None:
    random = Random(SEED)
    names = [name for name in FAULTS if rig.address.startswith("hf:") or name not in UNSEEN]
    places = {name: requests_of(name, rig, expected, tmp_path / "first") for name in names}
    figures: Counter[str] = Counter()
    problems: list[str] = []
    for number in range(times):
        if number % len(names) == 0:
            random.shuffle(names)
        name, store = names[number % len(names)], open_store(tmp_path / f"store{number}")
        lasts = name not in PASSING and random.random() < 0.3
        faults = Faults(name, random.randrange(places[name]), random, lasts=lasts)
        rig.play(faults.around)
        outcome = one_import(rig, store)
        ended = outcome if isinstance(outcome, BlobStoreError) else None
        figures[f"{name}: {type(ended).__name__ if ended else 'success'}"] += 1
        figures["struck"] += faults.struck > 0
        if not isinstance(outcome, BlobStoreError) and outcome != expected:
            problems.append(f"{name}: another model was made: {different(outcome, expected)}")
        if ended is not None and name in PASSING:
            problems.append(f"{name}: a passing fault ended the import: {ended!r}")
        assert list(store.manifests.names()) == ([] if ended else [ModelName.parse("m")])
        assert is_sound(store)
        rig.play()
        assert far(rig, store) == expected, f"after {name}"
        assert is_sound(store)
        shutil.rmtree(store.root)
    sys.stdout.writelines(f"{count:5} {what}\n" for what, count in sorted(figures.items()))
    assert problems == []
    assert figures["struck"] > times // 2


def different(made: Blobs, expected: Blobs) -> list[str | None]:
    """Return the names of the blobs that differ."""
    return [name for name in made | expected if made.get(name) != expected.get(name)]


def requests_of(name: str, rig: FarRig, expected: Blobs, root: Path) -> int:
    """Return how many requests of an import a fault can befall."""
    faults = Faults(name, -1, Random(SEED))
    rig.play(faults.around)
    assert far(rig, open_store(root)) == expected
    shutil.rmtree(root)
    assert faults.struck == 0
    return faults.seen


def is_sound(store: Store) -> bool:
    """Return True if nothing in a store is damaged; it may not be there yet."""
    return not store.root.exists() or verify(store).is_sound


def one_import(rig: FarRig, store: Store) -> Blobs | BlobStoreError:
    """Import once; return its blobs, or the error if it is one of ours."""
    try:
        return far(rig, store)
    except BlobStoreError as error:
        return error


@pytest.mark.parametrize("times", TIMES)
def test_kills(rig: FarRig, expected: Blobs, times: int, tmp_path: Path) -> None:
    """Each import is killed one to three times, at any byte, and continued to its end."""
    random = Random(SEED)
    kills = imports = again = 0
    while kills < times:
        store = open_store(tmp_path / f"store{imports}")
        sent = 0
        for _ in range(random.randint(1, 3)):
            was_killed = killed(rig, store, random.randrange(rig.nbytes))
            kills, sent = kills + was_killed, sent + rig.sent
            assert is_sound(store)
        rig.play()
        assert run(started(rig, store)) == 0
        assert blobs_of(store.manifest("m")) == expected
        assert is_sound(store)
        imports, again = imports + 1, again + max(0, sent + rig.sent - rig.nbytes)
        shutil.rmtree(store.root)
    said = f"{kills} kills of {imports} imports: {again / kills / 1e6:.2f} MB sent again a kill"
    sys.stdout.write(f"{said}, of {rig.nbytes / 1e6:.1f}\n")


def killed(rig: FarRig, store: Store, after: int) -> bool:
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
    _, errors = process.communicate(timeout=240)
    assert process.returncode in (0, -9), errors
    return process.returncode
