"""Commands to disturb, on small stores: those that change stores, write files, or only read."""

from __future__ import annotations

import fcntl
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from faults.lab.command import Action, Kill, run
from faults.lab.stops import Call
from support.checkpoints import (
    LLAMA_CONFIG,
    normal,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)

import blobstore
from blobstore import hashing
from blobstore.cli import main as cli
from blobstore.errors import BlobStoreError
from blobstore.importer import writing as write
from blobstore.io import durable as files
from blobstore.names import ModelName
from blobstore.store.archive.saving import save_models
from blobstore.store.care.prune import prune
from blobstore.store.local import session
from blobstore.store.local.store import Store, open_store, pack


@dataclass(frozen=True, slots=True)
class Command:
    """A command to disturb: how to make its store, its arguments, changes to its process.

    ``{work}`` in an argument is the folder, ``{store}`` the store in it. ``program`` is run with
    the store's folder instead of the command line.
    """

    name: str
    prepare: Callable[[Path, Store], None]
    arguments: tuple[str, ...]
    before: Callable[[], None] = lambda: None
    program: Callable[[Path], None] | None = None


def as_it_is() -> None:
    """Make a command do the same calls in the same order: one thread, each finished blob noted."""
    write._SPARE_THREADS = 0
    session._NOTE_EVERY_S = -1


def one_blob_at_a_time() -> None:
    """Make a transfer do the same calls in the same order, too."""
    as_it_is()
    hashing.width = lambda: 1


def without_syncfs() -> None:
    """As on a file system whose syncfs is not trusted: every file is synced when it is finished."""
    as_it_is()
    files._WITH_SYNCFS = frozenset()


@contextmanager
def no_locks() -> Iterator[None]:
    """Take no locks, here and in all commands, as long as the block lasts."""
    real = fcntl.flock
    fcntl.flock = lambda _fd, _operation: None
    try:
        yield
    finally:
        fcntl.flock = real


