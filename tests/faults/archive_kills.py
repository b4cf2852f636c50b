"""SIGKILL at random moments of ``save`` and ``load``: ``python tests/faults/archive_kills.py``.

Each kill is followed by the same command once more, until it completes. A killed ``save`` leaves no
file of the archive's name, and at most one temporary file, which the next one takes over. A killed
``load`` leaves no model, and a store that ``verify`` finds sound; the next one reads fewer bytes,
because blobs that were complete are taken over.

``--count``: kills of each command. Prints its figures; the exit code is 1 if one that has to be 0
is not.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from blobstore.errors import NotFoundError
from blobstore.names import Digest, ModelName
from blobstore.store.archive.archive import open_archive
from blobstore.store.local.store import Store, open_store
from blobstore.store.ports import Readable
from blobstore.testing.blobs import commit, data_of

_BLOBS = 60
_BLOB_NBYTES = 1_500_000
_NAME = ModelName.parse("m")


def _command(*words: str | Path) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "blobstore", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL)


def _killed(words: tuple[str | Path, ...], after_s: float) -> bool:
    """Run a command, kill it after so long; return whether it was killed before it ended."""
    with _command(*words) as process:
        try:
            code = process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait() == -9
    if code != 0:
        raise AssertionError(f"{words} ended with {code}")
    return False


def experiment(folder: Path, count: int, seed: int) -> Counter[str]:
    """Return figures: kills, and what was seen that must not be."""
    source = open_store(folder / "source")
    commit(source, "m", *(data_of(_BLOB_NBYTES, number) for number in range(_BLOBS)))
    moments, figures = random.Random(seed), Counter[str]()
    for suffix in (".tar", ".tar.zst"):
        path = folder / f"m{suffix}"
        saving = ("save", "m", "-o", path, "--force", "--store", source.root)
        _repeat(saving, count // 2, moments, figures, partial(_check_save, path, source, figures))
        target = folder / f"target{suffix}"
        loading = ("load", path, "--store", target)
        _repeat(
            loading, count // 2, moments, figures, partial(_check_load, target, source, figures)
        )
    return figures


def _repeat(
    words: tuple[str | Path, ...],
    count: int,
    moments: random.Random,
    figures: Counter[str],
    check: Callable[[], None],
) -> None:
    """Kill a command so often, at moments within the time that it takes."""
    began = time.monotonic()
    if _killed(words, 600):
        raise AssertionError("the first run takes too long")
    takes_s = time.monotonic() - began
    made, kept = Path(str(words[-1])), Path(str(words[3]))
    target = kept if words[0] == "save" else made
    done = 0
    while done < count:
        _remove(target)
        while done < count and _killed(words, moments.uniform(0.2, 1.0) * takes_s):
            done += 1
            figures[f"kills of {words[0]}"] += 1
            check()
    if target != made:
        _remove(target)
    if _killed(words, 600):
        raise AssertionError("the last run takes too long")
    check()
    figures[f"{words[0]} completed"] += 1


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)


def _check_save(path: Path, source: Store, figures: Counter[str]) -> None:
    """Count an archive that is there but not whole, and temporary files beside the first."""
    left = list(path.parent.glob(f".{path.name}.*"))
    figures["files left behind"] += max(0, len(left) - 1)
    if path.exists():
        with open_archive(path) as archive:
            _check_whole(archive, source, figures)


def _check_load(target: Path, source: Store, figures: Counter[str]) -> None:
    """Count a model that is visible but not whole, and blobs with other bytes."""
    store = open_store(target)
    figures["damaged blobs"] += sum(
        Digest.of(path.read_bytes()).file_name != path.name
        for path in store.blobs.path.glob("sha256-*")
    )
    try:
        store.find(_NAME)
    except NotFoundError:
        return
    _check_whole(store, source, figures)


def _check_whole(home: Readable, source: Store, figures: Counter[str]) -> None:
    manifest = home.manifests.read(_NAME)
    is_whole = manifest == source.manifests.read(_NAME) and not home.blobs.missing(manifest.layers)
    figures["partial models"] += not is_whole


def main() -> int:
    """Print the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = experiment(Path(folder), options.count, options.seed)
    for what, number in sorted(figures.items()):
        sys.stdout.write(f"{what}: {number}\n")
    return int(
        any(figures[what] for what in ("files left behind", "damaged blobs", "partial models"))
    )


if __name__ == "__main__":
    sys.exit(main())
