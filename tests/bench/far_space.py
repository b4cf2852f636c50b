"""Disk of an import from afar, and what it fetches again after a kill, for afar.py."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from random import Random

from far_sides import Command, Servers
from import_processes import TemporaryFiles, files_under, run, stored_bytes


@dataclass(slots=True)
class DiskPeak:
    """Most bytes on the disk below a folder, seen while a process runs, unlinked files included."""

    folder: Path
    nbytes: int = 0

    def __call__(self, pid: int) -> None:
        """Look once."""
        unlinked = sum(TemporaryFiles(self.folder)._nameless(pid))
        self.nbytes = max(self.nbytes, stored_bytes(self.folder) + unlinked)

    def beyond(self) -> float:
        """Return what was there beyond the blobs that are there now, as a part of them."""
        blobs = sum(512 * stat.st_blocks for stat in files_under(self.folder / "store" / "blobs"))
        return (self.nbytes - blobs) / blobs


def sent_again(line: Command, servers: Servers, seconds: float, random: Random) -> float:
    """Return the bytes that are sent again when an import is killed and continued.

    They are a part of the source's. ``seconds``: how long it takes; it is killed at a random moment
    of its last four fifths. What a killed import did not take out of its sockets is counted.
    """
    nbytes = sum(path.stat().st_size for path in servers.source.iterdir())
    while True:
        servers.run([])
        servers.sent()
        moment = seconds * random.uniform(0.2, 1)
        with subprocess.Popen(
            [*map(str, line)], stdout=subprocess.DEVNULL, env=servers.environment
        ) as process:
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.kill()
                break
    run(line, environment=servers.environment).checked()
    return servers.sent() / nbytes - 1
