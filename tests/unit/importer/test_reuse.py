"""Never twice: what an earlier import made is used again when its bytes are sure, and only then."""

import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.stores import process, wrong_digests

import blobstore
from blobstore.errors import CorruptDataError, NotFoundError
from blobstore.importer.run import ImportResult
from blobstore.names import Digest
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home

HOUR_S = 3600
Change = Callable[[Path], None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "m")
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    return folder


def int4(source: Path, store: Home, **options: Any) -> ImportResult:
    return blobstore.import_model(source, "m", store=store, **{"quant": "int4", **options})


def tensor_blob(store: Store, layer: str = "lm_head.weight") -> Path:
    with blobstore.open_model("m", store=store) as model:
        (digest,) = (one.digest for one in model.manifest.layers if one.name == layer)
    return store.root / "blobs" / digest.file_name


def rest_of(store: Store) -> list[str]:
    places = (".blobstore/tmp/*", ".blobstore/left/*")
    return [path.name for place in places for path in store.root.glob(place)]


def test_an_unchanged_source_is_not_read_again(
    source: Path, store: Store, snapshot: Callable[[Store], dict[str, str]]
) -> None:
    first = int4(source, store)
    before = snapshot(store)
    told: list[tuple[int, str]] = []
    again = int4(source, store, progress=lambda nbytes, blob: told.append((nbytes, blob)))
    assert (first.recalled, again.recalled) == (0, 6)
    assert (again.digest, again.created, again.reused) == (first.digest, 0, first.blobs)
    assert (again.new_bytes, again.stored_bytes) == (0, first.stored_bytes)
    assert told == [(first.source_bytes, "")]
    assert snapshot(store) == before
    tensor_blob(store).unlink()
    told.clear()
    again = int4(source, store, progress=lambda nbytes, blob: told.append((nbytes, blob)))
    assert again.recalled == 5
    assert told[0] == (first.source_bytes - small_tensors()["lm_head.weight"].nbytes, "")
    assert sum(nbytes for nbytes, _ in told) == first.source_bytes


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path)


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def flip_unseen(path: Path) -> None:
    """As a disk can change a blob without changing its time: --verify-reuse exists for that."""
    then = path.stat()
    flip(path)
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "verify"),
    [
        *((damage, False) for damage in (Path.unlink, shorten, flip, become_fifo)),
        *((damage, True) for damage in (shorten, become_fifo, flip_unseen)),
    ],
)
def test_damage_is_made_again(source: Path, store: Store, damage: Change, *, verify: bool) -> None:
    first = int4(source, store)
    path = tensor_blob(store)
    whole = path.read_bytes()
    damage(path)
    if damage is flip_unseen:
        assert int4(source, store).recalled == 6
    again = int4(source, store, verify_reuse=verify)
    assert (again.digest, again.recalled) == (first.digest, 5)
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.read_bytes() == whole


def test_an_old_blob_is_made_young_for_ollama(source: Path, store: Store) -> None:
    """A starting Ollama removes unnamed files over an hour old: these are about to be named."""
    int4(source, store)
    path = tensor_blob(store)
    then = time.time() - 2 * HOUR_S
    os.utime(path, (then, then))
    assert int4(source, store).recalled == 6
    assert path.stat().st_mtime > then + HOUR_S


def test_a_source_changed_through_a_map_is_imported_again(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "mapped")
    weights = np.memmap(source / "model.safetensors", np.uint8, "r+")
    # The pages are dirty from here on: later writes alone leave no trace in the file's times.
    weights[-8192:] = 1
    first = int4(source, store, quant=None)
    weights[-8192:] = 2
    assert int4(source, store, quant=None).digest != first.digest


def touch(path: Path) -> None:
    os.utime(path, (2, 2))


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.rename(path)


def rewrite(path: Path) -> None:
    tensors = {name: -array for name, array in small_tensors().items()}
    path.write_bytes(safetensors_bytes(tensors))
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [touch, replace, rewrite])
def test_another_source_is_read(source: Path, store: Store, change: Change) -> None:
    """Also when its size and its time of writing are what they were."""
    int4(source, store)
    change(source / "model.safetensors")
    again = int4(source, store)
    assert (again.digest, again.recalled) == (int4(source, MemoryStore()).digest, 0)


