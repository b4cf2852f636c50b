"""Reports: the page of a stored model, or of a plan, in one file.

The page of a model has the server's answers about it in the file. It can be compared with the other
side: the model's source, or a stored model. Without one, the errors are those that the store kept
of the last `quality`, if there are any.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from blobstore._version import __version__
from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError
from blobstore.formats.dtypes import QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.plan import make_plan
from blobstore.importer.targets import target_range
from blobstore.inspection.comparison import diff_models, stored_values
from blobstore.inspection.quality import (
    ValueReader,
    distribution_of,
    measure_quality,
    source_values,
    sources_of,
)
from blobstore.io.durable import check_place, make_folder, os_errors, replace_file
from blobstore.io.workers import Progress
from blobstore.model.loader import open_model
from blobstore.names import ModelName
from blobstore.plots.charts import (
    TensorError,
    distribution as distribution_plot,
    errors as errors_plot,
    scatter,
    worst_first,
)
from blobstore.plots.specification import Specification
from blobstore.plots.treemap import treemap
from blobstore.source.addresses import Source, is_address
from blobstore.source.weights import SourceReaders
from blobstore.store.ports import Readable
from blobstore.views.documents import document_of
from blobstore.views.quantities import count, counted, shape, size
from blobstore.views.records import kept_quality
from blobstore.web.api import Served, tree_rows
from blobstore.web.pages import FOLDER, markup_of, page_in_file, table, table_of

MOST_DISTRIBUTIONS = 6
# Rows of a table for browsers without JavaScript.
_MOST_ROWS = 30


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What a report shows of a model.

    ``answers``: of the server, by address below ``/api/``, with a tensor's name if it is of one.
    ``diff``: from another model, None without one. ``plots``: by name, in the order of the page.
    """

    name: str
    answers: dict[str, Any]
    diff: Any
    plots: dict[str, Specification]


