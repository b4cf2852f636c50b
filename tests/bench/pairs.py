"""Our commands in turn with other programs, or with another version of blobstore.

``python tests/bench/pairs.py [ROW …]`` runs each row's command and the program that does the same
work, alternately. ``--before PYTHON`` takes, instead of that program, the command of the version
that PYTHON's environment has. Each run is a process of its own, with a warm page cache and an empty
target. Printed are the medians of ``--pairs`` runs: processor and wall time in seconds, of the
other side and of ours, and their ratio. Servers are not counted, but those that the row starts.
Needs nginx, docker-registry and skopeo, the extras of the tests, and 15 GB under ``--work``.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import Run, retire, run
from sources import FULL_SIZE_GB, Sources, warm
from support import FIXTURES
from support.hub_stand_in import REPOSITORY, HubStandIn, repository_files
from support.nginx import nginx
from support.registries import CERTIFICATE, registry
from support.servers import server
from support.sparse import write_sparse_folder
from tables import machine, show, table

MODELS = 1000
TENSORS = 40_000
Line = list[str | Path]


@dataclass(frozen=True, slots=True)
class Places:
    """The folders of a run.

    Commands run in ``work``. There ``store`` has the model ``m``, int4, and ``exported`` is that
    for mlx-lm; ``large`` is a store with one blob of 2 GB; ``sparse`` a checkpoint of 40,000
    tensors, whose weights are holes; ``target`` is what a command writes, and gone before the next.
    """

    work: Path
    source: Path
    is_before: bool = False

    @property
    def many(self) -> Path:
        """A store of 1,000 models, and of this side's hints."""
        return self.work / ("many-before" if self.is_before else "many")


Side = Callable[[str, Places], AbstractContextManager[Line]]
"""Gives the command of a version, whose Python it takes, or of another program, while it runs."""


def ours(*words: str) -> Side:
    """Return a command of blobstore, with places as in ``{at.source}``."""
    return lambda python, at: nullcontext(
        [python, "-m", "blobstore", *(word.format(at=at) for word in words)]
    )


def program(text: str, *words: str) -> Side:
    return lambda python, _at: nullcontext([python, "-c", text, *words])


def shell(text: str) -> Side:
    """Return a line for sh, in which ``$PYTHON`` is ours."""
    return lambda python, at: nullcontext(
        ["sh", "-c", f"set -e; PYTHON={python}; {text.format(at=at)}"]
    )


def convert(*options: str, source: str = "{at.source}") -> str:
    return (
        f"$PYTHON -m mlx_lm convert --hf-path {source} --mlx-path target -q "
        f"{' '.join(options)} >/dev/null"
    )


FETCHED = """
import sys, blobstore
source = blobstore.open_folder(sys.argv[1], ca_file=sys.argv[2])
blobstore.import_model(source, "m", store=blobstore.open_store(sys.argv[3]), quant="int4")
"""


@contextmanager
def fetched(python: str, at: Places) -> Iterator[Line]:
    """Import from nginx on loopback, over TLS."""
    with nginx(at.work / "nginx", at.source, gzip=False, tls=True) as url:
        yield [python, "-c", FETCHED, f"{url}/", CERTIFICATE, "target"]


@contextmanager
def downloaded(python: str, at: Places) -> Iterator[Line]:
    """Download from a stand-in for the Hub on loopback, and convert."""
    with nginx(at.work / "nginx", at.source, gzip=False) as place, server() as hub:
        files = repository_files(at.source)
        hub.play(HubStandIn(files, lambda file: f"{place}/{file.name}"))
        here = at.work / "downloaded"
        url = hub.at("").rstrip("/")
        hf = f"HF_HUB_OFFLINE=0 HF_ENDPOINT={url} HF_HUB_DISABLE_XET=1 HF_HOME=target-home"
        download = f"{hf} $PYTHON -m huggingface_hub.cli.hf download {REPOSITORY}"
        options = ("--q-bits", "4", "--q-group-size", "32")
        text = f"{download} --local-dir {here} >/dev/null; {convert(*options, source=str(here))}"
        with shell(text)(python, at) as line:
            yield line
        retire(here)


