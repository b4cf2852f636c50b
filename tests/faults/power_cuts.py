"""Power cuts during commands: everything acknowledged is present, nothing is half-present.

Commands run one after the other on an ext4, XFS or Btrfs whose disk is recorded
(lab/disks.py), slowed down and mixed with other programs' syncs, so that the journal is
committed, and data are written back, between any two calls. Each cut is a disk as it may have been
left: it is mounted, which replays the journal, and read. The same with syncs that do nothing must
lose data in some cuts, or the experiment would show nothing.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faults.lab.cases import Figures, Models, Task, check_sound, is_between
from faults.lab.checker import Found, look
from faults.lab.command import Action, Pretend, run
from faults.lab.disks import FORMATS, Event, Format, Replay, read_events, recorded
from faults.lab.fuse import FLUSH, MARK, WRITE
from faults.lab.stops import SYNCING, Call
from faults.lab.wandering import Choices
from support.mounts import NotShownError, keep_mounts_private, mount

_LONG = 1200
_LEAST_COMMANDS = 4
_LONGEST_S = 0.5
_RE_RUN_EVERY = 4
_LEAST_CONTROL = 12
_ALL_CONTROLS = 400  # cuts; fewer might not meet the moment that each is about
_ZERO = ("corrupt", "dangling", "lost", "strays", "re-runs failed", "disks not mounted")


def experiment(task: Task) -> Figures:
    """Return what so many cuts found, as many for each mount option.

    In the long form 1,200, and 300 for each control.

    Raises: NotShownError where no disk can be recorded, and on a file system without a disk.
    """
    disk = FORMATS.get(task.file_system.disk)
    if disk is None:
        raise NotShownError(
            f"{task.file_system.name} has no disk of its own: its power cuts are those of "
            "what lies below"
        )
    keep_mounts_private()
    figures = Figures(
        *(
            "cuts",
            "cuts with damage",
            "mount options",
            "commands",
            "writes",
            "flushes",
            "re-runs",
        ),
        zero=_ZERO,
    )
    count = _LONG if task.count is None else task.count
    each, moments = -(-count // len(disk.options)), task.moments()
    image = disk.empty_image(task.folder / "image")
    workshop = Workshop(task.folder, disk, image, Choices(task.folder, moments), moments)
    for options in disk.options:
        recording = record(workshop, options, each)
        figures.add("commands", sum(event.kind == MARK for event in recording) // 2)
        figures.add("writes", sum(event.kind == WRITE for event in recording))
        figures.add("flushes", sum(event.kind == FLUSH for event in recording))
        cut(workshop, recording, each, figures)
    figures.most("mount options", len(disk.options))
    for what, left_out in [*CONTROLS.items()][: None if count >= _ALL_CONTROLS else 1]:
        control(workshop, what, left_out, max(each, _LEAST_CONTROL), figures)
    return figures


def _is_sync(call: Call) -> bool:
    return call.name in SYNCING


def _is_syncfs(call: Call) -> bool:
    return call.name == "syncfs"


def _is_last(call: Call) -> bool:
    return call.name == "fsync" and "/manifests/" in call.paths[0]


CONTROLS: Mapping[str, Callable[[Call], bool]] = {
    "without syncs": _is_sync,
    "without syncfs": _is_syncfs,
    "without fsync of the manifest's folder": _is_last,
}
"""Syncs that do nothing in the controls.

