"""Commands to disturb, on small stores: those that change stores or files, or only read."""

import fcntl
import io
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from faults.lab.command import run
from faults.lab.stops import KILL, Action, Call
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint

import blobstore
from blobstore import hashing
from blobstore.cli.main import run as command_line
from blobstore.importer import writing
from blobstore.names import ModelName
from blobstore.store.archive.saving import save_models
from blobstore.store.care.prune import prune
from blobstore.store.local import session
from blobstore.store.local.store import Store, open_store, pack

Tensors = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Command:
    """A command to disturb: how to make its store, and its arguments.

    ``{work}`` in an argument is the folder, ``{store}`` the store in it. The command's process
    calls ``before`` first.
    """

    name: str
    prepare: Callable[[Path, Store], None]
    arguments: tuple[str, ...]
    before: Callable[[], None] = lambda: None


def same_calls() -> None:
    """Make a command do the same calls in the same order: one thread, each finished blob noted."""
    writing.SPARE_THREADS = 0
    session.NOTE_EVERY_S = -1
    hashing.width = lambda: 1


@contextmanager
def no_locks() -> Iterator[None]:
    """Take no locks, here and in all commands, as long as the block lasts."""
    real = fcntl.flock
    fcntl.flock = lambda _fd, _operation: None
    try:
        yield
    finally:
        fcntl.flock = real


def model(seed: str, **more: np.ndarray[Any, Any]) -> Tensors:
    """Return a small model's tensors: all but one are the same for every ``seed``."""
    return {**small_tensors(), "own.weight": normal(seed, 64, 64), **more}


def _add(
    work: Path, store: Store, name: str, tensors: Tensors | None = None, **options: Any
) -> None:
    source = write_checkpoint(work / "sources" / name, tensors or model(name))
    blobstore.import_model(source, name, store=store, jobs=1, **{"quant": "int4", **options})


def _beside(work: Path, store: Store) -> None:
    write_checkpoint(work / "new", model("new"))
    _add(work, store, "old")


def _damaged(work: Path, store: Store) -> None:
    """A flipped bit, a short blob, a missing one, and a manifest cut short that has a copy."""
    _beside(work, store)
    blobstore.import_model(work / "new", "new", store=store, quant="int4", jobs=1)
    flipped, short, missing = [
        store.blobs.path / layer.digest.file_name for layer in store.manifest(NEW).layers[:3]
    ]
    data = flipped.read_bytes()
    flipped.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    short.write_bytes(short.read_bytes()[:-1])
    missing.unlink()
    path = store.root.joinpath("manifests", *NEW.path_parts)
    path.write_bytes(path.read_bytes()[:-100])


def _killed(work: Path, store: Store) -> None:
    """An import was killed when its blobs were made, before the first was visible."""
    _beside(work, store)
    done = run(
        *("import", work / "new", "new", "--quant", "int4", "--jobs", "1", "--store", store.root),
        within=[work],
        decide=_kill_before_visible,
        before=same_calls,
    )
    if done.code != -9:
        raise AssertionError(done)


def _kill_before_visible(call: Call) -> Action | None:
    return KILL if call.name.startswith("rename") and "/blobs/sha256" in call.paths[-1] else None


def _large(work: Path, store: Store) -> None:
    """Tensors of several pieces, written past the page cache, whose scales are read back."""
    tensors = {"large.weight": normal("large", 4096, 640), "small": normal("small", 9)}
    write_checkpoint(work / "new", tensors)


def _two(work: Path, store: Store) -> None:
    """Two models that share most of their blobs."""
    _add(work, store, "old")
    _add(work, store, "other")


def _unneeded(work: Path, store: Store) -> None:
    """Blobs of a removed model and of a killed import, beside two models and a trash."""
    _two(work, store)
    for name in ("trashed", "gone"):
        _add(work, store, name, model(name, more=normal(name, 64, 64)))
        store.manifests.remove(ModelName.parse(name))
        if name == "trashed":
            prune(store, grace_s=0, sole_owner=True)
    _killed(work, store)


