"""A recorded source imported as one type in the ollama profile, beside Ollama's result."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support import FIXTURES
from support.ollama_sources import write_source

from blobstore.formats.documents import Descriptor
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.run import ImportResult, plan_import, run_plan
from blobstore.kernels.arrays import dtype_of
from blobstore.model.loader import Model, open_model
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store

Array = np.ndarray[Any, Any]
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One source imported as one type, and what Ollama recorded for it."""

    record: Json
    plan: ImportPlan
    result: ImportResult
    store: Store

    def open(self) -> Model:
        return open_model(self.result.name, store=self.store)

    def header_text(self, layer: Descriptor) -> str:
        data = self.store.blobs.read(layer)
        return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()

    @property
    def recorded_layers(self) -> list[Descriptor]:
        return [
            Descriptor.from_json(layer) for layer in json.loads(self.record["manifest"])["layers"]
        ]

    def described_arrays(self) -> dict[str, list[Any]]:
        """Return the model's arrays as the records describe them: dtype, shape, sha256."""
        with self.open() as model:
            return {
                name: [
                    dtype_of(array).value,
                    list(array.shape),
                    hashlib.sha256(array.tobytes()).hexdigest(),
                ]
                for name, array in model.arrays("numpy", names="ollama").items()
            }


Cases = Callable[[str, str], Case]


def case_maker(root: Path) -> Cases:
    """Return a function that imports a source as a type, once, into a store under ``root``."""
    store = open_store(root / "store")

    @functools.cache
    def folder(source: str) -> Path:
        return write_source(root / "sources", source)

    @functools.cache
    def case(source: str, quant: str) -> Case:
        plan = plan_import(folder(source), quant=quant, profile="ollama")
        result = run_plan(plan, ModelName(model=source, tag=quant), store)
        return Case(record_of(source)[quant], plan, result, store)

    return case


@functools.cache
def record_of(source: str) -> Json:
    loaded: Json = json.loads((FIXTURES / "ollama-records" / f"{source}.json").read_text())
    return loaded


def contents(text: str) -> Json:
    """Return what a header says, with sizes for places; MLX writes null for no metadata."""
    header = json.loads(text)
    if header.get("__metadata__", {}) is None:
        del header["__metadata__"]
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry.pop("data_offsets")
            entry["nbytes"] = end - begin
    return dict(header)
