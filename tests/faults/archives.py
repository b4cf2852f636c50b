"""SIGKILL at random calls of ``save``, ``load`` and of a cache; then the same command once more.

A killed ``save`` leaves no partial archive, and at most one temporary file. A killed ``load``
leaves no partial model and no damaged blob. In the cache of a bucket's blobs, also after a call
that fails, every blob has the bytes of its name.
"""

from __future__ import annotations

import errno
import random
import sys
from functools import partial
from pathlib import Path

from faults.lab.cases import Figures, Task, check_sound
from faults.lab.checker import look
from faults.lab.command import At, Done, Fail, Kill, run

from blobstore.errors import BlobStoreError
from blobstore.names import Digest
from blobstore.store.archive.archive import open_archive
from blobstore.store.bucket.bucket_store import open_bucket_store
from blobstore.store.local.store import Store, open_store
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import commit, data_of, descriptor_of

_LONG = 200
_SIZE = 300_000
_CACHED = 4
_ZERO = ("partial archives", "corrupt", "dangling", "strays", "lost", "left behind", "failed")


def experiment(task: Task) -> Figures:
    """Return what so many kills left, of each command, plain and compressed, and of a cache."""
    figures = Figures("kills", "completed", zero=_ZERO)
    source = open_store(task.folder / "source")
    commit(source, "m", *(data_of(_SIZE, number) for number in range(12)))
    count, moments = _LONG if task.count is None else task.count, task.moments()
    for suffix in (".tar", ".tar.zst"):
        _save(task.folder / f"m{suffix}", source, count // 4, moments, figures)
        _load(task.folder / f"m{suffix}", source, count // 4, moments, figures)
    _cache(task.folder / "caches", source, count // 2, moments, figures)
    return figures


def _save(path: Path, source: Store, count: int, moments: random.Random, figures: Figures) -> None:
    line = ("save", "m", "-o", path, "--force", "--store", source.root)
    calls = _calls(line, path.parent)
    for _ in range(count):
        path.unlink(missing_ok=True)
        _kill(line, path.parent, moments.randint(1, calls), figures)
        if path.exists():
            _check_archive(path, source, figures)
        left = list(path.parent.glob(f".{path.name}.*"))
        figures.expect(len(left) <= 1, "left behind", left)
    figures.expect(run(*line).code == 0, "failed", line)
    _check_archive(path, source, figures)
    figures.add("completed")


def _load(path: Path, source: Store, count: int, moments: random.Random, figures: Figures) -> None:
    wanted, target = look(source.root).models, path.with_suffix(".store")
    line = ("load", path, "--store", target)
    calls = _calls((*line[:-1], path.with_suffix(".first")), path.parent)
    for _ in range(count):
        _kill(line, path.parent, moments.randint(1, calls), figures)
        found = look(target)
        check_sound(found, figures, line)
        figures.expect(found.models in ({}, wanted), "lost", found)
    figures.expect(run(*line).code == 0, "failed", line)
    figures.expect(look(target).models == wanted, "lost", line)
    figures.add("completed")


def _calls(line: tuple[object, ...], folder: Path) -> int:
    """Return how many calls of an undisturbed command change the disk."""
    return sum(not call.reads for call in run(*line, within=[folder]).calls)


def _kill(line: tuple[object, ...], folder: Path, number: int, figures: Figures) -> None:
    done = run(*line, within=[folder], decide=At(number, Kill()))
    figures.add("kills", done.code == -9)
    figures.expect(done.code in (0, -9), "failed", f"{line}: {done}")


def _check_archive(path: Path, source: Store, figures: Figures) -> None:
    with open_archive(path) as archive:
        transfer("m", archive, home := MemoryStore())
    is_whole = home.manifests.all == {
        name: source.manifests.text(name) for name in source.manifests.names()
    }
    figures.expect(is_whole, "partial archives", path)


def _cache(
    folder: Path, source: Store, count: int, moments: random.Random, figures: Figures
) -> None:
    """Kill, or let a call fail, where a full cache gives up blobs 0 and 1 for 4 and 5."""

    def bring(cache: Path, first: int, decide: At | None = None, *, watched: bool = False) -> Done:
        program = partial(_bring, source.root, cache, range(first, first + _CACHED))
        return run(program=program, within=[cache] if watched else [], decide=decide)

    def check(cache: Path) -> None:
        paths = list(cache.glob("blobs/sha256-*"))
        wrong = [path for path in paths if Digest.of(path.read_bytes()).file_name != path.name]
        figures.expect(not wrong, "corrupt", wrong)

    bring(folder / "0", 0)
    calls = sum(not call.reads for call in bring(folder / "0", 2, watched=True).calls)
    for number in range(1, count + 1):
        bring(cache := folder / f"{number}", 0)
        fault = At(moments.randint(1, calls), Kill() if number % 2 else Fail(errno.EIO))
        done = bring(cache, 2, fault, watched=True)
        figures.add("kills", done.code == -9)
        figures.expect(done.code in (0, 3, -9), "failed", f"{fault}: {done}")
        check(cache)
        done = bring(cache, 2)
        figures.expect(done.code == 0, "failed", f"{fault}, again: {done}")
        check(cache)
        size = sum(path.stat().st_size for path in cache.glob("blobs/*"))
        figures.expect(size <= _CACHED * _SIZE, "left behind", f"{fault}: {size} bytes")
    figures.add("completed")


def _bring(source: Path, cache: Path, numbers: range) -> None:
    """Bring a bucket's blobs into a cache and read them. One of our errors is exit code 3."""
    try:
        store = open_bucket_store(f"file://{source}", cache=cache, cache_size=_CACHED * _SIZE)
        blobs = [data_of(_SIZE, number) for number in numbers]
        store.prefetch([descriptor_of(data) for data in blobs])
        for data in blobs:
            with store.blobs.open(descriptor_of(data)) as reader:
                if reader.read(0, reader.size) != data:
                    sys.exit("wrong bytes")
    except BlobStoreError as error:
        sys.stderr.write(str(error))
        sys.exit(3)
