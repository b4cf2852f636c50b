"""The lines that say how much of a source is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.cli.output import counted, emit, printable, shortened

if TYPE_CHECKING:
    from blobstore.formats.coverage import Coverage, Tally
    from blobstore.views.view import CoverageView, TallyView

_MOST_NAMES = 5


def show_coverage(coverage: Coverage | CoverageView) -> None:
    """Print what is stored of a source.

    One line, and one more for each thing to know: tensors that are counted apart, derived or left
    out.
    """
    tensors, files = coverage.tensors, coverage.files
    lines = [f"{_share(tensors, 'tensor')} and {_share(files, 'file')} stored"]
    if tensors.source is None:
        why = "the model was not imported by blobstore in its default profile"
        lines.append(f"The source is not known: {why}")
    lines += [
        f"{number:,} of the tensors belong to the {head}" for head, number in coverage.heads.items()
    ]
    derived = {**tensors.derived, **files.derived}
    lines += [f"Derived: {number:,} {how}" for how, number in derived.items()]
    if coverage.kept_whole:
        lines.append(f"Kept as files, not quantized: {shortened(coverage.kept_whole, _MOST_NAMES)}")
    reasons: dict[str, list[str]] = {}
    for one in (*tensors.left_out, *files.left_out):
        name = one.name if one.count == 1 else f"{one.name} ({one.count:,})"
        reasons.setdefault(one.reason, []).append(name)
    lines += [f"Left out: {shortened(names, _MOST_NAMES)}: {why}" for why, names in reasons.items()]
    emit(printable("\n".join(lines), keep="\n"))


def _share(tally: Tally | TallyView, noun: str) -> str:
    covered = tally.stored + sum(tally.derived.values())
    if tally.source is None:
        return counted(covered, noun)
    return f"{covered:,} of {counted(tally.source, noun)}"
