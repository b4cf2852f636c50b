"""``list``, ``show``, ``rm``, ``cp`` and ``mv``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import blobstore
from blobstore.cli.output import (
    LONGEST_REASON,
    Jobs,
    JsonOption,
    Model,
    ReaderGoneError,
    age,
    amounts,
    bits,
    blobs,
    count,
    counted,
    counts,
    coverage_lines,
    emit,
    emit_bytes,
    emit_lines,
    note,
    say_empty,
    shape,
    shares,
    show_facts,
    show_json,
    show_lines,
    show_table,
    size,
    with_bar,
    with_flags,
)
from blobstore.cli.stores import (
    CACHE,
    CaFileOption,
    InsecureOption,
    LowerOption,
    PlaceModel,
    StoreOption,
    WaitOption,
    home_at,
    model_at,
    registry_access,
    store_at,
    stores_at,
)
from blobstore.cli.trees import in_number_order
from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.names import ModelName

if TYPE_CHECKING:
    from blobstore.inspection.listing import BrokenModel, ListedModel
    from blobstore.views.results import CopiedModel, RemovedModel, ShownModel


# Names in a note.
_SHOWN = 20


def list_(
    place: Annotated[
        str | None,
        Argument(
            metavar="PLACE",
            help="List other models: HOST/NAMESPACE/MODEL (its tags) or HOST of a registry, "
            "s3://BUCKET/PREFIX, a folder or an archive.",
        ),
    ] = None,
    sort: Annotated[
        str,
        Option(
            metavar="name|time|size",
            help="Order: by name, the newest first, or the largest first.",
        ),
    ] = "time",
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models of the store, the newest first."""
    if sort not in _ORDERS:
        raise UsageError(f"unknown order {sort!r}", hint=f"Use one of: {', '.join(_ORDERS)}.")
    if place is None:
        opened = stores_at(store, lower, cache=CACHE, ca_file=ca_file)
    else:
        opened = home_at(place, registry_access(insecure, ca_file))
    listed = sorted(blobstore.list_models(opened), key=_ORDERS[sort])
    if as_json:
        show_json(listed)
    elif listed:
        _show_list(listed)
    elif place is not None:
        hint = "Some registries list only tags: blobstore list HOST/NAMESPACE/MODEL."
        raise NotFoundError(f"no models at {place}", hint=None if "/" in place else hint)
    else:
        say_empty(opened.address)
    with _note_unreadable():
        if (newest := opened.upper.newer) is not None and (newer := newest.names()):
            names = ", ".join(map(str, newer[:_SHOWN])) + (", …" if len(newer) > _SHOWN else "")
            note(
                f"a newer Ollama has {counted(len(newer), 'model')} in manifests-v2/, not listed"
                f" here: {names}"
            )


@contextmanager
def _note_unreadable() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        note(f"the models of newer Ollama versions can't be listed: {error.message}")


_ORDERS: Mapping[str, Callable[[ListedModel | BrokenModel], float]] = {
    "name": lambda _: 0,  # they are listed by name
    "time": lambda model: (
        -moment.timestamp() if (moment := getattr(model, "modified", None)) else math.inf
    ),
    "size": lambda model: -getattr(model, "size", -math.inf),
}


def _show_list(models: Sequence[ListedModel | BrokenModel]) -> None:
    headings = ["NAME", "ID", "SIZE", "TYPE", "BITS", "PARAMETERS", "MODIFIED"]
    rows = [_list_row(model) for model in models]
    more = {
        "STATE": ["packed" if model.is_packed else "" for model in models],
        "STORE": [model.store or "" for model in models],
    }
    for heading, cells in more.items():
        if any(cells):
            headings.append(heading)
            rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
    show_table(headings, rows)


def _list_row(model: ListedModel | BrokenModel) -> tuple[object, ...]:
    from blobstore.inspection.listing import BrokenModel

    if isinstance(model, BrokenModel):
        return (model.name, "", "", "broken", "", "", model.error.message[:LONGEST_REASON])
    return (
        model.name,
        model.id.short,
        size(model.size),
        model.quant_type,
        bits(model.bits_per_weight),
        count(model.parameters) if model.parameters else "",  # of an unread GGUF file
        age(model.modified),
    )


