"""Perplexity of a stored fixture: `tests/bench/perplexity.py [pycode-5m|…] [types|targets]`.

Imports the fixture into a temporary store, in each type and method, or (`targets`) in one type for
all matrices and then in those that a target of as many bits per weight gives, and prints a Markdown
table: the first 20 held-out sequences of 256 tokens, the first token of each being context only.
The weights are run dequantized, in float32: what is measured is what quantizing lost, and MLX's
quantized products take minutes a type on a CPU.
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
TYPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("int4", {}),
    ("int4", {"group_size": 64}),
    ("int8", {}),
    ("nvfp4", {}),
    ("mxfp4", {}),
    ("mxfp8", {}),
)
METHODS = ("minmax", "search")
UNIFORM = ("int4/64", "int4/32")


def predictions(model: Any, ids: Any) -> list[Any]:
    """Return the log-probabilities of all next tokens, ``[1, length - 1, tokens]`` a sequence."""
    from mlx import core as mx

    found = []
    for sequence in ids:
        logits = model(mx.array(sequence[None, :-1])).astype(mx.float32)
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(found[-1])
    return found


def perplexity_of(predicted: list[Any], ids: Any) -> float:
    """Return exp of the mean negative log-likelihood of the tokens that followed."""
    from mlx import core as mx

    pairs = zip(ids, predicted, strict=True)
    lost: list[Any] = [
        -mx.take_along_axis(found, mx.array(tokens[None, 1:, None]), axis=-1).sum().item()
        for tokens, found in pairs
    ]
    return math.exp(sum(lost) / (len(lost) * (LENGTH - 1)))


def dequantized(name: str, store: blobstore.Store, folder: Path) -> Path:
    """Write the values of a stored model to a folder, as a float32 checkpoint, and return it."""
    folder.mkdir(exist_ok=True)
    with blobstore.open_model(name, store=store) as model:
        save_file(
            {key: tensor.dequantize() for key, tensor in model.items()},
            folder / "model.safetensors",
        )
        for document in model.documents():
            if document != "blobstore.json":
                (folder / document).write_bytes(model.document(document))
    return folder


class Bench:
    """Imports of one fixture, and how its held-out text fares with them."""

    def __init__(self, fixture: Path, folder: str) -> None:
        """Keep the unquantized model's predictions, which the others are compared with."""
        self.fixture = fixture
        self._folder = Path(folder)
        self._store = blobstore.open_store(folder)
        ids = np.load(fixture / "heldout_ids.npy").reshape(-1, LENGTH)
        self._ids = ids[:SEQUENCES].astype(np.int32)
        self._reference = self._predictions()

    def _predictions(self, **options: Any) -> list[Any]:
        blobstore.import_model(self.fixture, "bench", store=self._store, **options)
        values = dequantized("bench", self._store, self._folder / "values")
        blobstore.import_model(values, "values", store=self._store)
        model, _ = blobstore.mlx_lm.load("values", store=self._store)
        return predictions(model, self._ids)

    def measure(self, **options: Any) -> tuple[float, float]:
        """Return the perplexity, and the mean divergence from the unquantized model.

        The divergence is Kullback and Leibler's, in nats.
        """
        from mlx import core as mx

        found = self._predictions(**options)
        pairs = zip(self._reference, found, strict=True)
        diverged = sum((mx.exp(wanted) * (wanted - given)).sum().item() for wanted, given in pairs)
        return perplexity_of(found, self._ids), diverged / (SEQUENCES * (LENGTH - 1))


def types(bench: Bench) -> None:
    """Print a row for every type."""
    print(
        f"| type | stored as | bits per weight | {' | '.join(METHODS)} "
        f"|\n|---|---|---|{'---|' * len(METHODS)}"
    )
    for quant, options in TYPES:
        plan = blobstore.plan_import(bench.fixture, quant=quant, **options)
        kinds = sorted(
            {str(tensor.quantization) for tensor in plan.tensors if tensor.quantization is not None}
        )
        values = " | ".join(
            f"{bench.measure(quant=quant, method=method, **options)[0]:.3f}" for method in METHODS
        )
        print(
            f"| {quant} | {', '.join(kinds)} | {plan.bits_per_weight:.2f} | {values} |", flush=True
        )


def targets(bench: Bench) -> None:
    """Print pairs of rows: one type or a policy, and a target of as many bits.

    One type means all matrices but routing gates.
    """
    figures = "bits per weight | perplexity | divergence"
    print(f"| method | types | {figures} |\n|---|---|---|---|---|")
    uniform: list[dict[str, Any]] = [
        {"rules": [f"*={kind}", "*.gate.weight=none"][: 1 + ("moe" in bench.fixture.name)]}
        for kind in UNIFORM
    ]
    for method in METHODS:
        for asked in (*uniform, {"quant": "int4"}):
            bits = blobstore.plan_import(bench.fixture, **asked).bits_per_weight
            said = (
                asked["rules"][0].removeprefix("*=") + " for all"
                if "rules" in asked
                else "--quant int4"
            )
            for name, options in ((said, asked), ("--target-bpw", {"target_bpw": bits})):
                plan = blobstore.plan_import(bench.fixture, method=method, **options)
                perplexity, divergence = bench.measure(method=method, **options)
                print(
                    (
                        f"| {method} | {name} | {plan.bits_per_weight:.3f} | {perplexity:.3f} | "
                        f"{divergence:.5f} |"
                    ),
                    flush=True,
                )


def main(name: str = "pycode-5m", table: str = "types") -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(FIXTURES / name, folder)
        print(f"{name}, unquantized: {bench.measure()[0]:.3f}\n")
        {"types": types, "targets": targets}[table](bench)


if __name__ == "__main__":
    main(*sys.argv[1:])
