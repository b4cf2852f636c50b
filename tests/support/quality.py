"""Models that are imported to be measured, and their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import blobstore
from blobstore import ModelQuality
from blobstore.store.local.store import Store
from support.checkpoints import write_checkpoint

Array = np.ndarray[Any, Any]


def measured(
    store: Store, folder: Path, stored: dict[str, Array], source: dict[str, Array], **options: Any
) -> ModelQuality:
    """Import ``stored`` and return its report against ``source``."""
    blobstore.import_model(write_checkpoint(folder / "stored", stored), "m", store=store, **options)
    return blobstore.measure_quality("m", write_checkpoint(folder / "source", source), store=store)


def imported(store: Store, source: Path, **options: Any) -> str:
    """Import ``source`` and return the model's name."""
    blobstore.import_model(source, "m", store=store, **options)
    return "m"
