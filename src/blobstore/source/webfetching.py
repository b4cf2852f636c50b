"""A fetcher of files on web servers and on the Hub: which file, and which version of it.

How the bytes come is in `blobstore.io.http.filling`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from blobstore.source.fetching import Fetcher, FetchOptions

if TYPE_CHECKING:
    from blobstore.io.http.direct import Came
    from blobstore.io.http.filling import FetchControl, RangeFiller
    from blobstore.io.http.remote_files import Remote
    from blobstore.io.ranges import Identity
    from blobstore.source.web import WebFolder


class WebFetcher:
    """Fills memory with ranges of the files of one folder. See `Fetcher`."""

    def __init__(self, folder: WebFolder, control: FetchControl) -> None:
        self._folder = folder
        self._control = control
        self._fillers: dict[tuple[str, str], RangeFiller] = {}
        self._lock = threading.Lock()

    @property
    def at_once(self) -> int:
        """See `Fetcher`."""
        return self._control.slots.most

    @property
    def wanted(self) -> int:
        """See `Fetcher`."""
        return self._control.slots.level

    def fill(
        self,
        name: str,
        identity: Identity,
        begin: int,
        buffer: memoryview,
        came: Came | None = None,
    ) -> None:
        """See `Fetcher`."""
        self._filler(name, identity).fill(begin, buffer, came)

    def cancel(self) -> None:
        """See `Fetcher`."""
        self._control.cancel()

    def _filler(self, name: str, identity: Identity) -> RangeFiller:
        from blobstore.io.http.filling import RangeFiller

        with self._lock:
            key = (name, identity.key)
            if key not in self._fillers:
                self._fillers[key] = RangeFiller(
                    self._control,
                    self._folder.url(name),
                    self._folder.version_of(identity),
                    partial(self._folder.check_version, name, identity),
                    self._folder.target_of(name),
                )
            return self._fillers[key]


@contextmanager
def web_fetcher(folder: WebFolder, remote: Remote, options: FetchOptions) -> Iterator[Fetcher]:
    """Give a fetcher of a folder's files, over the connections of ``remote``."""
    from blobstore.io.http.filling import FetchControl

    control = FetchControl(remote, options.connections, options.limit_rate)
    try:
        yield WebFetcher(folder, control)
    finally:
        control.cancel()
