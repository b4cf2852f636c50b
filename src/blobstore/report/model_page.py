"""The page of a model: its bytes, its errors, distributions of a few tensors, how it was made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources

from blobstore._version import __version__
from blobstore.inspection.listing import weights_by_type
from blobstore.plots.heatmap import errors as errors_plot
from blobstore.plots.histograms import distribution as distribution_plot
from blobstore.plots.points import scatter
from blobstore.plots.specification import Specification
from blobstore.plots.subjects import TensorError
from blobstore.plots.treemap import treemap
from blobstore.report.gathering import ModelFindings
from blobstore.report.page import (
    Html,
    document,
    facts,
    figure,
    section,
    side_by_side,
    table,
    tag,
)
from blobstore.views.quantities import count, counted, shape, size

_MOST_ROWS = 40


def model_plots(found: ModelFindings) -> dict[str, Specification]:
    """Return the plots of a model by name, in the order of the page."""
    plots = {"treemap": treemap(found.summary.tensors)}
    if found.errors is not None:
        plots |= {"errors": errors_plot(found.errors), "scatter": scatter(found.errors)}
    for number, one in enumerate(found.distributions, 1):
        plots[f"distribution-{number}"] = distribution_plot(one)
    return plots


def model_page(found: ModelFindings, plots: dict[str, Specification], made: str | None) -> bytes:
    """Return the report in HTML, UTF-8. ``made``: when, as it shall be written; None: not said."""
    summary = found.summary
    body = [
        tag("h1", str(summary.name)),
        tag("p", _headline(found), class_="quiet"),
        _facts(found),
        section("Bytes by module", figure("treemap", plots["treemap"]), _largest(found)),
        *_errors(found, plots),
        *_difference(found),
        *_distributions(found, plots),
        _how(found, made),
    ]
    return document(f"{summary.name}: report", body, plots)


def _headline(found: ModelFindings) -> str:
    summary = found.summary
    bits = 8 * sum(one.nbytes for one in summary.tensors) / max(1, summary.parameters)
    words = [f"{count(summary.parameters)} parameters in {size(summary.size)}"]
    words.append(f"{bits:.2f} bits per weight")
    changed = [one for one in found.errors or () if not one.kept and one.relative_rmse is not None]
    if changed:
        worst = max(changed, key=lambda one: (one.relative_rmse or 0, one.name))
        words.append(f"largest relative rmse of a tensor {worst.relative_rmse:.3%}")
    return ", ".join(words)


def _facts(found: ModelFindings) -> Html:
    summary, details = found.summary, found.details
    weights = weights_by_type(summary.tensors)
    return facts(
        [
            ("architecture", details.architecture or ""),
            ("parameters", f"{count(summary.parameters)} ({summary.parameters:,})"),
            ("type", summary.quant_type),
            ("weights", ", ".join(f"{kind} {count(number)}" for kind, number in weights.items())),
            ("context length", _number(details.context_length)),
            ("embedding length", _number(details.embedding_length)),
            ("capabilities", ", ".join(details.capabilities)),
            ("size", f"{size(summary.size)} ({summary.size:,} bytes)"),
            ("manifest layers", f"{summary.layers:,}"),
            ("tensors", f"{len(summary.tensors):,}"),
            *((one.runtime, one.sentence) for one in details.runs_in),
        ]
    )


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _largest(found: ModelFindings) -> Html:
    tensors = sorted(found.summary.tensors, key=lambda one: (-one.nbytes, one.name))
    title = f"The {_MOST_ROWS} largest of {counted(len(tensors), 'tensor')}"
    if len(tensors) <= _MOST_ROWS:
        title = "The tensors, the largest first"
    rows = [
        (one.name, one.type_name, shape(one.shape), size(one.nbytes))
        for one in tensors[:_MOST_ROWS]
    ]
    return side_by_side([tag("h3", title), table(title, ("tensor", "type", "shape", "size"), rows)])


def _errors(found: ModelFindings, plots: dict[str, Specification]) -> Iterator[Html]:
    if found.errors is None:
        hint = f"blobstore report {found.summary.name} --against SOURCE measures it."
        yield section("Errors", tag("p", f"The error of the weights was not measured. {hint}"))
        return
    yield section(
        "Errors",
        tag("p", f"Relative rmse of the stored weights against {found.basis}."),
        tag("h3", "By layer"),
        figure("errors", plots["errors"]),
        tag("h3", "Against the number of weights"),
        figure("scatter", plots["scatter"]),
        _worst(found.errors),
    )


def _worst(errors: tuple[TensorError, ...]) -> Html:
    changed = [one for one in errors if not one.kept and one.relative_rmse != 0]
    if not changed:
        return Html("")
    changed.sort(
        key=lambda one: (one.relative_rmse is not None, -(one.relative_rmse or 0), one.name)
    )
    rows = [
        (one.name, one.type_name, shape(one.shape), _share(one)) for one in changed[:_MOST_ROWS]
    ]
    title = "The tensors with the largest errors"
    return side_by_side(
        [tag("h3", title), table(title, ("tensor", "type", "shape", "relative rmse"), rows)]
    )


def _share(one: TensorError) -> str:
    """Return the error in words: it has no size beside weights that are all zero."""
    return "not defined" if one.relative_rmse is None else f"{one.relative_rmse:.3%}"


def _difference(found: ModelFindings) -> Iterator[Html]:
    difference = found.difference
    if difference is None:
        return
    a, b = difference.nbytes
    rows = [("added", fact.name, "", fact.type_name) for fact in difference.added]
    rows += [("removed", fact.name, fact.type_name, "") for fact in difference.removed]
    rows += [
        ("changed", one.after.name, one.before.type_name, one.after.type_name)
        for one in difference.changed
    ]
    title = f"Differences from {difference.a}"
    parts = [
        facts(
            [
                ("tensors", f"{difference.equal:,} equal, {len(difference.changed):,} changed"),
                (
                    "only in one",
                    f"{len(difference.added):,} added, {len(difference.removed):,} removed",
                ),
                (
                    "size",
                    f"{size(a)} before, {size(b)} after, {size(difference.shared_bytes)} shared",
                ),
            ]
        )
    ]
    if rows:
        shown = rows[:_MOST_ROWS]
        parts.append(tag("h3", f"{len(shown)} of {counted(len(rows), 'tensor')} that differ"))
        parts.append(table(title, ("", "tensor", "before", "after"), shown))
    yield section(title, *parts)


def _distributions(found: ModelFindings, plots: dict[str, Specification]) -> Iterator[Html]:
    if not found.distributions and not found.undrawn:
        return
    parts: list[Html] = [
        tag("p", "The tensor with the largest error, and the largest of each type.")
    ]
    for number, one in enumerate(found.distributions, 1):
        name = f"distribution-{number}"
        parts += [tag("h3", one.name), figure(name, plots[name])]
    parts += [tag("p", f"Without a histogram: {reason}.") for reason in found.undrawn]
    yield section("Distributions", *parts)


def _how(found: ModelFindings, made: str | None) -> Html:
    bundled = resources.files("blobstore").joinpath("web", "static", "vendor", "vendored.json")
    vega = json.loads(bundled.read_text("utf-8"))["packages"]["vega"]["version"]
    return section(
        "How this page was made",
        facts(
            [
                ("manifest", str(found.summary.id)),
                ("errors against", found.basis or ""),
                ("blobstore", __version__),
                ("plots", f"Vega {vega}"),
                ("made", made or ""),
            ]
        ),
        tag(
            "p",
            "The page asks no server for anything. Its plots need JavaScript; the tables do not.",
        ),
    )