def show(
    name: Annotated[
        str,
        Argument(
            metavar="NAME",
            help="A stored model, HOST/NAMESPACE/MODEL[:TAG] at a registry, or an archive or "
            "s3://BUCKET/PREFIX.",
        ),
    ],
    model: PlaceModel = None,
    tensors: Annotated[bool, Option("--tensors", help="List the tensors as well.")] = False,
    coverage: Annotated[
        bool,
        Option(
            "--coverage",
            help="Show how much of the source is stored, what was left out, and why.",
        ),
    ] = False,
    template: Annotated[
        bool,
        Option("--template", help="Print only the prompt template."),
    ] = False,
    system: Annotated[bool, Option("--system", help="Print only the system prompt.")] = False,
    license_: Annotated[bool, Option("--license", help="Print only the licenses.")] = False,
    params: Annotated[
        bool,
        Option(
            "--params", "--parameters", help="Print only the parameters for generating, as stored."
        ),
    ] = False,
    modelfile: Annotated[bool, Option("--modelfile", help="Print only the Modelfile.")] = False,
    file: Annotated[
        str | None, Option(metavar="NAME", help="Print only a file of the source, as stored.")
    ] = None,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model: its architecture, type and size; or print one of its texts."""
    from blobstore.export.texts import PARTS, file_of, text_of
    from blobstore.inspection.listing import stored_coverage, summarize
    from blobstore.store.stored_model import StoredModel
    from blobstore.views.results import ShownModel

    opened, asked = model_at(name, model, registry_access(insecure, ca_file), store, lower)
    home = opened.holder(asked)
    full = home.find(asked)
    manifest = home.manifests.read(full)
    own = StoredModel(full, manifest, home)
    parts = list(compress(PARTS, (template, system, license_, params, modelfile)))
    if file is not None or parts:
        if len(parts) + (file is not None) + as_json > 1:
            raise UsageError("show prints one text at a time, and not as JSON")
        emit_bytes(text_of(own, parts[0]) if file is None else file_of(own, file))
        return
    details, stored = summarize(home, full, manifest)
    covered = stored_coverage(home, manifest) if coverage else None
    with _note_unreadable():
        if (newest := opened.upper.newer) is not None and newest.has(full):
            note(f"a newer Ollama has its own {full}, in manifests-v2/: it does not read this one")
    shown = ShownModel(replace(details, is_packed=home is opened.packed), manifest, stored, covered)
    if as_json:
        show_json(shown)
        return
    _show_model(shown)
    if (hint := own.gguf_hint) is not None:
        note(f"it is a GGUF file, for Ollama. {hint}")
    if covered is not None:
        emit()
        emit_lines(*coverage_lines(covered))
    if tensors:
        emit()
        show_table(
            ("TENSOR", "TYPE", "SHAPE", "SIZE"),
            [
                (one.name, one.type_text, shape(one.shape), size(one.nbytes))
                for one in in_number_order(stored)
            ],
        )


def _show_model(model: ShownModel) -> None:
    from blobstore.store.stored import bytes_by_type, weights_by_type

    details = model.details
    facts = {
        "name": details.name,
        "id": details.id,
        "architecture": details.architecture,
        "parameters": f"{count(details.parameters)} ({details.parameters:,})"
        if details.parameters
        else None,
        "type": details.quant_type or None,
        "weights": counts(weights_by_type(model.tensors)) or None,
        "bits per weight": bits(details.bits_per_weight) or None,
        "bytes": shares(bytes_by_type(model.tensors)) or None,
        "context length": details.context_length,
        "embedding length": details.embedding_length,
        "capabilities": ", ".join(details.capabilities) or None,
        "size": size(details.size),
        "layers": len(model.manifest.layers),
        "tensors": len(model.tensors),
        "state": "packed" if details.is_packed else None,
    }
    for verdict in details.runs_in:
        facts[f"runs in {verdict.runtime}"] = (
            f"{verdict.runs.value}: {with_flags(verdict.reason)} ({verdict.version})"
        )
    show_facts({key: value for key, value in facts.items() if value is not None})


def rm(
    names: Annotated[list[str], Argument(metavar="NAME", help="Models to remove.")],
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove models, and the blobs that no other model needs."""
    from blobstore.views.results import RemovedModel

    asked = list(map(ModelName.parse, names))
    opened = stores_at(store, lower, wait)
    done = []
    # All or none: a typing error must not remove half of them.
    for full in dict.fromkeys([opened.holder(one).find(one) for one in asked]):
        done.append(RemovedModel(full, opened.remove(full)))
        if not as_json:
            with suppress(ReaderGoneError):  # the other models were to be removed all the same
                _show_removal(done[-1])
    if as_json:
        show_json(done)


def _show_removal(done: RemovedModel) -> None:
    removal = done.removal
    kept = f"Kept {blobs(len(removal.kept), removal.kept_bytes)}: {removal.reason}"
    emit_lines(
        f"Removed {done.name}: {counted(len(removal.removed), 'blob')}, "
        f"{size(removal.removed_bytes)}",
        "" if removal.reason is None else kept,
    )


ReplaceOption = Annotated[
    bool, Option("--force", help="Replace a model that already has this name.")
]


def cp(
    source: Model,
    target: Annotated[
        str | None,
        Argument(
            metavar="NEW_NAME", help="Another name for it [default with --to: the same name]."
        ),
    ] = None,
    to: Annotated[
        str | None,
        Option(metavar="DIR", help="Copy the model to the store DIR, which may be new."),
    ] = None,
    force: ReplaceOption = False,
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
            hint="blobstore cp --help shows the usage.",
        )
    asked, wanted = ModelName.parse(source), ModelName.parse(source if target is None else target)
    opened = stores_at(store, lower, wait)
    if to is None:
        _give_name(
            "Copied", opened, asked, partial(opened.copy, asked, wanted, replace=force), as_json
        )
    else:
        there = store_at(to, wait, may_be_new=True)
        copy = _copy_to(opened, asked, wanted, there, jobs, force)
        ways = {how: getattr(copy.done, how) for how in ("there", "linked", "cloned", "copied")}
        copied = f"Copied {copy.done.source} to {copy.done.name} in {copy.store}: {amounts(ways)}"
        show_lines(copy, as_json, copied)


def _copy_to(
    source: Any, name: ModelName, wanted: ModelName, target: Any, jobs: int | None, replace: bool
) -> CopiedModel:
    from blobstore.store.ports import already_exists, id_of
    from blobstore.views.results import CopiedModel

    if Path(source.address) in (Path(target.address), *Path(target.address).parents):
        what = "is" if source.address == target.address else "is in"
        raise UsageError(
            f"{target.address} {what} the store that the model is in",
            hint="Leave --to out, and give a NEW_NAME.",
        )
    target_name = target.target(wanted)
    if not replace and id_of(target, target_name) not in (None, id_of(source, source.find(name))):
        raise already_exists(target_name)  # before gigabytes are copied
    (done,) = with_bar(blobstore.transfer, {str(name): str(wanted)}, source, target, jobs=jobs)
    return CopiedModel(done, target.address)


def mv(
    source: Model,
    target: Annotated[str, Argument(metavar="NEW_NAME", help="Its new name.")],
    force: ReplaceOption = False,
    wait: WaitOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a model another name."""
    asked, wanted = ModelName.parse(source), ModelName.parse(target)
    opened = stores_at(store, lower, wait)
    _give_name("Moved", opened, asked, partial(opened.move, asked, wanted, replace=force), as_json)


def _give_name(
    done: str, store: Any, asked: ModelName, rename: Callable[[], ModelName], as_json: bool
) -> None:
    from blobstore.views.results import RenamedModel

    old = store.holder(asked).find(asked)  # as it is written there; gone after a move
    model = RenamedModel(old, rename())
    show_lines(model, as_json, f"{done} {model.source} to {model.name}")