def _archived(work: Path, store: Store) -> None:
    """Two models, and a third in another store and in an archive."""
    _two(work, store)
    _add(work, other := open_store(work / "elsewhere"), "new")
    save_models("new", work / "new.tar.zst", store=other)


def _packable(work: Path, store: Store) -> None:
    """Two models: a large tensor differs a little, a small one differs, the others are shared."""
    large = normal("large", 192, 256, dtype=np.float32)
    for name, amount in (("old", 0.0), ("tuned", 1e-5)):
        changed = large + normal("amount", 192, 256, dtype=np.float32, scale=amount)
        tensors = model(name, more=changed.astype(ml_dtypes.bfloat16))
        _add(work, store, name, tensors, quant=None)


def _packed(work: Path, store: Store) -> None:
    _packable(work, store)
    pack(store, "tuned")


def _file(work: Path, store: Store) -> None:
    """A file with metadata, in the folder of the store, so that each run has its own."""
    store.blobs.path.mkdir(parents=True)
    data = safetensors_bytes({"x": normal("x", 64, 64)}, {"k": "o" * 2000, "other": "1"})
    (store.root / "m.safetensors").write_bytes(data)


NEW = ModelName.parse("new")
PRUNE_ALL = ("prune", "--grace", "0s", "--sole-owner", "--forget")
_IN = ("--store", "{store}")
_IMPORT = ("import", "{work}/new", "new", "--quant", "int4", "--jobs", "1", *_IN)
_REPAIR = ("repair", "new", "--from", "{work}/new", "--jobs", "1", *_IN)
_FROM = ("cp", "new", "--jobs", "1", "--to", "{store}", "--store", "{work}/elsewhere")
_EXPORT = ("export", "old", "{store}-out", "--jobs", "1", "--max-shard-size", "50000", *_IN)
_METADATA = ("metadata", "set", "{store}/m.safetensors", "k")
COMMANDS = (
    Command("import", _beside, _IMPORT),
    Command("import over damage", _damaged, (*_IMPORT, "--verify-reuse")),
    Command("import that was killed", _killed, _IMPORT),
    Command("import of a large tensor", _large, _IMPORT),
    Command("repair", _damaged, _REPAIR),
    Command("rm", _two, ("rm", "other", *_IN)),
    Command("cp over another", _two, ("cp", "old", "other", "--force", *_IN)),
    Command("cp from another store", _archived, _FROM),
    Command("mv over another", _two, ("mv", "old", "other", "--force", *_IN)),
    Command("load", _archived, ("load", "{work}/new.tar.zst", "--jobs", "1", *_IN)),
    Command("pack", _packable, ("pack", "old", "--jobs", "1", *_IN)),
    Command("unpack", _packed, ("unpack", "tuned", "--jobs", "1", *_IN)),
    Command("rm of a packed one", _packed, ("rm", "tuned", *_IN)),
    Command("prune", _unneeded, (*PRUNE_ALL, *_IN)),
    Command("prune undone", _unneeded, ("prune", "--undo", *_IN)),
)
FILE_COMMANDS = (
    Command("export", _two, _EXPORT),
    Command("save", _two, ("save", "old", "-o", "{store}-out.tar", "--jobs", "1", *_IN)),
    Command("metadata set in one sector", _file, (*_METADATA, "o" * 1990 + "n" * 10)),
    Command("metadata set in a longer header", _file, (*_METADATA, "n" * 9000)),
)
"""Commands that write a folder or a file, beside the store's own folders."""
READERS = (
    Command("list", _two, ("list", *_IN)),
    Command("show", _two, ("show", "old", "--tensors", "--coverage", *_IN)),
    Command("verify", _unneeded, ("verify", *_IN)),
)


def warm_up() -> None:
    """Do once what every fork would do again: import all modules, read the commands' parameters."""
    for module in pkgutil.walk_packages(blobstore.__path__, "blobstore."):
        if module.name.rpartition(".")[2] != "__main__":
            import_module(module.name)
    with redirect_stdout(io.StringIO()):
        command_line(["--version"])
