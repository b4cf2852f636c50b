"""Export: a stored model becomes a checkpoint folder. Read (the model's headers), decide (plan.py), do (writing.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from blobstore.dtypes import DType
from blobstore.export.folder import Target
from blobstore.export.options import AS_SOURCE, DEFAULT_SHARD, ExportOptions
from blobstore.export.plan import make_plan
from blobstore.export.stored_model import read_model
from blobstore.export.writing import Progress, write_files
from blobstore.importer import threads
from blobstore.names import ModelName
from blobstore.store import Store

__all__ = ["AS_SOURCE", "ExportResult", "export_model"]

Bar = Callable[[int], AbstractContextManager[Progress | None]]
"""Gives what is told of progress, for a number of bytes."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote: its files by path in ``folder``, with their sizes in bytes.

    ``notes`` are sentences about what was left out or changed; ``seconds`` are those of writing.
    """

    name: ModelName
    folder: Path
    files: dict[str, int]
    notes: tuple[str, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def export_model(
    name: str | ModelName,
    folder: str | os.PathLike[str],
    *,
    store: Store,
    format: str = "safetensors",  # noqa: A002  # the option's name
    dequantize: str | DType | None = None,
    max_shard_size: int | str = DEFAULT_SHARD,
    jobs: int | None = None,
    verify: bool = False,
    bar: Bar | None = None,
) -> ExportResult:
    """Write a stored model into a new ``folder`` as a checkpoint: shards and their index, JSON documents, maybe a Modelfile.

    ``format``: "safetensors" keeps names and stored arrays, so that an import of the folder stores the same; "mlx" gives
    what ``mlx_lm.load`` opens. ``dequantize``: "bfloat16", "float16" or "float32" for all quantized weights and floats.
    ``max_shard_size``: bytes of a file at most, by huggingface_hub's rule, or "source" for the files that were imported.
    ``jobs``: threads (None: one a core). ``verify``: hash every blob first. ``bar``: given the bytes to write, returns a
    context manager that gives what is told of progress.

    The folder appears when all of it is on the disk, or not at all. A draft model becomes a checkpoint in ``draft/``.

    Raises: UsageError (an unknown word, a folder in the store, mlx without the ``lm`` extra); as `open_model`;
    UnsupportedSourceError when mlx-lm can't have the model, or a value does not fit the dtype; StorageError when the folder
    is there and not empty, and for what the system refuses; BusyError when another export into it is at work.
    """
    options = ExportOptions.parse(format, dequantize, max_shard_size)
    workers = threads(jobs)
    target = Target(folder, store)
    with store.lease():  # blobs are opened one by one, until the last was copied
        model = read_model(name, store, verify=verify)
        plan = make_plan(model, options)
        started = time.monotonic()
        with target.staged() as staging, (bar or _no_bar)(plan.nbytes) as progress:
            write_files(plan, staging, workers, progress or _silent)
    files = {file.path: file.size for file in sorted(plan.files, key=lambda file: file.path)}
    return ExportResult(model.name, target.path, files, plan.notes, time.monotonic() - started)


def _no_bar(_: int) -> AbstractContextManager[Progress | None]:
    return nullcontext()


def _silent(nbytes: int, name: str) -> None:
    """Progress that is not shown."""
