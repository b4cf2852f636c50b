"""``import``, ``plan`` and ``export``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.buckets import CacheOption, CacheSizeOption, cached_stores_at
from blobstore.cli.covered import show_coverage
from blobstore.cli.import_options import (
    Connections,
    CopyUp,
    Force,
    LimitRate,
    Memory,
    On,
    Planned,
    VerifyReuse,
    takes_import_options,
)
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    LowerOption,
    Model,
    StoreOption,
    WaitOption,
    count,
    counted,
    emit,
    flags_of,
    note,
    parse_size,
    printable,
    progress_bar,
    rate,
    shape,
    show_json,
    show_replaced,
    show_table,
    show_view,
    size,
    source_at,
    stores_at,
    with_flags,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.importer.planning.outputs import ImportPlan
    from blobstore.importer.run import ImportResult
    from blobstore.io.workers import Progress
    from blobstore.model.facts import Verdict
    from blobstore.names import ModelName
    from blobstore.views.checkpoints import ExportView


@takes_import_options
def import_(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A .safetensors file or a folder, here or at an https, hf, s3, gs or az address. "
            "With --modelfile, a single argument is the NAME.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the model [default: the source's name, tagged with the type].",
        ),
    ] = None,
    *,
    jobs: Jobs = None,
    memory: Memory = None,
    connections: Connections = None,
    limit_rate: LimitRate = None,
    verify_reuse: VerifyReuse = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")
    ] = False,
    force: Force = False,
    planned: Planned = None,
    on: On = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    copy_up: CopyUp = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Import a checkpoint into the store, quantized on the way."""
    from blobstore.importer.model_names import check_tag, default_name
    from blobstore.importer.run import plan_import, run_plan
    from blobstore.source.fetching import FetchOptions

    if name is None and (options["modelfile"] is not None or planned is not None):
        source, name = None, source  # as in `ollama create NAME -f Modelfile`
    if on is not None and (jobs is not None or verify_reuse):
        given = "--jobs" if jobs is not None else "--verify-reuse"
        raise UsageError(f"{given} can't be used with --on, whose workers have their own threads")
    target = _model_name(name, options["modelfile"]) if name is not None else None
    budget = parse_size(memory) if memory is not None else None
    at_most = parse_size(limit_rate) if limit_rate is not None else None
    fetch = FetchOptions(connections=connections, limit_rate=at_most)
    how: Any = {"jobs": jobs, "fetch": fetch}
    with progress_bar() as progress:
        made = (
            plan_import(source, progress=progress, open_source=source_at, **how, **options)
            if planned is None
            else _travelled(planned, source, options)
        )
    target = target or default_name(made)
    if not force:
        check_tag(made, target)
    _print_notes(made)
    if dry_run:
        _show_planned(made, made.runs_in, as_json=as_json)
        return
    if made.options.target is not None and not as_json:
        _show_tensors(made)
    home = stores_at(store, lower, wait, may_be_new=True, copies_up=copy_up)
    with progress_bar() as progress:
        if on is not None:
            result = _run_on(on, made, target, home, planned, budget, progress)
        else:
            result = run_plan(
                made,
                target,
                home,
                memory=budget,
                verify_reuse=verify_reuse,
                progress=progress,
                **how,
            )
    show_import(result, as_json=as_json)


def _run_on(
    address: str,
    made: ImportPlan,
    target: ModelName,
    home: Any,
    path: str | None,
    memory: int | None,
    progress: Progress | None,
) -> ImportResult:
    from blobstore.distributed import connected, run_plan_on

    with connected(address) as client:
        return run_plan_on(
            client,
            made,
            target,
            home,
            path=path,
            memory=memory,
            progress=progress,
            force=True,  # the tag is checked already
            open_source=source_at,
        )


def _travelled(planned: str, source: str | None, options: Any) -> ImportPlan:
    from blobstore.importer.planning.travel import read_plan

    if given := [
        name for name, value in options.items() if value not in (None, [], False, "default")
    ]:
        message = f"{flags_of(given[0])[0]} can't be used with --plan, which has decided everything"
        raise UsageError(message, hint="Make the plan with it.")
    return read_plan(planned, source=source, open_source=source_at)


def _model_name(text: str, modelfile: str | None) -> ModelName:
    from blobstore.errors import InvalidNameError
    from blobstore.names import ModelName

    try:
        return ModelName.parse(text)
    except InvalidNameError as error:
        if modelfile is None:
            raise
        hint = (
            "With --modelfile and one argument, that is the model's name; "
            "give SOURCE and NAME for both."
        )
        raise InvalidNameError(error.message, hint=hint, rule=error.rule) from error


