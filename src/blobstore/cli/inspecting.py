"""``inspect``, ``quality``, ``diff`` and ``report``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import blobstore
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    Model,
    bits,
    count,
    counted,
    counts,
    cut_text,
    emit,
    emit_lines,
    has_colours,
    shape,
    show_facts,
    show_json,
    show_lines,
    show_result,
    show_table,
    size,
    with_bar,
)
from blobstore.cli.stores import (
    CACHE,
    CaFileOption,
    InsecureOption,
    LowerOption,
    PlaceModel,
    StoreOption,
    holds_models,
    is_registry,
    model_at,
    registry_access,
    source_at,
    stores_at,
)
from blobstore.cli.trees import (
    LONGEST_NAME,
    SIZES,
    EveryTensor,
    Top,
    in_number_order,
    show_each,
    show_tree,
    sizes,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.inspection.comparison import Errors, ModelDiff, TensorFact, ValueErrors
    from blobstore.inspection.inspection import LogicalTensor
    from blobstore.inspection.quality import TensorQuality


_LONGEST_VALUE = 120
_LARGE_VALUE = 2000
_MOST_VALUES = 40


def inspect(
    target: Annotated[
        str,
        Argument(
            metavar="TARGET",
            help="A .safetensors file, a folder, a shard index, an address, "
            "hf://ORG/NAME[@REVISION][/PATH], a stored model, HOST/NAMESPACE/MODEL[:TAG] at a "
            "registry, or an archive or s3://BUCKET/PREFIX with models.",
        ),
    ],
    model: PlaceModel = None,
    tensors: Annotated[bool, Option("--tensors", help="List the tensors.")] = False,
    tree: Annotated[
        bool,
        Option("--tree", help="Show the modules as a tree, with identical ones on one line."),
    ] = False,
    depth: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Levels of --tree [default: all]."),
    ] = None,
    filters: Annotated[
        list[str] | None,
        Option(
            "--filter",
            metavar="GLOB",
            help="Count and show only tensors whose names match. Repeatable.",
        ),
    ] = None,
    sort: Annotated[
        str,
        Option(
            metavar="name|file|size|parameters",
            help="Order of --tensors; size and parameters list the largest first.",
        ),
    ] = "name",
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds. It may be local or remote: only headers are read."""
    from blobstore.inspection.inspect import inspect_model, inspect_source, model_named

    if sort not in _ORDERS:
        raise UsageError(f"unknown order {sort!r}", hint=f"Use one of: {', '.join(_ORDERS)}.")
    is_model = model is not None or model_named(target) is not None or is_registry(target)
    if is_model or holds_models(target, ca_file):
        home, name = model_at(target, model, registry_access(insecure, ca_file), store, lower)
        everything = inspect_model(name, target, home)
    else:
        everything = inspect_source(source_at(target, ca_file), target)
    inspection = everything.only(filters) if filters else everything
    if as_json:
        show_json(inspection, compact=True)
        return
    _show(inspection, len(everything.tensors))
    if tensors:
        emit()
        _show_tensors(inspection, sort)
    if tree:
        emit()
        show_tree(inspection.tensors, SIZES, sizes, depth=depth)


def _show(inspection: blobstore.Inspection, of: int) -> None:
    from blobstore.inspection.inspection import MODELSPEC
    from blobstore.store.stored import weights_by_type

    facts = {
        "name": cut_text(inspection.name, _LONGEST_VALUE),
        "kind": inspection.kind.value,
        "files": f"{len(inspection.files):,}",
        "tensors": f"{len(inspection.tensors):,}"
        + (f" of {of:,}" if len(inspection.tensors) != of else ""),
        "parameters": f"{count(inspection.parameters)} ({inspection.parameters:,})",
        "dtypes": counts(inspection.parameter_count),
        "types": counts(weights_by_type(inspection.tensors)) if inspection.quantizations else "",
        "size": size(inspection.nbytes),
        "bits per weight": bits(inspection.bits_per_weight),
    }
    show_facts({key: value for key, value in facts.items() if value})
    _show_quantizations(inspection)
    _show_values("MODELSPEC", inspection.modelspec)
    _show_values(
        "METADATA",
        {key: value for key, value in inspection.metadata.items() if not key.startswith(MODELSPEC)},
    )
    if inspection.notes:
        emit()
    emit_lines(*(f"Note: {note}" for note in inspection.notes))


def _show_quantizations(inspection: blobstore.Inspection) -> None:
    if inspection.quantizations:
        emit()
        show_table(
            ("QUANTIZATION", "BITS", "GROUP", "FORMAT", "TENSORS", "PARAMETERS"),
            [
                (
                    quantization.type,
                    f"{quantization.bits:g}",
                    "" if quantization.group_size is None else quantization.group_size,
                    quantization.format,
                    f"{quantization.tensors:,}",
                    count(quantization.parameters),
                )
                for quantization in inspection.quantizations
            ],
        )