def model(seed: str, **more: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return a small model's tensors: all but one are the same for every ``seed``."""
    return {**small_tensors(), "own.weight": normal(seed, 64, 64), **more}


def _add(
    work: Path, store: Store, name: str, tensors: Mapping[str, np.ndarray[Any, Any]], **options: Any
) -> None:
    blobstore.import_model(
        write_checkpoint(work / "sources" / name, tensors), name, store=store, jobs=1, **options
    )


def _source(work: Path, tensors: Mapping[str, np.ndarray[Any, Any]] | None = None) -> None:
    write_checkpoint(
        work / "new",
        model("new") if tensors is None else tensors,
        {**LLAMA_CONFIG, "num_hidden_layers": 1},
    )


def _fresh(work: Path, store: Store) -> None:
    _source(work)


def _beside(work: Path, store: Store) -> None:
    _source(work)
    _add(work, store, "old", model("old"), quant="int4")


def _over(work: Path, store: Store) -> None:
    _beside(work, store)
    _add(work, store, "new", model("older"), quant="int8")


def _damaged(work: Path, store: Store) -> None:
    """The model is there, with a flipped bit, a blob that is too short and one that is missing."""
    _beside(work, store)
    blobstore.import_model(work / "new", "new", store=store, quant="int4", jobs=1)
    flipped, short, missing = [
        store.blobs.path / layer.digest.file_name for layer in store.manifest(NEW).layers[:3]
    ]
    data = flipped.read_bytes()
    flipped.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    short.write_bytes(short.read_bytes()[:-1])
    missing.unlink()


def _without_manifest(work: Path, store: Store) -> None:
    """A model's manifest is cut short; a copy of it is there."""
    _damaged(work, store)
    path = store.root.joinpath("manifests", *NEW.path_parts)
    path.write_bytes(path.read_bytes()[:-100])


def _resumed(work: Path, store: Store) -> None:
    """An import was killed when its blobs were made."""
    _beside(work, store)
    _leave(work, store)


def _leave(work: Path, store: Store) -> None:
    done = run(
        *("import", work / "new", "new", "--quant", "int4", "--jobs", "1", "--store", store.root),
        within=[work],
        decide=kill_before_visible,
        before=as_it_is,
    )
    if done.code != -9:
        raise AssertionError(done)


def _large(work: Path, store: Store) -> None:
    """Tensors of several pieces, written past the page cache, whose scales are read back."""
    _source(work, {"large.weight": normal("large", 4096, 640), "small": normal("small", 9)})


def _experts(work: Path, store: Store) -> None:
    experts = {
        f"model.layers.0.mlp.experts.{expert}.{projection}.weight": normal(
            f"{expert}{projection}", 64, 64
        )
        for expert in range(4)
        for projection in ("down_proj", "up_proj")
    }
    _source(work, {"norm": normal("norm", 64), **experts})


def two(work: Path, store: Store) -> None:
    """Add two models that share most of their blobs."""
    _add(work, store, "old", model("old"), quant="int4")
    _add(work, store, "other", model("other"), quant="int4")


def _unneeded(work: Path, store: Store) -> None:
    """Blobs of a removed model and of a killed import, beside two models and a trash."""
    _resumed(work, store)
    _add(work, store, "other", model("other"), quant="int4")
    for gone in ("gone", "gone too"):
        _add(
            work,
            store,
            gone.replace(" ", "-"),
            model(gone, more=normal(gone, 64, 64)),
            quant="int4",
        )
        store.manifests.remove(ModelName.parse(gone.replace(" ", "-")))
        if gone == "gone":
            prune(store, grace_s=0, sole_owner=True)
            _leave(work, store)


def _elsewhere(work: Path, store: Store) -> None:
    """Two models, and a third in another store."""
    two(work, store)
    _add(work, open_store(work / "elsewhere"), "new", model("new"), quant="int4")


def _archived(work: Path, store: Store) -> None:
    """Two models, and a third in an archive."""
    _elsewhere(work, store)
    save_models("new", work / "new.tar.zst", store=open_store(work / "elsewhere"), replace=True)


def _packable(work: Path, store: Store) -> None:
    """Two models: a large tensor differs a little, a small one differs, the others are shared."""
    large = normal("large", 192, 256, dtype=np.float32)
    for name, amount in (("old", 0.0), ("tuned", 1e-5)):
        changed = large + normal("amount", 192, 256, dtype=np.float32, scale=amount)
        _add(work, store, name, model(name, more=changed.astype(ml_dtypes.bfloat16)))


def _packed(work: Path, store: Store) -> None:
    _packable(work, store)
    pack(store, "tuned")


def _checkpoint(work: Path, store: Store) -> None:
    """A checkpoint in the Hugging Face cache: other files, two shards, a Modelfile and a draft."""
    two(work, store)
    repository = work / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    blobs = repository / "blobs"
    for folder in (snapshot / "sub", blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    tensors = model("hub")
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[:4],
        "model-00002-of-00002.safetensors": names[4:],
    }
    files = {
        "config.json": json.dumps(LLAMA_CONFIG).encode(),
        "tokenizer.json": b'{"version":"1.0"}',
        "generation_config.json": b'{"temperature":0.5}',
        "chat_template.jinja": b"{{ messages }}",
        "sub/README.md": b"text",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
        ).encode(),
        **{
            shard: safetensors_bytes({name: tensors[name] for name in held})
            for shard, held in shards.items()
        },
    }
    for number, (name, data) in enumerate(files.items()):
        (blobs / f"{number:040x}").write_bytes(data)
        (snapshot / name).symlink_to(
            os.path.relpath(blobs / f"{number:040x}", (snapshot / name).parent)
        )
    write_checkpoint(work / "draft", {"draft.weight": normal("draft", 64, 64)})
    (work / "policy.toml").write_text('quant = "int8"\n')
    (work / "Modelfile").write_text(
        "FROM hub/models--org--name\nSYSTEM text\nPARAMETER temperature 0.5\n"
    )


def _file(work: Path, store: Store) -> None:
    """A file with metadata, in the folder of the store, so that each run has its own."""
    work.mkdir(exist_ok=True)
    store.root.mkdir()
    data = safetensors_bytes({"x": normal("x", 64, 64)}, {"k": "o" * 2000, "other": "1"})
    (store.root / "m.safetensors").write_bytes(data)
    (store.root / "blobs").mkdir()


def _open(root: Path) -> None:
    """Use a store by the library, and end like the command line."""
    try:
        with blobstore.open_model("old", store=open_store(root), verify=True) as opened:
            sums = [float(opened[name].dequantize().sum()) for name in opened]
            sys.stdout.write(f"{sums} {opened['own.weight'].torch()} {opened['own.weight'].mlx()}")
    except BlobStoreError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(1) from None


