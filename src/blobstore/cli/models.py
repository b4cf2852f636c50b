"""``list``, ``show``, ``rm``, ``cp`` and ``mv``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.import_options import show_coverage
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    LowerOption,
    ReaderGoneError,
    StoreOption,
    WaitOption,
    age,
    count,
    counted,
    emit,
    note,
    printable,
    progress_bar,
    reason,
    shape,
    show_facts,
    show_json,
    show_table,
    size,
    store_at,
    stores_at,
)
from blobstore.errors import StorageError, UsageError
from blobstore.names import ModelName

if TYPE_CHECKING:
    from blobstore.inspection.listing import BrokenModel, ListedModel, ModelDetails, ModelSummary


_SHOWN = 20
"""Names in a note."""
Sort = Annotated[
    str,
    typer.Option(
        "--sort",
        metavar="name|time|size",
        help="Order: by name, the newest first, or the largest first.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("list")(list_)
    app.command("ls", hidden=True)(list_)
    app.command("show")(show)
    app.command("rm")(rm)
    app.command("cp")(cp)
    app.command("mv")(mv)


def list_(
    sort: Sort = "time",
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models of the store, the newest first."""
    from blobstore.inspection.listing import ListedModel, list_models

    if sort not in _ORDERS:
        raise UsageError(f"unknown order {sort!r}", hint=f"Use one of: {', '.join(_ORDERS)}.")
    upper, opened = store_at(store, may_be_new=True), stores_at(store, lower)
    models = sorted(list_models(opened), key=_ORDERS[sort])
    if as_json:
        from blobstore.views.models import ListItemView

        show_json([ListItemView.of(model, _place(opened, model)) for model in models])
    elif not models:
        emit(printable(f"No models in {opened.address} yet. Import one: blobstore import FOLDER"))
    else:
        rows = [
            _list_row(model) if isinstance(model, ListedModel) else _broken_row(model)
            for model in models
        ]
        places = [
            () if (place := _place(opened, model)) is None else (printable(place),)
            for model in models
        ]
        headings = (
            "NAME",
            "ID",
            "SIZE",
            "TYPE",
            "PARAMETERS",
            "MODIFIED",
            *(("STORE",) if any(places) else ()),
        )
        show_table(headings, [(*row, *place) for row, place in zip(rows, places, strict=True)])
    with _unreadable_is_noted():
        if newer := upper.newer.names():
            names = ", ".join(map(str, newer[:_SHOWN])) + (", …" if len(newer) > _SHOWN else "")
            note(
                f"a newer Ollama has {counted(len(newer), 'model')} in manifests-v2/, not listed here: {names}"
            )


def _place(store: Any, model: ListedModel | BrokenModel) -> str | None:
    """Return in which of several stores a model lies; None where there is one."""
    return store.home_of(model.name).address if hasattr(store, "home_of") else None


@contextmanager
def _unreadable_is_noted() -> Iterator[None]:
    """Print a note if manifests-v2/ can't be read: the models of this store can be shown all the same."""
    try:
        yield
    except StorageError as error:
        note(f"the models of newer Ollamas are unknown: {error.message}")


def _by_time(model: ListedModel | BrokenModel) -> tuple[float, ModelName]:
    """Return a key that sorts the newest first.

    A model that can't be read, or without a date, is last.
    """
    modified = getattr(model, "modified", None)
    return (-modified.timestamp() if modified is not None else math.inf, model.name)


def _by_size(model: ListedModel | BrokenModel) -> tuple[float, ModelName]:
    """Return a key that sorts the largest first, what can't be read last."""
    return (-getattr(model, "size", -math.inf), model.name)


_ORDERS: Mapping[str, Callable[[ListedModel | BrokenModel], Any]] = {
    "name": lambda model: model.name,
    "time": _by_time,
    "size": _by_size,
}


def _list_row(model: ListedModel) -> tuple[str, ...]:
    return (
        str(model.name),
        model.id.short,
        size(model.size),
        model.quant_type,
        count(model.parameters),
        age(model.modified),
    )


def _broken_row(model: BrokenModel) -> tuple[str, ...]:
    return (str(model.name), "", "", "broken", "", reason(model.error))


