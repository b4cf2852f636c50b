"""Two versions of blobstore in turn: ``python tests/bench/before_after.py BEFORE AFTER [ROW …]``.

BEFORE and AFTER are Python programs, each of an environment with one version; blobstore needs to be
installed in the one that runs this, too. Every row is a command, or a short program, that each
version runs ``--pairs`` times, alternately, in a process of its own and with a warm page cache.
Printed are the medians of processor time and of wall time in seconds, as before / after = ratio.
Needs nginx and docker-registry, about 12 GB under ``--work``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from import_processes import Run, run
from import_sources import Sources, warm
from machine import machine
from retired import retire
from support.nginx import nginx
from support.registries import CERTIFICATE, registry
from tables import show, table

SIZE_GB = 1.88
MODELS = 1000
FETCHED = """
import sys, blobstore
source = blobstore.open_folder(sys.argv[1], ca_file=sys.argv[2])
blobstore.import_model(source, "m", store=blobstore.open_store(sys.argv[3]), quant="int4")
"""
OPENED = """
import sys, blobstore
model = blobstore.open_model("m", store=blobstore.open_store(sys.argv[1]))
print(len([tensor.numpy() for tensor in model.values()]))
"""
SERVED = """
import re, subprocess, sys, time, urllib.request
line = [sys.executable, "-m", "blobstore", "serve", "--port", "0", "--store", sys.argv[1]]
server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
address = re.search("http://[^ ]*/", server.stdout.readline())[0]
with urllib.request.urlopen(address + sys.argv[2]) as answer:
    while answer.readinto(buffer := bytearray(2**20)):
        pass
server.terminate()
server.wait()
"""


@dataclass(frozen=True, slots=True)
class Places:
    """The folders of a run."""

    work: Path
    source: Path

    @property
    def store(self) -> Path:
        """A store with the model ``m``, int4."""
        return self.work / "store"

    def many(self, python: str) -> Path:
        """Return a store of 1,000 models, whose hints one version has written."""
        return self.work / "many" / python.strip("/").replace("/", "-")

    @property
    def target(self) -> Path:
        """What a command writes; gone before the next one."""
        return self.work / "target"


Row = Callable[[str, Places], Iterator[list[str | Path]]]
"""Yields the command of a version, which is run while the generator waits."""


def command(python: str, *words: str | Path) -> list[str | Path]:
    """Return a command of the version that ``python`` has."""
    return [python, "-m", "blobstore", *words]


def import_int4(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Import 1.88 GB to int4."""
    yield command(python, "import", at.source, "m", "--store", at.target, "--quant", "int4")


def import_none(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Import 1.88 GB as it is."""
    yield command(python, "import", at.source, "m", "--store", at.target)


def import_https(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Import 1.88 GB to int4 from nginx on loopback, over TLS."""
    with nginx(at.work / "nginx", at.source, gzip=False, tls=True) as server:
        yield [python, "-c", FETCHED, f"{server.url}/", CERTIFICATE, at.target]


def verify(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Verify a store of one model, int4."""
    yield command(python, "verify", "--store", at.store)


def export(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Export an int4 model as it is."""
    yield command(python, "export", "m", at.target, "--store", at.store)


def opened(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Open an int4 model, and each tensor as NumPy."""
    yield [python, "-c", OPENED, at.store]


def listed(python: str, at: Places) -> Iterator[list[str | Path]]:
    """List 1,000 models."""
    yield command(python, "list", "--store", at.many(python))


def pushed(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Push an int4 model to docker-registry on loopback."""
    with registry(at.target) as server:
        yield command(python, "push", "m", "--store", at.store, "--to", f"{server.host}/a/m:b")


def pulled(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Pull an int4 model from docker-registry on loopback."""
    with registry(at.work / "registry") as server:
        name = f"{server.host}/a/m:b"
        if not server.tags():
            run(command(python, "push", "m", "--store", at.store, "--to", name)).checked()
        yield command(python, "pull", name, "--store", at.target)


def blob(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Get a blob of 1 GB over /v2/, with the server's start."""
    largest = max((at.work / "large" / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    digest = largest.name.replace("-", ":")
    yield [python, "-c", SERVED, at.work / "large", f"v2/library/m/blobs/{digest}"]


def page(python: str, at: Places) -> Iterator[list[str | Path]]:
    """Get the first page, with the server's start."""
    yield [python, "-c", SERVED, at.store, ""]


ROWS: dict[str, Row] = {
    "import int4": import_int4,
    "import none": import_none,
    "import https int4": import_https,
    "verify": verify,
    "export": export,
    "open, all arrays": opened,
    "list 1,000": listed,
    "push": pushed,
    "pull": pulled,
    "blob of 1 GB": blob,
    "first page": page,
}


def fill(at: Places, python: str) -> None:
    """Make the stores of one model that rows read, with the version before."""
    work = at.work
    line = command(python, "import", at.source, "m", "--quant", "int4")
    run([*line, "--store", at.store]).checked()
    sources = Sources(work / "sources", SIZE_GB)
    run(
        [*command(python, "import", sources.one_tensor(), "m"), "--store", work / "large"]
    ).checked()


def fill_many(folder: Path, python: str) -> None:
    """Make a store of 1,000 models, and list it once."""
    small = Path(__file__).resolve().parents[2] / "fixtures" / "pycode-5m"
    run(command(python, "import", small, "m0", "--store", folder)).checked()
    names = folder / "manifests" / "registry.ollama.ai" / "library"
    (first,) = (names / "m0").iterdir()
    for number in range(1, MODELS):
        (names / f"m{number}").mkdir()
        (names / f"m{number}" / first.name).write_bytes(first.read_bytes())
    run(command(python, "list", "--store", folder)).checked()


@contextmanager
def ready(at: Places) -> Iterator[None]:
    """Leave nothing of the command before, and the source in the page cache."""
    retire(at.target)
    os.sync()
    warm(at.source)
    yield
    retire(at.target)


def timed(row: Row, python: str, at: Places) -> Run:
    """Run a row once."""
    with ready(at):
        waiting = row(python, at)
        line = next(waiting)
        done = run(line).checked()
        next(waiting, None)
    return done


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        work = Path(folder)
        at = Places(work, Sources(work / "sources", SIZE_GB).shards())
        fill(at, options.before)
        for python in (options.before, options.after):
            fill_many(at.many(python), python)
        print(f"{machine(work)}\n", flush=True)
        table("command", "processor s, before / after", "wall s, before / after")
        for name in options.rows or ROWS:
            runs = [
                [timed(ROWS[name], python, at) for python in (options.before, options.after)]
                for _ in range(options.pairs)
            ]
            figures = (
                [statistics.median(getattr(pair[side], kind) for pair in runs) for side in (0, 1)]
                for kind in ("processor", "seconds")
            )
            show([name, *(f"{old:.2f} / {new:.2f} = {new / old:.2f}" for old, new in figures)])


if __name__ == "__main__":
    main()
