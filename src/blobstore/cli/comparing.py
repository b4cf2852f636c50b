"""``du``, ``diff`` and ``quality``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.output import (
    Jobs,
    JsonOption,
    LowerOption,
    StoreOption,
    count,
    counted,
    emit,
    printable,
    progress_bar,
    reason,
    shape,
    show_json,
    show_table,
    size,
    source_at,
    store_at,
    stores_at,
)

if TYPE_CHECKING:
    from blobstore.inspection.diff import ChangedTensor, Errors, ModelDiff, TensorFact
    from blobstore.inspection.quality import ModelQuality
    from blobstore.store.care.usage import ModelUsage


_HEADINGS = ("TENSOR", "TYPE", "SHAPE", "RMSE", "RELATIVE", "LARGEST", "COSINE", "SATURATED")


def quality(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="SOURCE", help="The checkpoint that the model was imported from."
        ),
    ],
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what quantization changed. Lists the error of each tensor, the largest first."""
    from blobstore.inspection.quality import measure_quality

    opened = stores_at(store, lower)
    with progress_bar() as progress:
        source = source_at(against) or against
        report = measure_quality(name, source, store=opened, jobs=jobs, progress=progress)
    if as_json:
        from blobstore.views.comparing import QualityView

        show_json(QualityView.of(report))
    else:
        _show(report)


def _show(report: ModelQuality) -> None:
    measured = [tensor for tensor in report.tensors if not tensor.kept]
    if measured:
        rows = [
            (tensor.name, tensor.type_name, shape(tensor.shape), *_quality_figures(tensor.errors))
            for tensor in measured
        ]
        total = report.errors
        rows.append(
            (
                str(report.name),
                f"{len(measured)} tensors",
                count(total.count),
                *_quality_figures(total),
            )
        )
        show_table(_HEADINGS, rows)
    kept = len(report.tensors) - len(measured)
    if kept:
        emit(
            f"{kept} {'tensor is stored as it was' if kept == 1 else 'tensors are stored as they were'}"
        )


def _quality_figures(errors: Errors) -> tuple[str, ...]:
    relative = errors.relative_rmse
    return (
        f"{errors.rmse:.4g}",
        "" if relative is None else f"{relative:.3%}",
        f"{errors.max_error:.4g}",
        f"{errors.cosine:.6f}",
        f"{errors.saturated:.3%}",
    )


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("quality")(quality)
    app.command("du")(du)
    app.command("diff")(diff)


def du(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Models to show [default: all].")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the disk space of models.

    UNIQUE is what rm would free, SHARED is needed by other models too.
    """
    from blobstore.store.care.usage import measure_usage

    usage = measure_usage(store_at(store), names or ())
    if as_json:
        from blobstore.views.care import UsageView

        show_json(UsageView.of(usage))
        return
    show_table(("NAME", "SIZE", "UNIQUE", "SHARED"), [_usage_row(model) for model in usage.models])
    emit(
        f"{counted(usage.blobs, 'blob')}, {size(usage.nbytes)}; {size(usage.reclaimable)} needed by no model"
    )
    if usage.trash:
        emit(f"{size(usage.trash)} in the trash")


def _usage_row(model: ModelUsage) -> tuple[str, ...]:
    if model.error is not None:
        return (str(model.name), "broken", "", reason(model.error))
    return (str(model.name), size(model.nbytes), size(model.unique), size(model.shared))


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A stored model.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The stored model to compare it with.")],
    error: Annotated[
        bool,
        typer.Option("--error", help="Also measure how much the values of changed tensors differ."),
    ] = False,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how model B differs from A. Lists tensors added, removed and changed, types, and shared bytes."""
    from blobstore.inspection.diff import diff_models

    found = diff_models(a, b, store=stores_at(store, lower), error=error, jobs=jobs)
    if as_json:
        from blobstore.views.comparing import DiffView

        show_json(DiffView.of(found))
    else:
        _show_diff(found, error=error)


def _show_diff(found: ModelDiff, *, error: bool) -> None:
    rows = [("-", *_fact_cells(fact), "") for fact in found.removed]
    rows += [("+", *_fact_cells(fact), "") for fact in found.added]
    rows += [("~", *_change_cells(change)) for change in found.changed]
    headings = (
        "",
        "TENSOR",
        "TYPE",
        "SHAPE",
        "SIZE",
        "RMSE, RELATIVE, LARGEST, COSINE" if error else "",
    )
    if rows:
        show_table(headings, sorted(rows, key=lambda row: row[1]))
    documents = found.documents
    for sign, names in (("-", documents.removed), ("+", documents.added), ("~", documents.changed)):
        for name in names:
            emit(printable(f"{sign} {name}"))
    changes = f"{counted(len(found.added), 'tensor')} added, {len(found.removed)} removed, {len(found.changed)} changed"
    emit(
        f"{changes}, {found.equal} equal; {size(found.shared_bytes)} shared of {' and '.join(map(size, found.nbytes))}"
    )


def _fact_cells(fact: TensorFact) -> tuple[str, ...]:
    return (fact.name, fact.type_name, shape(fact.shape), size(fact.nbytes))


def _change_cells(change: ChangedTensor) -> tuple[str, ...]:
    before, after = _fact_cells(change.before)[1:], _fact_cells(change.after)[1:]
    cells = (
        old if old == new else f"{old} → {new}" for old, new in zip(before, after, strict=True)
    )
    return (change.before.name, *cells, _figures(change))


def _figures(change: ChangedTensor) -> str:
    errors = change.errors
    if errors is None:
        return ""
    relative = "" if errors.relative_rmse is None else f"{errors.relative_rmse:.3%}"
    odd = f", {change.odd_values} infinite or NaN on one side" if change.odd_values else ""
    return f"{errors.rmse:.4g}, {relative}, {errors.max_error:.4g}, {errors.cosine:.6f}{odd}"
