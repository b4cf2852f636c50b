"""What the commands print: JSON documents, tables, sizes, errors.

Text from files is made harmless first.

One progress bar on stderr: bytes, rate, time left. None unless stderr is a terminal.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from typer import Argument, Option

from blobstore.errors import UsageError, from_os_error
from blobstore.names import shortened
from blobstore.views.quantities import (
    UNITS,
    bits as bits,
    count as count,
    counted as counted,
    counts as counts,
    cut_text as cut_text,
    printable as printable,
    shape as shape,
    shares as shares,
    size as size,
)

if TYPE_CHECKING:
    from blobstore.formats.documents import Coverage, Tally
    from blobstore.io.workers import Progress
    from blobstore.names import Digest
    from blobstore.store.transfer import Amount

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Yield a progress bar, shown from its ``begin`` on; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console
    from rich.table import Column

    columns = (
        rich.BarColumn(bar_width=20, table_column=Column(no_wrap=True)),
        rich.DownloadColumn(table_column=Column(no_wrap=True, min_width=16)),
        rich.TransferSpeedColumn(table_column=Column(no_wrap=True, min_width=10)),
        rich.TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        # In a narrow terminal the name is cut, not a number.
        rich.TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
    )
    bar = rich.Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
    task = bar.add_task("", total=None)

    class Shown:
        def begin(self, total: int) -> None:
            bar.start()
            bar.reset(task, total=total)

        def __call__(self, nbytes: int, name: str, /) -> None:
            bar.update(task, advance=nbytes, description=printable(name))

    try:
        yield Shown()
    finally:
        bar.stop()


def with_bar(work: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Return the result of a function that takes a ``progress``, shown by a progress bar."""
    with progress_bar() as progress:
        return work(*arguments, **options, progress=progress)  # type: ignore[arg-type]  # it takes it


Jobs = Annotated[
    int | None,
    Option("--jobs", "-j", metavar="N", help="Number of threads [default: one per core]."),
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON document.")]
Model = Annotated[str, Argument(metavar="NAME", help="A stored model.")]
_LONGEST_MESSAGE = 1000
_RED, _YELLOW, _CYAN = 31, 33, 36
LONGEST_REASON = 120
"""Of why something is broken, in a row of a table."""
# The flags of options whose flags are not just their names.
_FLAGS = {
    "rules": "--rule",
    "alignment": "--align",
    "licenses": "--license",
    "parameters": "--param",
    "replace": "--force",
    "wait_s": "--wait",
    "realms": "--realm",
}
# An option as hints of the library name it: ``quant="int4"``, ``force=True``, ``draft=DIR``.
_NAMED = re.compile(
    r"""(?<![^\s(])(`?)([a-z_]+)=(?:True|["']([^"'`]*)["']|([A-Z]+))\1(?=[\s,.;)]|$)""", re.ASCII
)
_SIZE = re.compile(
    r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?P<unit>|[kmgt]?b)", re.ASCII | re.IGNORECASE
)


PLAIN: dict[str, Any] = {
    "invoke_without_command": True,
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}
"""Settings of groups of commands."""


def show_help(context: typer.Context) -> None:
    """Print the help of a group that was used without a command."""
    if context.invoked_subcommand is None:
        emit(context.get_help())


class ReaderGoneError(Exception):
    """The reader of our output went away, as ``head`` does, which is not an error."""


def emit(text: str | bytes = "", end: str = "\n") -> None:
    """Print on stdout, at once; bytes as they are.

    Raises: ReaderGoneError, after which output is dropped; StorageError otherwise.
    """
    try:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            print(text, end=end)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in Python's buffer has to go somewhere, or it would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ReaderGoneError from None
    except OSError as error:
        raise from_os_error(error, "write to", "standard output") from error


def emit_lines(*lines: str) -> None:
    """Print lines on stdout, made harmless, but not the empty ones."""
    for line in filter(None, lines):
        emit(printable(line))


def has_colours(stream: IO[str]) -> bool:
    """Return True for a terminal with colours, unless the user wants none (no-color.org)."""
    is_dumb = os.environ.get("TERM") == "dumb"
    return stream.isatty() and not (is_dumb or os.environ.get("NO_COLOR"))


def _remark(label: str, colour: int, text: str) -> None:
    if has_colours(sys.stderr):
        label = f"\x1b[1;{colour}m{label}\x1b[0m"
    print(f"{label} {printable(text)}", file=sys.stderr)


def emit_bytes(data: bytes) -> None:
    """Print a file on stdout; in a terminal as harmless text. Raises: as `emit`."""
    if sys.stdout.isatty():
        emit(printable(data.decode(errors="replace"), keep="\n\t").removesuffix("\n"))
    else:
        emit(data)


def fail(message: str, hint: str | None = None) -> None:
    """Print ``Error: …`` and, where there is one, ``Hint: …`` on stderr, one line each."""
    text = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"
    _remark("Error:", _RED, text)
    if hint:
        _remark("Hint:", _CYAN, with_flags(hint))


