"""Every call of every command fails once, or fails for good; what is said, and what is left.

The command succeeds, with everything in place, or ends with a typed error of one line and every
model as it was or as it is to be: never a blob whose bytes are not its digest's, never success
after a sync that failed.

`experiment`: no space, I/O error, interruption, half of the work, at calls that read or change
data. `lookups`: errors of calls that only look (stat, open to read, list, map, lock, seek, close),
also in commands that only read. `refusals`: the answers of a network file system (no locks, no
times, stale handles, quotas, removed files that stay).
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

from faults.lab.cases import ZERO, Case, Figures, Task, all_cases, store_cases
from faults.lab.command import OUTPUT, Action, At, Decide, Done, Fail, Half, Pretend
from faults.lab.commands import COMMANDS, READERS, as_it_is
from faults.lab.stops import SYNCING, Call

from blobstore.io import ranges

_ZERO = (*ZERO, "unclear", "success though a sync failed", "left behind")
_COUNTED = ("errors", "commands", "refused", "done all the same")
_WRITE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR)
_READ_ERRORS = (errno.EIO, errno.EINTR)
_LOOK_ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES)
_ONCE = (errno.ESTALE, errno.EDQUOT)
_ALL_OR_NOTHING = ("import", "cp")
"""Commands that leave every model as it was when they fail."""
_CAN_BE_HALF = ("read", "pread64", "preadv", "preadv2", "write", "pwrite64")
_CONTROLS = 4
_RANDOM = re.compile(r"[0-9a-f]{16,64}|[0-9]+", re.ASCII)
_SAME = 3
"""How often calls of one kind on paths of one kind are disturbed in a command by `lookups`."""
_FOR_GOOD = {
    "no locks": ("flock", errno.ENOLCK),
    "no times": ("utimensat", errno.EPERM),
    "no copies in the kernel": ("copy_file_range", errno.EIO),
    "no syncs of folders": ("fsync", errno.EINVAL),
    "no lengths": ("ftruncate", errno.EPERM),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a command's calls. ``error`` 0: half of the work of one call."""

    case: Case
    name: str
    decide: Decide
    error: int = 0


def experiment(task: Task) -> Figures:
    """Return what came of so many errors, evenly spread over all calls of all commands."""
    figures = Figures(*_COUNTED, "failing syncs", zero=_ZERO)
    cases = all_cases(task.folder.parent / "cases")
    figures.most("commands", len(cases))
    for fault in task.pick([fault for case in cases for fault in _errors(case)]):
        disturb(fault, figures)
    for fault in task.pick([fault for case in cases for fault in _failing_syncs(case)], of=0.1):
        disturb(fault, figures)
        figures.add("failing syncs")
    careless = _careless(cases, "import quantized", _ignore_syncs)
    _control(list(_failing_syncs(careless))[-_CONTROLS:], figures)
    return figures


def lookups(task: Task) -> Figures:
    """Return what came of so many errors, evenly spread over all looks of all commands."""
    figures = Figures(*_COUNTED, zero=_ZERO)
    few = task.count is not None and task.count < len(COMMANDS) * 10
    commands = (*(COMMANDS[2::5] if few else COMMANDS), *READERS)
    cases = [Case(command, task.folder, looks=True) for command in commands]
    figures.most("commands", len(cases))
    for fault in task.pick([fault for case in cases for fault in _looks(case)]):
        disturb(fault, figures)
    careless = _careless(cases, "list", _let_errors_through)
    _control([one for one in _looks(careless) if one.name.startswith("openat")], figures)
    return figures


def refusals(task: Task) -> Figures:
    """Return what came of so many refusals, half of them for good and half of one call."""
    figures = Figures(*_COUNTED, zero=_ZERO)
    cases = store_cases(task.folder.parent / "cases")
    figures.most("commands", len(cases))
    for faults in (_refused_for_good, _refused_once):
        for fault in task.pick([one for case in cases for one in faults(case)], of=0.5):
            disturb(fault, figures)
    return figures


# What may happen


def _errors(case: Case) -> Iterator[Fault]:
    """Yield the errors of each call; a failing print ends in a message that fails, too."""
    for number, call in enumerate(case.calls, start=1):
        if call.paths[-1] != OUTPUT:
            for code in _READ_ERRORS if call.reads else _WRITE_ERRORS:
                at = At(number, Fail(code), chosen=_is_any)
                yield Fault(case, f"{call} {errno.errorcode[code]} at call {number}", at, code)
            if call.name in _CAN_BE_HALF:
                at = At(number, Half(), chosen=_is_any)
                yield Fault(case, f"{call} by half at call {number}", at)


def _failing_syncs(case: Case) -> Iterator[Fault]:
    """Yield for each sync that it and all later ones fail."""
    syncs = [call for call in case.calls if call.name in SYNCING]
    for number, call in enumerate(syncs, start=1):
        at = At(number, Fail(errno.EIO), chosen=_is_sync, on=True)
        yield Fault(case, f"{call} fails from sync {number} on", at, errno.EIO)


def _looks(case: Case) -> Iterator[Fault]:
    seen: dict[tuple[str, ...], int] = {}
    for number, call in enumerate(filter(_is_look, case.calls), start=1):
        kind = (call.name, *(_RANDOM.sub("*", path) for path in call.paths))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _SAME:
            for code in _LOOK_ERRORS:
                # A folder of a checkpoint that may not be listed is left out, with a message.
                if code != errno.EACCES or not call.paths[-1].endswith("/sub"):
                    at = At(number, Fail(code), _is_look)
                    yield Fault(case, f"{call} {errno.errorcode[code]} at look {number}", at, code)


