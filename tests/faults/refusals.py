"""Simulated answers of a network file system: no locks, no times, stale handles, quotas.

One kind of call fails for good, as on a file system that can't do it; or one call fails as a server
fails (ESTALE, EDQUOT). On NFS a file that is removed while it is open stays in its folder as
``.nfs…`` until it is closed (nfs(5)): here every file that is removed does, until the command has
ended. The command succeeds or ends with a typed error of one line, and every model is as it was or
as it is to be.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.lab.cases import ZERO, Case, standard_cases
from support.lab.command import OUTPUT, Action, At, Decide, Done, Fail, Pretend
from support.lab.figures import Figures
from support.lab.system_calls import Call
from support.lab.task import Task

SHORT = 40
_ZERO = (*ZERO, "unclear", "left behind")
_FOR_GOOD = {
    "no locks": ("flock", errno.ENOLCK),
    "no times": ("utimensat", errno.EPERM),
    "no copies in the kernel": ("copy_file_range", errno.EIO),
    "no syncs of folders": ("fsync", errno.EINVAL),
    "no lengths": ("ftruncate", errno.EPERM),
}
_ONCE = (errno.ESTALE, errno.EDQUOT)
_SILLY = "unlinked files stay"


@dataclass(slots=True)
class Silly:
    """Files that are removed stay under another name, until `forget`."""

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
        """The command has ended, and with it what kept the files."""
        for path in self.kept:
            path.unlink(missing_ok=True)


def experiment(task: Task) -> Figures:
    """Return what came of so many refusals, half of them for good and half of one call.

    Of all in the long form.
    """
    figures = Figures("refusals", "commands", "refused", "done all the same", zero=_ZERO)
    cases = standard_cases(task.folder.parent / "cases")
    figures.most("commands", len(cases))
    for case, what, decide in task.pick(
        [(each, *refusal) for each in cases for refusal in _for_good(each)], of=0.5
    ):
        refuse(case, what, decide, figures)
    for case, what, decide in task.pick(
        [(each, *refusal) for each in cases for refusal in _once(each)], of=0.5
    ):
        refuse(case, what, decide, figures)
    return figures


@dataclass(frozen=True, slots=True)
class Never:
    """All calls of a name fail; syncs of folders only."""

    name: str
    code: int

    def __call__(self, call: Call) -> Action | None:
        """Refuse a call."""
        is_meant = call.name == self.name and (self.name != "fsync" or Path(call.paths[0]).is_dir())
        return Fail(self.code) if is_meant else None


def _for_good(case: Case) -> Iterator[tuple[str, Decide]]:
    """Yield what may be refused to a command for good, by name."""
    yield _SILLY, Silly()
    for what, (name, code) in _FOR_GOOD.items():
        if any(call.name == name for call in case.calls):
            yield what, Never(name, code)


def _once(case: Case) -> Iterator[tuple[str, Decide]]:
    """Yield the failures of each call that changes something, by name."""
    for number, call in enumerate((call for call in case.calls if not call.reads), start=1):
        if call.paths[-1] != OUTPUT:
            yield from (
                (f"{call} {errno.errorcode[code]}", At(number, Fail(code))) for code in _ONCE
            )


def refuse(case: Case, what: str, decide: Decide, figures: Figures) -> None:
    """Run a command with a refusal, look, and run it again without one."""
    root = case.copy()
    done = case.run(root, decide)
    if isinstance(decide, Silly):
        decide.forget()
    figures.add("refusals")
    figures.add("done all the same" if done.code == 0 else "refused")
    found = case.check(root, done, figures, what)
    _check_answer(case, what, done, figures)
    if done.code != 0 and case.command.arguments[0] == "import":
        figures.expect(
            found.models == case.start.models, "lost", f"{case.command.name}, {what}: {done.err}"
        )
    case.check_again(root, figures, what)
    case.remove(root)


def _check_answer(case: Case, what: str, done: Done, figures: Figures) -> None:
    is_clear = done.code == 0 or (
        done.code == 1 and done.err.startswith("Error: ") and done.err.count("\n") <= 2
    )
    figures.expect(is_clear, "unclear", f"{case.command.name}, {what}: {done.code} {done.err}")
