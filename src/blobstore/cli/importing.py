"""``import`` and ``plan``, and ``work`` and ``commit``: one plan that many machines carry out.

The options that decide are made from the table in importer/arguments.py, those that carry out are
here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from typer import Argument, Option

import blobstore
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    count,
    counted,
    coverage_lines,
    emit,
    emit_lines,
    flag_of,
    note,
    parse_size,
    rate,
    replaced_line,
    shares,
    show_json,
    show_lines,
    show_result,
    show_table,
    size,
    with_bar,
    with_flags,
)
from blobstore.cli.stores import (
    CaFileOption,
    LowerOption,
    StoreOption,
    WaitOption,
    source_at,
    stores_at,
)
from blobstore.cli.trees import (
    SIZES,
    EveryTensor,
    Top,
    show_each,
    show_tree,
    sizes,
)
from blobstore.errors import InvalidNameError, UsageError
from blobstore.importer.arguments import ImportArguments, Option as ImportOption
from blobstore.names import ModelName

if TYPE_CHECKING:
    from blobstore.importer.batch import Batch
    from blobstore.importer.outputs import OutputTensor
    from blobstore.source.addresses import OpenSource


Memory = Annotated[
    str | None,
    Option(
        "--memory",
        metavar="SIZE",
        help="Memory to work in [default: 76MB plus 20MB per thread].",
    ),
]
VerifyReuse = Annotated[
    bool,
    Option("--verify-reuse", help="Hash the blobs of earlier imports before using them again."),
]
Force = Annotated[
    bool,
    Option("--force", help="Allow a tag of another type, such as :int4 for int8 weights."),
]


# What a command line makes of a value's type; of all others a text.
_TYPES: dict[Any, Any] = {
    **{kind: kind for kind in (bool, int | None, float | None)},
    Sequence[str]: list[str] | None,
}


def takes_import_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command, whose ``**options`` typer now sees as the options of an import."""
    own = inspect.signature(command, eval_str=True)
    *named, _ = own.parameters.values()
    ordered = sorted([*_OPTIONS, *named], key=lambda one: one.kind)
    command.__signature__ = own.replace(parameters=ordered)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return command


def _parameter(name: str, kind: Any, option: ImportOption) -> inspect.Parameter:
    kind = Sequence[str] if name == "adapter" else kind  # to find out if it is given twice
    info = Option(
        flag_of(name),
        *(["-f"] if name == "modelfile" else []),
        metavar=option.metavar,
        help=option.help,
        parser=parse_size if name == "target_size" else None,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[_TYPES.get(kind, str | None), info],
    )


def _only_one(adapters: list[str] | None) -> str | None:
    if adapters and len(adapters) > 1:
        raise UsageError(
            "--adapter was given twice", hint="Merge one, export, and merge the other."
        )
    return adapters[0] if adapters else None


_OPTIONS = [
    _parameter(name, *get_args(hint))
    for name, hint in get_type_hints(ImportArguments, include_extras=True).items()
]