NEW = ModelName.parse("new")
PRUNE_ALL = ("prune", "--grace", "0s", "--sole-owner", "--forget")
_IMPORT = ("import", "{work}/new", "new", "--jobs", "1", "--store", "{store}")
_REPAIR = ("repair", "new", "--from", "{work}/new", "--jobs", "1", "--store", "{store}")
_QUANTIZED = (*_IMPORT, "--quant", "int4")
COMMANDS = (
    Command("import", _fresh, _IMPORT, as_it_is),
    Command("import quantized", _fresh, _QUANTIZED, as_it_is),
    Command("import beside another", _beside, _QUANTIZED, as_it_is),
    Command("import over an older one", _over, _QUANTIZED, as_it_is),
    Command("import over damage", _damaged, (*_QUANTIZED, "--verify-reuse"), as_it_is),
    Command("import that was killed", _resumed, _QUANTIZED, as_it_is),
    Command("import of a large tensor", _large, _QUANTIZED, as_it_is),
    Command("import of experts", _experts, _QUANTIZED, as_it_is),
    Command("import without syncfs", _beside, _QUANTIZED, without_syncfs),
    Command("repair", _damaged, _REPAIR, as_it_is),
    Command("repair of a manifest", _without_manifest, _REPAIR, as_it_is),
    Command("rm", two, ("rm", "other", "--store", "{store}")),
    Command("cp", two, ("cp", "old", "third", "--store", "{store}")),
    Command("cp over another", two, ("cp", "old", "other", "--force", "--store", "{store}")),
    Command(
        "cp from another store",
        _elsewhere,
        ("cp", "new", "--jobs", "1", "--to", "{store}", "--store", "{work}/elsewhere"),
        as_it_is,
    ),
    Command(
        "load",
        _archived,
        ("load", "{work}/new.tar.zst", "--jobs", "1", "--store", "{store}"),
        as_it_is,
    ),
    Command("mv", two, ("mv", "old", "third", "--store", "{store}")),
    Command("mv over another", two, ("mv", "old", "other", "--force", "--store", "{store}")),
    Command("pack", _packable, ("pack", "old", "--jobs", "1", "--store", "{store}")),
    Command(
        "unpack",
        _packed,
        ("unpack", "tuned", "--jobs", "1", "--store", "{store}"),
        one_blob_at_a_time,
    ),
    Command("rm of a packed one", _packed, ("rm", "tuned", "--store", "{store}")),
    Command("mv of a packed one", _packed, ("mv", "tuned", "third", "--store", "{store}")),
    Command("prune", _unneeded, (*PRUNE_ALL, "--store", "{store}")),
    Command("prune undone", _unneeded, ("prune", "--undo", "--store", "{store}")),
)


_METADATA = ("metadata", "set", "{store}/m.safetensors", "k")
FILE_COMMANDS = (
    Command(
        "export",
        two,
        (
            *("export", "old", "{store}-out", "--jobs", "1"),
            *("--max-shard-size", "50000", "--store", "{store}"),
        ),
    ),
    Command("metadata set in one sector", _file, (*_METADATA, "o" * 1990 + "n" * 10)),
    Command("metadata set in several sectors", _file, (*_METADATA, "n" * 2000)),
    Command("metadata set with a longer header", _file, (*_METADATA, "n" * 9000)),
)
"""Commands that write a folder or a file, beside the store's own folders."""
_HUB = "{work}/hub/models--org--name"
_OTHER_IMPORT = ("import", "--jobs", "1", "--store", "{store}")
READERS = (
    Command("list", two, ("list", "--store", "{store}")),
    Command("show", two, ("show", "old", "--tensors", "--coverage", "--store", "{store}")),
    Command("inspect", _checkpoint, ("inspect", _HUB, "--store", "{store}")),
    Command("plan", _checkpoint, ("plan", _HUB, "--quant", "int4")),
    Command(
        "import a Modelfile",
        _checkpoint,
        (*_OTHER_IMPORT, "--modelfile", "{work}/Modelfile", "new"),
        as_it_is,
    ),
    Command(
        "import with a policy and a draft",
        _checkpoint,
        (*_OTHER_IMPORT, "{work}/draft", "new", "--policy", "{work}/policy.toml", "--draft", _HUB),
        as_it_is,
    ),
    Command("verify", _unneeded, ("verify", "--store", "{store}")),
    Command("du", _unneeded, ("du", "--store", "{store}")),
    Command("prune tried", _unneeded, ("prune", "--dry-run", "--store", "{store}")),
    Command("diff", two, ("diff", "old", "other", "--error", "--store", "{store}")),
    Command("the library", two, ("open",), program=_open),
)
"""Commands that only read, and imports of other sources."""


def kill_before_visible(call: Call) -> Action | None:
    """Kill before the first blob is renamed: all blobs of an import exist, all invisible."""
    return Kill() if call.name.startswith("rename") and "/blobs/" in call.paths[-1] else None


def warm_up() -> None:
    """Do once what every fork would do again: import all modules, read the commands' parameters."""
    for module in pkgutil.walk_packages(blobstore.__path__, "blobstore."):
        if module.name.rpartition(".")[2] != "__main__":
            import_module(module.name)
    cli._command_line()  # kept from then on
