"""``import`` and ``plan``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.import_options import flags_of, show_coverage, takes_import_options, with_flags
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    LowerOption,
    StoreOption,
    WaitOption,
    count,
    counted,
    emit,
    parse_size,
    printable,
    progress_bar,
    shape,
    show_json,
    show_table,
    size,
    source_at,
    stores_at,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.importer.planning.outputs import ImportPlan
    from blobstore.importer.run import ImportResult
    from blobstore.model.facts import Verdict
    from blobstore.names import ModelName


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="A .safetensors file or a checkpoint folder. With --modelfile, a single argument is the NAME.",
    ),
]
PlanSource = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="A .safetensors file or a checkpoint folder [default: the Modelfile's FROM].",
    ),
]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Name of the model [default: the source's name, tagged with the type]."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Memory for the work [default: 32MB, and 32MB per thread]."
    ),
]
VerifyReuse = Annotated[
    bool,
    typer.Option(
        "--verify-reuse", help="Hash the blobs of earlier imports before using them again."
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Let mlx-lm build its network for the planned tensors; takes seconds (extra: lm).",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the plan to a file, for import --plan."
    ),
]
Planned = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Carry out a plan that plan -o wrote; SOURCE is where it is now.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")
]
CopyUp = Annotated[
    bool, typer.Option("--copy-up", help="Write all blobs, also those that a lower store has.")
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Allow a tag that says another type, such as :int4 for int8 weights."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("import")(takes_import_options(import_))
    app.command("plan")(takes_import_options(plan))


def import_(
    source: Source = None,
    name: Name = None,
    *,
    jobs: Jobs = None,
    memory: Memory = None,
    verify_reuse: VerifyReuse = False,
    dry_run: DryRun = False,
    force: Force = False,
    planned: Planned = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    copy_up: CopyUp = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Import a checkpoint into the store, quantized on the way."""
    from blobstore.importer.run import check_tag, default_name, plan_import, run_plan

    if name is None and (options["modelfile"] is not None or planned is not None):
        source, name = None, source  # as in `ollama create NAME -f Modelfile`
    target = _model_name(name, options["modelfile"]) if name is not None else None
    budget = parse_size(memory) if memory is not None else None
    with progress_bar() as progress:
        made = (
            plan_import(source_at(source), jobs=jobs, progress=progress, **options)
            if planned is None
            else _travelled(planned, source, options)
        )
    target = target or default_name(made)
    if not force:
        check_tag(made, target)
    _print_notes(made)
    if dry_run:
        _show_plan(made, made.runs_in, as_json=as_json)
        return
    if made.options.target is not None and not as_json:
        _show_tensors(made)
    with progress_bar() as progress:
        result = run_plan(
            made,
            target,
            stores_at(store, lower, wait, may_be_new=True, copies_up=copy_up),
            jobs=jobs,
            memory=budget,
            verify_reuse=verify_reuse,
            progress=progress,
        )
    if as_json:
        from blobstore.views.importing import ImportView

        show_json(ImportView.of(result))
    else:
        _show_result(result)


def _travelled(planned: str, source: str | None, options: Any) -> ImportPlan:
    from blobstore.importer.planning.travel import read_plan

    if given := [
        name for name, value in options.items() if value not in (None, [], False, "default")
    ]:
        raise UsageError(
            f"{flags_of(given[0])[0]} can't be used with --plan, which has decided everything",
            hint="Make the plan with it.",
        )
    return read_plan(planned, source=source_at(source), open_source=source_at)


def _model_name(text: str, modelfile: str | None) -> ModelName:
    from blobstore.errors import InvalidNameError
    from blobstore.names import ModelName

    try:
        return ModelName.parse(text)
    except InvalidNameError as error:
        if modelfile is not None:
            error.hint = "With --modelfile and one argument, that is the model's name; give SOURCE and NAME for both."
        raise


def plan(
    source: PlanSource = None,
    *,
    output: Output = None,
    jobs: Jobs = None,
    check: Check = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Show what an import would write. Lists its tensors and their types; nothing is stored."""
    from blobstore.importer.run import plan_import

    with progress_bar() as progress:
        made = plan_import(source_at(source), jobs=jobs, progress=progress, **options)
    _print_notes(made)
    runs_in = made.runs_in
    if check:
        from blobstore.mlx_lm import check_plan

        runs_in = (check_plan(made), *runs_in[1:])
    if output is not None:
        from blobstore.importer.planning.document import write_plan

        write_plan(made, output)
    _show_plan(made, runs_in, as_json=as_json)


def _print_notes(made: ImportPlan) -> None:
    for note in (*made.options.modelfile.notes, *made.notes):
        print(f"Note: {printable(with_flags(note))}", file=sys.stderr)


def _show_result(result: ImportResult) -> None:
    from blobstore.model.facts import in_one_line

    rate = result.source_bytes / max(result.seconds, 1e-3)
    emit(f"{result.name}   {result.digest.short}")
    emit(
        f"{size(result.source_bytes)} in, {size(result.stored_bytes)} stored, {result.bits_per_weight:.2f} bits per weight"
    )
    saved = f" ({size(result.saved_bytes)} saved)" if result.saved_bytes else ""
    recalled = f", {result.recalled} not made again" if result.recalled else ""
    emit(
        f"{counted(result.blobs, 'blob')}: {result.created} new ({size(result.new_bytes)}), "
        f"{result.reused} were there{saved}{recalled}"
    )
    emit(f"{result.seconds:.2f} s, {size(int(rate))}/s")
    emit(printable(in_one_line(result.runs_in)))
    show_coverage(result.coverage)


def _show_plan(made: ImportPlan, runs_in: Iterable[Verdict], *, as_json: bool) -> None:
    if as_json:
        from blobstore.views.importing import PlanView

        show_json(PlanView.of(made, runs_in))
        return
    _show_tensors(made)
    for verdict in runs_in:
        emit(printable(verdict.sentence))
    show_coverage(made.coverage)


def _show_tensors(made: ImportPlan) -> None:
    headings = ["TENSOR", "TYPE", "SHAPE", "SIZE"]
    rows = [
        [tensor.name, _type(tensor), shape(tensor.shape), size(tensor.nbytes)]
        for tensor in made.tensors
    ]
    if made.options.target is not None:
        headings.append("ERROR")
        for row in rows:
            error = made.relative_errors.get(row[0])
            row.append("" if error is None else f"{error:.3%}")
    show_table(headings, rows)
    emit(
        f"{counted(len(made.blobs), 'blob')}, {count(made.parameters)} parameters, {size(made.stored_bytes)}, "
        f"{made.bits_per_weight:.2f} bits per weight"
    )


def _type(tensor: Any) -> str:
    kind = str(tensor.quantization if tensor.quantization is not None else tensor.dtype)
    return f"{kind} transposed" if tensor.transposed else kind
