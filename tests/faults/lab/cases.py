"""Commands with their stores: the states allowed after a kill, a failure and a success.

Also what every experiment is asked for (`Task`), and what it counts (`Figures`).
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, TypeVar

from faults.lab.checker import Found, look
from faults.lab.command import Decide, Done, run
from faults.lab.commands import COMMANDS, FILE_COMMANDS, PRUNE_ALL, Command
from faults.lab.file_systems import MEMORY, Copied, FileSystem

from blobstore.store.local.store import open_store

_Item = TypeVar("_Item")
Models = Mapping[str, str]
ZERO = ("corrupt", "dangling", "lost", "strays", "re-runs failed", "foreign errors", "hangs")
"""What every experiment counts and must not see."""
_BLIND = "blind"
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Task:
    """An experiment's ``folder`` on a ``file_system``, and how many faults; None: the long form."""

    folder: Path
    count: int | None
    seed: int
    file_system: FileSystem = MEMORY

    def moments(self) -> random.Random:
        """Return where random choices come from."""
        return random.Random(self.seed)

    def pick(self, items: Sequence[_Item], *, of: float = 1) -> Sequence[_Item]:
        """Return ``count`` times ``of`` of the items, evenly spread; all in the long form."""
        return sample(items, None if self.count is None else round(self.count * of))


def sample(items: Sequence[_Item], count: int | None) -> Sequence[_Item]:
    """Return ``count`` of the items, evenly spread, with the first and the last; None: all."""
    if count is None or len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / max(count - 1, 1))] for index in range(count)]


class Figures:
    """Counts in the order in which they were first named; those of ``zero`` must stay 0.

    ``quiet``: what is wrong is not printed. That is for controls: the same experiment on code that
    is broken on purpose, which has to see that (`control`).
    """

    def __init__(self, *counted: str, zero: Iterable[str], quiet: bool = False) -> None:
        self._zero = (*zero, *([] if quiet else [_BLIND]))
        self.is_quiet = quiet
        self.counts = dict.fromkeys((*counted, *self._zero), 0)

    def add(self, name: str, number: int = 1) -> None:
        """Count something."""
        self.counts[name] = self.counts.get(name, 0) + number

    def most(self, name: str, number: int) -> None:
        """Keep the largest number."""
        self.counts[name] = max(self.counts.get(name, 0), number)

    def wrong(self, name: str, what: object) -> None:
        """Count something that must not be, and print what it was."""
        self.add(name)
        if self.counts[name] <= _SHOWN and not self.is_quiet:
            sys.stderr.write(f"{name}: {what}\n")

    def expect(self, holds: bool, name: str, what: object) -> None:
        """Count as `wrong` what does not hold."""
        if not holds:
            self.wrong(name, what)

    def control(self, found: Figures) -> None:
        """Count how much a control saw that must not be; it is blind when that is nothing."""
        seen = sum(found.counts[name] for name in found._zero)
        self.add("seen in controls", seen)
        self.expect(seen > 0, _BLIND, found)

    @property
    def is_good(self) -> bool:
        """True when nothing is counted that must not be."""
        return not any(self.counts[name] for name in self._zero)

    def __str__(self) -> str:
        return " · ".join(f"{name} {number:,}" for name, number in self.counts.items())


class Case:
    """A command with its store: run undisturbed once, then on any number of copies.

    ``stores`` makes and removes the copies, as the file system wants it.
    """

    stores: ClassVar[Copied] = Copied()

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
        """Remove a copy of the store, and what was exported from it."""
        self.stores.remove(root)
        for path in root.parent.glob(f"*{root.name}-out*"):
            shutil.rmtree(path, ignore_errors=True)

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

        line = [argument.format(work=self.work, store=root) for argument in self.command.arguments]
        program = partial(self.command.program, root) if self.command.program is not None else None
        return run(
            *line,
            within=[self.work, root] if watched or decide is not None else [],
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
        is_ours = "Traceback" not in done.err and "Exception ignored" not in done.err
        figures.expect(is_ours, "foreign errors", f"{at}: {done.err}")
        return found

    def _kept(self) -> set[str]:
        """Return unneeded blobs that must be in the trash after the command."""
        if "--undo" in self.command.arguments:
            return {*self.start.orphans, *self.start.trash}
        is_prune = (
            self.command.arguments[0] == "prune" and "--dry-run" not in self.command.arguments
        )
        return set(self.start.orphans) if is_prune else set()

    def check_left(self, found: Found, figures: Figures, what: object) -> None:
        """Count temporary folders that a command which was refused left behind."""
        left = set(found.temporary) - set(self.start.temporary)
        figures.expect(not left, "left behind", f"{self.command.name}, {what}: {left}")

    def check_again(self, root: Path, figures: Figures, what: object) -> Found:
        """Run the command once more, undisturbed; count what is wrong then."""
        done = self.run(root)
        at = f"{self.command.name}, {what}, again"
        found = look(root)
        # What was removed, given back or exported can't be removed, given back or exported again.
        repeats = ("not found", "is empty", "already exists and is not an empty folder")
        is_done = done.code == 0 or (done.code == 1 and any(text in done.err for text in repeats))
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


def check_sound(found: Found, figures: Figures, at: object) -> bool:
    """Count the faults of a store in which nothing may be wrong; return True if nothing is."""
    for name in ("corrupt", "dangling", "strays"):
        faults = getattr(found, name)
        figures.expect(not faults, name, f"{at}: {faults}")
    return not (found.corrupt or found.dangling or found.strays)


@cache
def store_cases(folder: Path) -> tuple[Case, ...]:
    """Return the commands that change stores, with their stores in ``folder``.

    They are made once for all experiments.
    """
    return tuple(Case(command, folder) for command in COMMANDS)


@cache
def all_cases(folder: Path) -> tuple[Case, ...]:
    """Return these and the commands that write files, in ``folder``."""
    return (*store_cases(folder), *(Case(command, folder) for command in FILE_COMMANDS))


def is_between(found: Models, start: Models, end: Models, *, said: bool) -> bool:
    """Return True when models are as a command may leave them: each name as before or as after.

    After, when that was ``said``. No manifest that is there before and after, perhaps under another
    name, is ever nowhere.
    """
    if said:
        return found == end
    names = set(found) | set(start) | set(end)
    one_or_the_other = all(found.get(name) in (start.get(name), end.get(name)) for name in names)
    return one_or_the_other and set(start.values()) & set(end.values()) <= set(found.values())