def note(*texts: str) -> None:
    """Print ``Note: …`` on stderr for each text: what to know with the result."""
    for text in texts:
        _remark("Note:", _YELLOW, with_flags(text))


def say_empty(address: str) -> None:
    """Print that a store has no models yet, and how it gets one."""
    emit(printable(f"No models in {address} yet. Import one: blobstore import FOLDER"))


def flag_of(name: str) -> str:
    """Return the flag of the option of that Python name."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def with_flags(hint: str) -> str:
    """Return a hint of the library with flags for the options that it names."""
    return _NAMED.sub(
        lambda named: " ".join([flag_of(named[2]), *filter(None, named.groups()[2:])]), hint
    )


def show_json(document: Any, *, compact: bool = False) -> None:
    """Print results as one JSON document on stdout.

    ``compact``: on one line, which takes a tenth of the time for a large document.
    """
    from blobstore.views.documents import encoded

    emit(json.dumps(document, indent=None if compact else 2, default=encoded))


def show_result(result: Any, show: Callable[[Any], object], as_json: bool) -> None:
    """Print results as one JSON document, or by a function that prints them as lines and tables.

    If the reader of the output goes away, the exit code still tells the result.
    """
    with suppress(ReaderGoneError):
        (show_json if as_json else show)(result)


def show_lines(result: Any, as_json: bool, *lines: str) -> None:
    """Print results as one JSON document, or as lines; see `show_result` and `emit_lines`."""
    show_result(result, lambda _: emit_lines(*lines), as_json)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns as wide as their widest cell, three spaces apart."""
    cells = [list(headings), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
    emit("\n".join(lines))


def show_facts(facts: Mapping[str, object]) -> None:
    """Print names and values, one pair a line, the values in one column."""
    width = max(map(len, facts), default=0)
    emit_lines(*(f"{name.ljust(width)}   {value}" for name, value in facts.items()))


def blobs(number: int, nbytes: int) -> str:
    """Return a number of blobs with their bytes: ``2 blobs (5.9 MB)``."""
    return f"{counted(number, 'blob')} ({size(nbytes)})"


def amounts(ways: Mapping[str, Amount]) -> str:
    """Return how many blobs went which way: ``2 linked (5.9 MB), 1 copied (80 B)``."""
    parts = (f"{way.blobs:,} {how} ({size(way.nbytes)})" for how, way in ways.items() if way)
    return ", ".join(parts) or "no blobs"


def replaced_line(digest: Digest | None) -> str:
    """Return what is said of a model that another one replaced; nothing without one."""
    return "" if digest is None else f"Replaced {digest.short}, which had this name"


def rate(nbytes: int, seconds: float) -> str:
    """Return how fast something was done: ``5.9 MB/s``."""
    return f"{size(int(nbytes / max(seconds, 1e-3)))}/s"


def age(moment: datetime | None) -> str:
    """Return how long ago a moment was: ``2 hours ago``."""
    if moment is None:
        return "unknown"
    seconds = (datetime.now(UTC) - moment).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 60 else "just now"  # noqa: PLR2004  # less than a minute


def duration(seconds: float) -> str:
    """Return a time span in whole units of the largest that fits: ``3 days``."""
    for length, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return f"{max(0, int(seconds))} s"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 300MB, 3.5GB or 1073741824. Raises: UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"invalid size {text!r}",
            hint="Write bytes, or a number with KB, MB, GB or TB, such as 3.5GB.",
        )
    return int(float(match["number"]) * 1000 ** UNITS.index(match["unit"].upper() or "B"))


_MOST_NAMES = 5


def coverage_lines(coverage: Coverage) -> list[str]:
    """Return what is stored of a source.

    One line, and one more for each thing to know: tensors that are counted apart, derived or left
    out.
    """
    tensors, files = coverage.tensors, coverage.files
    unknown = "The source is unknown: the model was not imported by blobstore with the default"
    derived = {**tensors.derived, **files.derived}
    whole = shortened(coverage.kept_whole, _MOST_NAMES)
    reasons: dict[str, list[str]] = {}
    for one in (*tensors.left_out, *files.left_out):
        name = one.name if one.count == 1 else f"{one.name} ({one.count:,})"
        reasons.setdefault(one.reason, []).append(name)
    return [
        f"{_share(tensors, 'tensor')} and {_share(files, 'file')} stored",
        f"{unknown} profile" if tensors.source is None else "",
        *(
            f"{number:,} of the tensors belong to the {head}"
            for head, number in coverage.heads.items()
        ),
        *(f"Derived: {number:,} {how}" for how, number in derived.items()),
        f"Kept as files, not quantized: {whole}" if whole else "",
        *(f"Left out: {shortened(names, _MOST_NAMES)}: {why}" for why, names in reasons.items()),
    ]


def _share(tally: Tally, noun: str) -> str:
    if tally.source is None:
        return counted(tally.covered, noun)
    return f"{tally.covered:,} of {counted(tally.source, noun)}"
