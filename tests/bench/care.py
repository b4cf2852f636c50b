"""How long `list`, `du` and `prune --dry-run` take on a store of very many models.

``python tests/bench/care.py [MODELS [BLOBS [FOLDER]]]`` makes a store of MODELS models (2,000) of
BLOBS blobs (300) each, all of them different and a few hundred bytes long, and one of half as many
models, and prints what each command takes on both: twice as many models should take twice as long.
Each command is a process of its own; the best of three runs counts, and of `list` also the first
run, which has every header to read. The second figure is the processor's time, for busy machines.
The first list's peer is a program that only opens, stats, reads and closes every blob.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS, BLOBS = 2000, 300
Seconds = tuple[float, float]
COMMANDS = {
    "list": ["list"],
    "list --json": ["list", "--json"],
    "du": ["du"],
    "prune --dry-run": ["prune", "--dry-run"],
}
RUNS = 3
FIRST, PEER = "list, the first time", "open, stat, read and close each blob"
PEER_PROGRAM = """
import os, sys
for name in os.listdir(sys.argv[1]):
    fd = os.open(f"{sys.argv[1]}/{name}", os.O_RDONLY)
    os.fstat(fd), os.pread(fd, 4096, 0), os.close(fd)
"""


def main() -> None:
    """Print the table."""
    models = int(sys.argv[1]) if len(sys.argv) > 1 else MODELS
    blobs = int(sys.argv[2]) if len(sys.argv) > 2 else BLOBS
    folder = Path(tempfile.mkdtemp(dir=sys.argv[3] if len(sys.argv) > 3 else None))
    try:
        table: dict[str, list[Seconds]] = {}
        for count in (models // 2, models):
            store = folder / str(count)
            made = time.perf_counter()
            fill(store, count, blobs)
            print(
                f"{count} models of {blobs} blobs, made in {time.perf_counter() - made:.0f} s",
                flush=True,
            )
            peer = [sys.executable, "-c", PEER_PROGRAM, str(store / "blobs")]
            table.setdefault(PEER, []).append(seconds(peer))
            table.setdefault(FIRST, []).append(seconds(command(store, ["list"])))
            for what, words in COMMANDS.items():
                line = command(store, words)
                table.setdefault(what, []).append(min(seconds(line) for _ in range(RUNS)))
            shutil.rmtree(store)
        print(f"\n| command | {models // 2:,} models | {models:,} models |\n|---|---|---|")
        for what, (half, whole) in table.items():
            print(
                f"| `{what}` | {half[0]:.2f} s ({half[1]:.2f} s) | {whole[0]:.2f} s "
                f"({whole[1]:.2f} s) |"
            )
        first, bare = table[FIRST][1], table[PEER][1]
        print(
            f"\nthe first list: {first[1] / models / blobs * 1e6:.1f} us of the processor a blob, "
            f"{first[1] / bare[1]:.1f} times its peer's; {first[0] / bare[0]:.1f} by the clock"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(store: Path, words: list[str]) -> list[str]:
    """Return the command line of a command on a store."""
    return [sys.executable, "-m", "blobstore", *words, "--store", str(store)]


def seconds(line: list[str]) -> Seconds:
    """Return how long a program takes, by the clock and by the processor."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.perf_counter() - started,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def fill(root: Path, models: int, blobs: int) -> None:
    """Write a store by hand, as an Ollama might have: each blob is a bias of 16 F32 values."""
    (root / "blobs").mkdir(parents=True)
    config = blob(root, b'{"model_format":"safetensors","file_type":"","architecture":"","os":""}')
    for number in range(models):
        layers = []
        for index in range(blobs):
            name = f"model.layers.{index // 7}.self_attn.{'qkvognd'[index % 7]}_proj.bias"
            header = json.dumps(
                {name: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}
            ).encode()
            data = (
                struct.pack("<Q", len(header))
                + header
                + hashlib.sha512(b"%d %d" % (number, index)).digest()
            )
            layers.append(
                {
                    "mediaType": "application/vnd.ollama.image.tensor",
                    **blob(root, data),
                    "name": name,
                }
            )
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", **config},
            "layers": layers,
        }
        path = root / f"manifests/registry.ollama.ai/library/m{number}/latest"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(manifest, separators=(",", ":")) + "\n")


def blob(root: Path, data: bytes) -> dict[str, object]:
    """Write a blob and return its digest and size."""
    digest = hashlib.sha256(data).hexdigest()
    fd = os.open(root / "blobs" / f"sha256-{digest}", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, data)
    os.close(fd)
    return {"digest": f"sha256:{digest}", "size": len(data)}


if __name__ == "__main__":
    main()
