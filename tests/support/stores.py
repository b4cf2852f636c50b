"""Stores for tests: small committed models, and hand-written blobs and manifests."""

import functools
import gc
import hashlib
import json
import os
import pkgutil
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest
from blobstore.names import ModelName
from blobstore.store.local.store import Store
from blobstore.store.ports import Home

NOBODY = 65534
_NOT_LOADED = ("__main__", ".chat_handler", ".chat_service")  # they load a server, for seconds
Arrays = dict[str, np.ndarray[Any, Any]]
HOLD = """
import sys
from blobstore import open_store
with getattr(open_store(sys.argv[1]), sys.argv[2])():
    print("ready", flush=True)
    sys.stdin.read()
"""
"""For `process`: a store's root, and what it holds: ``session`` (shared) or ``alone``."""


def commit_model(store: Home, name: str, *blobs: bytes) -> Manifest:
    """Store ``blobs`` as a model through a session, as an import does, and return its manifest."""
    with store.session() as session:
        for data in blobs:
            session.put(data)
        manifest = Manifest(
            layers=tuple(descriptor(data, f"layer{index}") for index, data in enumerate(blobs))
        )
        session.publish(ModelName.parse(name), manifest)
    return manifest


def descriptor(data: bytes, name: str | None = None) -> Descriptor:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return Descriptor.from_json(
        {"mediaType": TENSOR_MEDIA_TYPE, "digest": digest, "size": len(data), "name": name}
    )


def blob_path(store: Store, data: bytes) -> Path:
    """Return where the blob of these bytes lies, there or not."""
    return store.root / "blobs" / f"sha256-{hashlib.sha256(data).hexdigest()}"


def open_files(folder: Path) -> list[Path]:
    """Return the paths in a folder that this process has open."""
    gc.collect()
    opened: list[Path] = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile by another thread
            opened.append(fd.readlink())
    return [path for path in opened if path.is_relative_to(folder)]


@contextmanager
def files_may_be_open(count: int) -> Iterator[None]:
    """Limit the files of this process, and of those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def manifest_path(store: Store, name: str) -> Path:
    """Return where the manifest of a name lies, there or not."""
    return store.root.joinpath("manifests", *ModelName.parse(name).path_parts)


def link_by_hand(store: Store, name: str, blobs: Mapping[str, bytes]) -> None:
    """Write blobs and a manifest that names them, by layer name, with the standard library only."""
    layers = [layer_by_hand(store, layer, data) for layer, data in blobs.items()]
    write_manifest(store, name, json.dumps({"schemaVersion": 2, "layers": layers}))


def write_manifest(store: Store, name: str, text: str) -> None:
    path = manifest_path(store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gguf_by_hand(store: Store, name: str, data: bytes, file_type: str) -> None:
    kind = "application/vnd.ollama.image.model"
    config = json.dumps({"model_format": "gguf", "file_type": file_type}).encode()
    layers = [layer_by_hand(store, "", data) | {"mediaType": kind}]
    manifest = {"schemaVersion": 2, "config": layer_by_hand(store, "", config), "layers": layers}
    write_manifest(store, name, json.dumps(manifest))


def layer_by_hand(store: Store, name: str, data: bytes) -> dict[str, Any]:
    path = blob_path(store, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    digest = path.name.replace("-", ":")
    return {"mediaType": TENSOR_MEDIA_TYPE, "digest": digest, "size": len(data), "name": name}


def stored_arrays(
    name: str, array: np.ndarray[Any, Any], quant_type: str, group_size: int | None = None
) -> tuple[Arrays, dict[str, str]]:
    quantized = blobstore.quantize(array, quant_type, group_size=group_size)
    arrays = {name: quantized.weight, f"{name}.scale": quantized.scale}
    if quantized.bias is not None:
        arrays[f"{name}.bias"] = quantized.bias
    return arrays, {"quant_type": quant_type, "group_size": str(quantized.group_size)}


def wrong_digests(store: Store) -> list[str]:
    """Return the files in ``blobs/`` whose sha256 is not their name."""
    return [
        path.name
        for path in (store.root / "blobs").glob("*")
        if blob_path(store, path.read_bytes()) != path
    ]


@functools.cache
def _load_modules() -> None:
    from blobstore.cli import main as cli

    for module in pkgutil.walk_packages(blobstore.__path__, "blobstore."):
        if not module.name.endswith(_NOT_LOADED):
            import_module(module.name)
    cli._command_line()  # kept from then on


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be another user than root, who may look into everything.

    That user may not be allowed to read this Python's own files. So all modules are loaded before,
    whatever other tests of this process have loaded.
    """
    if os.geteuid() != 0:
        yield
        return
    _load_modules()
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def meanwhile(patch: pytest.MonkeyPatch, call: str, path: Path, act: Callable[[], object]) -> None:
    """Let another process ``act`` once, just before this one's next ``os`` call of a path."""
    real, waiting = getattr(os, call), [act]

    def called(*arguments: Any, **options: Any) -> Any:
        if waiting and os.fspath(path) in map(str, arguments):
            waiting.pop()()
        return real(*arguments, **options)

    patch.setattr(os, call, called)


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run Python ``code`` in a process, yield at its first line, and kill it at the end."""
    line = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def with_newline_config(store: Store, name: str, other: str) -> Path:
    """Store a model again, its config ended by a newline as by newer Ollamas; return that path."""
    manifest = store.manifest(ModelName.parse(name))
    assert manifest.config is not None
    data = store.blobs.read(manifest.config) + b"\n"
    path = blob_path(store, data)
    path.write_bytes(data)
    old = f'"digest":"{manifest.config.digest}","size":{manifest.config.size}'
    new = f'"digest":"{path.name.replace("-", ":")}","size":{len(data)}'
    write_manifest(store, other, manifest.raw.decode().replace(old, new))
    return path
