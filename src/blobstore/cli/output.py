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
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.bucket_settings import bucket_options, places_of
from blobstore.errors import UsageError, from_os_error
from blobstore.views.quantities import (
    UNITS,
    count as count,
    counted as counted,
    printable as printable,
    shape as shape,
    size as size,
)

if TYPE_CHECKING:
    from blobstore.cli.buckets import CacheChoice
    from blobstore.io.workers import Progress
    from blobstore.source.folders import Folder


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
        """A bar over as many bytes as it is told."""

        def begin(self, total: int) -> None:
            bar.start()
            bar.reset(task, total=total)

        def __call__(self, nbytes: int, name: str, /) -> None:
            bar.update(task, advance=nbytes, description=printable(name))

    try:
        yield Shown()
    finally:
        bar.stop()


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="The store, a folder or s3://BUCKET/PREFIX "
        "[default: $BLOBSTORE_STORE, $OLLAMA_MODELS, else ~/.ollama/models].",
    ),
]
LowerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lower",
        metavar="DIR",
        help="A store that is only read, for what the store lacks; "
        "repeatable [default: $BLOBSTORE_LOWER].",
    ),
]
WaitOption = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        min=0,
        help="How long to wait while another process uses the store "
        "[default: 10, or 1 to remove blobs].",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", metavar="N", help="Number of threads [default: one per core]."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Model = Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")]

_LONGEST_MESSAGE = 1000
_LONGEST_REASON = 120
_FLAGS = {
    "rules": ("--rule",),
    "alignment": ("--align",),
    "modelfile": ("--modelfile", "-f"),
    "licenses": ("--license",),
    "parameters": ("--param",),
    "replace": ("--force",),
    "wait_s": ("--wait",),
    "realms": ("--realm",),
}
"""The flags of options whose flags are not just their names."""
_NAMED = re.compile(
    r"""(?<![^\s(])(`?)([a-z_]+)=(?:True|["']([^"'`]*)["']|([A-Z]+))\1(?=[\s,.;)]|$)""", re.ASCII
)
"""An option as hints of the library name it: ``quant="int4"``, ``force=True``, ``draft=DIR``."""
_SIZE = re.compile(
    r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?P<unit>|[kmgt]?b)", re.ASCII | re.IGNORECASE
)


def store_at(
    folder: str | None,
    wait_s: float | None = None,
    *,
    may_be_new: bool = False,
    cache: CacheChoice | None = None,
) -> Any:
    """Return the store that ``--store``, the environment or the default names.

    ``cache``: for the blobs of a bucket; None: they are read from it.

    Raises: NotFoundError when one that is named does not exist, and it is not ``may_be_new``: the
    path is misspelt.
    """
    from blobstore.store.local.store import open_store

    if folder == "":
        raise UsageError("--store is empty", hint="Is a variable unset?")
    environment = os.environ.get("BLOBSTORE_STORE") or os.environ.get("OLLAMA_MODELS")
    named = folder or environment or None
    if named is not None and "://" in named:
        from blobstore.cli.buckets import store_in_bucket

        return store_in_bucket(named, wait_s, cache)
    store = open_store(named, wait_s=wait_s)
    if named is not None and not may_be_new:
        store.require()
    return store


def source_at(address: str) -> str | Folder:
    """Return an address as an open folder, with the Hub's token where it is the Hub's.

    The token is a secret between its owner and the Hub. A path is returned as it is.

    Raises: as `open_folder`.
    """
    from blobstore.source.addresses import is_address, open_folder

    if not is_address(address):
        return address
    endpoint = hub_endpoint()
    return open_folder(
        address,
        token=token_for(address, endpoint),
        endpoint=endpoint,
        bucket_options=bucket_options(address),
    )


def hub_endpoint() -> str:
    """Return the address of the Hub."""
    from blobstore.source.folders import HUB

    return os.environ.get("HF_ENDPOINT") or HUB


