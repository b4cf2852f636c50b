"""Push to and pull from docker-registry on loopback, beside skopeo and beside one connection.

``python tests/bench/registry.py [--rounds N] [--folder FOLDER] [--only NAME,…] [--small]
[--blobs N] [--delay-ms N]`` prints a table for each of two models of random bytes: 2 GB in 300
blobs, and 5,000 blobs of 20 KB (``--small``: these alone; ``--blobs``: so many). ``--only``:
the runs whose names contain one of these. Every run has a new registry and a new target; the runs
of all programs are interleaved, and the sources are in the page cache. ``registry``: processor time
of docker-registry, which is part of every transfer. ``--delay-ms``: how long bytes take in each
direction, through a relay: on loopback many connections have nothing to gain but cores. skopeo's
own work grows with the square of the blobs in three of its forms, which 5,000 are not given.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.registries import Registry, registry, skopeo
from support.relay import relay

from blobstore import open_store
from blobstore.names import ModelName
from blobstore.store.registry.push_pull import RegistryAccess, pull, push

NAME = "library/bench:latest"
LAYER = "application/vnd.ollama.image.tensor"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"  # skopeo refuses such layers in others
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
SMALL, MANY = 100_000, 5000
QUADRATIC = {"skopeo from dir", "skopeo from oci", "skopeo to dir"}
"""What takes more than five minutes for 5,000 blobs: 43 s for 1,000, 272 s for 2,500."""
MODELS = {"2 GB in 300 blobs": (300, 2 * 10**9 // 300)}


@dataclass(frozen=True, slots=True)
class Model:
    """The same model in three forms: skopeo's folder, an OCI layout, and our store."""

    folder: Path
    layout: Path
    store: Path
    size: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """What a run took: of the clock, and of processors, by the client and by the registry."""

    wall: float
    client: float
    registry: float
    requests: int


Run = Callable[[Model, str, Path], None]
"""With the registry's host, and a folder for what is pulled."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--blobs", type=int, default=MANY)
    parser.add_argument("--delay-ms", type=float, default=0)
    arguments = parser.parse_args()
    delay_s = arguments.delay_ms / 1000
    models = MODELS | {f"{arguments.blobs:,} blobs of 20 KB": (arguments.blobs, 20_000)}
    for title, (count, nbytes) in models.items():
        if arguments.small and nbytes > SMALL:
            continue
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            model = made(Path(folder) / "source", count, nbytes)
            print(f"\n{title}, {model.size / 1e6:,.0f} MB")
            for kind, runs in (("push", PUSHES), ("pull", PULLS)):
                words = arguments.only.split(",")
                chosen = {
                    name: run for name, run in runs.items() if any(word in name for word in words)
                }
                if count >= MANY:
                    chosen = {name: run for name, run in chosen.items() if name not in QUADRATIC}
                rounds = arguments.rounds
                took = measured(model, Path(folder), kind, chosen, rounds, delay_s)
                show(kind, took, model)


def measured(
    model: Model, folder: Path, kind: str, runs: dict[str, Run], rounds: int, delay_s: float
) -> dict[str, list[Seconds]]:
    """Return what each run took in each round."""
    took = defaultdict(list)
    with registry(folder / "full") as full:
        if kind == "pull":
            push("bench", open_store(model.store), to=f"{full.host}/{NAME}")
        for _ in range(rounds):
            for name, run in runs.items():
                target = folder / "target"
                with registry(folder / "registry") as empty:
                    server = full if kind == "pull" else empty
                    took[name].append(seconds(run, model, server, target, delay_s))
                    if kind == "push":
                        assert not empty.incomplete()
                        assert len(empty.tags()) == 1
                shutil.rmtree(folder / "registry")
                shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(folder / "full")
    return took


def seconds(run: Run, model: Model, server: Registry, target: Path, delay_s: float = 0) -> Seconds:
    """Run once, perhaps through a relay that delays, and return what it took."""
    asked, served, used = server.log.count(" HTTP/1.1"), server.cpu_s(), client_s()
    with relay(server.port, delay_s=delay_s) if delay_s else nullcontext(server) as place:
        begin = time.perf_counter()
        run(model, place.host, target)
        wall = time.perf_counter() - begin
    time.sleep(0.2)  # the registry writes its last lines
    requests = server.log.count(" HTTP/1.1") - asked
    return Seconds(wall, client_s() - used, server.cpu_s() - served, requests)


def client_s() -> float:
    """Return the processor time of this process and of those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def show(kind: str, took: dict[str, list[Seconds]], model: Model) -> None:
    """Print one table: medians, and how much faster blobstore is in the same round."""
    ours = took.get("blobstore")
    print(
        f"{kind:6} {'seconds':>28} {'MB/s':>6} {'client':>7} {'registry':>8} {'requests':>8} ratio"
    )
    for name, runs in took.items():
        walls = " ".join(f"{one.wall:.2f}" for one in runs)
        middle = statistics.median(one.wall for one in runs)
        ratio = ""
        if ours is not None:
            pairs = zip(runs, ours, strict=True)
            ratio = f"{statistics.median(one.wall / mine.wall for one, mine in pairs):.2f}"
        print(
            f"  {name:22} {walls:>20} {model.size / middle / 1e6:6.0f} {runs[-1].client:7.2f}"
            f" {runs[-1].registry:8.2f} {runs[-1].requests:8} {ratio}"
        )


