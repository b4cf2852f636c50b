"""One progress bar on stderr: bytes, rate, time left. None unless stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blobstore.cli.output import printable

if TYPE_CHECKING:
    from blobstore.importer import Progress


@contextmanager
def progress_bar(total: int) -> Iterator[Progress | None]:
    """Yield what an import reports to: a bar over ``total`` source bytes, or None when it would not be seen."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.table import Column

    columns = (
        BarColumn(bar_width=20, table_column=Column(no_wrap=True)),
        DownloadColumn(table_column=Column(no_wrap=True, min_width=16)),
        TransferSpeedColumn(table_column=Column(no_wrap=True, min_width=10)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        # What has no room is the name, not a number.
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task("", total=total)

        def advance(nbytes: int, blob: str) -> None:
            bar.update(task, advance=nbytes, description=printable(blob))

        yield advance
