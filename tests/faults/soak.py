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
from dataclasses import dataclass
from pathlib import Path

from faults.lab.cases import Figures, Models, Task, check_sound, is_between
from faults.lab.checker import look
from faults.lab.command import Done, run
from faults.lab.commands import no_locks
from faults.lab.wandering import Choices

import blobstore
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.store.local.store import open_store

_LONG = 20_000
_CONTROL = 2_000
_WORKERS = 4
_NAMES = 4
_CONTENDED = 3
_MOST_OPEN = 6
_LONGEST_S = 0.06
_KILLED = 0.2
_ZERO = (
    "lost",
    "torn",
    "corrupt",
    "dangling",
    "strays",
    "commands failed",
    "workers failed",
    "left behind",
)
_COUNTED = (
    "operations",
    "imports",
    "copies",
    "moves",
    "removals",
    "prunes",
    "loads",
    "late reads",
    "kills",
    "busy",
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


Truth = dict[str, str]
"""What loads from a model: the sha256 of every array, by its name."""


def _truth_of(model: blobstore.Model) -> Truth:
    arrays = model.arrays("numpy")
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


def experiment(task: Task) -> Figures:
    """Return what came of so many operations of four workers.

    In the long form 20,000, and 2,000 without locks.
    """
    folder, moments = task.folder, task.moments()
    choices = Choices(folder, moments)
    truths = _truths(folder / "elsewhere", choices)
    figures = Figures(*_COUNTED, zero=_ZERO)
    count = _LONG if task.count is None else task.count
    soak(folder / "soak", count, Knowledge(choices.sources, truths), moments, figures)
    if count >= _LONG:
        found = Figures(zero=_ZERO, quiet=True)
        with no_locks():
            soak(folder / "control", _CONTROL, Knowledge(choices.sources, truths), moments, found)
        figures.control(found)
    return figures


def soak(
    folder: Path, count: int, knowledge: Knowledge, moments: random.Random, figures: Figures
) -> None:
    """Let four workers do ``count`` operations on one store in ``folder``, then check it."""
    folder.mkdir()
    workers = [
        Worker(folder, number, knowledge, random.Random(moments.random()), quiet=figures.is_quiet)
        for number in range(_WORKERS)
    ]
    pids = [_start(worker, -(-count // _WORKERS)) for worker in workers]
    known: dict[str, str] = {}
    for number, pid in enumerate(pids):
        status = os.waitpid(pid, 0)[1]
        figures.expect(status == 0, "workers failed", f"worker {number}: {status}")
        if status == 0:
            result = json.loads((folder / f"worker{number}").read_text())
            known |= result["models"]
            for name, value in result["counts"].items():
                figures.add(name, value)
    _check_the_end(folder / "store", known, knowledge.truths, figures)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What all workers know: the sources, and what loads from each manifest's digest."""

    sources: Sequence[tuple[Path, str, str]]
    truths: Mapping[str, Truth]


def _truths(pristine: Path, choices: Choices) -> dict[str, Truth]:
    """Return what loads from each model that an import can make, by the digest of its manifest."""
    store = open_store(pristine)
    truths = {}
    for source, quant, digest in choices.sources:
        blobstore.import_model(source, "m", store=store, quant=None if quant == "none" else quant)
        with blobstore.open_model("m", store=store, verify=True) as model:
            truths[digest] = _truth_of(model)
    return truths


def _check_the_end(
    root: Path, known: Models, truths: Mapping[str, Truth], figures: Figures
) -> None:
    """Count what is lost at the end; then clean up, and count what that leaves or takes."""
    store = open_store(root)
    for is_clean in (False, True):
        if is_clean:
            done = run("prune", "--grace", "0s", "--sole-owner", "--forget", "--store", root)
            figures.expect(done.code == 0, "commands failed", done.err)
        found = look(root)
        check_sound(found, figures, "at the end")
        for name, digest in known.items():
            figures.expect(
                found.models.get(name) == digest,
                "lost",
                f"{name}: {found.models.get(name)}, not {digest}",
            )
        for name, digest in found.models.items():
            try:
                with blobstore.open_model(name, store=store, verify=True) as model:
                    figures.expect(_truth_of(model) == truths[digest], "torn", f"{name} at the end")
            except BlobStoreError as error:
                figures.wrong("lost", f"{name} at the end: {error}")
    figures.expect(
        not found.orphans and not found.temporary,
        "left behind",
        f"{found.orphans} {found.temporary}",
    )
    figures.add("models at the end", len(found.models))


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


class Worker:
    """One process of the soak: its names, and what it knows of them."""

    def __init__(
        self,
        folder: Path,
        number: int,
        knowledge: Knowledge,
        moments: random.Random,
        *,
        quiet: bool,
    ) -> None:
        """Begin with no models."""
        self._result = folder / f"worker{number}"
        self._root = folder / "store"
        self._root.mkdir(exist_ok=True)
        self._store = open_store(self._root)
        self._own = [f"own{number}{name}:latest" for name in range(_NAMES)]
        self._contended = [f"contended{name}:latest" for name in range(_CONTENDED)]
        self._sources = knowledge.sources
        self._truths = knowledge.truths
        self._moments = moments
        self._models: dict[str, str] = {}
        self._open: deque[tuple[blobstore.Model, str]] = deque()
        self._figures = Figures(*_COUNTED, zero=_ZERO, quiet=quiet)

    def work(self, count: int) -> None:
        """Do so many operations, and write down what was counted and what is known."""
        for _ in range(count):
            kind = self._moments.choices(list(_KINDS), list(_KINDS.values()))[0]
            operation, _, contended = kind.partition(" ")
            getattr(self, f"_{operation}")(*([True] if contended else []))
            self._figures.add("operations")
        while self._open:
            self._read_late()
        self._result.write_text(
            json.dumps({"models": self._models, "counts": self._figures.counts})
        )

    def _load(self, contended: bool = False) -> None:  # noqa: FBT002
        """Load a model, at once or later."""
        names = self._contended if contended else sorted(self._models)
        if not names:
            return
        name = self._moments.choice(names)
        try:
            model = blobstore.open_model(name, store=self._store)
        except NotFoundError as error:
            self._figures.expect(contended, "lost", f"{name}: {error}")
            return
        except BlobStoreError as error:
            self._figures.wrong("torn", f"{name}: {error}")
            return
        digest = model.manifest.digest.hex
        self._figures.expect(
            contended or digest == self._models[name], "lost", f"{name} is {digest}"
        )
        self._figures.add("loads")
        if self._moments.random() < 0.3:
            self._open.append((model, digest))
            if len(self._open) > _MOST_OPEN:
                self._read_late()
        else:
            self._check(model, digest)

    def _read_late(self) -> None:
        self._figures.add("late reads")
        self._check(*self._open.popleft())

    def _check(self, model: blobstore.Model, digest: str) -> None:
        with model:
            self._figures.expect(
                _truth_of(model) == self._truths[digest], "torn", f"{model.name}: {digest}"
            )

    def _import(self, contended: bool = False) -> None:  # noqa: FBT002
        name = self._moments.choice(self._contended if contended else self._own)
        source, quant, digest = self._moments.choice(self._sources)
        options = [] if quant == "none" else ["--quant", quant]
        self._figures.add("imports")
        self._run(
            "import",
            source,
            name,
            *options,
            "--jobs",
            self._moments.choice((1, 2)),
            after={name: digest},
        )

    def _cp(self) -> None:
        if self._models:
            name, other = (
                self._moments.choice(sorted(self._models)),
                self._moments.choice(self._own),
            )
            self._figures.add("copies")
            self._run("cp", name, other, "--force", after={other: self._models[name]})

    def _mv(self) -> None:
        free = sorted(set(self._own) - set(self._models))
        if self._models and free:
            name, other = self._moments.choice(sorted(self._models)), self._moments.choice(free)
            self._figures.add("moves")
            self._run("mv", name, other, after={other: self._models[name], name: None})

    def _rm(self, contended: bool = False) -> None:  # noqa: FBT002
        names = self._contended if contended else sorted(self._models)
        if names:
            name = self._moments.choice(names)
            self._figures.add("removals")
            self._run("rm", name, after={name: None})

    def _prune(self) -> None:
        done = self._run(
            "prune", "--grace", "0s", "--sole-owner", "--forget", "--wait", "5", after={}
        )
        self._figures.add("prunes", done.code == 0)

    def _run(self, *arguments: object, after: dict[str, str | None]) -> Done:
        """Run a command, which may be killed.

        Take note of what has become of our names, and check that it may.
        """
        kill_after_s = (
            self._moments.uniform(0, _LONGEST_S) if self._moments.random() < _KILLED else None
        )
        done = run(*arguments, "--store", self._root, kill_after_s=kill_after_s)
        at = f"{' '.join(map(str, arguments))}: {done.code} {done.err.strip()}"
        is_busy = done.code == 1 and "in use" in done.err
        is_contended = any(name in self._contended for name in after)
        is_gone = is_contended and done.code == 1 and "not found" in done.err
        self._figures.add("kills", done.code == -9)
        self._figures.add("busy", is_busy)
        self._figures.expect(done.code in (0, -9) or is_busy or is_gone, "commands failed", at)
        if not is_contended:
            self._note(after, done, at)
        return done

    def _note(self, after: dict[str, str | None], done: Done, at: str) -> None:
        end = {
            name: digest for name, digest in {**self._models, **after}.items() if digest is not None
        }
        found = {name: digest for name in self._own if (digest := self._digest(name)) is not None}
        is_right = is_between(found, self._models, end, said=done.code == 0)
        self._figures.expect(is_right, "lost", f"{at}: {self._models} -> {end}: {found}")
        self._models = found

    def _digest(self, name: str) -> str | None:
        """Return the sha256 of a manifest's bytes, read by hand."""
        try:
            raw = (
                self._root / "manifests/registry.ollama.ai/library" / name.replace(":", "/")
            ).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return hashlib.sha256(raw).hexdigest()
