"""Time, requests and bytes for the headers of published checkpoints from nginx on loopback.

``python tests/bench/remote.py`` prints a table: the best of some rounds, with blobstore, and with
huggingface_hub's function for one file called by 16 threads (names known, no index). Both keep
their connections from round to round. Loopback has no distance: what is measured is what a client
does beside waiting.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.corpus import INDEX_NAME
from support.nginx import Nginx, nginx
from support.published import COUNTS, shards, write
from support.remotes import Remote, hub_folder, open_all

from blobstore.formats.safetensors.header import header_of as read_header
from blobstore.source.files import MAX_INDEX, ShardIndex

ROUNDS = 5
MANY = "many-tensors"
ONE_FILE = "model.safetensors"


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as server:
        print(
            f"{'repository':30} {'files':>5} {'requests':>8} {'KB':>7} {'seconds':>8} "
            f"{'huggingface_hub':>16}"
        )
        for repository in [*COUNTS, MANY]:
            sharded = repository in COUNTS and len(shards(repository)) > 1
            server.requests()
            with Remote() as remote:
                read_all(remote, server.url, repository, sharded=sharded)
                asked = server.requests()
                ours = best(partial(read_all, remote, server.url, repository, sharded=sharded))
            names = sorted(shards(repository)) if sharded else [ONE_FILE]
            theirs = best(partial(read_with_hub, server.url, repository, names))
            kilobytes = sum(request.sent for request in asked) / 1000
            print(
                f"{repository:30} {len(names):5} {len(asked):8} {kilobytes:7.0f} {ours:8.3f} "
                f"{theirs:16.3f}"
            )


@contextmanager
def served(folder: Path) -> Iterator[Nginx]:
    """Serve all repositories, and one of a header of 100,000 tensors."""
    root = folder / "root"
    for repository in COUNTS:
        write(repository, root / repository / "resolve" / "main")
    many = root / MANY / "resolve" / "main" / ONE_FILE
    many.parent.mkdir(parents=True)
    entry = (
        b'"model.layers.%05d.mlp.experts.down_proj.weight":{"dtype":"F32","shape":[1,1],'
        b'"data_offsets":[%d,%d]}'
    )
    entries = (entry % (number, 4 * number, 4 * number + 4) for number in range(100_000))
    text = b"{" + b",".join(entries) + b"}"
    many.write_bytes(struct.pack("<Q", len(text)) + text + bytes(400_000))
    with nginx(folder / "nginx", root, gzip=False) as server:
        yield server


def best(call: Callable[[], None]) -> float:
    """Return the seconds of the fastest round."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def read_all(remote: Remote, url: str, repository: str, *, sharded: bool) -> None:
    """Read the index, where there is one, and all headers."""
    folder = hub_folder(remote, repository, endpoint=url)
    names = [ONE_FILE]
    if sharded:
        names = sorted(
            set(ShardIndex.parse(folder.read(INDEX_NAME, MAX_INDEX)).weight_map.values())
        )
    for reader in open_all(folder, names):
        read_header(reader)


def read_with_hub(url: str, repository: str, names: list[str]) -> None:
    """Read all headers with huggingface_hub."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=url, token=False)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: api.parse_safetensors_file_metadata(repository, name), names))


if __name__ == "__main__":
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    main()