def show(
    name: Name,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors as well.")] = False,
    coverage: Annotated[
        bool,
        typer.Option(
            "--coverage",
            help="Say how much of its source is stored, and what was left out, and why.",
        ),
    ] = False,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model: its architecture, type and size."""
    from blobstore.inspection.listing import describe, stored_coverage, summarize

    asked = ModelName.parse(name)
    upper, opened = store_at(store, may_be_new=True), stores_at(store, lower)
    full = opened.find(asked)
    manifest = opened.manifests.read(full)
    summary = summarize(opened, full, manifest)
    details = describe(opened, manifest, summary.tensors)
    covered = stored_coverage(opened, manifest) if coverage else None
    with _unreadable_is_noted():
        if upper.newer.has(full):
            note(f"a newer Ollama has its own {full}, in manifests-v2/: it does not read this one")
    if as_json:
        from blobstore.views.models import ModelView

        show_json(ModelView.of(summary, details, covered))
        return
    _show_summary(summary, details)
    if covered is not None:
        emit()
        show_coverage(covered)
    if tensors:
        emit()
        show_table(
            ("TENSOR", "TYPE", "SHAPE", "SIZE"), [_tensor_row(tensor) for tensor in summary.tensors]
        )


def _show_summary(summary: ModelSummary, details: ModelDetails) -> None:
    from blobstore.inspection.listing import weights_by_type

    facts = {
        "name": str(summary.name),
        "id": str(summary.id),
        "architecture": details.architecture,
        "parameters": f"{count(summary.parameters)} ({summary.parameters:,})"
        if summary.parameters
        else None,
        "type": summary.quant_type or None,
        "weights": ", ".join(
            f"{kind} {count(number)}" for kind, number in weights_by_type(summary.tensors).items()
        )
        or None,
        "context length": details.context_length,
        "embedding length": details.embedding_length,
        "capabilities": ", ".join(details.capabilities) or None,
        "size": size(summary.size),
        "layers": summary.layers,
        "tensors": len(summary.tensors),
    }
    runs_in = {f"runs in {verdict.runtime}": str(verdict) for verdict in details.runs_in}
    show_facts({key: str(value) for key, value in facts.items() if value is not None} | runs_in)


def _tensor_row(tensor: Any) -> tuple[str, ...]:
    kind = tensor.quantization if tensor.quantization is not None else tensor.dtype
    return (tensor.name, str(kind), shape(tensor.shape), size(tensor.nbytes))


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Models to remove.")],
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove models, and the blobs that no other model needs."""
    asked = list(map(ModelName.parse, names))
    opened = stores_at(store, lower, wait)
    removals = []
    wanted = list(
        dict.fromkeys(map(opened.find, asked))
    )  # all or none: a typing error must not remove half of them
    for full in wanted:
        removal = opened.remove(full)
        freed, kept = (
            sum(blob.size for blob in blobs) for blobs in (removal.removed, removal.kept)
        )
        removals.append((full, removal))
        if not as_json:
            with suppress(ReaderGoneError):  # the other models were to be removed all the same
                emit(f"Removed {full}: {counted(len(removal.removed), 'blob')}, {size(freed)}")
                if removal.reason is not None:
                    emit(
                        f"Kept {counted(len(removal.kept), 'blob')} ({size(kept)}): {removal.reason}"
                    )
    if as_json:
        from blobstore.views.models import RemovalView

        show_json([RemovalView.of(full, removal) for full, removal in removals])


def cp(
    source: Name,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="NEW_NAME", help="Another name for it [default with --to: the same name]."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="DIR", help="Copy the model to the store DIR, which may be new."
        ),
    ] = None,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a model a second name, or copy it to another store. A second name shares its blobs."""
    if target is None and to is None:
        raise UsageError(
            "cp needs a NEW_NAME, or another store",
            hint="blobstore cp --help shows what is possible.",
        )
    asked, wanted = ModelName.parse(source), ModelName.parse(source if target is None else target)
    if to is None:
        opened = stores_at(store, lower, wait)
        old = opened.find(asked)
        new = opened.copy(asked, wanted)
        _show_new_name(old, new, "Copied", as_json)
    else:
        _copy_to(
            stores_at(store, lower, wait),
            asked,
            wanted,
            store_at(to, wait, may_be_new=True),
            jobs,
            as_json,
        )


def _copy_to(
    source: Any, name: ModelName, wanted: ModelName, target: Any, jobs: int | None, as_json: bool
) -> None:
    from blobstore.store.transfer import transfer

    if Path(source.address) in (Path(target.address), *Path(target.address).parents):
        what = "is" if source.address == target.address else "lies in"
        message = f"{target.address} {what} the store that the model is in"
        raise UsageError(message, hint="Leave --to out, and give a NEW_NAME.")
    with progress_bar() as progress:
        (done,) = transfer({str(name): str(wanted)}, source, target, jobs=jobs, progress=progress)
    if as_json:
        from blobstore.views.models import CopyView

        show_json(CopyView.of(done, target.address))
    else:
        told = ", ".join(
            f"{done.blobs[how]:,} {how.value} ({size(done.nbytes[how])})" for how in done.blobs
        )
        emit(
            f"Copied {done.source} to {done.name} in {printable(target.address)}: {told or 'no blobs'}"
        )


def mv(
    source: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
    target: Annotated[str, typer.Argument(metavar="NEW_NAME", help="Its new name.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model that already has this name.")
    ] = False,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a model another name."""
    asked, wanted = ModelName.parse(source), ModelName.parse(target)
    opened = stores_at(store, lower, wait)
    old = opened.find(asked)
    _show_new_name(old, opened.move(asked, wanted, replace=force), "Moved", as_json)


def _show_new_name(old: ModelName, new: ModelName, done: str, as_json: bool) -> None:
    if as_json:
        from blobstore.views.models import NewNameView

        show_json(NewNameView(source=str(old), name=str(new)))
    else:
        emit(f"{done} {old} to {new}")
