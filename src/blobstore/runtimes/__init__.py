"""Runtimes: where a model runs, and why not otherwise. Pure, from tables: no runtime is imported, no weight is read.

A table says which architectures, types and layouts of experts a runtime reads. That is not yet that each tensor fits the
network: `blobstore.mlx_lm` and the export of folders for mlx-lm build the network and look.
"""

from __future__ import annotations

from blobstore.runtimes import ollama
from blobstore.runtimes.facts import ModelFacts, TensorFacts
from blobstore.runtimes.verdict import Runs, Verdict

__all__ = ["ModelFacts", "Runs", "TensorFacts", "Verdict", "verdicts"]


def verdicts(model: ModelFacts) -> tuple[Verdict, ...]:
    """Return what each runtime makes of a model."""
    return (ollama.verdict(model),)
