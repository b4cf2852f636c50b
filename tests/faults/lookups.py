"""Every call that only looks fails once: stat, open to read, list, read, map, lock, seek, close.

Whatever a command was doing, it succeeds or ends with a typed error of one line; no command leaves
a foreign error, and none that fails has hurt a model. Commands that only read are among them, and
programs that use the library.
"""

from __future__ import annotations

import errno
import re
import shutil
from copy import copy
from dataclasses import replace

from support.lab.cases import ZERO, Case, Point
from support.lab.command import OUTPUT, At, Done, Fail
from support.lab.commands import COMMANDS, as_it_is
from support.lab.figures import Figures
from support.lab.readers import READERS
from support.lab.system_calls import SYNCING, Call
from support.lab.task import Task

from blobstore.io import ranges

SHORT = 80
_ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES)
"""A disk that fails, a server that lost the file, a folder that may not be searched."""
_DAMAGED = 3
_REFUSED = (1, 2, _DAMAGED)
_ZERO = (*ZERO, "unclear", "left behind")
_RANDOM = re.compile(r"[0-9a-f]{16,64}|[0-9]+", re.ASCII)
_SAME = 3
"""How often calls of one kind on paths of one kind are disturbed in a command.

A tensor is read under another name.
"""


def experiment(task: Task) -> Figures:
    """Return what came of so many errors, evenly spread over all looks of all commands.

    All of them in the long form.
    """
    figures = Figures("errors", "commands", "refused", "done all the same", zero=_ZERO)
    commands = (*COMMANDS, *READERS)
    cases = [Case(command, task.folder.parent / "looking", looks=True) for command in commands]
    figures.most("commands", len(cases))
    points = [point for case in cases for point in _points(case)]
    for point in task.pick(points):
        disturb(point, figures)
    if task.is_first:
        control(next(case for case in cases if case.command.name == "list"), figures)
    return figures


def control(case: Case, figures: Figures) -> None:
    """Disturb a command whose reader lets the system's errors through."""
    found = Figures(zero=_ZERO, quiet=True)
    careless = copy(case)
    careless.command = replace(case.command, before=_let_through)
    for point in _points(careless):
        if point.call.name == "openat" and "/manifests/" in point.call.paths[-1]:
            disturb(point, found)
    figures.control(found)


def _let_through() -> None:
    as_it_is()

    def raised(error: OSError, *_: object) -> OSError:
        return error

    vars(ranges)["from_os_error"] = raised


def _points(case: Case) -> list[Point]:
    points = []
    seen: dict[tuple[str, ...], int] = {}
    number = 0
    for call in case.calls:
        if not _is_look(call):
            continue
        number += 1
        kind = (call.name, *(_RANDOM.sub("*", path) for path in call.paths))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _SAME:
            points += [
                Point(case, number, call, error)
                for error in _ERRORS
                if not _is_left_out(call, error)
            ]
    return points


def _is_look(call: Call) -> bool:
    """Return True for a call that changes nothing, and for locks.

    What is printed is another matter.
    """
    is_look = call.reads or call.name == "flock"
    return is_look and call.name not in SYNCING and not call.paths[-1].startswith(OUTPUT)


def _is_left_out(call: Call, error: int) -> bool:
    """Return True for a checkpoint's folder that may not be listed.

    An import leaves it out, and says so.
    """
    return error == errno.EACCES and call.paths[-1].endswith("/sub")


def disturb(point: Point, figures: Figures) -> None:
    """Let one look fail; check what the command says and did, and run it again."""
    case = point.case
    root = case.copy()
    done = case.run(root, At(point.number, Fail(point.error), _is_look))
    figures.add("errors")
    figures.add("done all the same" if done.code == 0 else "refused")
    found = case.check(root, done, figures, point)
    _check_answer(point, done, figures)
    if (
        done.code != 0 and "/.blobstore/tmp" not in point.call.paths[-1]
    ):  # what can't be removed stays for the next import
        figures.expect(
            set(found.temporary) <= set(case.start.temporary),
            "left behind",
            f"{point}: {found.temporary}",
        )
    out = root.with_name(f"{root.name}-out")
    shutil.rmtree(out, ignore_errors=True)
    case.check_again(root, figures, point)
    case.remove(root)
    shutil.rmtree(out, ignore_errors=True)


def _check_answer(point: Point, done: Done, figures: Figures) -> None:
    at = f"{point.case.command.name}, {point}: {done.code} {done.out!r} {done.err!r}"
    figures.expect("Exception ignored" not in done.err, "foreign errors", at)
    is_clear = done.err.startswith("Error: ") or "\nError: " in done.err or done.code == _DAMAGED
    figures.expect(done.code == 0 or (done.code in _REFUSED and is_clear), "unclear", at)
