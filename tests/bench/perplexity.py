"""Perplexity of a stored fixture for every type and method: `python tests/bench/perplexity.py [pycode-5m|pycode-moe-5m]`.

Imports the fixture into a temporary store in each type, and prints a Markdown table: the first 20 held-out sequences of 256
tokens, the first token of each being context only. The weights are run dequantized, in float32: what is measured is what
quantizing lost, and MLX's quantized products take minutes a type on a CPU.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import blobstore

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SEQUENCES = 20
LENGTH = 256
TYPES = (("int4", {}), ("int4", {"group_size": 64}), ("int8", {}), ("nvfp4", {}), ("mxfp4", {}), ("mxfp8", {}))
METHODS = ("minmax", "search")


def perplexity(model: Any, fixture: Path, sequences: int = SEQUENCES) -> float:
    """Return exp of the mean negative log-likelihood of the fixture's first held-out sequences."""
    from mlx import core as mx
    from mlx import nn

    ids = np.load(fixture / "heldout_ids.npy").reshape(-1, LENGTH)[:sequences].astype(np.int32)
    total = 0.0
    for sequence in ids:
        tokens = mx.array(sequence[None])
        logits = model(tokens[:, :-1]).astype(mx.float32)
        total += nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="sum").item()
    return math.exp(total / (sequences * (LENGTH - 1)))


def dequantized(name: str, store: blobstore.Store, folder: Path) -> Path:
    """Write the values of a stored model to a folder, as a float32 checkpoint, and return it."""
    folder.mkdir(exist_ok=True)
    with blobstore.open_model(name, store=store) as model:
        save_file({key: tensor.dequantize() for key, tensor in model.items()}, folder / "model.safetensors")
        for document in model.documents():
            if document != "blobstore.json":
                (folder / document).write_bytes(model.document(document))
    return folder


def main(name: str = "pycode-5m") -> None:
    """Print the table."""
    fixture = FIXTURES / name
    with tempfile.TemporaryDirectory() as folder:
        store = blobstore.open_store(folder)

        def measure(**options: Any) -> float:
            blobstore.import_model(fixture, "bench", store=store, **options)
            blobstore.import_model(dequantized("bench", store, Path(folder, "values")), "values", store=store)
            model, _ = blobstore.mlx_lm.load("values", store=store)
            return perplexity(model, fixture)

        print(f"{name}, unquantized: {measure():.3f}\n")
        print(f"| type | stored as | bits per weight | {' | '.join(METHODS)} |\n|---|---|---|{'---|' * len(METHODS)}")
        for quant, options in TYPES:
            plan = blobstore.plan_import(fixture, quant=quant, **options)
            kinds = sorted({str(tensor.quantization) for tensor in plan.tensors if tensor.quantization is not None})
            values = " | ".join(f"{measure(quant=quant, method=method, **options):.3f}" for method in METHODS)
            print(f"| {quant} | {', '.join(kinds)} | {plan.bits_per_weight:.2f} | {values} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