def _show_values(heading: str, values: Mapping[str, str]) -> None:
    """Show keys and values: long ones are cut, large ones, such as pictures, only their size."""
    if not values:
        return
    rows = [
        (cut_text(key, LONGEST_NAME), _value(value))
        for key, value in list(values.items())[:_MOST_VALUES]
    ]
    if len(values) > _MOST_VALUES:
        rows.append((f"and {len(values) - _MOST_VALUES:,} more", ""))
    emit()
    show_table((heading, "VALUE"), rows)


def _value(text: str) -> str:
    return (
        f"({size(len(text.encode()))})"
        if len(text) > _LARGE_VALUE
        else cut_text(text, _LONGEST_VALUE)
    )


def _show_tensors(inspection: blobstore.Inspection, sort: str) -> None:
    headings = (*SIZES, "FILE") if len(inspection.files) > 1 else SIZES

    def cells(tensors: Sequence[LogicalTensor]) -> tuple[str, ...]:
        (tensor,) = tensors
        file = cut_text(tensor.file, LONGEST_NAME)
        return (f"{tensor.parameters:,}", size(tensor.nbytes), file)[: len(headings)]

    show_each(_ORDERS[sort](inspection.tensors), headings, cells)


_ORDERS: Mapping[str, Callable[[Iterable[LogicalTensor]], Iterable[LogicalTensor]]] = {
    "file": lambda tensors: tensors,
    "name": in_number_order,
    "size": lambda tensors: sorted(tensors, key=lambda tensor: -tensor.nbytes),
    "parameters": lambda tensors: sorted(tensors, key=lambda tensor: -tensor.parameters),
}


_ERRORS = ("RMSE", "RELATIVE", "LARGEST", "COSINE", "SATURATED")


