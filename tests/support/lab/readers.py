"""Commands that read: stores, checkpoints, other ways of an import, library programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import blobstore
from blobstore.errors import BlobStoreError
from blobstore.store.local.store import Store
from support.checkpoints import LLAMA_CONFIG, normal, safetensors_bytes, write_checkpoint
from support.lab.commands import COMMANDS, Command, as_it_is, model, two

_HUB = "{work}/hub/models--org--name"
_IN_STORE = ("--store", "{store}")


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


def _program(use: Callable[[Store], object]) -> Callable[[Path], None]:
    """Return a program that uses a store by the library and ends like the command line."""

    def run(root: Path) -> None:
        try:
            print(use(blobstore.open_store(root)))  # noqa: T201  # as a command does
        except BlobStoreError as error:
            os.write(2, f"Error: {error}\n".encode())
            raise SystemExit(1) from None

    return run


def _arrays(store: Store) -> float:
    with blobstore.open_model("old", store=store) as opened:
        return sum(float(opened[name].dequantize().sum()) for name in opened)


def _torch(store: Store) -> int:
    with blobstore.open_model("old", store=store, verify=True) as opened:
        return sum(opened[name].torch() is not None for name in opened)


def _mlx(store: Store) -> int:
    with blobstore.open_model("old", store=store) as opened:
        return sum(opened[name].mlx() is not None for name in opened)


_DAMAGED = next(command.prepare for command in COMMANDS if command.name == "import over damage")
_PRUNED = next(command.prepare for command in COMMANDS if command.name == "prune")
_IMPORT = ("import", "--jobs", "1", *_IN_STORE)
READERS = (
    Command("list", two, ("list", *_IN_STORE)),
    Command("show", two, ("show", "old", "--tensors", *_IN_STORE)),
    Command("show coverage", two, ("show", "old", "--coverage", *_IN_STORE)),
    Command("inspect a model", two, ("inspect", "old", *_IN_STORE)),
    Command("inspect the cache", _checkpoint, ("inspect", _HUB, *_IN_STORE)),
    Command(
        "inspect an index",
        _checkpoint,
        ("inspect", f"{_HUB}/snapshots/abc/model.safetensors.index.json"),
    ),
    Command("plan", _checkpoint, ("plan", _HUB, "--quant", "int4")),
    Command("import all files", _checkpoint, (*_IMPORT, _HUB, "new"), as_it_is),
    Command(
        "import a Modelfile",
        _checkpoint,
        (*_IMPORT, "--modelfile", "{work}/Modelfile", "new"),
        as_it_is,
    ),
    Command(
        "import with a policy and a draft",
        _checkpoint,
        (*_IMPORT, "{work}/draft", "new", "--policy", "{work}/policy.toml", "--draft", _HUB),
        as_it_is,
    ),
    Command(
        "import to a size",
        _checkpoint,
        (*_IMPORT, _HUB, "new", "--target-bpw", "6", "--method", "search"),
        as_it_is,
    ),
    Command("verify", _PRUNED, ("verify", *_IN_STORE)),
    Command("verify one", two, ("verify", "old", *_IN_STORE)),
    Command("du", _PRUNED, ("du", *_IN_STORE)),
    Command("prune tried", _PRUNED, ("prune", "--dry-run", *_IN_STORE)),
    Command("diff", two, ("diff", "old", "other", "--error", *_IN_STORE)),
    Command(
        "quality",
        two,
        ("quality", "old", "--against", "{work}/sources/old", "--jobs", "1", *_IN_STORE),
    ),
    Command("export", two, ("export", "old", "{store}-out", "--jobs", "1", *_IN_STORE)),
    Command("metadata get", _file, ("metadata", "get", "{store}/m.safetensors")),
    Command("metadata set", _file, ("metadata", "set", "{store}/m.safetensors", "k", "n" * 2000)),
    Command(
        "metadata set anew", _file, ("metadata", "set", "{store}/m.safetensors", "k", "n" * 9000)
    ),
    Command("numpy", two, ("numpy",), program=_program(_arrays)),
    Command("torch", two, ("torch",), program=_program(_torch)),
    Command("mlx", two, ("mlx",), program=_program(_mlx)),
)
