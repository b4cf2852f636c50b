"""Imports, copies, removals, clean-ups, loaders and kills in several processes, for long.

Each worker has names of its own, whose models it knows: they load with the right bytes at any time,
whatever the others do with models that share their blobs. Beside them there are names that all
workers write to, remove and load: there a model may be missing, but what loads is one whole model.
Some models are read long after they were opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path

from faults.lab.cases import Figures, Models, Task, check_sound, is_between
from faults.lab.checker import look
from faults.lab.choices import CALLS, Choices
from faults.lab.command import At, run
from faults.lab.commands import PRUNE_ALL, no_locks
from faults.lab.stops import KILL

import blobstore
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.store.local.store import open_store

_LONG = 20_000
_CONTROL = 2_000
_WORKERS = 4
_SHARED = [f"shared{number}:latest" for number in range(3)]
_MOST_OPEN = 6
_KILLED = 0.2
_KINDS = {"load": 50, "import": 30, "cp": 6, "mv": 4, "rm": 8, "prune": 2}
"""Operations, and how often each is chosen."""
_ON_SHARED = 0.3
Truth = dict[str, str]
"""What loads from a model: the sha256 of every array, by its name."""


def experiment(task: Task) -> Figures:
    """Return what came of so many operations of four workers: 20,000 in the long form."""
    figures, choices = Figures(), Choices(task.folder, task.chance)
    truths = {}
    for name, digest in look(choices.reference.root).models.items():
        with blobstore.open_model(name, store=choices.reference, verify=True) as model:
            truths[digest] = _truth_of(model)
    count = task.count or _LONG
    _soak(task.folder / "soak", count, choices, truths, figures)
    if count >= _LONG:
        found = Figures(is_quiet=True)
        with no_locks():
            _soak(task.folder / "control", _CONTROL, choices, truths, found)
        figures.control(found)
    return figures


def _truth_of(model: blobstore.Model) -> Truth:
    arrays = model.arrays("numpy")
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


def _soak(
    folder: Path, count: int, choices: Choices, truths: dict[str, Truth], figures: Figures
) -> None:
    """Let four workers do ``count`` operations on one store in ``folder``, then check it."""
    (folder / "store").mkdir(parents=True)
    pids = []
    for number in range(_WORKERS):
        if (pid := os.fork()) == 0:
            _be_a_worker(Worker(folder, number, choices, truths, figures.is_quiet), count)
        pids.append(pid)
    known: dict[str, str] = {}
    for number, pid in enumerate(pids):
        if os.waitpid(pid, 0)[1] != 0:
            figures.wrong("workers failed", number)
            continue
        models, counts, faults = json.loads((folder / f"worker{number}").read_text())
        known |= models
        figures.counts.update(counts)
        figures.faults.update(faults)
    _check_the_end(folder / "store", known, truths, figures)


def _be_a_worker(worker: Worker, count: int) -> None:
    """Do a part of ``count`` operations; this never returns."""
    code = 1
    try:
        worker.work(-(-count // _WORKERS))
        code = 0
    except BaseException:  # noqa: BLE001  # whatever it is, it is the worker's end
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _check_the_end(root: Path, known: Models, truths: dict[str, Truth], figures: Figures) -> None:
    """Clean up; count what is lost at the end, and what is left over."""
    done = run(*PRUNE_ALL, "--store", root)
    figures.expect(done.code == 0, "commands failed", done.err)
    found = look(root)
    check_sound(found, figures, "at the end")
    lost = known.items() - found.models.items()
    figures.expect(not lost, "lost", lost)
    for name, digest in found.models.items():
        try:
            with blobstore.open_model(name, store=open_store(root), verify=True) as model:
                figures.expect(_truth_of(model) == truths[digest], "torn", f"{name} at the end")
        except BlobStoreError as error:
            figures.wrong("lost", f"{name} at the end: {error}")
    left = [*found.orphans, *found.temporary]
    figures.expect(not left, "left behind", left)


class Worker:
    """One process of the soak: its names, and the models that they have."""

    def __init__(
        self, folder: Path, number: int, choices: Choices, truths: dict[str, Truth], is_quiet: bool
    ) -> None:
        """Begin with no models."""
        self._result, self._root = folder / f"worker{number}", folder / "store"
        self._store = open_store(self._root, wait_s=600)
        self._own = [f"own{number}{name}:latest" for name in range(4)]
        self._choices, self._truths = choices, truths
        self._chance = choices.chance = random.Random(f"{choices.chance.random()} {number}")
        self._models: dict[str, str] = {}
        self._open: deque[tuple[blobstore.Model, str]] = deque()
        self._figures = Figures(is_quiet=is_quiet)

    def work(self, count: int) -> None:
        """Do so many operations, write down what was counted and what is known."""
        for kind in self._chance.choices(list(_KINDS), list(_KINDS.values()), k=count):
            self._figures.counts[kind] += 1
            self._do(kind)
        while self._open:
            self._read(*self._open.popleft())
        result = [self._models, self._figures.counts, self._figures.faults]
        self._result.write_text(json.dumps(result))

    def _do(self, kind: str) -> None:
        is_shared = self._chance.random() < _ON_SHARED
        name = self._chance.choice(_SHARED if is_shared else self._own)
        other = self._chance.choice(self._own)
        if kind == "prune":
            self._run(*PRUNE_ALL, after={})
        elif kind == "import" or not (is_shared or name in self._models):
            line, digest = self._choices.choose_import(name)
            self._run(*line, after={name: digest})
        elif kind == "rm":
            self._run("rm", name, after={name: None})
        elif kind in ("cp", "mv") and not is_shared and name != other:
            gone = {name: None} if kind == "mv" else {}
            self._run(kind, name, other, "--force", after={other: self._models[name], **gone})
        else:
            self._load(name)

    def _load(self, name: str) -> None:
        """Open a model, and read it now or later."""
        try:
            model = blobstore.open_model(name, store=self._store)
        except BlobStoreError as error:
            is_gone = isinstance(error, NotFoundError) and name in _SHARED
            self._figures.expect(is_gone, "lost", f"{name}: {error}")
            return
        digest = model.manifest.digest.hex
        is_right = name in _SHARED or digest == self._models[name]
        self._figures.expect(is_right, "lost", f"{name} is {digest}")
        self._open.append((model, digest))
        if self._chance.random() < 0.7 or len(self._open) > _MOST_OPEN:
            self._read(*self._open.popleft())

    def _read(self, model: blobstore.Model, digest: str) -> None:
        with model:
            is_right = _truth_of(model) == self._truths[digest]
            self._figures.expect(is_right, "torn", f"{model.name}: {digest}")

    def _run(self, *line: object, after: dict[str, str | None]) -> None:
        """Run a command, which may be killed; check what has become of our names."""
        within = [self._root] if self._chance.random() < _KILLED else []
        kill = At(self._chance.randint(1, CALLS[f"{line[0]}"]), KILL)
        done = run(*line, "--store", self._root, within=within, decide=kill)
        at = f"{' '.join(map(str, line))}: {done.code} {done.err.strip()}"
        is_shared = any(name in _SHARED for name in after)
        is_gone = is_shared and done.code == 1 and "not found" in done.err
        self._figures.counts["kills"] += done.code == -9
        is_busy = done.code == 1 and "in use" in done.err
        self._figures.counts["busy"] += is_busy
        self._figures.expect(done.code in (0, -9) or is_gone or is_busy, "commands failed", at)
        if is_shared:
            return
        changed = {**self._models, **after}
        end = {name: digest for name, digest in changed.items() if digest is not None}
        found = {}
        for name in self._own:
            path = self._root / "manifests/registry.ollama.ai/library" / name.replace(":", "/")
            with suppress(FileNotFoundError, NotADirectoryError):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        is_right = is_between(found, self._models, end, said=done.code == 0)
        self._figures.expect(is_right, "lost", f"{at}: {self._models} -> {end}: {found}")
        self._models = found
