"""Commands with their stores: the states allowed after a kill, a failure and a success."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

from blobstore.store.local.store import open_store
from support.lab.checker import Found, look
from support.lab.command import Decide, Done, run
from support.lab.commands import COMMANDS, PRUNE_ALL, Command
from support.lab.figures import Figures
from support.lab.file_systems import Copied, Stores
from support.lab.system_calls import Call

Models = Mapping[str, str]
ZERO = ("corrupt", "dangling", "lost", "strays", "re-runs failed", "foreign errors", "hangs")
"""What every experiment counts and must not see."""


class Case:
    """A command with its store: run undisturbed once, then on any number of copies.

    ``stores`` makes and removes the copies, as the file system wants it.
    """

    stores: ClassVar[Stores] = Copied()

    def __init__(self, command: Command, folder: Path, *, looks: bool = False) -> None:
        """Make the store in ``folder`` and note the undisturbed command's calls.

        ``looks`` is that of `run`.
        """
        self.command = command
        self._looks = looks
        self.work = folder / command.name.replace(" ", "-")
        self.work.mkdir(parents=True)
        self._base = self.work / "base"
        self._numbers = itertools.count()
        command.prepare(self.work, open_store(self._base))
        self.start = look(self._base)
        self.watched = self.copy()
        done = self.run(self.watched, watched=True)
        if done.code != 0:
            raise AssertionError(f"{command.name} fails undisturbed: {done.err}")
        self.end = look(self.watched)
        self.calls = done.calls
        self.remove(self.watched)

    def copy(self, root: Path | None = None) -> Path:
        """Return a new copy of the store before the command, at ``root`` or beside the others."""
        root = self.work / f"store{next(self._numbers)}" if root is None else root
        if self._base.exists():
            self.stores.copy(self._base, root)
        return root

    def remove(self, root: Path) -> None:
        """Remove a copy of the store."""
        self.stores.remove(root)

    def run(
        self,
        root: Path,
        decide: Decide | None = None,
        *,
        watched: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> Done:
        """Run the command on a copy of the store; note its calls if ``watched`` or ``decide``.

        ``before`` is called in the command's process first.
        """

        def prepare() -> None:
            self.command.before()
            before()

        arguments = [
            argument.format(work=self.work, store=root) for argument in self.command.arguments
        ]
        within = [self.work, root] if watched or decide is not None else []
        program = partial(self.command.program, root) if self.command.program is not None else None
        return run(
            *arguments,
            within=within,
            decide=decide,
            before=prepare,
            looks=self._looks,
            program=program,
        )

    def check(self, root: Path, done: Done, figures: Figures, what: object) -> Found:
        """Count the faults of a store after a disturbed run: each name is as before or as after."""
        found = look(root)
        at = f"{self.command.name}, {what}"
        for corrupt in set(found.corrupt) - set(self.start.corrupt):
            figures.wrong("corrupt", f"{at}: {corrupt}")
        if len(found.dangling) > len(self.start.dangling) or (
            done.code == 0 and found.dangling != self.end.dangling
        ):
            figures.wrong("dangling", f"{at}: {found.dangling}")
        if not is_between(found.models, self.start.models, self.end.models, said=done.code == 0):
            figures.wrong("lost", f"{at}: {found.models}, exit code {done.code}")
        nowhere = self._kept() - {*found.orphans, *found.trash}
        figures.expect(not nowhere, "lost", f"{at}: {nowhere}, exit code {done.code}")
        figures.expect(not found.strays, "strays", f"{at}: {found.strays}")
        figures.expect(not done.hung, "hangs", at)
        figures.expect("Traceback" not in done.err, "foreign errors", f"{at}: {done.err}")
        return found

    def _kept(self) -> set[str]:
        """Return unneeded blobs that must be in the trash after the command."""
        if "--undo" in self.command.arguments:
            return {*self.start.orphans, *self.start.trash}
        return set(self.start.orphans) if self.command.arguments[0] == "prune" else set()

    def check_again(self, root: Path, figures: Figures, what: object) -> Found:
        """Run the command once more, undisturbed; count what is wrong then."""
        done = self.run(root)
        at = f"{self.command.name}, {what}, again"
        found = look(root)
        # What has been removed or given back can't be removed or given back again.
        is_done = done.code == 0 or (
            done.code == 1 and ("not found" in done.err or "is empty" in done.err)
        )
        figures.expect(
            is_done and (found.models, found.packed) == (self.end.models, self.end.packed),
            "re-runs failed",
            f"{at}: {done.code} {done.err}",
        )
        figures.expect(not found.strays, "strays", f"{at}: {found.strays}")
        figures.expect(found.corrupt == self.end.corrupt, "corrupt", f"{at}: {found.corrupt}")
        figures.expect(found.dangling == self.end.dangling, "dangling", f"{at}: {found.dangling}")
        return found


def check_clean(root: Path, figures: Figures, what: object) -> None:
    """Clean up without grace, and count what is left over then."""
    done = run(*PRUNE_ALL, "--store", root)
    found = look(root)
    left = [*found.temporary, *found.orphans]
    figures.expect(
        done.code == 0 and not left, "left after prune", f"{what}: {done.code} {done.err} {left}"
    )


def check_verify(root: Path, figures: Figures, what: object) -> None:
    """Count where our own verify says something else than the checker."""
    done, found = run("verify", "--store", root), look(root)
    is_damaged = bool(found.corrupt or found.dangling)
    figures.expect(
        done.code == (3 if is_damaged else 0),
        "verify disagrees",
        f"{what}: {done.code} {done.out} {found}",
    )


@cache
def standard_cases(folder: Path) -> tuple[Case, ...]:
    """Return all commands with their stores in ``folder``.

    They are made once for all experiments.
    """
    return tuple(Case(command, folder) for command in COMMANDS)


def is_between(found: Models, start: Models, end: Models, *, said: bool) -> bool:
    """Return True when models are as a command may leave them: each name as before or as after.

    After, when that was said.

    No manifest that is there before and after (under another name, perhaps) is ever nowhere.
    """
    if said:
        return found == end
    names = set(found) | set(start) | set(end)
    one_or_the_other = all(found.get(name) in (start.get(name), end.get(name)) for name in names)
    return one_or_the_other and set(start.values()) & set(end.values()) <= set(found.values())


@dataclass(frozen=True, slots=True)
class Point:
    """Where and how a command is disturbed: by an error (0: half of the work).

    ``number`` counts the calls that the experiment disturbs.
    """

    case: Case
    number: int
    call: Call
    error: int

    def __str__(self) -> str:
        return f"{self.call} {errno.errorcode.get(self.error, 'by half')} at call {self.number}"
