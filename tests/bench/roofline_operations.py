"""What roofline.py measures: an import, a verification, an export, a load; and its peers."""

from __future__ import annotations

import mmap
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hashing import PIECE
from import_limits import Took, Work, on_threads, work_of
from import_processes import blobstore_command, import_command, run
from import_sources import FIXTURE
from imports import CONTESTS, Contest, fresh, peer_command
from roofline_load import PAGE

from blobstore.io.workers import threads

HERE = Path(__file__).parent
METHODS = ("minmax", "search")
BY_TYPE = {contest.name: contest for contest in CONTESTS}

Command = Callable[[Path], Sequence[str | Path]]
"""Returns the line that fills an empty place."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another program that does the same: its name, and what measures its seconds."""

    name: str
    seconds: Callable[[Path], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Something that blobstore does with a large model, and with a tiny one.

    ``warmed``: the folder that it reads. ``is_mapped``: it reads maps, not into buffers.
    ``hashed``: bytes. ``written``: sizes of the files. ``quantized``: what the kernels do.
    """

    name: str
    ours: Command
    start: Command
    warmed: Path
    stored: int
    hashed: int = 0
    written: tuple[int, ...] = ()
    is_mapped: bool = False
    quantized: Work | None = None
    method: str = "minmax"
    peer: Peer | None = None

    @property
    def read(self) -> list[Path]:
        """The files that it reads."""
        if self.quantized is not None:
            return sorted(self.warmed.glob("*.safetensors"))
        return sorted(path for path in self.warmed.iterdir() if path.is_file())


def map_files(paths: Sequence[Path], count: int) -> Took:
    """Map files and read a byte of each page: what loading without a copy needs at least."""

    def read(path: Path) -> None:
        if nbytes := path.stat().st_size:
            with path.open("rb") as file:
                file_map = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
            np.frombuffer(file_map, np.uint8)[::PAGE].sum()
            file_map.close()

    return on_threads(read, paths, count)


def imports_of(source: Path, quant: str, *, with_mlx: bool) -> Iterator[Operation]:
    """Yield the imports of one type, by each method. Only the first method has a peer."""
    contest = BY_TYPE.get(quant)
    base = contest.ours if contest is not None else ("--quant", quant)
    work = work_of(source, *base)
    for method in METHODS if base else METHODS[:1]:
        options = base if method == METHODS[0] else (*base, "--method", method)
        is_compared = method == METHODS[0] and (with_mlx or not base)
        yield Operation(
            name=f"import {quant}{f', {method}' if base else ''}",
            ours=importing(source, *options),
            start=importing(FIXTURE, *options),
            warmed=source,
            stored=work.stored,
            hashed=work.stored,
            written=work.blobs,
            quantized=work,
            method=method,
            peer=peer_of(contest, source) if is_compared else None,
        )


def importing(source: Path, *options: str) -> Command:
    """Return the command that imports a checkpoint."""
    return lambda to: import_command(source, to, *options)


def peer_of(contest: Contest | None, source: Path) -> Peer | None:
    """Return the peer of an import, if there is one."""
    if contest is None:
        return None
    command = partial(peer_command, contest, source)
    return Peer(contest.peer_name, lambda to: fresh(command, source, to).seconds)


def uses_of(source: Path, quant: str, root: Path) -> Iterator[Operation]:
    """Yield the other operations, on a model of that type in a store of its own below ``root``."""
    options = () if quant == "none" else ("--quant", quant)
    store, tiny = root / f"store-{quant}", root / f"tiny-{quant}"
    for folder, checkpoint in ((store, source), (tiny, FIXTURE)):
        shutil.rmtree(folder, ignore_errors=True)
        run(import_command(checkpoint, folder, *options)).checked()
    blobs = store / "blobs"
    stored = sum(path.stat().st_size for path in blobs.iterdir())

    def operation(
        name: str, command: Callable[[Path, Path], Sequence[str | Path]], **moved: Any
    ) -> Operation:
        return Operation(
            name=f"{name} {quant}",
            ours=partial(command, store),
            start=partial(command, tiny),
            warmed=blobs,
            stored=stored,
            **moved,
        )

    yield operation("verify", verify_command, hashed=stored, peer=hashlib_of(stored))
    yield operation(
        "export", export_command, written=exported(store, root / "target"), peer=copying(blobs)
    )
    yield operation(
        "load",
        load_command,
        is_mapped=True,
        peer=reading(source) if quant == "none" else None,
    )
    yield operation("load and verify", verified_load_command, is_mapped=True, hashed=stored)


def verify_command(store: Path, _: Path) -> Sequence[str | Path]:
    """Return the line that verifies a store."""
    return [sys.executable, "-m", "blobstore", "verify", "--store", store, "--json"]


def export_command(store: Path, target: Path) -> Sequence[str | Path]:
    """Return the line that exports a store's model."""
    return blobstore_command("export", Path("bench"), target, "--store", store)


def load_command(store: Path, _: Path, *options: str) -> Sequence[str | Path]:
    """Return the line that loads a store's model."""
    return [sys.executable, HERE / "roofline_load.py", "bench", store, *options]


def verified_load_command(store: Path, target: Path) -> Sequence[str | Path]:
    """Return the line that loads a store's model and hashes it."""
    return load_command(store, target, "verify")


def exported(store: Path, target: Path) -> tuple[int, ...]:
    """Return the sizes of the files of an export."""
    shutil.rmtree(target, ignore_errors=True)
    run(export_command(store, target)).checked()
    sizes = tuple(path.stat().st_size for path in sorted(target.rglob("*")) if path.is_file())
    shutil.rmtree(target)
    return sizes


def hashlib_of(nbytes: int) -> Peer:
    """Return hashlib on as many bytes in memory, divided by the cores."""

    def seconds(_: Path) -> float:
        piece_s = float(run([sys.executable, HERE / "hashing.py", "hashlib"]).checked().output)
        return piece_s * nbytes / PIECE / threads(None)

    return Peer("hashlib in memory / cores", seconds)


def copying(folder: Path) -> Peer:
    """Return ``cp -r`` of a folder, and a ``sync``."""

    def command(to: Path) -> Sequence[str | Path]:
        return ["sh", "-c", 'cp -r "$0" "$1" && sync', folder, to]

    return Peer("cp -r; sync", lambda to: fresh(command, folder, to).seconds)


def reading(folder: Path) -> Peer:
    """Return safetensors' reading of all tensors of a folder."""

    def command(_: Path) -> Sequence[str | Path]:
        return [sys.executable, HERE / "roofline_load.py", folder]

    return Peer("safe_open, all tensors", lambda to: fresh(command, folder, to).seconds)