def made(folder: Path, count: int, nbytes: int) -> Model:
    """Make the model in all its forms, of hard links to one file for each blob."""
    model = Model(folder / "dir", folder / "layout", folder / "store", count * nbytes)
    blobs = model.layout / "blobs" / "sha256"
    for path in (model.folder, blobs, model.store / "blobs"):
        path.mkdir(parents=True)
    random = Random(16)
    entries: list[dict[str, Any]] = []
    for data in [b"{}", *(random.randbytes(nbytes) for _ in range(count))]:
        digits = hashlib.sha256(data).hexdigest()
        (blobs / digits).write_bytes(data)
        os.link(blobs / digits, model.folder / digits)
        os.link(blobs / digits, model.store / "blobs" / f"sha256-{digits}")
        name = {"name": f"layer{len(entries)}"} if entries else {}
        media_type = LAYER if entries else OCI_CONFIG
        entries.append({"mediaType": media_type, "digest": f"sha256:{digits}", "size": len(data)})
        entries[-1] |= name
    document = {"schemaVersion": 2, "mediaType": OCI_MANIFEST}
    document |= {"config": entries[0], "layers": entries[1:]}
    raw = json.dumps(document).encode()
    digits = hashlib.sha256(raw).hexdigest()
    (blobs / digits).write_bytes(raw)
    (model.folder / "manifest.json").write_bytes(raw)
    (model.folder / "version").write_text("Directory Transport Version: 1.1\n")
    (model.layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    entry = {"mediaType": OCI_MANIFEST, "digest": f"sha256:{digits}", "size": len(raw)}
    entry["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (model.layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    path = model.store.joinpath("manifests", *ModelName.parse("bench").path_parts)
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    return model


def push_with_skopeo(model: Model, host: str, _target: Path) -> None:
    """Push skopeo's folder."""
    copy(f"dir:{model.folder}", f"docker://{host}/{NAME}")


def push_layout_with_skopeo(model: Model, host: str, _target: Path) -> None:
    """Push the OCI layout."""
    copy(f"oci:{model.layout}:latest", f"docker://{host}/{NAME}")


def pull_with_skopeo(_model: Model, host: str, target: Path) -> None:
    """Pull to skopeo's folder, which takes one blob after the other."""
    copy(f"docker://{host}/{NAME}", f"dir:{target}")


def pull_layout_with_skopeo(_model: Model, host: str, target: Path) -> None:
    """Pull to an OCI layout, which takes six blobs at once."""
    copy(f"docker://{host}/{NAME}", f"oci:{target}:latest")


def copy(source: str, target: str) -> None:
    """Copy with skopeo, which must not compress the blobs."""
    flags = ("--preserve-digests", "--src-tls-verify=false", "--dest-tls-verify=false")
    skopeo("copy", "--quiet", *flags, source, target)


def ours(kind: str, connections: int | None = None) -> Run:
    """Return a run of blobstore, which pushes from our store or pulls to it."""
    access = RegistryAccess() if connections is None else RegistryAccess(connections=connections)

    def run(model: Model, host: str, target: Path) -> None:
        remote = f"{host}/{NAME}"
        if kind == "push":
            push("bench", open_store(model.store), to=remote, access=access)
        else:
            pull(remote, open_store(target), name="bench", access=access)

    return run


PUSHES: dict[str, Run] = {
    "blobstore": ours("push"),
    "blobstore, 1 connection": ours("push", 1),
    "skopeo from dir": push_with_skopeo,
    "skopeo from oci": push_layout_with_skopeo,
}
PULLS: dict[str, Run] = {
    "blobstore": ours("pull"),
    "blobstore, 1 connection": ours("pull", 1),
    "skopeo to dir": pull_with_skopeo,
    "skopeo to oci": pull_layout_with_skopeo,
}

if __name__ == "__main__":
    main()
