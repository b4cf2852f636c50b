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
from collections.abc import Mapping, Sequence
from pathlib import Path

from faults.lab.cases import Figures, Models, Task, check_sound, is_between
from faults.lab.checker import look
from faults.lab.command import Done, run
from faults.lab.commands import PRUNE_ALL, no_locks
from faults.lab.wandering import Choices

import blobstore
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.store.local.store import open_store

_LONG = 20_000
_CONTROL = 2_000
_WORKERS = 4
_CONTENDED = [f"contended{number}:latest" for number in range(3)]
_MOST_OPEN = 6
_LONGEST_S = 0.06
_KILLED = 0.2
_ZERO = (
    *("lost", "torn", "corrupt", "dangling", "strays"),
    *("commands failed", "workers failed", "left behind"),
)
_KINDS = {
    "load": 36,
    "load contended": 16,
    "import": 20,
    "import contended": 8,
    "cp": 5,
    "mv": 3,
    "rm": 6,
    "rm contended": 4,
    "prune": 2,
}
"""Operations, and how often each is chosen. ``contended``: on a name that all workers use."""
Truth = dict[str, str]
"""What loads from a model: the sha256 of every array, by its name."""


def experiment(task: Task) -> Figures:
    """Return what came of so many operations of four workers.

    In the long form 20,000, and 2,000 without locks.
    """
    moments = task.moments()
    choices = Choices(task.folder, moments)
    truths = _truths(task.folder / "truths", choices)
    figures = Figures("operations", *_KINDS, "late reads", "kills", "busy", zero=_ZERO)
    count = _LONG if task.count is None else task.count
    soak(task.folder / "soak", count, choices, truths, moments, figures)
    if count >= _LONG:
        found = Figures(zero=_ZERO, quiet=True)
        with no_locks():
            soak(task.folder / "control", _CONTROL, choices, truths, moments, found)
        figures.control(found)
    return figures


def _truth_of(model: blobstore.Model) -> Truth:
    arrays = model.arrays("numpy")
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


def _truths(folder: Path, choices: Choices) -> dict[str, Truth]:
    """Return what loads from each model that an import can make, by the digest of its manifest."""
    store, truths = open_store(folder), {}
    for source, quant, digest in choices.sources:
        blobstore.import_model(source, "m", store=store, quant=None if quant == "none" else quant)
        with blobstore.open_model("m", store=store, verify=True) as model:
            truths[digest] = _truth_of(model)
    return truths


