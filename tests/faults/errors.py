"""Every call of every command fails once, or fails for good; what is said, and what is left.

The command succeeds, with everything in place, or ends with a typed error of one line and every
model as it was or as it is to be: never a blob whose bytes are not its digest's, never success
after a sync that failed.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from faults.lab.cases import Case, Figures, Task
from faults.lab.command import At
from faults.lab.commands import READERS
from faults.lab.stops import OUTPUT, Action, Call, Decide, Fail

_CHANGE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR)
_READ_ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EINTR)
_ALL_OR_NOTHING = ("import", "cp")
"""Commands that leave every model as it was when they fail."""
_FOR_GOOD = {
    "flock": errno.ENOLCK,
    "utimensat": errno.EPERM,
    "copy_file_range": errno.EIO,
    "fsync": errno.EINVAL,
    "ftruncate": errno.EPERM,
}
"""Calls that a network file system may always refuse; fsync of folders only."""
_CONTROLS = 4


@dataclass(frozen=True, slots=True)
class Fault:
    case: Case
    name: str
    decide: Decide


def experiment(task: Task) -> Figures:
    """Return what came of so many errors; a tenth are failing syncs, a tenth are for good."""
    figures = Figures()
    readers = [Case(command, task.folder) for command in READERS]
    cases = [*task.cases(), *readers]
    for fault in task.pick([fault for case in cases for fault in _errors(case)], of=0.8):
        _disturb(fault, figures)
    for faults in (_failing_syncs, _refused_for_good):
        for fault in task.pick([fault for case in task.cases() for fault in faults(case)], of=0.1):
            _disturb(fault, figures)
    found, careless = Figures(is_quiet=True), copy(task.cases()[0])
    careless.command = replace(careless.command, before=_ignore_syncs)
    for fault in list(_failing_syncs(careless))[-_CONTROLS:]:
        _disturb(fault, found)
    figures.control(found)
    return figures


def _errors(case: Case) -> Iterator[Fault]:
    """Yield the errors of each call; a failing print ends in a message that fails, too."""
    for number, call in enumerate(case.calls, start=1):
        if call.paths[-1] != OUTPUT:
            for code in _READ_ERRORS if call.reads else _CHANGE_ERRORS:
                at = At(number, Fail(code), chosen=lambda _call: True)
                yield Fault(case, f"{call} {errno.errorcode[code]} at call {number}", at)


def _failing_syncs(case: Case) -> Iterator[Fault]:
    for number, call in enumerate((call for call in case.calls if call.syncs), start=1):
        at = At(number, Fail(errno.EIO), chosen=lambda call: call.syncs, on=True)
        yield Fault(case, f"{call} fails from sync {number} on", at)


def _refused_for_good(case: Case) -> Iterator[Fault]:
    for name, code in _FOR_GOOD.items():
        if any(call.name == name for call in case.calls):
            yield Fault(case, f"{name} {errno.errorcode[code]}", _never(name, code))


def _never(name: str, code: int) -> Decide:
    """Let all calls of a name fail; syncs of folders only."""

    def decide(call: Call) -> Action | None:
        is_meant = call.name == name and (name != "fsync" or Path(call.paths[0]).is_dir())
        return Fail(code) if is_meant else None

    return decide


def _disturb(fault: Fault, figures: Figures) -> None:
    """Run a command with a fault, check what it says and leaves, and run it again without."""
    case, root = fault.case, fault.case.copy()
    done = case.run(root, fault.decide)
    figures.counts["errors"] += 1
    figures.counts["refused" if done.code else "done all the same"] += 1
    found = case.check(root, done, figures, fault.name)
    at = f"{case.command.name}, {fault.name}: {done}"
    if done.code == 0:
        hit = fault.decide.hit if isinstance(fault.decide, At) else None
        is_lost = hit is not None and hit.syncs and _is_needed(hit, case) and "EINTR" not in at
        figures.expect(not is_lost, "success though a sync failed", at)
    else:
        case.check_refused(done, figures, fault.name)
        is_whole = case.command.name.split()[0] not in _ALL_OR_NOTHING
        figures.expect(is_whole or found.models == case.start.models, "lost", at)
        # An import's folder stays for the next one; so does an empty one that can't be locked.
        stays = "/.blobstore/tmp" in fault.name
        stays |= case.command.name == "export" and fault.name.startswith("flock")
        if not stays:
            left = set(found.temporary) - set(case.start.temporary)
            figures.expect(not left, "left behind", f"{at}: {left}")
    case.check_again(root, figures, fault.name)
    case.remove(root)


def _is_needed(sync: Call, case: Case) -> bool:
    """Return False for a sync of the source, or of the name of the journal's folder."""
    path = sync.paths[-1]
    is_source = path.startswith((f"{case.work}/new", f"{case.work}/sources"))
    return not is_source and not path.endswith("/.blobstore")


def _ignore_syncs() -> None:
    real = os.fsync

    def sync(fd: int) -> None:
        with suppress(OSError):
            real(fd)

    os.fsync = sync  # type: ignore[assignment]  # ours are integers
