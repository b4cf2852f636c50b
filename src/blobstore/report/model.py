"""A report: the page of a stored model in one file, with the server's answers about it.

It can be compared with the other side: the model's source, or a stored model. Without one, the
errors are those that the store kept of the last `quality`, if there are any.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore._version import __version__
from blobstore.errors import UnsupportedSourceError
from blobstore.inspection.comparison import checkpoint_shape, stored_values
from blobstore.inspection.diff import diff_models
from blobstore.inspection.distributions import ValueReader, distribution_of, source_values
from blobstore.inspection.quality import measure_quality, sources_of
from blobstore.io.workers import Progress
from blobstore.kernels.arrays import Array
from blobstore.model.loader import Model, open_model
from blobstore.model.tensors import Tensor
from blobstore.names import ModelName
from blobstore.plots.heatmap import errors as errors_plot
from blobstore.plots.histograms import distribution as distribution_plot
from blobstore.plots.points import scatter
from blobstore.plots.specification import Specification
from blobstore.plots.subjects import TensorError
from blobstore.source.addresses import Source, is_address
from blobstore.source.weights import SourceReaders
from blobstore.store.ports import Readable
from blobstore.views.documents import document_of
from blobstore.views.quality_records import KeptQuality, kept_quality
from blobstore.views.quantities import counted, shape, size
from blobstore.web.api import answered
from blobstore.web.pages import FOLDER, markup_of, page_in_file, table, table_of
from blobstore.web.served import Served

MOST_DISTRIBUTIONS = 6
_MOST_ROWS = 40
"""Rows of a table for browsers without JavaScript."""


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
    diff, errors, measured = None, None, None
    with ExitStack() as stack:
        model = stack.enter_context(open_model(name, store=store))
        kept = kept_quality(store, model.name, model.manifest.digest)
        if isinstance(against, ModelName):
            found = diff_models(against, model.name, store=store, error=True, jobs=jobs)
            diff, errors = document_of(found), list(map(TensorError.of_change, found.changed))
        elif against is not None:
            measured = measure_quality(
                model.name, against, store=store, jobs=jobs, progress=progress
            )
            kept = KeptQuality(
                model.name,
                model.manifest.digest,
                against=source_label(against),
                result=document_of(measured),
            )
        if errors is None and kept.result is not None:
            errors = list(map(TensorError.of_document, kept.result["tensors"]))
        answers = _answers(str(model.name), store) | {"quality": document_of(kept)}
        plots = {"treemap": answers["plots/treemap"]}
        if errors is not None:
            plots |= {"errors": errors_plot(errors), "scatter": scatter(errors)}
            answers["plots/errors"] = plots["errors"]
        readers = _readers(model, against, store, stack)
        chosen = _chosen(answers["tensors"], errors or ())
        drawn = _distributions([model[tensor] for tensor in chosen], readers)
        for number, (tensor, plot) in enumerate(drawn, 1):
            answers[f"plots/distribution {tensor}"] = plots[f"distribution-{number}"] = plot
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
    readable = "".join(_readable(report, origin))
    return page_in_file(f"{report.name}: report", ("model", "report"), data, readable)


def source_label(source: Source) -> str:
    """Return a source's name; paths of this machine, and the query of an address, stay on it."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else source.name
    return name.partition("?")[0] if is_address(name) else Path(name).resolve().name


def _answers(name: str, store: Readable) -> dict[str, Any]:
    served = Served(store)
    return {
        "model": answered(served, "model", name=name),
        "tensors": answered(served, "tensors", model=name),
        "plots/treemap": answered(served, "plots/treemap", model=name),
    }


def _chosen(tensors: Mapping[str, Any], errors: Sequence[TensorError]) -> list[str]:
    """Return names of tensors: the one with the largest error, and the largest of each type."""
    measured = [one for one in errors if one.relative_rmse and not one.kept]
    measured.sort(key=lambda one: (-(one.relative_rmse or 0), one.name))
    types: dict[str, str] = {}
    for name, type_name, _, _ in _largest(tensors):
        types.setdefault(type_name, name)
    chosen = [*(one.name for one in measured[:1]), *types.values()]
    return list(dict.fromkeys(chosen))[:MOST_DISTRIBUTIONS]


def _largest(tensors: Mapping[str, Any]) -> list[tuple[str, str, list[int], int]]:
    columns = (tensors[key] for key in ("names", "types", "shapes", "sizes"))
    return sorted(zip(*columns, strict=True), key=lambda row: (-row[3], row[0]))


_Readers = Callable[[Tensor], ValueReader | None]


def _readers(
    model: Model, against: Source | ModelName | None, store: Readable, stack: ExitStack
) -> _Readers:
    """Return what returns the reader of the values beside a tensor's; None without any."""
    if isinstance(against, ModelName):
        other = stack.enter_context(open_model(against, store=store))
        return lambda tensor: _of_other(tensor, other)
    made_from = {}
    if against is not None:
        made_from = {tensor.name: found for tensor, found in sources_of(model, against)}
    readers = SourceReaders()
    stack.callback(readers.close)
    return lambda tensor: (
        source_values(made_from[tensor.name], readers) if tensor.name in made_from else None
    )


def _of_other(tensor: Tensor, others: Mapping[str, Tensor]) -> ValueReader | None:
    other = others.get(tensor.name)
    if other is None or checkpoint_shape(other) != checkpoint_shape(tensor):
        return None
    if other.transposed is not tensor.transposed:
        return None  # a run of the one is not a run of the other

    def read(start: int, count: int) -> Array:
        return stored_values(other, start, count)

    return read


def _distributions(
    tensors: Sequence[Tensor], readers: _Readers
) -> Iterator[tuple[str, Specification]]:
    """Yield plots of tensors, but for those of types that are not drawn: the page says why."""
    for tensor in tensors:
        try:
            yield tensor.name, distribution_plot(distribution_of(tensor, readers(tensor)))
        except UnsupportedSourceError:
            continue


def _readable(report: ModelReport, origin: Mapping[str, str]) -> Iterator[str]:
    facts, tensors = report.answers["model"], report.answers["tensors"]
    said = {key: value for key, value in facts.items() if isinstance(value, str | int) and value}
    runs = {one["runtime"]: f"{one['runs']} {one['reason'] or ''}" for one in facts["runs_in"]}
    yield f"<h1>{markup_of(report.name)}</h1>"
    yield table("The model", ("", ""), (said | runs).items())
    rows = [
        (name, kind, shape(dims), size(nbytes)) for name, kind, dims, nbytes in _largest(tensors)
    ]
    title = f"The largest of {counted(len(rows), 'tensor')}"
    yield table(title, ("tensor", "type", "shape", "size"), rows[:_MOST_ROWS])
    yield from map(table_of, report.plots.values())
    if report.diff is not None:
        changes = [
            *(("added", one["name"], "", one["type"]) for one in report.diff["added"]),
            *(("removed", one["name"], one["type"], "") for one in report.diff["removed"]),
            *(
                ("changed", one["name"], one["before"]["type"], one["after"]["type"])
                for one in report.diff["changed"]
            ),
        ]
        title = f"Differences from {report.diff['a']}: {counted(len(changes), 'tensor')}"
        yield table(title, ("", "tensor", "before", "after"), changes[:_MOST_ROWS])
    yield table("How this page was made", ("", ""), origin.items())
