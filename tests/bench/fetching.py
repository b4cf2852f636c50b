"""How fast a `Fetcher` fills memory, beside curl and beside the way through the HTTP library.

``python tests/bench/fetching.py`` makes a file of 1.88 GB, serves it by nginx on loopback, and
prints GB a second, and GB for each second of this process's processor time. With ``--url ADDRESS
--file NAME`` it fetches from another server, such as one behind a slow line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.nginx import nginx

from blobstore.io.http.client import HttpClient, Request
from blobstore.source.addresses import open_folder
from blobstore.source.weights import FetchOptions, SourceFile, fetching

SIZE = 1_880_000_000
SEGMENT = 16 * 2**20
Fill = Callable[[int, memoryview], object]


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--file", default="big")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--connections", type=int)
    options = parser.parse_args(arguments)
    if options.url:
        measure(options.url, options.file, options.threads, options.connections)
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "root").mkdir()
        with (folder / "root" / options.file).open("wb") as file:
            for _ in range(SIZE // 10**7):
                file.write(os.urandom(10**7))
        with nginx(folder / "nginx", folder / "root") as server:
            measure(server.url, options.file, options.threads, options.connections)


def measure(url: str, name: str, threads: Sequence[int], connections: int | None) -> None:
    """Print a row for each way."""
    with open_folder(url) as folder:
        reader = folder.open(name)
        file = SourceFile(folder, name, reader.name, reader.identity, reader.size, (), {})
        for count in threads:
            with fetching([file], FetchOptions(connections=connections)) as fetcher:

                def fill(begin: int, buffer: memoryview) -> None:
                    fetcher.fill(file, begin, buffer)  # used here

                show(f"Fetcher.fill, {count} threads", reader.size, fill, count)
        for count in threads:
            with HttpClient() as client:

                def through(begin: int, buffer: memoryview) -> None:
                    through_library(client, f"{url}/{name}", begin, buffer)

                show(f"through the library, {count} threads", reader.size, through, count)
    if shutil.which("curl"):
        began = time.perf_counter()
        subprocess.run(["curl", "-s", "-o", "/dev/null", f"{url}/{name}"], check=True)
        print(f"{'curl':34} {reader.size / (time.perf_counter() - began) / 1e9:6.2f} GB/s")


def through_library(client: HttpClient, url: str, begin: int, buffer: memoryview) -> None:
    """Read a body in pieces, as registries' blobs are."""
    fields = (("Range", f"bytes={begin}-{begin + len(buffer) - 1}"),)
    limits = client.limits(len(buffer) + 2**16)
    with client.request(Request("GET", (206,), fields), client.start(url), limits) as (reply, _):
        for _chunk in reply.body(len(buffer)):
            pass


def show(what: str, size: int, fill: Fill, threads: int) -> None:
    """Fetch everything, and print a row."""
    begins: Iterator[int] = iter(range(0, size, SEGMENT))
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(SEGMENT))
        while True:
            with lock:
                begin = next(begins, None)
            if begin is None:
                return
            fill(begin, buffer[: min(SEGMENT, size - begin)])

    began, used = time.perf_counter(), time.process_time()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    print(f"{what:34} {size / seconds / 1e9:6.2f} GB/s {size / used / 1e9:6.2f} GB/s of a core")


if __name__ == "__main__":
    main(sys.argv[1:])