def test_a_blob_that_is_damaged_within_a_tick_of_its_clock_is_made_again(
    source: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system has times of one tick of two seconds, as FAT has."""
    now_ns = time.time_ns() // (2 * 10**9) * 2 * 10**9

    def coarse(call: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def status(*arguments: Any, **options: Any) -> os.stat_result:
            times = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), now_ns)
            return os.stat_result(tuple(call(*arguments, **options)), times)

        return status

    for name in ("stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, coarse(getattr(os, name)))
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 3 * 10**9)
    first = int4(source, store)
    flip(tensor_blob(store))
    again = int4(source, store)
    assert (again.digest, again.recalled) == (first.digest, 5)


IMPORTANCE = {"lm_head.weight": np.arange(1, 65, dtype=np.float32)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"group_size": 64},
    {"method": "search"},
    {"method": "search", "importance": IMPORTANCE},
    {"method": "search", "importance": {"lm_head.weight": IMPORTANCE["lm_head.weight"] + 9}},
    {"quant": "nvfp4"},
    {"quant": "nvfp4", "global_scale": True},
    {"dtype": "float16"},
    {"alignment": 4096},
]


def test_other_options_use_only_what_is_the_same(source: Path, store: Store) -> None:
    """Each import into a store full of the others gives what it gives into an empty one."""
    fresh = [int4(source, MemoryStore(), **options).digest for options in OPTIONS]
    assert [int4(source, store, **options).digest for options in OPTIONS] == fresh
    again = [int4(source, store, **options) for options in OPTIONS[:4]]
    assert [(one.digest, one.recalled) for one in again] == [(digest, 6) for digest in fresh[:4]]
    assert len(set(fresh)) == len(OPTIONS)


# Imports that stop, of 9 MiB in thirty weights: more than are made and hashed at once


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": normal(str(n), 320, 512) for n in range(30)}
    return write_checkpoint(tmp_path_factory.mktemp("larger") / "m", tensors)


@pytest.fixture(scope="module")
def wanted(made: Path) -> Digest:
    return int4(made, MemoryStore()).digest


@pytest.fixture
def larger(made: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(made, tmp_path / "larger")
    os.utime(folder / "model.safetensors", (1, 1))
    return folder


MOST = 8 * 2**20
"""Bytes that are read before an import stops: of 25 weights, of which 16 may be unfinished."""
STOPPING = f"""
import os, signal, sys, blobstore
from blobstore.store.local import session
session.NOTE_EVERY_S = -1  # what is finished is noted at once
source, root = sys.argv[1:]
done = 0
def progress(nbytes, blob):
    global done
    done += nbytes
    if done >= {MOST}:
        os.write(1, b"ready\\n")  # in one piece: two threads may come here
        signal.pause()
store = blobstore.open_store(root)
blobstore.import_model(source, "m", store=store, quant="int4", jobs=1, progress=progress)
"""


def test_a_killed_import_goes_on_there(larger: Path, store: Store, wanted: Digest) -> None:
    with process(STOPPING, larger, store.root):
        pass
    assert (list(store.models()), len(rest_of(store))) == ([], 1)
    result = int4(larger, store)
    assert result.digest == wanted
    assert 1 <= result.recalled < 30
    # What was finished but not noted when it was killed goes after a day.
    assert set(rest_of(store)) <= {path.name for path in (store.root / "blobs").iterdir()}
    assert int4(larger, store).recalled == 30


def test_ctrl_c_keeps_what_is_finished(larger: Path, store: Store, wanted: Digest) -> None:
    done = 0

    def interrupt(nbytes: int, blob: str) -> None:
        nonlocal done
        done += nbytes
        if done >= MOST:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        int4(larger, store, jobs=1, progress=interrupt)
    left = sorted(store.kept.left.iterdir())
    assert len(left) >= 4
    assert not list(store.root.glob("blobs/*"))
    left[0].unlink()
    shorten(left[1])
    flip(left[2])
    result = int4(larger, store)
    assert (result.digest, result.recalled) == (wanted, len(left) - 3)
    assert wrong_digests(store) == []


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(50))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(1000))


@pytest.mark.parametrize(
    ("change", "jobs"), [(halve, 1), (grow, 4), (replace, 1), (write_into, 4), (Path.unlink, 4)]
)
def test_after_a_source_that_changed_under_the_import_the_next_run_is_clean(
    larger: Path,
    store: Store,
    wanted: Digest,
    snapshot: Callable[[Store], dict[str, str]],
    change: Change,
    jobs: int,
) -> None:
    path = larger / "model.safetensors"
    whole = path.read_bytes()
    left = [change]

    def progress(nbytes: int, blob: str) -> None:
        with suppress(IndexError):
            left.pop()(path)  # once, whatever the threads

    with pytest.raises((CorruptDataError, NotFoundError)) as caught:
        int4(larger, store, jobs=jobs, progress=progress)
    assert caught.value.path == str(path)
    assert snapshot(store) == {}
    path.write_bytes(whole)
    os.utime(path, (1, 1))
    result = int4(larger, store)
    assert (result.digest, result.recalled) == (wanted, 0)
