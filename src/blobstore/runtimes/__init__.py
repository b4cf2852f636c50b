"""Runtimes: where a model runs, and why not otherwise. Pure, from tables: no runtime is imported, no weight is read.

A table says which architectures, types and layouts of experts a runtime reads. It does not say that each tensor fits the
network: only a load shows that (`blobstore.mlx_lm.load`, and the export of folders for mlx-lm).
"""

from __future__ import annotations

from blobstore.runtimes import mlx_lm, ollama
from blobstore.runtimes.facts import ModelFacts, TensorFacts
from blobstore.runtimes.verdict import Runs, Verdict, in_one_line

__all__ = ["ModelFacts", "Runs", "TensorFacts", "Verdict", "in_one_line", "verdicts"]


def verdicts(model: ModelFacts) -> tuple[Verdict, ...]:
    """Return what each runtime makes of a model.

    Where mlx-lm is installed, checking the network itself could replace the table's verdict.
    """
    return (mlx_lm.verdict(model), ollama.verdict(model))
