"""SIGKILL at every call that changes the disk, and at random calls; then the command runs again.

A killed command leaves every model as it was or as it is to be, no damaged blob, no manifest that
names a missing one, and at most one folder in ``.blobstore/tmp``. Run again, it succeeds.
"""

from __future__ import annotations

import os

from faults.lab.cases import Case, Figures, Task, check_clean, check_sound, check_verify, is_between
from faults.lab.checker import SOUND, look
from faults.lab.choices import CALLS, Choices
from faults.lab.command import At, run
from faults.lab.stops import KILL, Action, Call

import blobstore
from blobstore.store.local.store import open_store

_LONG = 1500
_VERIFIED_EVERY = 4
_LOADED_EVERY = 25


def experiment(task: Task) -> Figures:
    """Return the results of kills: two thirds at calls, if there are enough, others at random.

    In the long form: at every call, and 1,500 others.
    """
    figures = Figures()
    points = [(case, n) for case in task.cases() for n in range(1, 1 + len(case.changes))]
    chosen = task.pick(points, of=2 / 3)
    for case, number in chosen:
        _kill_at(case, number, figures)
    _control(task, figures)
    _at_random(task, _LONG if task.count is None else task.count - len(chosen), figures)
    return figures


def _kill_at(case: Case, number: int, figures: Figures) -> None:
    """Kill a command at one of its calls, look, and run it again."""
    root = case.copy()
    fault = At(number, KILL)
    done = case.run(root, fault)
    what = f"killed at call {number}, {fault.hit}"
    figures.counts["kills at calls"] += done.code == -9
    found = case.check(root, done, figures, what)
    if case.command.name.startswith("import"):  # others may have nothing left to do again
        left = len(found.temporary) - len(case.start.temporary)
        figures.expect(left <= 1, "left behind", f"{what}: {found.temporary}")
    if number % _VERIFIED_EVERY == 0:
        check_verify(root, figures, what)
    again = case.check_again(root, figures, what)
    if case.command.name.startswith("import"):
        figures.expect(not again.half_written, "left behind", f"{what}: {again.half_written}")
    check_clean(root, figures, what)
    case.remove(root)


def _control(task: Task, figures: Figures) -> None:
    """Cut a blob short before it gets its name: that must be found."""
    found = Figures(is_quiet=True)
    case = task.cases()[0]

    def cut_short(call: Call) -> Action | None:
        if call.name.startswith("rename") and "/blobs/sha256" in call.paths[-1]:
            os.truncate(call.paths[0], 10)
        return None

    case.check(root := case.copy(), case.run(root, cut_short), found, "cut short")
    case.remove(root)
    figures.control(found)


def _at_random(task: Task, count: int, figures: Figures) -> None:
    """Kill so many random commands on one store: what one leaves is where the next begins."""
    folder = task.folder / "random"
    choices, root, found = Choices(folder, task.chance), folder / "store", SOUND
    for step in range(1, count + 1):
        before = found
        line, end = choices.choose(before.models, before.packed)
        fault = At(task.chance.randint(1, CALLS[str(line[0])]), KILL)
        done = run(*line, "--store", root, within=[folder], decide=fault)
        found = look(root)
        at = f"step {step}, {line}: {done.code} {done.err}, {before.models} -> {end}"
        figures.counts["random commands"] += 1
        figures.counts["kills at random"] += done.code == -9
        check_sound(found, figures, at)
        figures.expect(done.code in (0, -9), "re-runs failed", at)
        is_right = is_between(found.models, before.models, end, said=done.code == 0)
        figures.expect(is_right, "lost", f"{at}: {found.models}")
        figures.expect(len(found.half_written) <= 1, "left behind", f"{at} {found.half_written}")
        if step % _LOADED_EVERY == 0:
            store = open_store(root)
            for name in found.models:
                blobstore.open_model(name, store=store, verify=True).close()
            found = look(root)  # opening a model unpacks it
