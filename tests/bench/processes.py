"""Processes of the benchmarks: run and time one, or sample its memory."""

import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Run:
    """What a process took.

    ``seconds`` is its wall time, from start to exit; ``processor`` the processor's seconds, user
    and system, which other processes of the machine change less.
    """

    seconds: float
    processor: float


@dataclass(slots=True)
class MemoryPeak:
    """Largest memory seen of one process, bytes.

    ``anonymous`` is what no file backs, shared memory included. ``bound`` is from the kernel's own
    peak, which no sample misses: VmHWM - RssFile, too high where file-backed pages went after the
    peak.
    """

    anonymous: int = 0
    bound: int = 0

    def look(self, pid: int) -> None:
        """Take a sample."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
        status = {key: 1024 * int(value.removesuffix(" kB")) for key, value in pairs}
        if "RssAnon" in status:
            self.anonymous = max(self.anonymous, status["RssAnon"] + status["RssShmem"])
            self.bound = max(self.bound, status["VmHWM"] - status["RssFile"])


def children_work() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(
    command: Sequence[str | Path], folder: Path | None = None, *, peak: MemoryPeak | None = None
) -> Run:
    """Run a command in a folder, sampling its memory. Raises: SystemExit when it fails."""
    before, started = children_work(), time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        ) as process:
            while peak is not None and process.poll() is None:
                peak.look(process.pid)
                time.sleep(0.005)
        seconds = time.perf_counter() - started
        if process.returncode:
            output.seek(0)
            sys.exit(f"{command}: exit code {process.returncode}\n{output.read()}")
    return Run(seconds, children_work() - before)


def retire(folder: Path) -> None:
    """Move a folder or file to ``retired`` beside it, if it is there, and free its space.

    After many deletions ext4 without a journal makes files slowly for about a minute: it passes
    over inodes that were just deleted, one by one (torvalds/linux fs/ext4/ialloc.c
    `recently_deleted`). So what a run wrote is not deleted before the next one.
    """
    if not folder.exists():
        return
    place = folder.parent / "retired" / f"{os.getpid()}-{next(_numbers)}"
    place.parent.mkdir(exist_ok=True)
    folder.rename(place)
    for path in (place, *place.rglob("*")):
        if path.is_file() and not path.is_symlink():
            os.truncate(path, 0)