@takes_import_options
def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="As for import [default: the Modelfile's FROM].",
        ),
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the plan to a file, for import --plan."
        ),
    ] = None,
    jobs: Jobs = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Let mlx-lm build its network for the planned tensors; takes seconds (extra: lm).",
        ),
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a page, too, that shows the sizes of all types and group sizes.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file of --html if it exists.")
    ] = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Show what an import would write. Lists its tensors and their types; nothing is stored."""
    from blobstore.importer.run import plan_import

    if html is not None:
        from blobstore.cli.reporting import write_plan_page
        from blobstore.report.placing import check_place

        check_place(html, force=force)
    with progress_bar() as progress:
        made = plan_import(source, jobs=jobs, progress=progress, open_source=source_at, **options)
    _print_notes(made)
    runs_in = made.runs_in
    if check:
        from blobstore.mlx_lm import check_plan

        checked = check_plan(made)
        runs_in = tuple(checked if one.runtime == checked.runtime else one for one in runs_in)
    if output is not None:
        from blobstore.importer.planning.document import write_plan

        write_plan(made, output)
    if html is not None:
        write_plan_page(made, html, options, force=force)
    _show_planned(made, runs_in, as_json=as_json)


def _print_notes(made: ImportPlan) -> None:
    for text in (*made.options.modelfile.notes, *made.notes):
        note(text)


def show_import(result: ImportResult, *, as_json: bool) -> None:
    """Print what an import did."""
    if as_json:
        from blobstore.views.checkpoints import ImportView

        show_json(ImportView.model_validate(result))
        return
    emit(f"{result.name}   {result.digest.short}")
    show_replaced(None if result.replaced is None else str(result.replaced))
    stored = f"{size(result.source_bytes)} in, {size(result.stored_bytes)} stored"
    emit(f"{stored}, {result.bits_per_weight:.2f} bits per weight")
    saved = f" ({size(result.saved_bytes)} saved)" if result.saved_bytes else ""
    recalled = f", {result.recalled} not made again" if result.recalled else ""
    new = f"{result.created} new ({size(result.new_bytes)})"
    emit(f"{counted(result.blobs, 'blob')}: {new}, {result.reused} were there{saved}{recalled}")
    emit(f"{result.seconds:.2f} s, {rate(result.source_bytes, result.seconds)}")
    first, *others = (with_flags(verdict.sentence) for verdict in result.runs_in)
    lower = (sentence[0].lower() + sentence[1:] for sentence in others)
    emit(printable("; ".join([first, *lower])))
    show_coverage(result.coverage)


def _show_planned(made: ImportPlan, runs_in: Sequence[Verdict], *, as_json: bool) -> None:
    if as_json:
        from blobstore.views.checkpoints import PlanView

        show_json(PlanView.of(made, runs_in))
        return
    _show_tensors(made)
    for verdict in runs_in:
        emit(printable(with_flags(verdict.sentence)))
    show_coverage(made.coverage)


def _show_tensors(made: ImportPlan) -> None:
    headings = ["TENSOR", "TYPE", "SHAPE", "SIZE"]
    rows = []
    for tensor in made.tensors:
        kind = str(tensor.quantization or tensor.dtype)
        kind = f"{kind} transposed" if tensor.transposed else kind
        rows.append([tensor.name, kind, shape(tensor.shape), size(tensor.nbytes)])
    if made.options.target is not None:
        headings.append("ERROR")
        for row in rows:
            error = made.relative_errors.get(row[0])
            row.append("" if error is None else f"{error:.3%}")
    show_table(headings, rows)
    parameters = sum(math.prod(tensor.shape) for tensor in made.tensors)
    totals = f"{count(parameters)} parameters, {size(made.stored_bytes)}"
    blobs = counted(len(made.blobs), "blob")
    emit(f"{blobs}, {totals}, {made.bits_per_weight:.2f} bits per weight")


def export(
    name: Model,
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    form: Annotated[
        str,
        typer.Option("--format", metavar="safetensors|mlx", help="mlx is for mlx_lm.load."),
    ] = "safetensors",
    dequantize: Annotated[
        str | None,
        typer.Option(
            "--dequantize",
            metavar="bfloat16|float16|float32",
            help="Write all weights as this type.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest size of a file, such as 5GB, "
            "or source for the same files as were imported.",
        ),
    ] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every blob before using it.")
    ] = False,
    jobs: Jobs = None,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a checkpoint folder.

    It gets shards and their index, config and tokenizer.
    """
    from blobstore.export.folder import export_model
    from blobstore.export.planned_files import AS_SOURCE
    from blobstore.model.mlx_lm_package import delay_package
    from blobstore.views.checkpoints import ExportView

    if form == "mlx":
        delay_package("mlx_lm")
    with progress_bar() as progress:
        result = export_model(
            name,
            folder,
            store=cached_stores_at(store, lower, cache, cache_size),
            format=form,
            dequantize=dequantize,
            max_shard_size=AS_SOURCE if max_shard_size == AS_SOURCE else parse_size(max_shard_size),
            jobs=jobs,
            verify=verify,
            progress=progress,
        )
    for text in result.notes:
        note(text)
    show_view(ExportView.of(result), _show_export, as_json=as_json)


def _show_export(view: ExportView) -> None:
    emit(f"{view.name} in {printable(view.folder)}: {len(view.files)} files")
    emit(f"{size(view.bytes)} in {view.seconds:.2f} s, {rate(view.bytes, view.seconds)}")
    if view.loads_in == ["blobstore"]:
        others = "; mlx-lm needs --format mlx, transformers --dequantize bfloat16"
    elif "transformers" not in view.loads_in:
        others = "; transformers needs --dequantize bfloat16, without --format mlx"
    else:
        others = ""
    emit(f"Loads in {', '.join(view.loads_in)}{others}")
