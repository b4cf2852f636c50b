"""``report``, and the page of ``plan --html``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.buckets import CacheChoice
from blobstore.cli.output import (
    Jobs,
    LowerOption,
    Model,
    StoreOption,
    counted,
    emit,
    printable,
    progress_bar,
    size,
    source_at,
    stores_at,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.importer.planning.outputs import ImportPlan
    from blobstore.names import ModelName
    from blobstore.source.addresses import Source


def report(
    name: Model,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="SOURCE|MODEL",
            help="Measure the error now: against the checkpoint, or a stored model "
            "[default: what quality has kept].",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page to write, as HTML."),
    ] = None,
    png: Annotated[
        str | None,
        typer.Option(
            "--png", metavar="DIR", help="Write the plots as PNG files too (extra: plots)."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that already exist.")
    ] = False,
    date: Annotated[
        str | None,
        typer.Option(
            "--date",
            metavar="TEXT",
            help="The date to write on the page. Without it, the same input gives the same bytes.",
        ),
    ] = None,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
) -> None:
    """Write a page about a model: plots and tables in one file.

    A path that exists is a source, as for inspect: NAME:TAG is nearly always a stored model.
    """
    from blobstore.report.gathering import gather
    from blobstore.report.model_page import model_page, model_plots
    from blobstore.report.placing import check_folder, check_place, place_file, place_folder
    from blobstore.report.rasters import check_drawable, drawn_png

    if output is None and png is None:
        raise UsageError("report has nothing to write", hint="Use -o FILE, or --png DIR.")
    if png is not None:
        check_drawable()
        check_folder(png)
    if output is not None:
        check_place(output, force=force)
    opened = stores_at(store, lower, cache=CacheChoice())
    other = None if against is None else _side(against)
    with progress_bar() as progress:
        found = gather(name, store=opened, against=other, jobs=jobs, progress=progress)
    plots = model_plots(found)
    pictures = {} if png is None else {Path(png, f"{key}.png"): plots[key] for key in plots}
    if png is not None:
        place_folder(Path(png))
    for path in pictures:
        check_place(str(path), force=force)
    if output is not None:
        page = model_page(found, plots, date)
        place_file(Path(output), page, force=force)
        emit(f"{printable(output)}: {counted(len(plots), 'plot')}, {size(len(page))}")
    if png is not None:
        for path, plot in pictures.items():
            place_file(path, drawn_png(plot), force=force)
        emit(f"{printable(png)}: {counted(len(pictures), 'picture')}")


def write_plan_page(
    made: ImportPlan, path: str, options: Mapping[str, Any], *, force: bool
) -> None:
    """Write the page of a plan that was made with ``options``. Raises: as `place_file`."""
    from blobstore.importer.policies.options import ImportOptions
    from blobstore.report.placing import place_file
    from blobstore.report.plan_choices import plan_choices
    from blobstore.report.plan_page import plan_page

    given = ImportOptions.parse(**{**options, "target_size": None, "target_bpw": None})
    place_file(Path(path), plan_page(plan_choices(made, given)), force=force)


def _side(text: str) -> Source | ModelName:
    """Return a stored model's name, or a source: a path that exists, or an address."""
    from blobstore.inspection.places import parse_target

    target = parse_target(text)
    return target.model if target.is_model and target.model is not None else source_at(text)