@contextmanager
def pushed(python: str, at: Places, *, skopeo: bool = False) -> Iterator[Line]:
    with registry(at.work / "target") as server:
        name = f"{server.host}/a/m:b"
        if skopeo:
            yield [*SKOPEO, "oci-archive:m.tar", f"docker://{name}"]
        else:
            yield [python, "-m", "blobstore", "push", "m", "--store", "store", "--to", name]


@contextmanager
def pulled(python: str, at: Places, *, skopeo: bool = False) -> Iterator[Line]:
    with registry(at.work / "registry") as server:
        ours, theirs = f"{server.host}/a/m:b", f"{server.host}/a/m:oci"
        if not server.tags():
            push: Line = [sys.executable, "-m", "blobstore", "push", "m", "--store", "store"]
            run([*push, "--to", ours], at.work)
            run([*push, "--artifact", "oci", "--to", theirs], at.work)
        if skopeo:
            yield [*SKOPEO, f"docker://{theirs}", "dir:target"]
        else:
            yield [python, "-m", "blobstore", "pull", ours, "--store", "target"]


SKOPEO: tuple[str | Path, ...] = (
    *("skopeo", "copy", "--quiet", "--preserve-digests"),
    *("--src-tls-verify=false", "--dest-tls-verify=false"),
)
SERVED = """
import re, subprocess, sys, urllib.request
line = [sys.executable, "-m", "blobstore", "serve", "--port", "0", "--store", sys.argv[1]]
server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
address = re.search("http://[^ ]*/", server.stdout.readline())[0]
buffer = bytearray(2**20)
with urllib.request.urlopen(address + sys.argv[2]) as answer:
    while answer.readinto(buffer):
        pass
server.terminate()
server.wait()
"""


def blob(python: str, at: Places) -> AbstractContextManager[Line]:
    """Get a blob of 2 GB over /v2/, with the server's start."""
    largest = max((at.work / "large/blobs").iterdir(), key=lambda path: path.stat().st_size)
    path = f"v2/library/m/blobs/{largest.name.replace('-', ':')}"
    return nullcontext([python, "-c", SERVED, "large", path])


OPENED = """
import sys, blobstore
model = blobstore.open_model("m", store=blobstore.open_store(sys.argv[1]))
print(len([tensor.numpy() for tensor in model.values()]))
"""
OPENED_FILES = """
import pathlib, sys, ml_dtypes
from safetensors import safe_open
files = [safe_open(path, "np") for path in pathlib.Path(sys.argv[1]).glob("*.safetensors")]
print(len([file.get_tensor(name) for file in files for name in file.keys()]))
"""
LOADED = """
import sys, mlx.core as mx, blobstore
from blobstore import mlx_lm
network = mlx_lm.load("m", store=blobstore.open_store(sys.argv[1]))[0]
mx.eval(network.parameters())
"""
LOADED_FILES = """
import sys, mlx.core as mx, mlx_lm
mx.eval(mlx_lm.load(sys.argv[1])[0].parameters())
"""
COUNTED = """
import sys
from huggingface_hub.hf_api import get_local_safetensors_metadata
print(get_local_safetensors_metadata(sys.argv[1]).parameter_count)
"""
IMPORT = ("import", "{at.source}", "m", "--store", "target")
SYNCED = "find target -type f | xargs sync"
ROWS: dict[str, tuple[Side, Side | None]] = {
    "import int4": (
        ours(*IMPORT, "--quant", "int4", "--group-size", "32"),
        shell(convert("--q-bits", "4", "--q-group-size", "32")),
    ),
    "import mxfp8": (ours(*IMPORT, "--quant", "mxfp8"), shell(convert("--q-mode", "mxfp8"))),
    "import none": (
        ours(*IMPORT),
        shell("cp -r {at.source} target; sync; sha256sum target/* >/dev/null"),
    ),
    "import int4 over https": (fetched, downloaded),
    "verify": (
        ours("verify", "--store", "store"),
        shell("find store/blobs -type f | xargs -P 0 -n 16 sha256sum >/dev/null"),
    ),
    "export": (
        ours("export", "m", "target", "--store", "store", "--format", "mlx"),
        shell(f"cp -r exported target; {SYNCED}"),
    ),
    "open, all arrays": (program(OPENED, "store"), program(OPENED_FILES, "exported")),
    "load for mlx-lm": (program(LOADED, "store"), program(LOADED_FILES, "exported")),
    "inspect 40,000 tensors": (ours("inspect", "sparse", "--json"), program(COUNTED, "sparse")),
    "list 1,000 models": (ours("list", "--store", "{at.many}"), None),
    "save": (
        ours("save", "m", "--store", "store", "-o", "target"),
        shell("tar -C store -cf target blobs manifests; sync target"),
    ),
    "load": (
        ours("load", "m.tar", "--store", "target"),
        shell(f"mkdir target; tar -C target -xf m.tar; {SYNCED}"),
    ),
    "push": (pushed, partial(pushed, skopeo=True)),
    "pull": (pulled, partial(pulled, skopeo=True)),
    "blob of 2 GB": (blob, None),
    "first page": (program(SERVED, "store", ""), None),
}
"""What is run, by ours and by another program, if there is one."""


