"""Power cuts during commands: everything acknowledged is present, nothing is half-present.

Commands run one after the other on an ext4 whose disk is recorded (lab/disks.py), mixed with
other programs' syncs, so that the journal is committed, and data are written back, between any two
calls. Each cut is a disk as it may have been left: it is mounted, which replays the journal, and
read. The same with syncs that do nothing must lose data in some cuts, or the experiment would show
nothing.
"""

import json
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from faults.lab.cases import Figures, Models, Task, check_sound, is_between
from faults.lab.checker import look
from faults.lab.choices import Choices
from faults.lab.command import run
from faults.lab.disks import Event, Replay, empty_image, read_events, recorded
from faults.lab.stops import PRETEND, Action, Call
from faults.mounts import NotShownError, keep_mounts_private, mount

_LONG = 1200
_OPTIONS = ("commit=1", "noauto_da_alloc,data=writeback")
_LAZY = "commit=3600"  # nothing is durable without a sync
_LEAST_COMMANDS = 4
_RE_RUN_EVERY = 4
_LEAST_CONTROL = 12


def experiment(task: Task) -> Figures:
    """Return what cuts found for each mount option. Raises: NotShownError without a disk."""
    keep_mounts_private()
    figures, found = Figures(), Figures(is_quiet=True)
    disk = Disk(task, empty_image(task.folder / "image"))
    choices = Choices(task.folder, task.chance)
    count = (_LONG if task.count is None else task.count) // len(_OPTIONS)
    for option in _OPTIONS:
        disk.cut(disk.record(choices, option, count), count, figures)
    control = max(count, _LEAST_CONTROL)
    disk.cut(disk.record(choices, _LAZY, control, syncs=False), control, found)
    figures.control(found)
    return figures


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk with an empty file system, on which commands run."""

    task: Task
    image: bytes

    def record(
        self, choices: Choices, options: str, cuts: int, *, syncs: bool = True
    ) -> Sequence[Event]:
        """Record half as many commands as cuts; without ``syncs`` these do nothing."""
        log, models = self.task.folder / "log", dict[str, str]()
        with recorded(self.task.folder, self.image, log, options) as (target, marks):

            def decide(call: Call) -> Action | None:
                if syncs:
                    _disturb(call, target / "other", self.task.chance)
                return PRETEND if call.syncs and not syncs else None

            for _ in range(max(_LEAST_COMMANDS, cuts // 2)):
                line, end = choices.choose(models, look(target / "store").packed)
                _mark(marks, models, end, line)
                done = run(*line, "--store", target / "store", within=[target], decide=decide)
                if done.code != 0:
                    raise AssertionError(f"{line} fails undisturbed: {done.err}")
                _mark(marks, end, end, [])
                models = end
        return read_events(log)

    def cut(self, events: Sequence[Event], count: int, figures: Figures) -> None:
        """Cut the power ``count`` times at random places, and look at what is left."""
        replay = Replay(self.image, events)
        target, disk = self.task.folder / "after", self.task.folder / "disk"
        target.mkdir(exist_ok=True)
        chance = self.task.chance
        for number, position in enumerate(sorted(chance.choices(range(len(events)), k=count))):
            disk.unlink(missing_ok=True)  # the kernel may let go of it later than umount says
            disk.write_bytes(replay.cut(position, chance))
            start, end, line = json.loads(replay.mark or "[{}, {}, []]")
            at = f"cut {number} at {position} of {len(events)}, {line}: {start} -> {end}"
            figures.counts["cuts"] += 1
            try:
                with mount("ext4", target, "loop", disk):
                    found = look(target / "store")
                    is_right = is_between(found.models, start, end, said=not line)
                    figures.expect(is_right, "lost", f"{at}: {found.models}")
                    is_sound = check_sound(found, figures, at)
                    if line and is_sound and number % _RE_RUN_EVERY == 0:
                        _run_again(target / "store", line, end, figures, at)
            except NotShownError as error:
                figures.wrong("disks not mounted", f"{at}: {error}")


def _mark(marks: Path, start: Models, end: Models, line: Sequence[object]) -> None:
    """Note the models before and after the running command, and the command, if one runs."""
    text = json.dumps([start, end, [*map(str, line)]])
    with marks.open("wb", buffering=0) as file:
        file.write(text.encode())


def _disturb(call: Call, other: Path, chance: random.Random) -> None:
    """Be another program on the disk: commit the journal, write data, or do nothing."""
    choice = chance.random()
    if choice < 0.03:
        with other.open("wb") as file:
            file.write(b"x" * chance.randrange(1, 10_000))
            file.flush()
            os.fsync(file.fileno())
    elif choice < 0.06:  # the kernel writes the data of a file and commits nothing
        with suppress(OSError), Path(call.paths[0]).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run_again(root: Path, line: list[str], end: Models, figures: Figures, at: str) -> None:
    """Run the interrupted command again, in another start of the machine."""
    done = run(*line, "--store", root)
    figures.counts["re-runs"] += 1
    found = look(root)
    is_done = done.code == 0 or "not found" in done.err
    is_good = is_done and found.models == end and not found.corrupt and not found.dangling
    figures.expect(is_good, "re-runs failed", f"{at}: {done.code} {done.err} {found}")
