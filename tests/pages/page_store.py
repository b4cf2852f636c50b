"""A store for the tests of the pages: real models, a large one, hostile texts, a broken one."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support import PYCODE, PYCODE_MOE
from support.checkpoints import write_checkpoint
from support.large_models import large_model
from support.patient import serving
from support.stores import manifest_path

import blobstore
from blobstore.inspection.quality import measure_quality
from blobstore.store.local.store import Store, open_store
from blobstore.views.records import keep_quality

DENSE, BETTER, WIDER = "pycode-5m:int4", "pycode-5m:better", "pycode-5m:int8"
MIXTURE = "pycode-moe-5m:nvfp4"
LARGE, HOSTILE, BROKEN = "large:int4", "hostile:int4", "broken:latest"
TENSORS = 5_000

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


def filled_store(folder: Path) -> Store:
    """Return a new store with the models of this file; their sources lie in the folder too."""
    store = open_store(folder / "store")
    blobstore.import_model(PYCODE, DENSE, store=store, quant="int4")
    blobstore.import_model(PYCODE, BETTER, store=store, quant="int4", method="search")
    blobstore.import_model(PYCODE, WIDER, store=store, quant="int8")
    blobstore.import_model(PYCODE_MOE, MIXTURE, store=store, quant="nvfp4")
    large_model(store, LARGE, TENSORS, together=100)
    blobstore.import_model(hostile(folder / "hostile"), HOSTILE, store=store, quant="int4")
    for name in (DENSE, BETTER, WIDER):
        keep_quality(store, measure_quality(name, PYCODE, store=store), str(PYCODE))
    broken = manifest_path(store, BROKEN)
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    return store


def hostile(folder: Path) -> Path:
    """Write a checkpoint whose names and texts are attempts to run scripts; return its folder."""
    tensors = {name: np.eye(64, dtype=np.float16) for name in HOSTILE_NAMES}
    write_checkpoint(folder, tensors, config=HOSTILE_TEXTS)
    (folder / "<img src=x onerror=alert(11)>.json").write_text(json.dumps({}))
    return folder


@contextmanager
def served(store: Store) -> Iterator[str]:
    """Run ``blobstore serve`` over a store; yield its origin, such as ``http://127.0.0.1:1234``."""
    with serving("--store", str(store.root)) as running:
        yield f"http://{running.host}"