def fill(at: Places, python: str, tensor: Path) -> None:
    """Make what the rows read, with the version before or our own."""
    options = ("--quant", "int4", "--group-size", "32")
    ready = (
        ours("import", "{at.source}", "m", "--store", "store", *options),
        ours("export", "m", "exported", "--store", "store", "--format", "mlx"),
        ours("save", "m", "--store", "store", "-o", "m.tar"),
        ours("import", str(tensor), "m", "--store", "large"),
    )
    for side in ready:
        with side(python, at) as line:
            run(line, at.work)
    expert = ("BF16", (768, 2048))
    names = (
        f"model.layers.{i // 384}.mlp.experts.{i % 384}.up_proj.weight" for i in range(TENSORS)
    )
    write_sparse_folder(at.work / "sparse", dict.fromkeys(names, expert), {}, shards=8)


def fill_many(at: Places, python: str) -> None:
    """Make the store of 1,000 models, and list it once."""
    small = str(FIXTURES / "pycode-5m")
    with ours("import", small, "m0", "--store", "{at.many}")(python, at) as line:
        run(line, at.work)
    names = at.many / "manifests" / "registry.ollama.ai" / "library"
    (first,) = (names / "m0").iterdir()
    for number in range(1, MODELS):
        (names / f"m{number}").mkdir()
        (names / f"m{number}" / first.name).write_bytes(first.read_bytes())
    with ours("list", "--store", "{at.many}")(python, at) as line:
        run(line, at.work)


def timed(side: Side, python: str, at: Places) -> Run:
    """Run a side once, into an empty target."""
    retire(at.work / "target")
    os.sync()
    warm(at.source)
    with side(python, at) as line:
        done = run(line, at.work)
    retire(at.work / "target")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--before", metavar="PYTHON", help="an absolute path")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--size", type=float, default=FULL_SIZE_GB, help="GB of the source")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        sources = Sources(Path(folder), options.size)
        at = Places(Path(folder), sources.shards())
        sides = [(options.before or sys.executable, Places(at.work, at.source, is_before=True))]
        sides.append((sys.executable, at))
        fill(at, sides[0][0], sources.one_tensor())
        for python, place in sides:
            fill_many(place, python)
        print(f"{machine(at.work)}\n", flush=True)
        table("", "processor s, other / ours", "wall s, other / ours")
        for name in options.rows or ROWS:
            side, other = ROWS[name]
            both = (side if options.before else other, side)
            if both[0] is None:
                continue
            runs = [
                [timed(one, *how) for one, how in zip(both, sides, strict=True) if one is not None]
                for _ in range(options.pairs)
            ]
            show([name, *map(partial(cell, runs), ("processor", "seconds"))])


def cell(runs: list[list[Run]], kind: str) -> str:
    """Return the medians of both sides, and their ratio."""
    other, own = (statistics.median(getattr(pair[side], kind) for pair in runs) for side in (0, 1))
    return f"{other:.2f} / {own:.2f} = {own / other:.2f}"


if __name__ == "__main__":
    main()
