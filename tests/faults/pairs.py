"""Two commands at once: a second one runs between any two calls of a first.

Both do what they say: the second may say that the store is in use, and then does nothing. The
second lives now, ten years ago or in ten years: a clock that jumps makes files look old or not yet
made, and nothing that is needed is removed for it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from faults.lab.cases import Case, Figures, Models, Task, sample
from faults.lab.checker import look
from faults.lab.command import Done, run
from faults.lab.commands import COMMANDS, Command, model, no_locks
from faults.lab.stops import Call
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.store.local.store import Store

_LONG = 4000
_CONTROLS = 6
_FIRST = ("import", "import over damage", "cp from another store", "mv over another", "prune")
_YEARS_S = 10 * 365 * 86400.0
_CLOCKS_S = (0.0, _YEARS_S, -_YEARS_S)
_VICTIM, _TWIN = "victim:latest", "twin:latest"
_OTHERS: dict[str, Callable[[Models], Models]] = {
    "import {work}/victim twin --quant int4 --jobs 1": lambda end: {**end, _TWIN: end[_VICTIM]},
    "cp victim twin": lambda end: {**end, _TWIN: end[_VICTIM]},
    "rm victim": lambda end: {name: end[name] for name in end if name != _VICTIM},
    "prune": lambda end: end,
    "prune --grace 0s --sole-owner --forget": lambda end: end,
}
"""The second commands, and what the models are after each."""


def experiment(task: Task) -> Figures:
    """Return what so many second commands did, spread over calls, commands and clocks.

    In the long form 4,000.
    """
    figures = Figures()
    chosen = [one for one in COMMANDS if task.count is None or one.name in _FIRST]
    cases = [Case(_beside_a_victim(command), task.folder) for command in chosen]
    pairs = [
        (case, number, other, clock_s)
        for case in cases
        for number in range(1, len(case.calls) + 1)
        for other in _OTHERS
        for clock_s in _CLOCKS_S
    ]
    for pair in sample(pairs, _LONG if task.count is None else task.count):
        _run_both(*pair, figures)
    found = Figures(is_quiet=True)
    with no_locks():
        for number in sample(range(1, len(cases[0].calls) + 1), _CONTROLS):
            _run_both(cases[0], number, [*_OTHERS][-1], 0.0, found)
    figures.control(found)
    return figures


def _beside_a_victim(command: Command) -> Command:
    """Return the command on a store with one more model that shares most blobs."""

    def prepare(work: Path, opened: Store) -> None:
        source = write_checkpoint(work / "victim", model("victim"))
        blobstore.import_model(source, _VICTIM, store=opened, quant="int4")
        command.prepare(work, opened)

    return replace(command, prepare=prepare)


@dataclass(slots=True)
class Second:
    """The second command: it runs before the call of that ``number`` of the first, on its store."""

    line: list[str]
    number: int
    clock_s: float
    calls: int = 0
    done: Done | None = None

    def __call__(self, _call: Call) -> None:
        """Run at the right call."""
        self.calls += 1
        if self.calls == self.number:
            self.done = run(*self.line, before=self._set_clock)

    def _set_clock(self) -> None:
        """Jump, and wait in no time for what the first command holds."""
        now, ticks = time.time, itertools.count(step=100.0)
        time.time = lambda: now() + self.clock_s
        time.monotonic = ticks.__next__
        time.sleep = lambda _seconds: None


def _run_both(case: Case, number: int, other: str, clock_s: float, figures: Figures) -> None:
    """Run a pair, check what both said and did."""
    root = case.copy()
    line = [*other.format(work=case.work).split(), "--store", f"{root}"]
    waits = [] if other.startswith("verify") else ["--wait", "0"]
    second = Second([*line, *waits], number, clock_s)
    done = case.run(root, second)
    at = f"{case.command.name}, before call {number} {other} {clock_s}: {done.code} {done.err}"
    figures.counts["pairs"] += 1
    figures.expect(done.code == 0 and not done.hung, "first failed", at)
    wanted: Models = case.end.models
    if second.done is not None:
        at += f"; {second.done.code} {second.done.err}"
        is_busy = second.done.code == 1 and "in use" in second.done.err
        figures.counts["busy"] += is_busy
        # A damaged model makes some commands end with an error.
        is_good = second.done.code == 0 or is_busy or case.start.broken
        figures.expect(is_good, "second failed", at)
        if second.done.code == 0:
            wanted = _OTHERS[other](wanted)
    found = look(root)
    figures.expect(found.models == wanted, "lost", f"{at}: {found.models}, not {wanted}")
    figures.expect(found.corrupt == case.end.corrupt, "corrupt", f"{at}: {found.corrupt}")
    figures.expect(found.dangling == case.end.dangling, "dangling", f"{at}: {found.dangling}")
    case.remove(root)
