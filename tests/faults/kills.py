"""SIGKILL at every call that changes the disk, and at random moments.

Then the command is run again.

A killed command leaves every model as it was or as it is to be, no damaged blob, no manifest that
names a missing one, and at most one folder in ``.blobstore/tmp``. Run again, it succeeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from faults.lab.cases import ZERO, Case, Figures, Task, all_cases, check_clean, check_verify
from faults.lab.command import At, Kill
from faults.lab.commands import COMMANDS, as_it_is
from faults.lab.wandering import Wanderer

from blobstore.formats.documents import Descriptor
from blobstore.names import Digest
from blobstore.store.local.blobs import Stamp
from blobstore.store.local.session import LocalSession

_LONG = 1500
_VERIFIED_EVERY = 4
_COUNTED = (
    "kills",
    "at calls",
    "at random",
    "random commands",
    "commands",
    "calls",
    "most temporary a kill",
)
_CONTROLS = 2


def experiment(task: Task) -> Figures:
    """Return the results of kills: two thirds at calls, if there are enough, others at random.

    In the long form: at every call, and 1,500 others.
    """
    figures = Figures(
        *_COUNTED, zero=(*ZERO, "left behind", "left after prune", "verify disagrees")
    )
    cases = all_cases(task.folder.parent / "cases")
    points = [(case, number) for case in cases for number in range(1, 1 + changes(case))]
    figures.most("commands", len(cases))
    figures.most("calls", len(points))
    for case, number in task.pick(points, of=2 / 3):
        kill_at(case, number, figures)
    control(task.folder / "control", figures)
    others = (
        _LONG if task.count is None else task.count - min(round(task.count * 2 / 3), len(points))
    )
    at_random(task.folder / "random", others, task.moments(), figures)
    return figures


def changes(case: Case) -> int:
    """Return how many calls of a command are no reads."""
    return sum(not call.reads for call in case.calls)


def kill_at(case: Case, number: int, figures: Figures) -> None:
    """Kill a command at one of its calls, look, and run it again."""
    root = case.copy()
    fault = At(number, Kill())
    done = case.run(root, fault)
    what = f"killed at call {number}, {fault.hit}"
    figures.add("kills", done.code == -9)
    figures.add("at calls", done.code == -9)
    found = case.check(root, done, figures, what)
    figures.most("most temporary a kill", len(found.temporary) - len(case.start.temporary))
    if number % _VERIFIED_EVERY == 0:
        check_verify(root, figures, what)
    again = case.check_again(root, figures, what)
    if case.command.arguments[0] == "import":  # others may have nothing left to do
        figures.expect(not again.half_written, "left behind", f"{what}: {again.half_written}")
    check_clean(root, figures, what)
    case.remove(root)


def control(folder: Path, figures: Figures) -> None:
    """Kill an import that writes blobs in place instead of renaming: damage must be found."""
    command = next(command for command in COMMANDS if command.name == "import quantized")
    case = Case(replace(command, before=_write_in_place), folder)
    found = Figures(zero=ZERO, quiet=True)
    calls = [call for call in case.calls if not call.reads]
    writes = [
        number
        for number, call in enumerate(calls, start=1)
        if call.name == "write" and "/blobs/" in call.paths[0]
    ]
    for number in writes[:_CONTROLS]:
        kill_at(case, number, found)
    figures.control(found)


def _write_in_place() -> None:
    as_it_is()

    def move(session: LocalSession, blobs: Iterable[Descriptor]) -> dict[Digest, Stamp]:
        for wanted in blobs:
            if (blob := session._made.pop(wanted.digest, None)) is not None:
                place = session._blobs.path / blob.digest.file_name
                place.write_bytes(blob.path.read_bytes())
        return {}

    LocalSession._move = move  # type: ignore[method-assign, assignment]  # its `self` is named


def at_random(folder: Path, count: int, moments: random.Random, figures: Figures) -> None:
    """Kill so many random commands on one store, at random calls and times.

    What one leaves is where the next begins.
    """
    wanderer = Wanderer(folder, moments)
    while figures.counts["at random"] < count:
        killed, temporary = wanderer.step(figures)
        figures.add("kills", killed)
        figures.add("at random", killed)
        figures.add("random commands")
        figures.most("most temporary a kill", temporary)
