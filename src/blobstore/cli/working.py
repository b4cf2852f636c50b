"""``work`` and ``commit``: one plan that many machines carry out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.conversion import show_import
from blobstore.cli.import_options import Force, Memory, VerifyReuse
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    LowerOption,
    StoreOption,
    WaitOption,
    counted,
    emit,
    parse_size,
    progress_bar,
    rate,
    show_table,
    show_view,
    size,
    source_at,
    stores_at,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.views.worked import BatchView, WorkView

_SHARD = re.compile(r"(?P<index>[0-9]{1,7})/(?P<count>[0-9]{1,7})", re.ASCII)
_FAILED = 1
Source = Annotated[
    str | None,
    typer.Option("--source", metavar="SOURCE", help="Where the plan's source is now."),
]
PlanFile = Annotated[str | None, typer.Argument(metavar="PLAN", help="A file that plan -o wrote.")]


def work(
    plan: PlanFile = None,
    *,
    shard: Annotated[
        str,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Which of N parts of the work to do; I counts from 0.",
        ),
    ] = "0/1",
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="FILE",
            help="Import a list of models, in TOML, instead of one plan.",
        ),
    ] = None,
    source: Source = None,
    jobs: Jobs = None,
    memory: Memory = None,
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
        raise UsageError("work does a PLAN or a --batch, not both")
    if batch is not None and source is not None:
        raise UsageError("--source can't be used with --batch, whose list names the sources")
    settings = {
        "shard": parse_shard(shard),
        "store": stores_at(store, lower, wait, may_be_new=True),
        "open_source": source_at,
        "jobs": jobs,
        "memory": parse_size(memory) if memory is not None else None,
        "verify_reuse": verify_reuse,
    }
    if batch is not None:
        from blobstore.importer.work.batch import work_on_batch
        from blobstore.views.worked import BatchView

        found = BatchView.of(work_on_batch(batch, **settings))
        show_view(found, _show_batch, as_json=as_json)
        return _FAILED if found.failed else 0
    if plan is None:
        raise UsageError("work needs a PLAN", hint="blobstore plan SOURCE -o PLAN writes it.")
    from blobstore.importer.work.worker import work_on_plan
    from blobstore.views.worked import WorkView

    with progress_bar() as progress:
        result = work_on_plan(plan, source=source, progress=progress, **settings)
    show_view(WorkView.model_validate(result), _show_work, as_json=as_json)
    return 0


def parse_shard(text: str) -> tuple[int, int]:
    """Return the index and the number of shards in a text such as 0/4. Raises: UsageError."""
    match = _SHARD.fullmatch(text)
    if match is None:
        raise UsageError(f"invalid shard {text!r}", hint="Write I/N, such as 0/4 for the first.")
    return int(match["index"]), int(match["count"])


def _show_work(view: WorkView) -> None:
    if view.made:
        done = f"{view.made} of {counted(view.tasks, 'task')} done now"
        emit(f"{done}: {counted(view.blobs, 'blob')}, {size(view.stored_bytes)}")
        emit(f"{view.seconds:.2f} s, {rate(view.source_bytes, view.seconds)}")
    else:
        emit(f"{counted(view.tasks, 'task')}, all done before")
    emit("blobstore commit PLAN publishes the model when all shards are done")


def _show_batch(view: BatchView) -> None:
    rows = [
        [
            model.name,
            model.state,
            model.digest.removeprefix("sha256:")[:12] if model.digest else "",
            model.error or (f"{counted(model.waits_for, 'task')} left" if model.waits_for else ""),
        ]
        for model in view.models
    ]
    show_table(["MODEL", "STATE", "ID", ""], rows)


def commit(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A file that plan -o wrote.")],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the model [default: the source's name, tagged with the type].",
        ),
    ] = None,
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every blob before publishing the model.")
    ] = False,
    source: Source = None,
    jobs: Jobs = None,
    force: Force = False,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a model that work has made."""
    from blobstore.importer.work.publishing import commit_plan

    with progress_bar() as progress:
        result = commit_plan(
            plan,
            name,
            store=stores_at(store, lower, wait),
            source=source,
            open_source=source_at,
            verify=verify,
            jobs=jobs,
            force=force,
            progress=progress,
        )
    show_import(result, as_json=as_json)
