"""SIGKILL at random calls of ``save`` and ``load``; then the same command once more.

A killed ``save`` leaves no partial archive, and at most one temporary file. A killed ``load``
leaves no partial model and no damaged blob.
"""

from __future__ import annotations

import random
from pathlib import Path

from faults.lab.cases import Figures, Task, check_sound
from faults.lab.checker import look
from faults.lab.command import At, Kill, run

from blobstore.store.archive.archive import open_archive
from blobstore.store.local.store import Store, open_store
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import commit, data_of

_LONG = 200
_ZERO = ("partial archives", "corrupt", "dangling", "strays", "lost", "left behind", "failed")


def experiment(task: Task) -> Figures:
    """Return what so many kills left, half of them of each command, plain and compressed."""
    figures = Figures("kills", "completed", zero=_ZERO)
    source = open_store(task.folder / "source")
    commit(source, "m", *(data_of(300_000, number) for number in range(12)))
    count, moments = _LONG if task.count is None else task.count, task.moments()
    for suffix in (".tar", ".tar.zst"):
        _save(task.folder / f"m{suffix}", source, count // 4, moments, figures)
        _load(task.folder / f"m{suffix}", source, count // 4, moments, figures)
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
