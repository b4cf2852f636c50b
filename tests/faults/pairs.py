"""Two commands at once: a second one runs between any two calls of a first.

Both do what they say: the second may say that the store is in use, and then does nothing. The
second lives now, ten years ago or in ten years: a clock that jumps makes files look old or not yet
made, and nothing that is needed is removed for it. What anybody can see between two calls is whole,
too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from faults.lab.cases import Case, Figures, Models, Task, sample
from faults.lab.checker import look
from faults.lab.command import Done, run
from faults.lab.commands import COMMANDS, Command, model, no_locks
from faults.lab.stops import Call
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.store.local import store_folder
from blobstore.store.local.store import Store, open_store

_LONG = 4000
_CONTROLS = 6
_YEARS_S = 10 * 365 * 86400.0
_CLOCKS = {"now": 0.0, "in ten years": _YEARS_S, "ten years ago": -_YEARS_S}
_VICTIM = "victim:latest"
_WAIT = ("--wait", "0")
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "import": ("import", "{twin}", "twin", "--quant", "int4", "--jobs", "1", *_WAIT),
    "cp": ("cp", "victim", "twin", "--force", *_WAIT),
    "rm": ("rm", "victim", *_WAIT),
    "mv": ("mv", "victim", "twin", *_WAIT),
    "prune": ("prune", *_WAIT),
    "prune of all": ("prune", "--grace", "0s", "--sole-owner", "--forget", *_WAIT),
    "verify": ("verify",),
}
_ZERO = ("lost", "corrupt", "dangling", "strays", "first failed", "second failed", "seen half done")


def experiment(task: Task) -> Figures:
    """Return what so many second commands did and saw, spread over calls, commands and clocks.

    In the long form 4,000.
    """
    figures = Figures("pairs", "first commands", "second commands", "clocks", "busy", zero=_ZERO)
    few = task.count is not None and task.count < _LONG
    cases = [
        Case(_beside_a_victim(command), task.folder)
        for command in (COMMANDS[2::4] if few else COMMANDS)
    ]
    pairs = [
        (case, number, other, clock)
        for case in cases
        for number in range(1, len(case.calls) + 1)
        for other in _OTHERS
        for clock in _CLOCKS
    ]
    count = _LONG if task.count is None else task.count
    for case, number, other, clock in sample(pairs, count):
        both(case, number, other, clock, figures)
    control(cases, figures)
    figures.most("first commands", len(cases))
    figures.most("second commands", len(_OTHERS))
    figures.most("clocks", len(_CLOCKS))
    return figures


def control(cases: Sequence[Case], figures: Figures) -> None:
    """Let a clean-up run during an import, both without locks."""
    found = Figures(zero=_ZERO, quiet=True)
    case = next(case for case in cases if case.command.name == "import beside another")
    with no_locks():
        for number in sample(range(1, len(case.calls) + 1), _CONTROLS):
            both(case, number, "prune of all", "now", found)
    figures.control(found)


def _beside_a_victim(command: Command) -> Command:
    """Return the command on a store with one more model that shares most blobs."""

    def prepare(work: Path, opened: Store) -> None:
        blobstore.import_model(
            write_checkpoint(work / "victim", model("victim")), _VICTIM, store=opened, quant="int4"
        )
        command.prepare(work, opened)

    return replace(command, prepare=prepare)


def _twin(work: Path) -> Path:
    """Return the source of the first command, if any: both write the same blobs and journal."""
    return work / "new" if (work / "new").exists() else work / "victim"


@dataclass(slots=True)
class Second:
    """The second command: it runs before the call of that ``number`` of the first, on its store."""

    case: Case
    root: Path
    number: int
    other: str
    clock: str
    calls: int = 0
    done: Done | None = None
    wrong: list[str] = field(default_factory=list)

    def __call__(self, _call: Call) -> None:
        """Run at the right call."""
        self.calls += 1
        if self.calls == self.number:
            self._see()
            line = [word.format(twin=_twin(self.case.work)) for word in _OTHERS[self.other]]
            self.done = run(*line, "--store", self.root, before=self._prepare)
            self._see()

    def _prepare(self) -> None:
        store_folder._NAMES_WAIT_S = 0
        offset, now = _CLOCKS[self.clock], time.time
        time.time = lambda: now() + offset

    def _see(self) -> None:
        """Look as anybody may, while the first command waits."""
        found = look(self.root)
        if found.strays or len(found.corrupt) > len(self.case.start.corrupt):
            self.wrong.append(f"{found.corrupt} {found.strays}")
        if len(found.dangling) > len(self.case.start.dangling):
            self.wrong.append(f"{found.dangling}")


def both(case: Case, number: int, other: str, clock: str, figures: Figures) -> None:
    """Run a pair, look at what both said and did."""
    root = case.copy()
    second = Second(case, root, number, other, clock)
    done = case.run(root, second)
    at = (
        f"{case.command.name}, before call {number} {other} {clock}: {done.code} {done.err.strip()}"
    )
    figures.add("pairs")
    is_gone = (
        "--undo" in case.command.arguments and other.startswith("prune") and "is empty" in done.err
    )
    figures.expect((done.code == 0 or is_gone) and not done.hung, "first failed", at)
    figures.expect(not second.wrong, "seen half done", f"{at}: {second.wrong}")
    if second.done is not None:
        at += f"; {second.done.code} {second.done.err.strip()}"
        is_busy = second.done.code == 1 and "in use" in second.done.err
        figures.add("busy", is_busy)
        # A store with damage is verified as such, and a damaged model is not copied.
        is_good = second.done.code in ((0, 1, 3) if case.start.broken else (0,)) or is_busy
        figures.expect(is_good, "second failed", at)
    found = look(root)
    wanted = _wanted(case.end.models, second, case, root)
    figures.expect(found.models == wanted, "lost", f"{at}: {found.models}, not {wanted}")
    figures.expect(found.corrupt == case.end.corrupt, "corrupt", f"{at}: {found.corrupt}")
    figures.expect(found.dangling == case.end.dangling, "dangling", f"{at}: {found.dangling}")
    case.remove(root)


def _wanted(end: Models, second: Second, case: Case, root: Path) -> Models:
    """Return the models after both commands."""
    if second.done is None or second.done.code != 0:
        return end
    match second.other:
        case "rm":
            return {name: digest for name, digest in end.items() if name != _VICTIM}
        case "cp":
            return {**end, "twin:latest": end[_VICTIM]}
        case "mv":
            return {
                **{name: digest for name, digest in end.items() if name != _VICTIM},
                "twin:latest": end[_VICTIM],
            }
        case "import":
            return {**end, "twin:latest": _digest_of_twin(case)}
        case _:
            return end


def _digest_of_twin(case: Case) -> str:
    """Return the digest of the manifest that an import of the twin makes, done once elsewhere."""
    elsewhere = open_store(case.work / "twins")
    if not elsewhere.root.exists():
        blobstore.import_model(_twin(case.work), "twin", store=elsewhere, quant="int4")
    return look(elsewhere.root).models["twin:latest"]
