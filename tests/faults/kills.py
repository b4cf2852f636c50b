"""SIGKILL at every call that changes the disk; then the command runs again.

A killed command leaves every model as it was or as it is to be, no damaged blob, no manifest that
names a missing one, and at most one folder in ``.blobstore/tmp``. Run again, it succeeds.
"""

import os

from faults.lab.cases import Case, Figures, Task, check_clean
from faults.lab.command import At
from faults.lab.stops import KILL, Action, Call


def experiment(task: Task) -> Figures:
    """Return the results of so many kills, evenly spread over the calls of all commands."""
    figures = Figures()
    points = [(case, n) for case in task.cases() for n in range(1, 1 + len(case.changes))]
    for case, number in task.pick(points):
        _kill_at(case, number, figures)
    _control(task, figures)
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
