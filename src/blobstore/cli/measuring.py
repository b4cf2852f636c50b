"""``quality``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.importing import Jobs
from blobstore.cli.output import (
    JsonOption,
    StoreOption,
    count,
    emit,
    errors_document,
    shape,
    show_json,
    show_table,
    store_at,
)
from blobstore.cli.progress import progress_bar

if TYPE_CHECKING:
    from blobstore.comparison import Errors
    from blobstore.quality import ModelQuality, TensorQuality

_HEADINGS = ("TENSOR", "TYPE", "SHAPE", "RMSE", "RELATIVE", "LARGEST", "COSINE", "SATURATED")


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("quality")(quality)


def quality(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
    against: Annotated[
        str, typer.Option("--against", metavar="SOURCE", help="The checkpoint that the model was imported from.")
    ],
    jobs: Jobs = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what quantization changed. Lists the error of each tensor, the largest first."""
    from blobstore.importer import read_inventory
    from blobstore.quality import measure_quality

    opened = store_at(store)
    with progress_bar(read_inventory(against).nbytes) as progress:
        report = measure_quality(name, against, store=opened, jobs=jobs, progress=progress)
    if as_json:
        show_json(_document(report))
    else:
        _show(report)


def _show(report: ModelQuality) -> None:
    measured = [tensor for tensor in report.tensors if not tensor.kept]
    if measured:
        rows = [(tensor.name, tensor.type_name, shape(tensor.shape), *_figures(tensor.errors)) for tensor in measured]
        total = report.errors
        rows.append((str(report.name), f"{len(measured)} tensors", count(total.count), *_figures(total)))
        show_table(_HEADINGS, rows)
    kept = len(report.tensors) - len(measured)
    if kept:
        emit(f"{kept} {'tensor is stored as it was' if kept == 1 else 'tensors are stored as they were'}")


def _figures(errors: Errors) -> tuple[str, ...]:
    relative = errors.relative_rmse
    return (
        f"{errors.rmse:.4g}",
        "" if relative is None else f"{relative:.3%}",
        f"{errors.max_error:.4g}",
        f"{errors.cosine:.6f}",
        f"{errors.saturated:.3%}",
    )


def _document(report: ModelQuality) -> dict[str, Any]:
    return {
        "name": str(report.name),
        "tensors": [_tensor_document(tensor) for tensor in report.tensors],
        "model": _errors_document(report.errors),
    }


def _tensor_document(tensor: TensorQuality) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "quant_type": tensor.type_name if tensor.quantized else None,
        "dtype": None if tensor.quantized else tensor.type_name,
        "kept": tensor.kept,
        "shape": list(tensor.shape),
        **_errors_document(tensor.errors),
    }


def _errors_document(errors: Errors) -> dict[str, Any]:
    return {**errors_document(errors), "saturated": errors.saturated}
