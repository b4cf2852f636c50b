"""The page of a plan, before it is run: sizes by type and groups, and what a target can reach."""

from __future__ import annotations

from collections.abc import Iterator

from blobstore._version import __version__
from blobstore.plots.specification import Specification
from blobstore.report.gathering import source_label
from blobstore.report.page import (
    Html,
    document,
    facts,
    figure,
    folded,
    scrolling,
    section,
    side_by_side,
    table,
    tag,
)
from blobstore.report.plan_choices import PlanChoice, PlanChoices
from blobstore.views.quantities import count, counted, shape, size

_ASKED = "asked"


def plan_page(found: PlanChoices) -> bytes:
    """Return the page in HTML, UTF-8. The same plans give the same bytes."""
    asked = found.asked
    plots: dict[str, Specification] = {}
    sections = []
    if found.chosen is None:
        label = "chosen for the target" if asked.options.target is not None else "as asked"
        choice = PlanChoice.of(asked, None, None)
        sections.append(_plan(choice, _ASKED, f"The plan {label}", plots))
    sections += [_plan(one, one.key, one.label, plots, is_choice=True) for one in found.plans]
    name = source_label(asked.inventory.folder)
    body = [
        tag("h1", f"Plan for {name}"),
        tag("p", _headline(found), class_="quiet"),
        section("Choose", _form(found), _overview(found)),
        *sections,
        section(
            "How this page was made",
            facts([("checkpoint", name), ("blobstore", __version__)]),
            tag("p", "Sizes follow from headers; no weight was read, and nothing was stored."),
        ),
    ]
    return document(f"{name}: plan", body, plots)


def _headline(found: PlanChoices) -> str:
    asked = found.asked
    parameters = f"{count(asked.parameters)} parameters, {size(asked.source_bytes)} in the source"
    bits = f"{asked.bits_per_weight:.2f} bits per weight"
    return f"{parameters}; as asked {size(asked.stored_bytes)}, {bits}"


def _form(found: PlanChoices) -> Html:
    """Return the controls, which are hidden until the page's script starts."""
    chosen = found.chosen or found.plans[0]
    kinds = dict.fromkeys(_kind(one) for one in found.plans)
    options = [_option(kind, selected=kind == _kind(chosen)) for kind in kinds]
    parts = [
        tag("label", "Type ", tag("select", *options, name="type")),
        tag("label", "Groups ", tag("select", name="groups")),
        tag("output", name="size"),
    ]
    if found.reach is not None:
        smallest, largest = found.reach
        target = tag(
            "input",
            name="target",
            size="10",
            placeholder="3.5GB",
            autocomplete="off",
            data_smallest=str(smallest),
            data_largest=str(largest),
        )
        parts += [tag("label", "Target size ", target), tag("output", name="answer")]
    return tag("form", *parts, hidden="", data_groups=_groups(chosen))


def _option(kind: str, *, selected: bool) -> Html:
    return tag("option", kind, value=kind, **({"selected": ""} if selected else {}))


def _kind(one: PlanChoice) -> str:
    return str(one.quant_type) if one.quant_type else "unquantized"


def _groups(one: PlanChoice) -> str:
    return str(one.group_size or "")


def _overview(found: PlanChoices) -> Html:
    """Return the table of all plans, why others are refused, and what a target can reach."""
    source = max(1, found.asked.source_bytes)
    largest = max(one.stored_bytes for one in found.plans)
    rows = (
        tag(
            "tr",
            *_cells(one, source, largest),
            data_bytes=str(one.stored_bytes),
            data_of=one.key,
        )
        for one in found.plans
    )
    parts = [scrolling("Plans", _heads(), rows)]
    parts += [tag("p", f"{label} is refused: {why}") for label, why in found.refused.items()]
    if found.reach is not None:
        smallest, largest = found.reach
        text = (
            f"A target between {size(smallest)} and {size(largest)} can be reached with a mixture"
            " of types. Which tensor gets which type, and the error, is only known when the"
            " weights are read: blobstore plan SOURCE --target-size SIZE."
        )
        parts.append(tag("p", text))
    return side_by_side(parts)


def _heads() -> Iterator[Html]:
    yield tag("th", "plan", scope="col")
    yield tag("th", "size", scope="col", class_="number")
    yield tag("th", "fits the target", scope="col", class_="fits")
    yield tag("td", class_="bar")
    for one in ("of the source", "bits per weight", "quantized tensors"):
        yield tag("th", one, scope="col", class_="number")


def _cells(one: PlanChoice, source: int, largest: int) -> Iterator[Html]:
    """Yield the cells of a plan; ``source`` and ``largest``: bytes, of the source and of plans."""
    yield tag("th", tag("a", one.label, href=f"#{one.key}"), scope="row")
    yield tag("td", size(one.stored_bytes), class_="number")
    yield tag("td", data_fits="", class_="fits")
    yield tag("td", _bar(one.stored_bytes / largest), class_="bar")
    yield tag("td", f"{one.stored_bytes / source:.0%}", class_="number")
    yield tag("td", f"{one.bits_per_weight:.2f}", class_="number")
    yield tag("td", f"{one.quantized:,}", class_="number")


def _bar(share: float) -> Html:
    """Return a picture of a share, which the numbers beside it say too."""
    filled = tag("rect", width=f"{share:.1%}", height="100%")
    return tag("svg", filled, width="100%", height="8", aria_hidden="true")


def _plan(
    one: PlanChoice,
    key: str,
    title: str,
    plots: dict[str, Specification],
    *,
    is_choice: bool = False,
) -> Html:
    """Return the section of a plan, whose plot is added to ``plots``."""
    plots[key] = one.treemap
    rows = [(t.name, t.type_name, shape(t.shape), size(t.nbytes)) for t in one.largest]
    listed = table(f"Largest tensors of {title}", ("tensor", "type", "shape", "size"), rows)
    marks = {"data_type": _kind(one), "data_groups": _groups(one), "data_plan": key, "id": key}
    marks["data_said"] = f"{size(one.stored_bytes)}, {one.bits_per_weight:.2f} bits per weight"
    return section(
        title,
        facts(
            [
                ("size", f"{size(one.stored_bytes)} ({one.stored_bytes:,} bytes)"),
                ("bits per weight", f"{one.bits_per_weight:.2f}"),
                ("blobs", f"{one.blobs:,}"),
                ("tensors", f"{one.tensors:,}"),
                *((verdict.runtime, verdict.sentence) for verdict in one.runs_in),
            ]
        ),
        *(tag("p", text) for text in one.notes),
        figure(key, plots[key]),
        folded(f"The largest of {counted(one.tensors, 'tensor')}", listed),
        **(marks if is_choice else {}),
    )
