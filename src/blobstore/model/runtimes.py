"""Runtimes: where a model runs, and why not otherwise.

Pure, from tables: no runtime is imported, no weight is read.

A table says which architectures, types and layouts of experts a runtime reads. It does not say that
each tensor fits the network: only a load shows that (`blobstore.mlx_lm.load`, and the export of
folders for mlx-lm).
"""

from __future__ import annotations

from blobstore.model import on_mlx_lm, on_ollama
from blobstore.model.facts import ModelFacts, Verdict


def verdicts(model: ModelFacts) -> tuple[Verdict, ...]:
    """Return what each runtime makes of a model.

    Where mlx-lm is installed, checking the network itself could replace the table's verdict.
    """
    return (on_mlx_lm.verdict(model), on_ollama.verdict(model))