The others are no loss on a journal that is committed whole.
"""


def control(
    workshop: Workshop, what: str, left_out: Callable[[Call], bool], count: int, figures: Figures
) -> None:
    """Count the cuts in which a store loses data whose syncs do nothing: they must be some."""
    found = Figures(zero=_ZERO, quiet=True)
    cut(workshop, record(workshop, "defaults", count, left_out), count, found)
    figures.add(f"cuts {what}", count)
    figures.add(f"damaged {what}", found.counts["cuts with damage"])
    figures.control(found)


@dataclass(frozen=True, slots=True)
class Workshop:
    """The folder, the disk and its empty file system, the commands, and random choices."""

    folder: Path
    disk: Format
    image: bytes
    choices: Choices
    moments: random.Random


@dataclass(slots=True)
class Moment:
    """A mark: the models before and after the running command, and the command.

    The command is empty while none runs.
    """

    start: Models = field(default_factory=dict)
    end: Models = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, marks: Sequence[str]) -> Moment:
        """Return the moment after the last mark."""
        return cls(**json.loads(marks[-1])) if marks else cls()


def record(
    workshop: Workshop,
    options: str,
    cuts: int,
    left_out: Callable[[Call], bool] = lambda _call: False,
) -> Sequence[Event]:
    """Run half as many commands as there will be cuts on a recorded disk; return the recording.

    Calls that are ``left_out`` do nothing and say that they succeeded.
    """
    log = workshop.folder / "log"
    with recorded(workshop.folder, workshop.image, log, workshop.disk.name, options) as (
        target,
        marks,
    ):
        models: Models = {}
        nuisance = Nuisance(target, workshop.moments, min(_LONGEST_S, cuts / 200), left_out)
        for _ in range(max(_LEAST_COMMANDS, cuts // 2)):
            arguments, end = workshop.choices.choose(models, look(target / "store").packed)
            line = [*map(str, arguments)]
            _mark(marks, Moment(models, end, line))
            done = run(*line, "--store", target / "store", within=[target], decide=nuisance)
            if done.code != 0:
                raise AssertionError(f"{line} fails undisturbed: {done.err}")
            _mark(marks, Moment(end, end))
            models = end
        nuisance.close()
    return read_events(log)


def _mark(marks: Path, moment: Moment) -> None:
    text = json.dumps({"start": moment.start, "end": moment.end, "command": moment.command})
    with marks.open("wb", buffering=0) as file:
        file.write(text.encode())


class Nuisance:
    """Other programs on the disk, at some of a command's calls.

    Time passes, a journal is committed, data are written.
    """

    def __init__(
        self,
        folder: Path,
        moments: random.Random,
        longest_s: float,
        left_out: Callable[[Call], bool],
    ) -> None:
        """``longest_s``: how long a call waits at most; ``left_out``: calls that do nothing."""
        self._moments = moments
        self._longest_s = longest_s
        self._left_out = left_out
        self._other = os.open(folder / "other", os.O_RDWR | os.O_CREAT)

    def __call__(self, call: Call) -> Action | None:
        """Disturb before a call."""
        chance = self._moments.random()
        if chance < 0.01:
            time.sleep(self._moments.uniform(0, self._longest_s))
        elif chance < 0.03:
            os.pwrite(self._other, b"x" * self._moments.randrange(1, 10_000), 0)
            os.fsync(self._other)
        elif chance < 0.06:
            self._write_back(call)
        return Pretend() if self._left_out(call) else None

    def _write_back(self, call: Call) -> None:
        """Let the kernel write the data of a file that the call names, and commit nothing."""
        with suppress(OSError):
            fd = os.open(call.paths[0], os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Close the other file."""
        os.close(self._other)


def cut(workshop: Workshop, events: Sequence[Event], count: int, figures: Figures) -> None:
    """Cut the power ``count`` times at random places of a recording, and look at what is left."""
    replay, moments = Replay(workshop.image, events, workshop.disk.blocks), workshop.moments
    (target := workshop.folder / "after").mkdir(exist_ok=True)
    disk = workshop.folder / "disk"
    for number, position in enumerate(sorted(moments.randrange(len(events)) for _ in range(count))):
        disk.unlink(missing_ok=True)  # the kernel may let go of it later than umount says
        disk.write_bytes(replay.cut(position, moments))
        moment = Moment.of(replay.marks)
        figures.add("cuts")
        at = f"cut {number} at {position} of {len(events)}, {moment.command}"
        try:
            if workshop.disk.name == "btrfs":  # of two disks of one name it mounts a known one
                subprocess.run(["btrfs", "device", "scan", "--forget"], check=False)
            with mount(workshop.disk.name, target, "loop", disk):
                figures.add(
                    "cuts with damage", not _is_whole(look(target / "store"), moment, figures, at)
                )
                if number % _RE_RUN_EVERY == 0 and figures.is_good:
                    _run_again(target, moment, figures, at)
        except NotShownError as error:
            figures.wrong("disks not mounted", f"{at}: {error}")


def _is_whole(found: Found, moment: Moment, figures: Figures, at: str) -> bool:
    """Count what is wrong with a store after a cut; return whether nothing is."""
    is_right = is_between(found.models, moment.start, moment.end, said=not moment.command)
    figures.expect(is_right, "lost", f"{at}: {moment.start} -> {moment.end}: {found.models}")
    return check_sound(found, figures, at) and is_right


def _run_again(target: Path, moment: Moment, figures: Figures, at: str) -> None:
    """Run the interrupted command again, in another start of the machine."""
    if not moment.command:
        return
    done = run(*moment.command, "--store", target / "store")
    figures.add("re-runs")
    found = look(target / "store")
    is_done = done.code == 0 or "not found" in done.err
    is_good = is_done and found.models == moment.end and not found.corrupt and not found.dangling
    figures.expect(is_good, "re-runs failed", f"{at}: {done.code} {done.err} {found}")
