"""No small input makes a command take much: the program that looks for one that does.

An input of at most 1 MiB on the disk (small_inputs.py) or 10 MB from a server (small_replies.py)
never takes a command more than 300 MB of memory or 60 s of processor time, a server's not more than
60 s by the clock either; the command ends with an exit code of ours and no traceback. What hashes
or quantizes values takes time for each byte of a file, also for those of a hole: so the inputs have
at most 64 MiB of values.

``python tests/fuzz/bounds.py --tries 20000 --jobs 2`` looks; ``--replay SEED`` makes one input
again and keeps it. docs/reliability.md says what it has found.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small_inputs import MOST_ON_DISK, SERVER, build, on_disk
from small_replies import start

import blobstore

MOST_BYTES = 300 * 10**6
MOST_SECONDS = 60
_GRACE_SECONDS = 30
"""What else the machine may be busy with."""
_WALL_SECONDS = 600
_STOPPED_AT_BYTES = 1500 * 10**6
_CODES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a command took: ``seconds`` of processor time, ``nbytes`` of memory at its most.

    How it ended.

    ``waited``: seconds by the clock.
    """

    seed: str
    line: str
    disk: int
    seconds: float
    waited: float
    nbytes: int
    code: int
    error: str

    @property
    def fault(self) -> str | None:
        """What must not be; None when all is well, or the input is no small one."""
        if self.disk > MOST_ON_DISK:
            return None
        if self.nbytes > MOST_BYTES:
            return f"{self.nbytes / 1e6:,.0f} MB"
        if self.seconds > MOST_SECONDS:
            return f"{self.seconds:,.0f} s"
        if "http://" in self.line and self.waited > MOST_SECONDS + _GRACE_SECONDS:
            return f"{self.waited:,.0f} s by the clock"
        if self.code not in _CODES or "Traceback" in self.error:
            return f"code {self.code}: {self.error[-300:]}"
        return None


def warm_up() -> None:
    """Import all that commands import, so that a fork has it; start a server."""
    os.environ[SERVER] = str(start())
    for module in walk_packages(blobstore.__path__, "blobstore."):
        if module.name != "blobstore.__main__":
            import_module(module.name)


def attempt(seed: str, folder: Path) -> Taken:
    """Make the input of ``seed`` in ``folder``, run its command, and report its cost."""
    folder.mkdir(parents=True)
    line = build(seed, folder)
    disk = on_disk(folder)
    errors = _errors_of(folder)
    begin = time.monotonic()
    pid = forked(line, errors)
    _, status, usage = os.wait4(pid, 0)
    waited = time.monotonic() - begin
    shown = " ".join(line).replace(str(folder), "…")
    seconds = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    text = errors.read_text(errors="replace") if errors.exists() else ""
    return Taken(seed, shown, disk, seconds, waited, usage.ru_maxrss * 1024, code, text)


def _errors_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-stderr")


def forked(line: list[str], errors: Path, read: str = os.devnull, write: str = os.devnull) -> int:
    """Start a command in a fork, and return its process; ``read``, ``write``: its streams."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS + 5, MOST_SECONDS + 10))
        resource.setrlimit(resource.RLIMIT_DATA, (_STOPPED_AT_BYTES, _STOPPED_AT_BYTES))
        signal.alarm(_WALL_SECONDS)
        os.dup2(os.open(read, os.O_RDONLY), 0)
        os.dup2(os.open(write, os.O_WRONLY | os.O_CREAT, 0o600), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        from blobstore.cli.main import run

        code = run(line)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  # the parent reads it
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def look(seeds: list[str], folder: Path) -> tuple[list[Taken], Counter[str]]:
    """Try all seeds.

    Return what must not be, and how many inputs each command had, how many were too large.
    """
    faults = []
    counts: Counter[str] = Counter()
    for seed in seeds:
        place = folder / seed
        taken = attempt(seed, place)
        remove(place)
        counts["too large" if taken.disk > MOST_ON_DISK else taken.line.split()[0]] += 1
        if taken.fault:
            faults.append(taken)
            print(
                f"{taken.fault}: --replay {seed}: {taken.line} ({taken.disk:,} bytes)", flush=True
            )
    return faults, counts


def remove(folder: Path) -> None:
    """Remove a folder, however deep: shutil gives up where rm does not."""
    subprocess.run(["rm", "-rf", str(folder), str(_errors_of(folder))], check=True)


def main() -> int:
    """Look for inputs that take too much; return 1 when there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument("--replay", help="one input again; its folder is kept")
    options = parser.parse_args()
    if options.replay:
        warm_up()
        folder = Path(tempfile.mkdtemp(prefix="bounds-"))
        taken = attempt(options.replay, folder / "input")
        print(taken, folder, sep="\n")
        return 1 if taken.fault else 0
    return _look_everywhere(options)


def _look_everywhere(options: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    faults: list[Taken] = []
    share = -(-options.tries // options.jobs)
    spawn = multiprocessing.get_context("spawn")  # of processes with one thread each: they fork
    with (
        tempfile.TemporaryDirectory(prefix="bounds-") as folder,
        ProcessPoolExecutor(options.jobs, spawn, warm_up) as pool,
    ):
        jobs = [
            pool.submit(
                look,
                [f"{options.seed}.{job}.{number}" for number in range(share)],
                Path(folder) / str(job),
            )
            for job in range(options.jobs)
        ]
        for job in jobs:
            found, counted = job.result()
            faults += found
            counts += counted
    print(
        f"{sum(counts.values()):,} tries: {dict(counts.most_common())}; {len(faults)} that "
        "take too much"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
