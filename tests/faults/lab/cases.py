"""Commands with their stores: the states allowed after a kill, a failure and a success.

Also what every experiment is asked for (`Task`), and what it counts (`Figures`).
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from faults.lab.checker import SOUND, Found, look
from faults.lab.command import Done, run
from faults.lab.commands import COMMANDS, FILE_COMMANDS, PRUNE_ALL, Command, same_calls
from faults.lab.stops import Decide

from blobstore.store.local.store import open_store

_Item = TypeVar("_Item")
Models = Mapping[str, str]
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Task:
    """An experiment's ``folder``, and how many faults; None: the long form."""

    folder: Path
    count: int | None
    chance: random.Random

    def pick(self, items: Sequence[_Item], *, of: float = 1) -> Sequence[_Item]:
        """Return ``count`` times ``of`` of the items, evenly spread; all in the long form."""
        return items if self.count is None else sample(items, round(self.count * of))

    def cases(self) -> tuple[Case, ...]:
        """Return all commands that change something; they are made once for all experiments."""
        return _cases(self.folder.parent / "cases")


def sample(items: Sequence[_Item], count: int) -> Sequence[_Item]:
    """Return ``count`` of the items, evenly spread, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / max(count - 1, 1))] for index in range(count)]


class Figures:
    """Counts and faults; these are printed to stderr unless ``is_quiet``, as for controls."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    def wrong(self, name: str, what: object) -> None:
        """Count a fault."""
        self.faults[name] += 1
        if self.faults[name] <= _SHOWN and not self.is_quiet:
            sys.stderr.write(f"{name}: {what}\n")

    def expect(self, holds: object, name: str, what: object) -> None:
        """Count as a fault what does not hold."""
        if not holds:
            self.wrong(name, what)

    def control(self, found: Figures) -> None:
        """Count how many faults a control saw: one that saw nothing is blind."""
        self.counts["seen in controls"] += found.faults.total()
        self.expect(found.faults, "blind", found)

    def __str__(self) -> str:
        return " · ".join(
            f"{name} {number:,}" for name, number in (self.counts + self.faults).items()
        )


class Case:
    """A command with its store: run undisturbed once, then on any number of copies."""

    def __init__(self, command: Command, folder: Path) -> None:
        """Make the store in ``folder`` and note the undisturbed command's calls."""
        self.command = command
        self.work = folder / command.name.replace(" ", "-")
        self.work.mkdir(parents=True)
        self._base = self.work / "base"
        self._numbers = itertools.count()
        command.prepare(self.work, open_store(self._base))
        self.start = look(self._base)
        self.watched = self.copy()
        done = self.run(self.watched, lambda _call: None)
        if done.code != 0:
            raise AssertionError(f"{command.name} fails undisturbed: {done.err}")
        self.end = look(self.watched)
        self.calls = done.calls
        self.changes = [call for call in done.calls if not call.reads]
        self.remove(self.watched)

    def copy(self, root: Path | None = None) -> Path:
        """Return a new copy of the store before the command, at ``root`` or beside the others."""
        root = root or self.work / f"store{next(self._numbers)}"
        if self._base.exists():
            shutil.copytree(self._base, root, symlinks=True)
        return root

    def remove(self, root: Path) -> None:
        """Remove a copy of the store, and what was written beside it."""
        shutil.rmtree(root, ignore_errors=True)
        for path in root.parent.glob(f"*{root.name}-out*"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(True)

    def run(
        self, root: Path, decide: Decide | None = None, *, before: Callable[[], None] = lambda: None
    ) -> Done:
        """Run on a copy, after ``before``; calls are noted if there is a ``decide``."""

        def prepare() -> None:
            same_calls()
            self.command.before()
            before()

        line = [argument.format(work=self.work, store=root) for argument in self.command.arguments]
        return run(
            *line,
            within=[] if decide is None else [self.work, root],
            decide=decide or (lambda _call: None),
            before=prepare,
        )

    def check(self, root: Path, done: Done, figures: Figures, what: object) -> Found:
        """Count the faults of a store after a disturbed run: each name is as before or as after."""
        found = look(root)
        at = f"{self.command.name}, {what}: {done.code} {done.err}"
        new = set(found.corrupt) - set(self.start.corrupt)
        figures.expect(not new, "corrupt", f"{at}: {new}")
        new = set(found.dangling) - set(
            self.end.dangling if done.code == 0 else self.start.dangling
        )
        figures.expect(not new, "dangling", f"{at}: {new}")
        is_right = is_between(found.models, self.start.models, self.end.models, said=done.code == 0)
        figures.expect(is_right, "lost", f"{at}: {found.models}")
        if "prune" in self.command.arguments:
            kept = {
                *self.start.orphans,
                *(self.start.trash if "--undo" in self.command.arguments else ()),
            }
            figures.expect(kept <= {*found.orphans, *found.trash}, "lost", f"{at}: {kept}")
        figures.expect(not found.strays, "strays", f"{at}: {found.strays}")
        figures.expect(not done.hung, "hangs", at)
        is_ours = "Traceback" not in done.err and "Exception ignored" not in done.err
        figures.expect(is_ours, "foreign errors", at)
        return found

    def check_refused(self, done: Done, figures: Figures, what: object) -> None:
        """Count what is no error message of one sentence, and perhaps a hint."""
        is_clear = done.err.startswith("Error: ") and done.err.count("\n") <= 2
        # verify prints what is damaged, and ends with 3; 2 is a name that is taken.
        is_clear = done.code == 3 or (is_clear and done.code in (1, 2))
        figures.expect(is_clear, "unclear", f"{self.command.name}, {what}: {done}")

    def check_again(self, root: Path, figures: Figures, what: object) -> Found:
        """Run the command once more, undisturbed; count what is wrong then."""
        done = self.run(root)
        at = f"{self.command.name}, {what}, again: {done.code} {done.err}"
        found = look(root)
        # What was removed, given back or exported can't be removed, given back or exported again.
        repeats = ("not found", "is empty", "already exists")
        is_done = done.code == 0 or any(text in done.err for text in repeats)
        is_right = (found.models, found.packed) == (self.end.models, self.end.packed)
        figures.expect(is_done and is_right, "re-runs failed", at)
        check_sound(found, figures, at, self.end)
        return found


def check_clean(root: Path, figures: Figures, what: object) -> None:
    """Clean up without grace, and count what is left over then."""
    done = run(*PRUNE_ALL, "--store", root)
    found = look(root)
    left = [*found.temporary, *found.orphans]
    is_clean = done.code == 0 and not left
    figures.expect(is_clean, "left after prune", f"{what}: {done.code} {done.err} {left}")


def check_sound(found: Found, figures: Figures, at: object, wanted: Found = SOUND) -> bool:
    """Count the faults that a store has beyond those of ``wanted``; return True for none."""
    for name in ("corrupt", "dangling", "strays"):
        faults = getattr(found, name)
        figures.expect(faults == getattr(wanted, name), name, f"{at}: {faults}")
    return not (found.corrupt or found.dangling or found.strays)


@cache
def _cases(folder: Path) -> tuple[Case, ...]:
    return tuple(Case(command, folder) for command in (*COMMANDS, *FILE_COMMANDS))


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
