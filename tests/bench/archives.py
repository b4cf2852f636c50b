"""Archives: how small and how fast at each level, and `save` and `load` against other programs.

``python tests/bench/archives.py levels`` prints the size and the speed of zstandard's levels on the
blobs of the fixture, imported in several types. ``python tests/bench/archives.py peers [--mb N]
[--runs N] [--folder DIR]`` saves and loads a model of N megabytes in 300 blobs, half BF16 of normal
values and half random bytes, beside tar, zstd and skopeo. The runs of all programs alternate, and
a file that a program wrote is synced, which save and load do themselves. Ratios are of medians, of
time by the clock and of processor time.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes
import numpy as np
import zstandard
from support import PYCODE
from tables import show, table

import blobstore
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.workers import threads
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store
from blobstore.store.memory import MemoryStore

TYPES = {"int4": "int4", "nvfp4": "nvfp4", "mxfp8": "mxfp8", "BF16": None}
LEVELS = (-1, 1, 2, 3, 6, 9)
WINDOWS = (19, 21, 23)
BLOBS = 300
MB = 10**6


def levels() -> None:
    """Print the sizes and speeds of zstandard's levels and windows, one thread."""
    table("type", "level", "window", "of plain", "compress, MB/s", "decompress, MB/s")
    for kind, quant in TYPES.items():
        blobs = _tensor_blobs(quant)
        for level in LEVELS:
            _show_level(kind, blobs, level, None)
        for window in WINDOWS:
            _show_level(kind, blobs, 1, window)


def _tensor_blobs(quant: str | None) -> list[bytes]:
    store = MemoryStore()
    blobstore.import_model(PYCODE, "m", store=store, quant=quant)
    layers = store.manifests.read(store.find("m")).tensor_layers
    return [store.blobs.open(layer).read(0, layer.size) for layer in layers]


def _show_level(kind: str, blobs: list[bytes], level: int, window: int | None) -> None:
    more = {} if window is None else {"window_log": window}
    parameters = zstandard.ZstdCompressionParameters.from_level(level, **more)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    began = time.process_time()
    frames = [compressor.compress(blob) for blob in blobs]
    middle = time.process_time()
    for frame in frames:
        zstandard.decompress(frame)
    ended = time.process_time()
    nbytes = sum(map(len, blobs))
    show(
        [
            kind,
            str(level),
            "its own" if window is None else f"2^{window}",
            f"{sum(map(len, frames)) / nbytes:.4f}",
            f"{nbytes / MB / (middle - began):.0f}",
            f"{nbytes / MB / (ended - middle):.0f}",
        ]
    )


def peers(folder: Path, nbytes: int, runs: int) -> None:
    """Print how long each program takes, and what that is of `save` and `load`."""
    source = open_store(folder / "source")
    _fill(source, nbytes)
    print(f"{nbytes / MB:.0f} MB in {BLOBS} blobs, {threads(None)} cores, {runs} runs\n")
    for what, commands in _commands(folder).items():
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                times[name].append(_seconds(command, folder / "out"))
        ours = _medians(times["blobstore"])
        table(what, "s", "of blobstore", "processor time, s", "of blobstore")
        for name, found in times.items():
            pairs = zip(_medians(found), ours, strict=True)
            cells = [(f"{theirs:.2f}", f"{theirs / own:.2f}") for theirs, own in pairs]
            show([name, *cells[0], *cells[1]])
        print()


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    clock, processor = zip(*times, strict=True)
    return statistics.median(clock), statistics.median(processor)


def _commands(folder: Path) -> dict[str, dict[str, str]]:
    """Return shell commands that write to ``$OUT``, a folder that is new for each."""
    source, plain, packed = folder / "source", folder / "m.tar", folder / "m.tar.zst"
    ours = f"{sys.executable} -m blobstore"
    save, load = f"{ours} save m --store {source} -o $OUT", "--store $OUT"
    for path in (plain, packed):
        subprocess.run(
            ["sh", "-c", f"{ours} save m --store {source} -o {path}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    sync_all = "find $OUT -type f | xargs sync"
    tar = f"tar -C {source} -c blobs manifests"
    return {
        "save": {
            "blobstore": f"{save}/m.tar",
            "tar": f"{tar} -f $OUT/m.tar && sync $OUT/m.tar",
            "skopeo copy": f"skopeo copy oci-archive:{plain} oci-archive:$OUT/m.tar"
            " && sync $OUT/m.tar",
        },
        "save compressed": {
            "blobstore": f"{save}/m.tar.zst",
            **{
                f"tar, zstd -T0 -{level}": f"{tar} | zstd -q -T0 -{level} -o $OUT/m.zst"
                " && sync $OUT/m.zst"
                for level in (1, 3)
            },
        },
        "load": {
            "blobstore": f"{ours} load {plain} {load}",
            "tar": f"tar -C $OUT -xf {plain} && {sync_all}",
            "skopeo copy": f"skopeo copy oci-archive:{plain} oci:$OUT/m && {sync_all}",
        },
        "load compressed": {
            "blobstore": f"{ours} load {packed} {load}",
            "zstd, tar": f"zstd -qdc {packed} | tar -C $OUT -x && {sync_all}",
        },
    }


def _seconds(command: str, out: Path) -> tuple[float, float]:
    """Return the time of a command by the clock, and the processor time of its processes."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    began, before = time.monotonic(), _processor_s()
    subprocess.run(
        ["sh", "-c", command],
        check=True,
        env={**os.environ, "OUT": str(out)},
        stdout=subprocess.DEVNULL,
    )
    took = time.monotonic() - began, _processor_s() - before
    shutil.rmtree(out)
    return took


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _fill(store: Store, nbytes: int) -> None:
    rng, size = np.random.default_rng(0), nbytes // BLOBS // 2 * 2
    layers = []
    with store.session() as session:
        for number in range(BLOBS):
            blob = session.put(_blob(rng, size, is_random=number % 2 == 0))
            layers.append(Descriptor("application/x", blob.digest, blob.size, name=f"w{number}"))
        config = session.put(b"{}")
        manifest = Manifest(
            config=Descriptor("application/x", config.digest, 2), layers=tuple(layers)
        )
        session.publish(ModelName.parse("m"), manifest)


def _blob(rng: np.random.Generator, size: int, *, is_random: bool) -> bytes:
    if is_random:
        return rng.bytes(size)
    return rng.standard_normal(size // 2, np.float32).astype(ml_dtypes.bfloat16).tobytes()


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["levels", "peers"])
    parser.add_argument("--mb", type=int, default=600)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    if options.what == "levels":
        levels()
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        peers(Path(folder), options.mb * MB, options.runs)


if __name__ == "__main__":
    main()
