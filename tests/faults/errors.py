"""Every call of every command fails once: no space, I/O error, interruption, half of the work.

The command succeeds, with everything in place, or ends with a typed error of one line and every
model as it was or as it is to be: never a blob whose bytes are not its digest's, never success
after a sync that failed. On small disks (tmpfs) of every size the same holds, and a store that has
been refused is as it was.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from copy import copy
from dataclasses import replace

from support.lab.cases import ZERO, Case, Point, standard_cases
from support.lab.command import OUTPUT, At, Done, Fail, Half
from support.lab.commands import as_it_is
from support.lab.figures import Figures
from support.lab.system_calls import SYNCING, Call
from support.lab.task import Task

SHORT = 40
_WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR)
_ALL_OR_NOTHING = ("import", "cp")
"""Commands that leave every model as it was when they fail."""
_CONTROLS = 4
_READ_ERRORS = (errno.EIO, errno.EINTR)


def experiment(task: Task) -> Figures:
    """Return what came of so many errors, evenly spread over all calls of all commands.

    All of them in the long form.
    """
    figures = Figures(
        *(
            "errors",
            "commands",
            "refused",
            "done all the same",
            "failing syncs",
            "failed syncs of hints",
        ),
        zero=(*ZERO, "unclear", "said though a sync failed", "left behind"),
    )
    cases = standard_cases(task.folder.parent / "cases")
    figures.most("commands", len(cases))
    points = [point for case in cases for point in _points(case)]
    for point in task.pick(points):
        disturb(point, figures)
    syncs = [point for point in points if point.call.name in SYNCING and point.error == errno.EIO]
    for point in task.pick(syncs, of=0.1):
        disturb(point, figures, on=True)
    if task.is_first:
        control(next(case for case in cases if case.command.name == "import quantized"), figures)
    return figures


def control(case: Case, figures: Figures) -> None:
    """Let syncs fail in an import that does not look at what they say."""
    found = Figures(zero=(*ZERO, "unclear", "said though a sync failed", "left behind"), quiet=True)
    careless = copy(case)
    careless.command = replace(case.command, before=_ignore_syncs)
    syncs = [
        point
        for point in _points(careless)
        if point.call.name in SYNCING and point.error == errno.EIO
    ]
    for point in syncs[-_CONTROLS:]:
        disturb(point, found)
    figures.control(found)


def _ignore_syncs() -> None:
    as_it_is()
    real = os.fsync

    def sync(fd: int) -> None:
        with suppress(OSError):
            real(fd)

    os.fsync = sync  # type: ignore[assignment]  # ours are integers


def _points(case: Case) -> list[Point]:
    points = []
    for number, call in enumerate(case.calls, start=1):
        # A print that fails ends in a message that fails: nobody is left to be told.
        if call.paths[-1] != OUTPUT:
            for error in (
                *(_READ_ERRORS if call.reads else _WRITE_ERRORS),
                *((0,) if _can_be_half(call) else ()),
            ):
                points.append(Point(case, number, call, error))
    return points


def _can_be_half(call: Call) -> bool:
    return call.name in ("read", "pread64", "preadv", "preadv2", "write", "pwrite64")


def disturb(point: Point, figures: Figures, *, on: bool = False) -> None:
    """Let one call fail, or with ``on`` all calls of its name from there on.

    Look, and run the command again.
    """
    case = point.case
    root = case.copy()
    action = Fail(point.error) if point.error else Half()
    chosen = _is_sync if on else _is_any
    number = sum(chosen(call) for call in case.calls[: point.number])
    fault = At(number, action, chosen, on=on)
    done = case.run(root, fault)
    figures.add("failing syncs" if on else "errors")
    figures.add("done all the same" if done.code == 0 else "refused")
    found = case.check(root, done, figures, point)
    _check_answer(point, fault, done, figures)
    if done.code != 0:
        if case.command.arguments[0] in _ALL_OR_NOTHING:
            figures.expect(
                found.models == case.start.models, "lost", f"{point}: {found.models}, {done.err}"
            )
        figures.expect(
            set(found.temporary) <= set(case.start.temporary),
            "left behind",
            f"{point}: {found.temporary}",
        )
    case.check_again(root, figures, point)
    case.remove(root)


def _is_sync(call: Call) -> bool:
    return call.name in SYNCING


def _is_any(_call: Call) -> bool:
    return True


def _check_answer(point: Point, fault: At, done: Done, figures: Figures) -> None:
    at = f"{point.case.command.name}, {point}: {done.code} {done.out!r} {done.err!r}"
    if done.code == 0:
        if (
            fault.hit is not None
            and fault.hit.name in SYNCING
            and point.error in (errno.EIO, errno.ENOSPC)
        ):
            is_hint = _is_of_a_hint(fault.hit, point.case)
            figures.add("failed syncs of hints", is_hint)
            figures.expect(is_hint, "said though a sync failed", at)
        return
    is_clear = (
        done.code == 1
        and not done.out
        and done.err.startswith("Error: ")
        and done.err.count("\n") <= 2
    )
    figures.expect(is_clear, "unclear", at)
    figures.expect(point.error != 0, "unclear", at)


def _is_of_a_hint(call: Call, case: Case) -> bool:
    """Return True for a sync that protects nothing acknowledged.

    These are syncs of the source, or of the name of the journal's folder.
    """
    return call.paths[-1].startswith((f"{case.work}/new", f"{case.work}/sources")) or call.paths[
        -1
    ].endswith("/.blobstore")
