"""Redirects from a file's address, followed once for all requests for its parts.

Servers of files often redirect to signed addresses of others, which expire. One request finds the
address, the others wait for it and then use it, until the server there says that it has expired.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blobstore.io.http.redirects import RequestTarget
from blobstore.io.http.web_addresses import WebAddress


class FileRoute:
    """Where the bytes of a file are. Safe to share between threads.

    ``start``: the file's own address. ``target``: where redirects from it led, if that is known.
    """

    def __init__(self, start: RequestTarget, target: RequestTarget | None = None) -> None:
        self.start = start
        self._target = target
        self._number = 0
        self._is_asked = False
        self._changed = threading.Condition()

    @property
    def address(self) -> WebAddress:
        """The address of the next request."""
        return (self._target or self.start).address

    @contextmanager
    def take(self) -> Iterator[tuple[RequestTarget, int | None]]:
        """Give the target, and its number; None to the one request that finds it.

        The others wait, until it was `found`, or the request ended without that.
        """
        with self._changed:
            while self._target is None and self._is_asked:
                self._changed.wait()
            target, number = self._target, self._number
            self._is_asked = self._is_asked or target is None
        if target is not None:
            yield target, number
            return
        try:
            yield self.start, None
        finally:
            with self._changed:
                self._is_asked = False
                self._changed.notify_all()

    def found(self, target: RequestTarget) -> None:
        """Use a target from now on."""
        with self._changed:
            self._target = target
            self._number += 1
            self._is_asked = False
            self._changed.notify_all()

    def expired(self, number: int) -> None:
        """Forget the target of that number, if it is still in use."""
        with self._changed:
            if number == self._number:
                self._target = None
