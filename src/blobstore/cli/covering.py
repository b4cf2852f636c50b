"""A coverage as people read it, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.cli.output import counted, emit, printable

if TYPE_CHECKING:
    from blobstore.coverage import Coverage, LeftOut, Tally

_MOST_NAMES = 5


def show_coverage(coverage: Coverage) -> None:
    """Print what is stored of a source: one line, and one more for each thing that there is to say."""
    for line in coverage_lines(coverage):
        emit(printable(line))


def coverage_lines(coverage: Coverage) -> list[str]:
    """Return the lines: how much is stored, what is counted apart, what was derived, what was left out and why."""
    from blobstore.coverage import by_reason

    lines = [f"{_share(coverage.tensors, 'tensor')} and {_share(coverage.files, 'file')} stored"]
    if coverage.tensors.source is None:
        lines.append("The source is not known: the model was not imported by blobstore in its default profile")
    lines += [f"{count:,} of the tensors belong to the {head}" for head, count in coverage.heads.items()]
    derived = {**coverage.tensors.derived, **coverage.files.derived}
    lines += [f"Derived: {count:,} {how}" for how, count in derived.items()]
    if coverage.kept_whole:
        lines.append(f"Kept as files, not quantized: {_names(coverage.kept_whole)}")
    for why, group in by_reason(coverage.left_out).items():
        lines.append(f"Left out: {_names([_named(one) for one in group])}: {why}")
    return lines


def _share(tally: Tally, noun: str) -> str:
    if tally.source is None:
        return counted(tally.covered, noun)
    return f"{tally.covered:,} of {counted(tally.source, noun)}"


def _named(one: LeftOut) -> str:
    return one.name if one.count == 1 else f"{one.name} ({one.count:,})"


def _names(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES:,} more"


def coverage_document(coverage: Coverage) -> dict[str, Any]:
    """Return a coverage for a JSON document."""
    return {
        "tensors": _tally(coverage.tensors),
        "files": _tally(coverage.files),
        "heads": dict(coverage.heads),
        "kept_whole": list(coverage.kept_whole),
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "source": tally.source,
        "stored": tally.stored,
        "derived": dict(tally.derived),
        "left_out": [{"name": one.name, "reason": one.reason, "count": one.count} for one in tally.left_out],
    }