def model_report(
    name: str | ModelName,
    *,
    store: Readable,
    against: Source | ModelName | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> ModelReport:
    """Return the report of a stored model.

    ``against``: its source, or a `ModelName` for a stored model. A packed model is unpacked, as
    `open_model` does it.

    Raises: as `open_model`, `measure_quality` and `diff_models`; DocumentError for a kept result
    that is damaged.
    """
    diff, errors = None, None
    compared: dict[str, ValueReader] = {}
    with ExitStack() as stack:
        model = stack.enter_context(open_model(name, store=store))
        kept = kept_quality(store, model.name, model.manifest.digest)
        if isinstance(against, ModelName):
            diff = document_of(diff_models(against, model.name, store=store, error=True, jobs=jobs))
            errors = [
                TensorError(
                    one["name"],
                    one["after"]["type"],
                    one["after"]["shape"],
                    one["error"] and one["error"]["relative_rmse"],
                )
                for one in diff["changed"]
            ]
            others = stack.enter_context(open_model(against, store=store))
            # Of another shape, a run of the one is not a run of the other.
            compared = {
                key: partial(stored_values, other)
                for key, other in others.items()
                if key in model
                and (other.shape, other.transposed) == (model[key].shape, model[key].transposed)
            }
        elif against is not None:
            measured = measure_quality(
                model.name, against, store=store, jobs=jobs, progress=progress
            )
            kept = replace(
                kept, measured=None, against=source_label(against), result=document_of(measured)
            )
            readers = stack.enter_context(closing(SourceReaders()))
            compared = {
                tensor.name: source_values(made_from, readers)
                for tensor, made_from in sources_of(model, against)
            }
        if errors is None and kept.result is not None:
            errors = list(map(TensorError.of_document, kept.result["tensors"]))
        served = Served(store)
        opened = served.open(served.find(str(model.name)))
        answers = {
            "model": json.loads(opened.facts) | {"modified": None},  # the same in every store
            "tensors": json.loads(opened.columns),
            "plots/treemap": json.loads(opened.treemap),
            "quality": document_of(kept),
        }
        plots = {"treemap": answers["plots/treemap"]}
        if errors is not None:
            plots |= {"errors": errors_plot(errors), "scatter": scatter(errors)}
            answers["plots/errors"] = plots["errors"]
        drawn = []
        for key in _choose_tensors(answers["tensors"], errors or ()):
            with suppress(UnsupportedSourceError):  # a type that is not drawn: the page says why
                drawn.append(distribution_plot(distribution_of(model[key], compared.get(key))))
                answers[f"plots/distribution {key}"] = drawn[-1]
    plots |= {f"distribution-{number}": plot for number, plot in enumerate(drawn, 1)}
    return ModelReport(str(model.name), answers, diff, plots)


def model_page(report: ModelReport, made: str | None) -> bytes:
    """Return the page in HTML, UTF-8. ``made``: when, as it shall be written; None: not said."""
    facts, tensors = report.answers["model"], report.answers["tensors"]
    vega = json.loads((FOLDER / "vendor/vendored.json").read_bytes())["packages"]["vega"]
    origin = {
        "Manifest": facts["id"],
        "Bits per weight": f"{8 * sum(tensors['sizes']) / max(1, facts['parameters']):.2f}",
        "blobstore": __version__,
        "Plots": f"Vega {vega['version']}",
        "Made": made or "",
    }
    data = {
        "name": report.name,
        "answers": report.answers,
        "diff": report.diff,
        "scatter": report.plots.get("scatter"),
        "made": origin,
    }
    return page_in_file(
        f"{report.name}: report", ("model", "report"), data, _readable(report, origin)
    )


def source_label(source: Source) -> str:
    """Return a source's name; paths of this machine, and the query of an address, stay on it."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else source.name
    return name.partition("?")[0] if is_address(name) else Path(name).resolve().name


def _choose_tensors(tensors: Mapping[str, Any], errors: Sequence[TensorError]) -> list[str]:
    """Return names of tensors: the one with the largest error, and the largest of each type."""
    types: dict[str, str] = {}
    for name, type_name, *_ in _largest(tensors):
        types.setdefault(type_name, name)
    chosen = [*(one.name for one in worst_first(errors)[:1]), *types.values()]
    return list(dict.fromkeys(chosen))[:MOST_DISTRIBUTIONS]


def _largest(tensors: Mapping[str, Any]) -> list[Any]:
    columns = (tensors[key] for key in ("names", "types", "shapes", "sizes"))
    return sorted(zip(*columns, strict=True), key=lambda row: (-row[3], row[0]))


def _readable(report: ModelReport, origin: Mapping[str, str]) -> Iterator[str]:
    facts, tensors = report.answers["model"], report.answers["tensors"]
    said = {key: value for key, value in facts.items() if isinstance(value, str | int) and value}
    runs = {one["runtime"]: f"{one['runs']} {one['reason'] or ''}" for one in facts["runs_in"]}
    yield f"<h1>{markup_of(report.name)}</h1>"
    yield table("The model", ("", ""), (said | runs).items())
    yield table(
        f"The largest of {counted(len(tensors['names']), 'tensor')}",
        ("tensor", "type", "shape", "size"),
        (
            (name, kind, shape(dims), size(nbytes))
            for name, kind, dims, nbytes in _largest(tensors)[:_MOST_ROWS]
        ),
    )
    yield from map(table_of, report.plots.values())
    if report.diff is not None:
        changes = [("added", one["name"], "", one["type"]) for one in report.diff["added"]]
        changes += [("removed", one["name"], one["type"], "") for one in report.diff["removed"]]
        changes += [
            ("changed", one["name"], one["before"]["type"], one["after"]["type"])
            for one in report.diff["changed"]
        ]
        yield table(
            f"Differences from {report.diff['a']}: {counted(len(changes), 'tensor')}",
            ("", "tensor", "before", "after"),
            changes[:_MOST_ROWS],
        )
    yield table("How this page was made", ("", ""), origin.items())


# Of a plan, because a page has about ten.
_MOST_RECTANGLES = 300
_Kind = tuple[QuantType | None, int | None]
_KINDS: tuple[_Kind, ...] = (
    *((kind, group_size) for kind in QuantType for group_size in kind.group_sizes),
    (None, None),
)


def plan_page(asked: ImportPlan, options: ImportOptions) -> bytes:
    """Return the page of a plan, before it is run, in HTML, UTF-8. The same plans give the same.

    It has the sizes with every type and group size, and what a target can reach. ``options``: those
    that the user gave; their rules are in every plan. No weight is read.
    """
    data = plan_document(asked, options)
    return page_in_file(
        f"{data['source']}: plan", ("plan",), {"answers": {"plan": data}}, _readable_plan(data)
    )


def plan_document(asked: ImportPlan, options: ImportOptions) -> dict[str, Any]:
    """Return what the page of a plan shows; the parameters are those of `plan_page`.

    ``asked``: the label of the plan that was asked for; None if types were chosen for a target,
    and that plan is ``target`` then. ``refused``: why other types can't be had. ``reach``: bytes
    of the smallest and of the largest plan that a target can lead to; None if it is refused.
    """
    options = replace(options, target=None)
    draft = asked.inventories[1] if len(asked.inventories) > 1 else None
    kind = asked.options.quant_type
    chosen = (kind, asked.options.quantization(kind).group_size if kind else None)
    has_target = asked.options.target is not None
    plans, refused = [], {}
    for one in _KINDS:
        wanted = replace(options, quant_type=one[0], group_size=one[1])
        if one[0] is not QuantType.NVFP4:
            wanted = replace(wanted, global_scale=False)
        is_asked = one == chosen and not has_target
        try:
            plan = asked if is_asked else make_plan(asked.inventory, wanted, draft)
        except BlobStoreError as error:
            refused[_label(one)] = error.message
        else:
            plans.append(_choice(plan, one))
    reach = None
    with suppress(BlobStoreError):
        reach = target_range(asked.inventory, replace(options, quant_type=None), draft)
    name = source_label(asked.inventory.folder)
    return {
        "source": name,
        "headline": f"{count(asked.parameters)} parameters, {size(asked.source_bytes)} in the"
        f" source; as asked {size(asked.stored_bytes)},"
        f" {asked.bits_per_weight:.2f} bits per weight",
        "source_bytes": asked.source_bytes,
        "plans": plans,
        "asked": None if has_target else _label(chosen),
        "target": _choice(asked, (None, None)) if has_target else None,
        "refused": refused,
        "reach": reach,
        "made": {"Checkpoint": name, "blobstore": __version__},
    }


def _choice(plan: ImportPlan, kind: _Kind) -> dict[str, Any]:
    """Return what the page shows of a plan, which is not kept: it may have 100,000 tensors."""
    tensors = list(plan.tensors)
    drawn = ((one.name, one.type_name, one.nbytes) for one in tensors)
    return {
        "label": _label(kind),
        "type": str(kind[0] or "unquantized"),
        "groups": str(kind[1] or ""),
        "bytes": plan.stored_bytes,
        "bits": f"{plan.bits_per_weight:.2f}",
        "blobs": len(plan.blobs),
        "tensors": len(tensors),
        "quantized": sum(tensor.quantization is not None for tensor in tensors),
        "runs_in": [(one.runtime, one.sentence) for one in plan.runs_in],
        "notes": list(plan.notes),
        "tree": document_of(tree_rows(tensors)[:_MOST_RECTANGLES]),
        "treemap": treemap(drawn, _MOST_RECTANGLES),
    }


def _label(kind: _Kind) -> str:
    return f"{kind[0]}/{kind[1]}" if kind[0] else "unquantized"


def _readable_plan(data: dict[str, Any]) -> Iterator[str]:
    yield f"<h1>Plan for {markup_of(data['source'])}</h1><p>{markup_of(data['headline'])}</p>"
    yield table(
        "Plans",
        ("plan", "size", "bits per weight", "quantized tensors"),
        (
            (one["label"], size(one["bytes"]), one["bits"], one["quantized"])
            for one in data["plans"]
        ),
    )
    yield table("Refused", ("plan", "why"), data["refused"].items())
    shown = {one["label"]: one for one in data["plans"]}
    if data["target"] is not None:
        shown = {"The plan as asked": data["target"], **shown}
    for title, plan in shown.items():
        yield f"<h2>{markup_of(title)}</h2>"
        yield table(f"Where it runs ({title})", ("runtime", ""), plan["runs_in"])
        yield table(
            f"The {counted(plan['tensors'], 'tensor')} by module",
            ("module", "type", "parameters", "size"),
            (
                (row["name"], ", ".join(row["types"]), count(row["parameters"]), size(row["size"]))
                for row in plan["tree"]
            ),
        )


def check_page(path: str, *, force: bool) -> None:
    """Check where a page shall go, before a minute of measuring.

    Raises: UsageError for ``-``, and if the path ends with a slash; as `check_place`.
    """
    if path == "-":
        raise UsageError("a page can't be written to standard output", hint="Name a file.")
    if not Path(path).name or path.endswith("/"):
        raise UsageError(
            f"{path!r} is not the path of a file",
            path=path,
            hint="Name a file, such as report.html.",
        )
    check_place(path, replace=force)


def place_file(path: Path, data: bytes, *, force: bool = False) -> None:
    """Write a durable file that appears when it is complete; with ``force`` in place of another.

    Raises: as `check_place`; StorageError.
    """
    check_place(path, replace=force)
    temporary = path.with_name(f".{os.urandom(8).hex()}.writing")
    with os_errors("write", path):
        replace_file(path, data, temporary=temporary, syncs=True)


def place_folder(path: Path) -> None:
    """Make a folder, if it is missing. Raises: StorageError if something else is there."""
    with os_errors("make the folder", path):
        make_folder(path)
