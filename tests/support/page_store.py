"""A store for the tests of the pages: real models, a large one, hostile texts, a broken one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import blobstore
from blobstore.store.local.store import Store, open_store
from support import PYCODE, PYCODE_MOE
from support.checkpoints import write_checkpoint
from support.stores import manifest_path

DENSE, BETTER, WIDER, MIXTURE = (
    *("pycode-5m:int4", "pycode-5m:better", "pycode-5m:int8"),
    "pycode-moe-5m:nvfp4",
)
LARGE, HOSTILE, BROKEN = "large:f16", "hostile:int4", "broken:latest"
TENSORS = 50_000
LAYERS = 97

HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(2)</script>',
    "javascript:alert(3)",
    "`${alert(4)}`",
    "layers.0.<svg onload=alert(5)>.weight",
    "{{constructor.constructor('alert(6)')()}}",
    "layers.1.\u202ethgiew.\u202c.weight",
    "layers.1.a\u200fb\u2066.weight",
    "layers.2.line\nbreak\t.weight",
    "&lt;b&gt;bold&lt;/b&gt;",
    "__proto__",
    "constructor",
)
"""Names of tensors that would run, or would be shown as others, if a page took them for markup."""
HOSTILE_TEXTS: Mapping[str, Any] = {
    "architectures": ["<img src=x onerror=alert(9)>"],
    "model_type": '"><script>alert(10)</script>',
}


def fill(store: Store, folder: Path) -> None:
    """Import the models of this file into a store; their sources lie in ``folder``."""
    blobstore.import_model(PYCODE, DENSE, store=store, quant="int4")
    blobstore.import_model(PYCODE, BETTER, store=store, quant="int4", method="search")
    blobstore.import_model(PYCODE, WIDER, store=store, quant="int8")
    blobstore.import_model(PYCODE_MOE, MIXTURE, store=store, quant="nvfp4")
    blobstore.import_model(large(folder / "large"), LARGE, store=store, experts="packed")
    blobstore.import_model(hostile(folder / "hostile"), HOSTILE, store=store, quant="int4")
    broken = manifest_path(store, BROKEN)
    broken.parent.mkdir(parents=True)
    broken.write_text("{")


def large(folder: Path) -> Path:
    """Write a made-up checkpoint of 50,000 small tensors; return its folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        for expert in range(128):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shapes[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"] = (4, 16)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"model.layers.{layer}.self_attn.{part}.weight"] = (8, 32)
    for number in range(TENSORS - len(shapes)):
        shapes[f"vision_tower.blocks.{number // 12}.part_{number % 12}.weight"] = (4, 32)
    values = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float16).ravel()
    tensors = {name: values[: np.prod(shape)].reshape(shape) for name, shape in shapes.items()}
    config = {"architectures": ["MadeUpForCausalLM"], "model_type": "made_up", "hidden_size": 64}
    write_checkpoint(folder, tensors, config=config)
    return folder


def hostile(folder: Path) -> Path:
    """Write a checkpoint whose names and texts are attempts to run scripts; return its folder."""
    tensors = {name: np.eye(64, dtype=np.float16) for name in HOSTILE_NAMES}
    write_checkpoint(folder, tensors, config=HOSTILE_TEXTS)
    (folder / "<img src=x onerror=alert(11)>.json").write_text(json.dumps({}))
    return folder


@contextmanager
def served(store: Store, folder: Path) -> Iterator[str]:
    """Run ``blobstore serve`` over a store; yield its origin, such as ``http://127.0.0.1:1234``."""
    line = [sys.executable, "-m", "blobstore", "serve", "--port", "0", "--store", str(store.root)]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert " at http://" in said, (said, (folder / "serve.log").read_text())
        yield said.rpartition(" at ")[2].strip().rstrip("/")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def filled_store(folder: Path) -> Store:
    """Return a new store in a folder with the models of this file."""
    store = open_store(folder / "store")
    fill(store, folder)
    return store
