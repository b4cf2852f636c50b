"""The sides of afar.py: imports from servers, and the peers that download first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from import_processes import ENVIRONMENT, Run, Sampler, run
from import_sources import warm
from retired import retire
from support.hub_stand_in import REPOSITORY, RunningHub, hub_stand_in
from support.nginx import Nginx, nginx
from support.wire import FarNetwork

QUANT = ("--quant", "int4", "--group-size", "32")
CONVERT = ("-q", "--q-bits", "4", "--q-group-size", "32")
NEAR = FarNetwork("127.0.0.1", ())
Command = list[str | Path]


@dataclass(frozen=True, slots=True)
class Servers:
    """The checkpoint on a plain web server and on the Hub, and where its users write."""

    source: Path
    web: Nginx
    hub: RunningHub
    target: Path

    @property
    def store(self) -> Path:
        """Where imports write."""
        return self.target / "store"

    @property
    def environment(self) -> dict[str, str]:
        """In which commands find the Hub."""
        kept = {key: value for key, value in ENVIRONMENT.items() if not key.startswith("HF_")}
        home = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.target / "home")}
        return kept | home | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def sent(self) -> int:
        """Return the bytes of bodies that both servers sent since the last call."""
        both = (*self.web.requests(), *self.hub.store.requests())
        return sum(request.body for request in both)

    def run(self, commands: list[Command], sample: Sampler | None = None) -> list[Run]:
        """Run commands one after the other, with the source in the page cache.

        The target is not there before. Raises: SystemExit when one fails.
        """
        retire(self.target)
        self.target.mkdir()
        os.sync()
        warm(self.source)
        return [run(line, sample, environment=self.environment).checked() for line in commands]


@contextmanager
def serving(source: Path, work: Path, network: FarNetwork = NEAR) -> Iterator[Servers]:
    """Serve a checkpoint from a network, for as long as the block lasts."""
    host, within = network.host, network.within
    with (
        hub_stand_in(work / "hub", source, host=host, within=within) as hub,
        nginx(work / "web", source, gzip=False, host=host, within=within) as web,
    ):
        yield Servers(source, web, hub, work / "target")


@dataclass(frozen=True, slots=True)
class Side:
    """What is timed: commands, one after the other."""

    name: str
    commands: Callable[[Servers], list[Command]]


def importing(source: str | Path, servers: Servers, *options: str) -> Command:
    """Return the line of our import."""
    line: Command = [sys.executable, "-m", "blobstore", "import", str(source), "bench", "--json"]
    return [*line, "--store", servers.store, *QUANT, *options]


def _downloading(servers: Servers) -> Command:
    line: Command = [sys.executable, "-m", "huggingface_hub.cli.hf", "download", REPOSITORY]
    return [*line, "--local-dir", servers.target / "here"]


def _converting(servers: Servers) -> Command:
    line: Command = [
        sys.executable,
        "-m",
        "mlx_lm",
        "convert",
        "--hf-path",
        servers.target / "here",
    ]
    return [*line, "--mlx-path", servers.target / "mlx", *CONVERT]


def _reading(servers: Servers) -> Command:
    """Return the line that only reads all weights, in two ranges of each file at once."""
    each = []
    for path in sorted(servers.source.glob("*.safetensors")):
        half = path.stat().st_size // 2
        for part in (f"0-{half - 1}", f"{half}-"):
            each.append(f"curl -sf -o /dev/null -r {part} {servers.web.url}/{path.name} &")
    return ["sh", "-c", " ".join([*each, "wait"])]


LOCAL = Side("import of the folder", lambda at: [importing(at.source, at)])
WEB = Side("import of https://", lambda at: [importing(at.web.url, at)])
HUB = Side("import of hf://", lambda at: [importing(f"hf://{REPOSITORY}", at)])
READING = Side("curl, two ranges a file", lambda at: [_reading(at)])
DOWNLOAD = Side("hf download", lambda at: [_downloading(at)])
CONVERSION = Side("hf download, mlx_lm convert", lambda at: [_downloading(at), _converting(at)])
