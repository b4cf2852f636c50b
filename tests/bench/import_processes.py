"""Processes for imports.py: run and time one, or sample its memory and its files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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


def blobstore_command(command: str, source: Path, *options: str | Path) -> list[str | Path]:
    """Return the line that runs our ``import`` or ``plan``, as JSON."""
    return [sys.executable, "-m", "blobstore", command, source, "--json", *options]


def import_command(
    source: Path, store: Path, *options: str | Path, name: str = "bench"
) -> list[str | Path]:
    """Return the line that imports ``source`` into a store."""
    return blobstore_command("import", source, name, "--store", store, *options)


def files_under(folder: Path) -> Iterator[os.stat_result]:
    """Yield the stat of each file below a folder; files may vanish meanwhile."""
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                yield os.lstat(os.path.join(path, name))  # noqa: PTH118  # called every few milliseconds


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a folder on the disk, with those that are not written back yet.

    A file that is moved meanwhile may be seen twice, and is counted once.
    """
    return sum({stat.st_ino: 512 * stat.st_blocks for stat in files_under(folder)}.values())


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


@dataclass(slots=True)
class TemporaryFiles:
    """Most files and bytes seen in a store's ``.blobstore`` and in files without a name."""

    store: Path
    files: int = 0
    nbytes: int = 0
    _own: Path = field(init=False)

    def __post_init__(self) -> None:
        self._own = self.store / ".blobstore"

    def __call__(self, pid: int) -> None:
        """Look once."""
        sizes = [stat.st_size for stat in files_under(self._own) if stat.st_size]
        sizes += self._nameless(pid)
        self.files = max(self.files, len(sizes))
        self.nbytes = max(self.nbytes, sum(sizes))

    def left(self) -> int:
        """Return how many files with bytes are there now."""
        return sum(stat.st_size > 0 for stat in files_under(self._own))

    def _nameless(self, pid: int) -> Iterator[int]:
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    stat = os.stat(entry.path)  # noqa: PTH116  # follows the link to the file itself
                    if stat.st_nlink == 0 and os.readlink(entry.path).startswith(str(self.store)):  # noqa: PTH115
                        yield stat.st_size