@takes_import_options
def import_(
    source: Annotated[
        str | None,
        Argument(
            metavar="SOURCE",
            help="A .safetensors or PyTorch file or a folder, here or at an https, hf, s3, gs or "
            "az address. "
            "With --modelfile, a single argument is the NAME.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="Name of the model [default: the source's name, tagged with the type].",
        ),
    ] = None,
    *,
    jobs: Jobs = None,
    memory: Memory = None,
    connections: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="Simultaneous requests to the source's server [default: 8].",
        ),
    ] = None,
    limit_rate: Annotated[
        str | None,
        Option(metavar="SIZE", help="Maximum download rate in bytes per second, such as 20MB."),
    ] = None,
    ca_file: CaFileOption = None,
    verify_reuse: VerifyReuse = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show what would be written, but write nothing.")
    ] = False,
    tensors: EveryTensor = False,
    top: Top = None,
    force: Force = False,
    planned: Annotated[
        str | None,
        Option(
            "--plan",
            metavar="FILE",
            help="Carry out a plan that plan -o wrote; SOURCE is where its source is now.",
        ),
    ] = None,
    on: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            help="Make the blobs on the workers of a Dask cluster: dask://HOST:PORT (extra: dask).",
        ),
    ] = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    copy_up: Annotated[
        bool, Option("--copy-up", help="Write all blobs, even those that a lower store has.")
    ] = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Import a checkpoint, and quantize it on the way."""
    from blobstore.importer.run import name_for
    from blobstore.source.weights import FetchOptions

    options["adapter"] = _only_one(options["adapter"])  # typer splits what a callback returns
    if name is None and (options["modelfile"] is not None or planned is not None):
        source, name = None, source  # as in `ollama create NAME -f Modelfile`
    if on is not None and (jobs is not None or verify_reuse):
        given = "--jobs" if jobs is not None else "--verify-reuse"
        raise UsageError(f"{given} can't be used with --on, whose workers have their own threads")
    target = _model_name(name, options["modelfile"]) if name is not None else None
    budget = parse_size(memory) if memory is not None else None
    at_most = parse_size(limit_rate) if limit_rate is not None else None
    how: Any = {"jobs": jobs, "fetch": FetchOptions(connections=connections, limit_rate=at_most)}
    open_source = partial(source_at, ca_file=ca_file)
    if planned is None:
        made = with_bar(blobstore.plan_import, source, open_source=open_source, **how, **options)
    else:
        made = _read_back(planned, source, options, open_source)
    target = name_for(made, target, force=force)
    note(*made.options.modelfile.notes, *made.notes)
    if dry_run:
        _show_plan(made, made.runs_in, as_json, every=tensors, top=top)
        return
    if made.options.target is not None and not as_json:
        _show_tensors(made, every=tensors, top=top)
    home = stores_at(store, lower, wait, may_be_new=True, copies_up=copy_up, ca_file=ca_file)
    if on is None:
        how["verify_reuse"] = verify_reuse
        result = with_bar(blobstore.run_plan, made, target, home, memory=budget, **how)
    else:
        from blobstore.distributed import connect, run_plan_on

        with connect(on) as client:
            result = with_bar(
                run_plan_on,
                client,
                made,
                target,
                home,
                path=planned,
                memory=budget,
                open_source=open_source,
            )
    show_result(result, _show_import, as_json)


def _read_back(
    planned: str, source: str | None, options: Any, open_source: OpenSource
) -> blobstore.ImportPlan:
    if given := [
        name for name, value in options.items() if value not in (None, [], False, "default")
    ]:
        raise UsageError(
            f"{flag_of(given[0])} can't be used with --plan: the plan has already decided it",
            hint="Give it to blobstore plan.",
        )
    return blobstore.read_plan(planned, source=source, open_source=open_source)


def _model_name(text: str, modelfile: str | None) -> ModelName:
    try:
        return ModelName.parse(text)
    except InvalidNameError as error:
        if modelfile is None:
            raise
        raise InvalidNameError(
            error.message,
            hint="With --modelfile, a single argument is the model's name; give both SOURCE and"
            " NAME.",
            rule=error.rule,
        ) from error


@takes_import_options
def plan(
    source: Annotated[
        str | None,
        Argument(
            metavar="SOURCE",
            help="As for import [default: the Modelfile's FROM].",
        ),
    ] = None,
    *,
    output: Annotated[
        str | None,
        Option(
            "--output", "-o", metavar="FILE", help="Write the plan to a file, for import --plan."
        ),
    ] = None,
    jobs: Jobs = None,
    ca_file: CaFileOption = None,
    check: Annotated[
        bool,
        Option(
            "--check",
            help="Check that mlx-lm can build its network for it; takes seconds (extra: lm).",
        ),
    ] = False,
    html: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Also write a page that shows the sizes of all types and group sizes.",
        ),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Replace the file of --html if it exists.")
    ] = False,
    tensors: EveryTensor = False,
    top: Top = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Show what an import would write. Lists its tensors and their types; nothing is stored."""
    options["adapter"] = _only_one(options["adapter"])
    if html is not None:
        from blobstore.web.report import check_page

        check_page(html, force=force)
    made = with_bar(
        blobstore.plan_import,
        source,
        jobs=jobs,
        open_source=partial(source_at, ca_file=ca_file),
        **options,
    )
    note(*made.options.modelfile.notes, *made.notes)
    runs_in = made.runs_in
    if check:
        from blobstore.mlx_lm import check_plan

        checked = check_plan(made)
        runs_in = tuple(checked if one.runtime == checked.runtime else one for one in runs_in)
    if output is not None:
        blobstore.write_plan(made, output)
    if html is not None:
        from blobstore.importer.options import ImportOptions
        from blobstore.web.report import place_file, plan_page

        given = ImportOptions.parse(**{**options, "target_size": None, "target_bpw": None})
        place_file(Path(html), plan_page(made, given), force=force)
    _show_plan(made, runs_in, as_json, every=tensors, top=top)


