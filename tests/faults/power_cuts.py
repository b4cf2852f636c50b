"""Power cuts during imports, copies and removals: everything that was acknowledged is there, and nothing is half there.

Commands run one after the other on an ext4 whose disk is recorded (support/lab/disk.py), slowed down and mixed with other
programs' syncs, so that the journal is committed, and data are written back, between any two calls. Each cut is a disk as
it may have been left: it is mounted, which replays the journal, and looked at. The same with syncs that do nothing must lose
data in some cuts, or the experiment would show nothing.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.lab.cases import Models, is_between
from support.lab.checker import Found, look
from support.lab.command import Action, Pretend, run
from support.lab.disk import Event, Replay, empty_image, read_events, recorded
from support.lab.figures import Figures, NotShownError
from support.lab.fuse import FLUSH, MARK, WRITE
from support.lab.mounts import keep_mounts_private, mount
from support.lab.system_calls import SYNCING, Call
from support.lab.wandering import Choices

from blobstore.store import ingest

OPTIONS = ("commit=1", "commit=5", "defaults", "noauto_da_alloc,data=writeback")
SHORT = 16
_LONG = 1200
_COMMANDS_A_CUT = 0.5
_RE_RUN_EVERY = 4
_CONTROLS = 12
_ZERO = ("corrupt", "dangling", "lost", "strays", "re-runs failed", "disks not mounted")


def experiment(folder: Path, count: int | None, seed: int) -> Figures:
    """Return what ``count`` cuts found (None: 1,200), as many for each mount option, and a quarter more as control."""
    keep_mounts_private()
    figures = Figures("cuts", "cuts with damage", "mount options", "commands", "writes", "flushes", "re-runs", zero=_ZERO)
    each = -(-(_LONG if count is None else count) // len(OPTIONS))
    moments = random.Random(seed)
    choices = Choices(folder, moments)
    image = empty_image(folder / "image")
    for number, options in enumerate(OPTIONS):
        recording = record(folder, image, options, choices, moments, each)
        figures.add("mount options")
        figures.add("commands", sum(event.kind == MARK for event in recording) // 2)
        figures.add("writes", sum(event.kind == WRITE for event in recording))
        figures.add("flushes", sum(event.kind == FLUSH for event in recording))
        cut(folder, image, recording, moments, each, figures)
        if number == 0:
            control(folder, image, choices, moments, each, figures)
    return figures


def control(folder: Path, image: bytes, choices: Choices, moments: random.Random, count: int, figures: Figures) -> None:
    """Count the cuts in which a store loses data whose syncs do nothing: they must be some."""
    found = Figures(zero=_ZERO, quiet=True)
    cuts = max(count, _CONTROLS)
    cut(folder, image, record(folder, image, "defaults", choices, moments, count, syncs=False), moments, cuts, found)
    figures.add("cuts without syncs", found.counts["cuts"])
    figures.add("of them with damage", found.counts["cuts with damage"])
    figures.control(found)


@dataclass(slots=True)
class Moment:
    """What a mark says: the models before, and after, the command that runs then, and the command (nothing: none runs)."""

    start: Models = field(default_factory=dict)
    end: Models = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, marks: Sequence[str]) -> Moment:
        """Return the moment after the last mark."""
        return cls(**json.loads(marks[-1])) if marks else cls()


def record(
    folder: Path, image: bytes, options: str, choices: Choices, moments: random.Random, cuts: int, *, syncs: bool = True
) -> Sequence[Event]:
    """Run half as many commands as there will be cuts on a recorded disk; return the recording."""
    log = folder / "log"
    with recorded(folder, image, log, options) as (target, marks):
        models: Models = {}
        nuisance = Nuisance(target, moments, longest_s=min(0.5, cuts / 200), syncs=syncs)
        for _ in range(max(4, int(cuts * _COMMANDS_A_CUT))):
            arguments, end = choices.choose(models)
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
    """Other programs on the disk: at some of a command's calls time passes, a journal is committed, data are written."""

    def __init__(self, folder: Path, moments: random.Random, *, longest_s: float, syncs: bool) -> None:
        """``syncs``: whether the command's own syncs are carried out; ``longest_s``: how long a call waits at most."""
        self._longest_s = longest_s
        self._moments = moments
        self._syncs = syncs
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
        return Pretend() if call.name in SYNCING and not self._syncs else None

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


def cut(folder: Path, image: bytes, events: Sequence[Event], moments: random.Random, count: int, figures: Figures) -> None:
    """Cut the power ``count`` times at random places of a recording, and look at what is left."""
    replay = Replay(image, events)
    (target := folder / "after").mkdir(exist_ok=True)
    disk = folder / "disk"
    for number, position in enumerate(sorted(moments.randrange(len(events)) for _ in range(count))):
        disk.write_bytes(replay.cut(position, moments))
        moment = Moment.of(replay.marks)
        figures.add("cuts")
        at = f"cut {number} at {position} of {len(events)}, {moment.command}"
        try:
            with mount("ext4", target, "loop", disk):
                figures.add("cuts with damage", not _is_whole(look(target / "store"), moment, figures, at))
                if number % _RE_RUN_EVERY == 0 and figures.is_good:
                    _run_again(target, moment, figures, at)
        except NotShownError as error:
            figures.wrong("disks not mounted", f"{at}: {error}")


def _is_whole(found: Found, moment: Moment, figures: Figures, at: str) -> bool:
    """Count what is wrong with a store after a cut; return whether nothing is."""
    figures.expect(not found.corrupt, "corrupt", f"{at}: {found.corrupt}")
    figures.expect(not found.dangling, "dangling", f"{at}: {found.dangling}")
    figures.expect(not found.strays, "strays", f"{at}: {found.strays}")
    is_right = is_between(found.models, moment.start, moment.end, said=not moment.command)
    figures.expect(is_right, "lost", f"{at}: {moment.start} -> {moment.end}: {found.models}")
    return is_right and not found.corrupt and not found.dangling and not found.strays


def _run_again(target: Path, moment: Moment, figures: Figures, at: str) -> None:
    """Run the interrupted command again, in another start of the machine."""
    if not moment.command:
        return
    done = run(*moment.command, "--store", target / "store", before=_another_start)
    figures.add("re-runs")
    found = look(target / "store")
    is_done = done.code == 0 or "not found" in done.err
    is_good = is_done and found.models == moment.end and not found.corrupt and not found.dangling
    figures.expect(is_good, "re-runs failed", f"{at}: {done.code} {done.err} {found}")


def _another_start() -> None:
    ingest.boot_id = lambda: "another"
