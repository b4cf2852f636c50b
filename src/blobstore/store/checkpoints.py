"""Checkpoints: finished blobs are made durable and noted in the journal while others are still being written.

So an import that is killed, or a machine that loses power, loses the work of seconds; and the disk is at work during an
import instead of after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from blobstore.store.journal import Entry, Journal

_INTERVAL_S = 0.5


class Checkpoints:
    """A thread that syncs and notes what `add` was told, now and then. ``sync`` makes all that was written durable."""

    def __init__(self, journal: Journal, sync: Callable[[], None]) -> None:
        self._journal = journal
        self._sync = sync
        self._finished: list[Entry] = []
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, entry: Entry) -> None:
        """Note a finished blob at the next checkpoint. Raises: what went wrong at an earlier one."""
        with self._mutex:
            self._finished.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
                self._thread.start()
        self._check()

    def stop(self) -> None:
        """Stop, without a last checkpoint. Raises: what went wrong: what was written is lost then, and not tried again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._check()

    def note(self) -> None:
        """Make a checkpoint of what was added since the last one. Raises: StorageError."""
        with self._mutex:
            finished, self._finished = self._finished, []
        if finished:
            self._sync()
            self._journal.append(finished)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(_INTERVAL_S):
                self.note()
        except BaseException as error:  # noqa: BLE001  # it is raised where the import can fail
            self._error = error