def quality(
    name: Model,
    against: Annotated[
        str,
        Option(metavar="SOURCE", help="The checkpoint that the model was imported from."),
    ],
    jobs: Jobs = None,
    ca_file: CaFileOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    tensors: EveryTensor = False,
    top: Top = None,
    plot: Annotated[
        bool, Option("--plot", help="Draw the errors by layer after the table.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what quantization changed: the errors of modules and tensors."""
    from blobstore.views.records import keep_quality

    opened = stores_at(store, lower, cache=CACHE, ca_file=ca_file)
    source = source_at(against, ca_file)
    report = with_bar(blobstore.measure_quality, name, source, store=opened, jobs=jobs)
    keep_quality(opened, report, source)
    show_result(report, partial(_show_quality, every=tensors, top=top), as_json)
    if plot and not as_json:
        _plot(report)


def _plot(report: blobstore.ModelQuality) -> None:
    from blobstore.plots.charts import TensorError, error_lines
    from blobstore.views.documents import document_of

    lines = error_lines(
        map(TensorError.of_document, document_of(report)["tensors"]),
        shutil.get_terminal_size().columns,
        ascii_only=not (sys.stdout.encoding or "ascii").lower().startswith("utf"),
        colours=has_colours(sys.stdout),
    )
    emit("\n".join(["", *lines]) if lines else "No tensor was changed.")


def _show_quality(report: blobstore.ModelQuality, *, every: bool, top: int | None) -> None:
    from blobstore.inspection.comparison import Errors

    def cells(tensors: Sequence[TensorQuality]) -> tuple[str, ...]:
        errors = sum((tensor.errors for tensor in tensors), Errors())
        return (*_figures(errors), f"{errors.saturated:.3%}")

    changed = [tensor for tensor in report.tensors if not tensor.kept]
    total = (
        str(report.name),
        f"{len(changed)} tensors",
        count(report.errors.count),
        *cells(changed),
    )
    if top is not None:
        show_each(changed[:top], _ERRORS, cells, total)  # the largest error comes first
    elif changed or every:
        show_tree(changed, _ERRORS, cells, total, every=every)
    if kept := len(report.tensors) - len(changed):
        are = "tensor is stored as it was" if kept == 1 else "tensors are stored as they were"
        emit(f"{kept} {are}")


def _figures(errors: Errors) -> tuple[str, ...]:
    relative = errors.relative_rmse
    return (
        f"{errors.rmse:.4g}",
        "" if relative is None else f"{relative:.3%}",
        f"{errors.max_error:.4g}",
        f"{errors.cosine:.6f}",
    )


def diff(
    a: Annotated[str, Argument(metavar="A", help="A stored model.")],
    b: Annotated[str, Argument(metavar="B", help="The stored model to compare it with.")],
    error: Annotated[
        bool,
        Option("--error", help="Also measure how much the values of changed tensors differ."),
    ] = False,
    tensors: EveryTensor = False,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how model B differs from A.

    Lists tensors added, removed and changed, types, and shared bytes.
    """
    result = blobstore.diff_models(
        a, b, store=stores_at(store, lower, cache=CACHE), error=error, jobs=jobs
    )
    show_result(result, partial(_show_diff, error=error, every=tensors), as_json)


def _show_diff(difference: ModelDiff, *, error: bool, every: bool) -> None:
    from blobstore.inspection.comparison import ValueErrors

    rows = [_difference(one, None) for one in difference.removed]
    rows += [_difference(None, one) for one in difference.added]
    rows += [_difference(one.before, one.after, one.errors) for one in difference.changed]
    headings = ("SIZE", *_ERRORS[:4]) if error else ("SIZE",)

    def cells(tensors: Sequence[SimpleNamespace]) -> tuple[str, ...]:
        both = (sum(side) for side in zip(*(one.nbytes for one in tensors), strict=True))
        sizes_of_both = dict.fromkeys(size(nbytes) for nbytes in both if nbytes)
        known = [one.errors for one in tensors if one.errors is not None]
        errors = sum(known, ValueErrors())
        odd = f", {errors.odd_values} infinite or NaN on one side" if errors.odd_values else ""
        figures = _figures(errors) if known else ("",) * 4
        return (" → ".join(sizes_of_both), *figures[:3], figures[3] + odd)[: len(headings)]

    if rows:
        show_tree(rows, headings, cells, every=every)
    documents = difference.documents
    emit_lines(
        *(f"- {name}" for name in documents.removed),
        *(f"+ {name}" for name in documents.added),
        *(f"~ {name}" for name in documents.changed),
        f"{counted(len(difference.added), 'tensor')} added, {len(difference.removed)} removed, "
        f"{len(difference.changed)} changed, {difference.equal} equal; "
        f"{size(difference.shared_bytes)} shared of {' and '.join(map(size, difference.nbytes))}",
    )


def _difference(
    before: TensorFact | None, after: TensorFact | None, errors: ValueErrors | None = None
) -> SimpleNamespace:
    """Return a row of a table: its type is ``- int4`` if A alone has it, ``+ int4`` if B has."""
    sides = [one for one in (before, after) if one is not None]
    is_reshaped = len({one.shape for one in sides}) > 1
    types = [
        f"{one.type_name} {shape(one.shape)}" if is_reshaped else one.type_name for one in sides
    ]
    sign = "" if before and after else "- " if before else "+ "
    return SimpleNamespace(
        name=sides[0].name,
        type_name=sign + " → ".join(dict.fromkeys(types)),
        shape=sides[-1].shape,
        parameters=sides[-1].nbytes,  # by which types are ordered
        nbytes=[one.nbytes if one else 0 for one in (before, after)],
        errors=errors,
    )


def report(
    name: Model,
    against: Annotated[
        str | None,
        Option(
            metavar="SOURCE|MODEL",
            help="Measure the error now, against the checkpoint or a stored model [default:"
            " the last result of quality].",
        ),
    ] = None,
    output: Annotated[
        str | None,
        Option("--output", "-o", metavar="FILE", help="The page to write, as HTML."),
    ] = None,
    png: Annotated[
        str | None,
        Option(metavar="DIR", help="Write the plots as PNG files too (extra: plots)."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace files that already exist.")] = False,
    date: Annotated[
        str | None,
        Option(
            metavar="TEXT",
            help="The date to write on the page. Without it, the same input gives the same bytes.",
        ),
    ] = None,
    jobs: Jobs = None,
    ca_file: CaFileOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a page about a model: plots and tables in one file.

    An existing path is a source, as for inspect; write NAME:TAG for a stored model.
    """
    from blobstore.inspection.inspect import model_named
    from blobstore.io.durable import check_place
    from blobstore.plots.specification import check_drawable, drawn_png
    from blobstore.views.results import WrittenReport
    from blobstore.web.report import check_page, model_page, model_report, place_file, place_folder

    if output is None and png is None:
        raise UsageError("report has nothing to write", hint="Use -o FILE, or --png DIR.")
    if png is not None:
        check_drawable()
        place_folder(Path(png))
    if output is not None:
        check_page(output, force=force)
    result = with_bar(
        model_report,
        name,
        store=stores_at(store, lower, cache=CACHE, ca_file=ca_file),
        against=None if against is None else model_named(against) or source_at(against, ca_file),
        jobs=jobs,
    )
    drawn = (
        {} if png is None else {Path(png, f"{key}.png"): plot for key, plot in result.plots.items()}
    )
    for path in drawn:
        check_place(path, replace=force)
    page = None if output is None else model_page(result, date)
    if output is not None and page is not None:
        place_file(Path(output), page, force=force)
    for path, plot in drawn.items():
        place_file(path, drawn_png(plot), force=force)
    done = WrittenReport(
        name=result.name,
        page=output,
        nbytes=None if page is None else len(page),
        plots=list(result.plots),
        pictures=list(map(str, drawn)),
    )
    plots, pictures = counted(len(done.plots), "plot"), counted(len(done.pictures), "picture")
    show_lines(
        done,
        as_json,
        f"{done.page}: {plots}, {size(done.nbytes)}" if done.nbytes is not None else "",
        f"{os.path.dirname(done.pictures[0])}: {pictures}" if done.pictures else "",  # noqa: PTH120  # as it was given
    )