def _show_import(result: blobstore.ImportResult) -> None:
    saved = f" ({size(result.saved_bytes)} saved)" if result.saved_bytes else ""
    recalled = f", {result.recalled} recalled from an earlier import" if result.recalled else ""
    first, *others = (with_flags(verdict.sentence) for verdict in result.runs_in)
    lower = (sentence[0].lower() + sentence[1:] for sentence in others)
    emit_lines(
        f"{result.name}   {result.digest.short}",
        replaced_line(result.replaced),
        f"{size(result.source_bytes)} in, {size(result.stored_bytes)} stored, {_bits(result)}",
        f"{counted(result.blobs, 'blob')}: {result.created} new ({size(result.new_bytes)}), "
        f"{result.reused} reused{saved}{recalled}",
        f"{result.seconds:.2f} s, {rate(result.source_bytes, result.seconds)}",
        "; ".join([first, *lower]),
        *coverage_lines(result.coverage),
        _mixture_line(result),
    )


def _show_plan(
    made: blobstore.ImportPlan, runs_in: Sequence[blobstore.Verdict], as_json: bool, **rows: Any
) -> None:
    if as_json:
        show_json(_plan_document(made, runs_in))
        return
    _show_tensors(made, **rows)
    emit_lines(
        *(with_flags(verdict.sentence) for verdict in runs_in),
        *coverage_lines(made.coverage),
        _mixture_line(made),
    )


def _plan_document(
    made: blobstore.ImportPlan, runs_in: Sequence[blobstore.Verdict]
) -> dict[str, Any]:
    from blobstore.views.documents import document_of

    document: dict[str, Any] = document_of(made) | {"runs_in": document_of(runs_in)}
    if made.options.target is not None:
        for tensor in (tensor for blob in document["blobs"] for tensor in blob["tensors"]):
            tensor["relative_error"] = made.relative_errors.get(tensor["name"])
    return document


def _show_tensors(made: blobstore.ImportPlan, *, every: bool, top: int | None) -> None:
    errors = made.relative_errors
    headings = (*SIZES, "ERROR") if made.options.target is not None else SIZES

    def cells(tensors: Sequence[OutputTensor]) -> tuple[str, ...]:
        measured = [errors[tensor.name] for tensor in tensors if tensor.name in errors]
        worst = (f"{max(measured):.3%}" if measured else "",)
        return (*sizes(tensors), *worst)[: len(headings)]

    if top is not None:
        keyed = ((errors.get(one.name, 0), one.nbytes, one.name, one) for one in made.tensors)
        show_each([one for *_, one in nlargest(top, keyed)], headings, cells)
    else:
        show_tree(made.tensors, headings, cells, every=every)
    emit(
        f"{counted(len(made.blobs), 'blob')}, {count(made.parameters)} parameters, "
        f"{size(made.stored_bytes)}, {_bits(made)}"
    )


def _bits(made: blobstore.ImportPlan | blobstore.ImportResult) -> str:
    return f"{made.bits_per_weight:.2f} bits per weight ({shares(made.type_bytes)})"


# A model of which as much is of the asked type has few bits already.
_MOSTLY = 0.95


def _mixture_line(made: blobstore.ImportPlan | blobstore.ImportResult) -> str:
    """Name the mixture of types that an import makes by default, and the way to fewer bits."""
    options, nbytes = made.options, made.type_bytes
    asked = options.quant_type
    is_users = options.pure or options.rules or options.target is not None
    if asked is None or is_users or nbytes[asked.value] >= _MOSTLY * sum(nbytes.values()):
        return ""
    return (
        "Ollama's mixture of types: embeddings and sensitive matrices have more bits; "
        f"--pure makes them {asked}"
    )