def _refused_for_good(case: Case) -> Iterator[Fault]:
    yield Fault(case, "unlinked files stay", Silly(), errno.EBUSY)
    for what, (name, code) in _FOR_GOOD.items():
        if any(call.name == name for call in case.calls):
            yield Fault(case, what, Never(name, code), code)


def _refused_once(case: Case) -> Iterator[Fault]:
    for number, call in enumerate((call for call in case.calls if not call.reads), start=1):
        if call.paths[-1] != OUTPUT:
            for code in _ONCE:
                yield Fault(case, f"{call} {errno.errorcode[code]}", At(number, Fail(code)), code)


def _is_any(_call: Call) -> bool:
    return True


def _is_sync(call: Call) -> bool:
    return call.name in SYNCING


def _is_look(call: Call) -> bool:
    """Return True for a call that changes nothing, and for locks, but not for prints."""
    is_look = call.reads or call.name == "flock"
    return is_look and call.name not in SYNCING and not call.paths[-1].startswith(OUTPUT)


@dataclass(frozen=True, slots=True)
class Never:
    """All calls of a name fail; syncs of folders only."""

    name: str
    code: int

    def __call__(self, call: Call) -> Action | None:
        """Refuse a call."""
        is_meant = call.name == self.name and (self.name != "fsync" or Path(call.paths[0]).is_dir())
        return Fail(self.code) if is_meant else None


@dataclass(slots=True)
class Silly:
    """Files that are removed stay as ``.nfs…`` until the command has ended, as on NFS (nfs(5))."""

    numbers: itertools.count[int] = field(default_factory=itertools.count)
    kept: list[Path] = field(default_factory=list)

    def __call__(self, call: Call) -> Action | None:
        """Rename instead of removing; a folder with such a file in it can't be removed then."""
        path = Path(call.paths[-1])
        if not call.name.startswith("unlink") or not path.is_file() or path.is_symlink():
            return None
        kept = path.with_name(f".nfs{next(self.numbers):024x}")
        path.rename(kept)
        self.kept.append(kept)
        return Pretend()

    def forget(self) -> None:
        """Remove the files: the command has ended."""
        for path in self.kept:
            path.unlink(missing_ok=True)


# What must come of it


def disturb(fault: Fault, figures: Figures) -> None:
    """Run a command with a fault, check what it says and leaves, and run it again without."""
    case, root = fault.case, fault.case.copy()
    done = case.run(root, fault.decide)
    if isinstance(fault.decide, Silly):
        fault.decide.forget()
    figures.add("errors")
    figures.add("done all the same" if done.code == 0 else "refused")
    found = case.check(root, done, figures, fault.name)
    _check_answer(fault, done, figures)
    if done.code != 0:
        at = f"{case.command.name}, {fault.name}: {found.models}, {done.err}"
        is_whole = case.command.arguments[0] not in _ALL_OR_NOTHING
        figures.expect(is_whole or found.models == case.start.models, "lost", at)
        if "/.blobstore/tmp" not in fault.name and not isinstance(fault.decide, Silly):
            case.check_left(found, figures, fault.name)  # else it stays for the next import
    case.check_again(root, figures, fault.name)
    case.remove(root)


def _check_answer(fault: Fault, done: Done, figures: Figures) -> None:
    at = f"{fault.case.command.name}, {fault.name}: {done.code} {done.out!r} {done.err!r}"
    if done.code == 0:
        hit = fault.decide.hit if isinstance(fault.decide, At) else None
        if hit is not None and hit.name in SYNCING and fault.error in (errno.EIO, errno.ENOSPC):
            is_hint = _protects_nothing(hit, fault.case)
            figures.expect(is_hint, "success though a sync failed", at)
        return
    # verify prints what is damaged, and ends with 3; 2 is a name that is taken.
    is_clear = done.code == 3 or (
        done.code in (1, 2) and "Error: " in done.err and done.err.count("\n") <= 2
    )
    figures.expect(is_clear and fault.error != 0, "unclear", at)


def _protects_nothing(call: Call, case: Case) -> bool:
    """Return True for a sync of the source, or of the name of the journal's folder."""
    path = call.paths[-1]
    is_source = path.startswith((f"{case.work}/new", f"{case.work}/sources"))
    return is_source or path.endswith("/.blobstore")


# Controls: commands that are broken on purpose


def _careless(cases: tuple[Case, ...] | list[Case], name: str, before: Callable[[], None]) -> Case:
    careless = copy(next(case for case in cases if case.command.name == name))
    careless.command = replace(careless.command, before=before)
    return careless


def _control(faults: list[Fault], figures: Figures) -> None:
    found = Figures(zero=_ZERO, quiet=True)
    for fault in faults:
        disturb(fault, found)
    figures.control(found)


def _ignore_syncs() -> None:
    as_it_is()
    real = os.fsync

    def sync(fd: int) -> None:
        with suppress(OSError):
            real(fd)

    os.fsync = sync  # type: ignore[assignment]  # ours are integers


def _let_errors_through() -> None:
    as_it_is()

    def raised(error: OSError, *_: object) -> OSError:
        return error

    vars(ranges)["from_os_error"] = raised