def token_for(address: str, endpoint: str) -> str | None:
    """Return the Hub's token for an address of the Hub, None for every other."""
    from blobstore.source.addresses import is_web_address

    token = os.environ.get("HF_TOKEN", "").strip() or None
    if not is_web_address(address):
        return token if address.lower().startswith("hf://") else None
    from blobstore.io.http.web_addresses import WebAddress

    return token if WebAddress.parse(address).origin == WebAddress.parse(endpoint).origin else None


def stores_at(
    folder: str | None,
    lower: Sequence[str] | None,
    wait_s: float | None = None,
    *,
    may_be_new: bool = False,
    copies_up: bool = False,
    cache: CacheChoice | None = None,
) -> Any:
    """Return the store of `store_at`, over those that ``--lower`` or the environment names.

    Raises: as `store_at`.
    """
    if lower is not None and "" in lower:
        raise UsageError("--lower is empty", hint="Is a variable unset?")
    folders = lower or [part for part in places_of(os.environ.get("BLOBSTORE_LOWER", "")) if part]
    upper = store_at(folder, wait_s, may_be_new=may_be_new or bool(folders), cache=cache)
    below = [store_at(one, cache=cache) for one in folders]
    if lower is None:  # an exported variable may name the store itself
        below = [store for store in below if store.address != upper.address]
    if not below:
        return upper
    from blobstore.store.layered import LayeredStore

    return LayeredStore(upper, below, copies_up=copies_up)


class ReaderGoneError(Exception):
    """The reader of our output went away, as ``head`` does, which is not an error."""


def emit(text: str = "", end: str = "\n") -> None:
    """Print on stdout, at once.

    Raises: ReaderGoneError, after which output is dropped; StorageError otherwise.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # What is still in Python's buffer has to go somewhere, or it would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ReaderGoneError from None
    except OSError as error:
        raise from_os_error(error, "write to", "standard output") from error


def fail(message: str, hint: str | None = None) -> None:
    """Print ``Error: …`` and, where there is one, ``Hint: …`` on stderr, one line each."""
    text = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"
    print(f"Error: {printable(text)}", file=sys.stderr)
    if hint:
        print(f"Hint: {printable(with_flags(hint))}", file=sys.stderr)


def note(text: str) -> None:
    """Print ``Note: …`` on stderr: what to know beside the result."""
    print(f"Note: {printable(with_flags(text))}", file=sys.stderr)


def flags_of(name: str) -> tuple[str, ...]:
    """Return the flags of the option of that Python name."""
    return _FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def with_flags(hint: str) -> str:
    """Return a hint of the library with flags for the options that it names."""
    return _NAMED.sub(
        lambda named: " ".join([flags_of(named[2])[0], *filter(None, named.groups()[2:])]), hint
    )


def show_json(document: Any, *, compact: bool = False) -> None:
    """Print one JSON document of views on stdout.

    ``compact``: on one line, which takes a tenth of the time for a large document.
    """
    emit(json.dumps(document, indent=None if compact else 2, default=lambda view: view.document()))


def show_view(view: Any, show: Callable[[Any], object], *, as_json: bool) -> None:
    """Print views as one JSON document, or by a function that prints them as lines and tables."""
    (show_json if as_json else show)(view)


def reason(message: str) -> str:
    """Return why something is broken, as short as a row of a table has room for."""
    return message[:_LONGEST_REASON]


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns as wide as their widest cell, three spaces apart."""
    cells = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = (
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
    emit("\n".join(lines))


def show_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one pair a line, the values in one column."""
    width = max(map(len, facts))
    for name, value in facts.items():
        emit(f"{name.ljust(width)}   {printable(value)}")


def shortened(names: Sequence[str], most: int, number: int | None = None) -> str:
    """Return the first ``most`` of ``number`` names: ``a, b and 3 more``."""
    more = (len(names) if number is None else number) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def short(digest: str) -> str:
    """Return the first 12 digits of a digest."""
    return digest.removeprefix("sha256:")[:12]


def show_replaced(digest: str | None) -> None:
    """Print the ID of a model that another one replaced; nothing without one."""
    if digest is not None:
        emit(f"Replaced {short(digest)}, which had this name")


def cut(text: str, longest: int) -> str:
    """Return a text of at most ``longest`` characters: a longer one loses its middle."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 1]}…{text[-end:]}"


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