_SHARD = re.compile(r"(?P<index>[0-9]{1,7})/(?P<count>[0-9]{1,7})", re.ASCII)
Source = Annotated[
    str | None,
    Option("--source", metavar="SOURCE", help="Where the plan's source is now."),
]


def work(
    plan: Annotated[str | None, Argument(metavar="PLAN", help="A file that plan -o wrote.")] = None,
    *,
    shard: Annotated[
        str,
        Option(
            metavar="I/N",
            help="Which of N parts of the work to do; I counts from 0.",
        ),
    ] = "0/1",
    batch: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Import a list of models, in TOML, instead of one plan.",
        ),
    ] = None,
    source: Source = None,
    jobs: Jobs = None,
    memory: Memory = None,
    ca_file: CaFileOption = None,
    verify_reuse: VerifyReuse = False,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Make a part of a plan's blobs.

    Other machines make the other parts, and commit publishes the model.
    """
    if plan is not None and batch is not None:
        raise UsageError("work takes a PLAN or a --batch, not both")
    if batch is not None and source is not None:
        raise UsageError("--source can't be used with --batch, whose list names the sources")
    settings: dict[str, Any] = {
        "shard": parse_shard(shard),
        "store": stores_at(store, lower, wait, may_be_new=True, ca_file=ca_file),
        "open_source": partial(source_at, ca_file=ca_file),
        "jobs": jobs,
        "memory": parse_size(memory) if memory is not None else None,
        "verify_reuse": verify_reuse,
    }
    if batch is not None:
        from blobstore.importer.batch import Batch

        batch_result = Batch(blobstore.work_on_batch(batch, **settings))
        show_result(batch_result, _show_batch, as_json)
        return 1 if batch_result.failed else 0
    if plan is None:
        raise UsageError("work needs a PLAN", hint="blobstore plan SOURCE -o PLAN writes it.")
    result = with_bar(blobstore.work_on_plan, plan, source=source, **settings)
    done = f"{counted(result.tasks, 'task')}, all done already"
    if result.made:
        done = (
            f"{result.made} of {counted(result.tasks, 'task')} of this shard done: "
            f"{counted(result.blobs, 'blob')}, {size(result.stored_bytes)}"
        )
    speed = f"{result.seconds:.2f} s, {rate(result.source_bytes, result.seconds)}"
    then = "blobstore commit PLAN publishes the model when all shards are done"
    show_lines(result, as_json, done, speed if result.made else "", then)
    return 0


def parse_shard(text: str) -> tuple[int, int]:
    """Return the index and the number of shards in a text such as 0/4. Raises: UsageError."""
    match = _SHARD.fullmatch(text)
    if match is None:
        raise UsageError(f"invalid shard {text!r}", hint="Write I/N, such as 0/4 for the first.")
    return int(match["index"]), int(match["count"])


def _show_batch(batch: Batch) -> None:
    show_table(
        ["MODEL", "STATE", "ID", ""],
        [
            [
                model.name,
                model.state,
                model.digest.short if model.digest else "",
                model.error
                or (f"{counted(model.waits_for, 'task')} left" if model.waits_for else ""),
            ]
            for model in batch.models
        ],
    )


def commit(
    plan: Annotated[str, Argument(metavar="PLAN", help="A file that plan -o wrote.")],
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="Name of the model [default: the source's name, tagged with the type].",
        ),
    ] = None,
    *,
    verify: Annotated[
        bool, Option("--verify", help="Hash every blob before publishing the model.")
    ] = False,
    source: Source = None,
    jobs: Jobs = None,
    force: Force = False,
    ca_file: CaFileOption = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish the model whose blobs work has made."""
    result = with_bar(
        blobstore.commit_plan,
        plan,
        name,
        store=stores_at(store, lower, wait, ca_file=ca_file),
        source=source,
        open_source=partial(source_at, ca_file=ca_file),
        verify=verify,
        jobs=jobs,
        force=force,
    )
    show_result(result, _show_import, as_json)