def soak(
    folder: Path,
    count: int,
    choices: Choices,
    truths: Mapping[str, Truth],
    moments: random.Random,
    figures: Figures,
) -> None:
    """Let four workers do ``count`` operations on one store in ``folder``, then check it."""
    (folder / "store").mkdir(parents=True)
    pids = []
    for number in range(_WORKERS):
        chance = random.Random(moments.random())
        worker = Worker(folder, number, choices.sources, truths, chance, quiet=figures.is_quiet)
        pids.append(_start(worker, -(-count // _WORKERS)))
    known: dict[str, str] = {}
    for number, pid in enumerate(pids):
        status = os.waitpid(pid, 0)[1]
        figures.expect(status == 0, "workers failed", f"worker {number}: {status}")
        if status == 0:
            result = json.loads((folder / f"worker{number}").read_text())
            known |= result["models"]
            for name, value in result["counts"].items():
                figures.add(name, value)
    _check_the_end(folder / "store", known, truths, figures)


def _start(worker: Worker, count: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            worker.work(count)
            code = 0
        except BaseException:  # noqa: BLE001  # whatever it is, it is the worker's end
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def _check_the_end(
    root: Path, known: Models, truths: Mapping[str, Truth], figures: Figures
) -> None:
    """Count what is lost at the end; then clean up, and count what that leaves or takes."""
    store = open_store(root)
    for is_clean in (False, True):
        if is_clean:
            done = run(*PRUNE_ALL, "--store", root)
            figures.expect(done.code == 0, "commands failed", done.err)
        found = look(root)
        check_sound(found, figures, "at the end")
        lost = known.items() - found.models.items()
        figures.expect(not lost, "lost", lost)
        for name, digest in found.models.items():
            try:
                with blobstore.open_model(name, store=store, verify=True) as model:
                    figures.expect(_truth_of(model) == truths[digest], "torn", f"{name} at the end")
            except BlobStoreError as error:
                figures.wrong("lost", f"{name} at the end: {error}")
    left = [*found.orphans, *found.temporary]
    figures.expect(not left, "left behind", left)


class Worker:
    """One process of the soak: its names, and the models that they have."""

    def __init__(
        self,
        folder: Path,
        number: int,
        sources: Sequence[tuple[Path, str, str]],
        truths: Mapping[str, Truth],
        moments: random.Random,
        *,
        quiet: bool,
    ) -> None:
        """Begin with no models."""
        self._result, self._root = folder / f"worker{number}", folder / "store"
        self._store = open_store(self._root)
        self._own = [f"own{number}{name}:latest" for name in range(4)]
        self._sources, self._truths, self._moments = sources, truths, moments
        self._models: dict[str, str] = {}
        self._open: deque[tuple[blobstore.Model, str]] = deque()
        self._figures = Figures(zero=_ZERO, quiet=quiet)

    def work(self, count: int) -> None:
        """Do so many operations, and write down what was counted and what is known."""
        for _ in range(count):
            kind = self._moments.choices(list(_KINDS), list(_KINDS.values()))[0]
            operation, _, contended = kind.partition(" ")
            names = _CONTENDED if contended else sorted(self._models)
            self._figures.add("operations")
            if operation == "prune":
                self._figures.add(kind)
                self._run(*PRUNE_ALL, "--wait", "5", after={})
            elif operation == "import":
                self._figures.add(kind)
                self._import(self._moments.choice(_CONTENDED if contended else self._own))
            elif names:
                self._figures.add(kind)
                self._use(operation, self._moments.choice(names))
        while self._open:
            self._read(*self._open.popleft())
        result = {"models": self._models, "counts": self._figures.counts}
        self._result.write_text(json.dumps(result))

    def _import(self, name: str) -> None:
        source, quant, digest = self._moments.choice(self._sources)
        options = [] if quant == "none" else ["--quant", quant]
        line = ["import", source, name, *options, "--jobs", self._moments.choice((1, 2))]
        self._run(*line, after={name: digest})

    def _use(self, operation: str, name: str) -> None:
        """Load, copy, move or remove a model."""
        other = self._moments.choice(self._own)
        if operation == "load":
            self._load(name)
        elif operation == "rm":
            self._run("rm", name, after={name: None})
        elif operation == "cp":
            self._run("cp", name, other, "--force", after={other: self._models[name]})
        elif other not in self._models:
            self._run("mv", name, other, after={other: self._models[name], name: None})

    def _load(self, name: str) -> None:
        """Open a model, and read it now or later."""
        try:
            model = blobstore.open_model(name, store=self._store)
        except NotFoundError as error:
            self._figures.expect(name in _CONTENDED, "lost", f"{name}: {error}")
            return
        except BlobStoreError as error:
            self._figures.wrong("torn", f"{name}: {error}")
            return
        digest = model.manifest.digest.hex
        is_right = name in _CONTENDED or digest == self._models[name]
        self._figures.expect(is_right, "lost", f"{name} is {digest}")
        if self._moments.random() < 0.3:
            self._open.append((model, digest))
            if len(self._open) > _MOST_OPEN:
                self._figures.add("late reads")
                self._read(*self._open.popleft())
        else:
            self._read(model, digest)

    def _read(self, model: blobstore.Model, digest: str) -> None:
        with model:
            is_right = _truth_of(model) == self._truths[digest]
            self._figures.expect(is_right, "torn", f"{model.name}: {digest}")

    def _run(self, *arguments: object, after: dict[str, str | None]) -> Done:
        """Run a command, which may be killed; check what has become of our names."""
        is_killed = self._moments.random() < _KILLED
        kill_after_s = self._moments.uniform(0, _LONGEST_S) if is_killed else None
        done = run(*arguments, "--store", self._root, kill_after_s=kill_after_s)
        at = f"{' '.join(map(str, arguments))}: {done.code} {done.err.strip()}"
        is_busy = done.code == 1 and "in use" in done.err
        is_contended = any(name in _CONTENDED for name in after)
        is_gone = is_contended and done.code == 1 and "not found" in done.err
        self._figures.add("kills", done.code == -9)
        self._figures.add("busy", is_busy)
        self._figures.expect(done.code in (0, -9) or is_busy or is_gone, "commands failed", at)
        if not is_contended:
            changed = {**self._models, **after}
            end = {name: digest for name, digest in changed.items() if digest is not None}
            found = {name: digest for name in self._own if (digest := self._digest(name))}
            is_right = is_between(found, self._models, end, said=done.code == 0)
            self._figures.expect(is_right, "lost", f"{at}: {self._models} -> {end}: {found}")
            self._models = found
        return done

    def _digest(self, name: str) -> str | None:
        """Return the sha256 of a manifest's bytes, read by hand; None without one."""
        path = self._root / "manifests/registry.ollama.ai/library" / name.replace(":", "/")
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            return None
