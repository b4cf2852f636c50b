"""Processes of the benchmarks: run and time one, or sample its memory."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}

Sampler = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Run:
    """How a process ended.

    ``seconds`` is its wall time, from start to exit; ``processor`` the processor's seconds, user
    and system, which other processes of the machine change less.
    """

    seconds: float
    processor: float
    code: int
    output: str
    errors: str

    @property
    def problem(self) -> str | None:
        """What went wrong, in a line, or None."""
        if self.code == 0:
            return None
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        said = next(
            (line for line in lines if line.startswith("Error:")),
            lines[-1] if lines else "nothing was said",
        )
        return f"exit code {self.code}: {said}"

    def checked(self) -> Self:
        """Return the run itself. Raises: SystemExit when it failed."""
        if self.problem is not None:
            sys.exit(self.problem)
        return self

    @property
    def document(self) -> dict[str, Any]:
        """What it printed with --json. Raises: SystemExit when it failed."""
        document: dict[str, Any] = json.loads(self.checked().output)
        return document


def children_work() -> float:
    """Return the seconds of processor time that all ended child processes took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(
    command: Sequence[str | Path],
    sample: Sampler | None = None,
    interval_s: float = 0.005,
    *,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Run:
    """Run a command to its end; call ``sample`` (pid) every ``interval_s`` seconds."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        before = children_work()
        started = time.perf_counter()
        with subprocess.Popen(
            [*map(str, command)], stdout=output, stderr=errors, env=environment
        ) as process:
            if sample is not None:
                while process.poll() is None:
                    sample(process.pid)
                    time.sleep(interval_s)
            code = process.wait()
        seconds = time.perf_counter() - started
        for file in (output, errors):
            file.seek(0)
        return Run(
            seconds,
            children_work() - before,
            code,
            output.read().decode(errors="replace"),
            errors.read().decode(errors="replace"),
        )


def import_command(source: Path, store: Path, *options: str | Path) -> list[str | Path]:
    """Return the line that imports ``source`` into a store."""
    line = (sys.executable, "-m", "blobstore", "import", source, "bench", "--json")
    return [*line, "--store", store, *options]


_numbers = itertools.count()


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


def status_of(pid: int) -> dict[str, int]:
    """Return the memory lines of /proc/PID/status in bytes; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {key: 1024 * int(value.removesuffix(" kB")) for key, value in pairs}


@dataclass(slots=True)
class MemoryPeak:
    """Largest memory seen of one process, bytes.

    ``anonymous`` is what no file backs, shared memory included. ``bound`` is from the kernel's own
    peak, which no sample misses: VmHWM - RssFile, too high where file-backed pages went after the
    peak.
    """

    anonymous: int = 0
    bound: int = 0
    samples: int = 0

    def __call__(self, pid: int) -> None:
        """Look once."""
        status = status_of(pid)
        if "RssAnon" in status:
            self.anonymous = max(self.anonymous, status["RssAnon"] + status["RssShmem"])
            self.bound = max(self.bound, status["VmHWM"] - status["RssFile"])
            self.samples += 1
