"""Files on web servers, several read at once, and small documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TypeVar

from blobstore.errors import BlobStoreError, LimitExceededError, NotFoundError, RemoteError
from blobstore.io.budget import Budget, RequestLimits
from blobstore.io.http.client import HttpClient
from blobstore.io.http.reader import FIRST_READ, HttpReader, Wanted
from blobstore.io.http.replies import Reply

_T = TypeVar("_T")
_HEAD = 64 * 2**10
_OK = 200


class Remote(HttpClient):
    """Reads files of web servers over kept-alive connections, several at once.

    A context manager; safe to share between threads.
    """

    first_read = FIRST_READ
    """Bytes that opening a file asks for."""

    def open(
        self, url: str, budget: Budget | None = None, *, wanted: Wanted | None = None
    ) -> HttpReader:
        """Return a reader of the file at ``url``, with what is ``wanted`` read, within ``budget``.

        Raises: as `HttpReader`.
        """
        return self._open(url, self.limits(0, budget), wanted)

    def _open(self, url: str, limits: RequestLimits, wanted: Wanted | None) -> HttpReader:
        return HttpReader(self, url, first_read=self.first_read, wanted=wanted, limits=limits)

    def reading(
        self,
        urls: Sequence[str],
        read: Callable[[HttpReader], _T],
        budget: Budget | None = None,
        *,
        wanted: Wanted | None = None,
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``read`` makes of a reader of each of ``urls``, in their order.

        ``connections`` are read at once. The first file that fails, in whatever order, ends the
        others where they wait, and so does leaving the block. ``budget``: what they may take in
        all.

        Raises: UsageError when one of ``urls`` is not a web address, before any request; as
        `HttpReader` and ``read``.
        """
        return self._at_once(
            urls, lambda url, limits: read(self._open(url, limits, wanted)), budget
        )

    def present(self, urls: Sequence[str], budget: Budget | None = None) -> list[HttpReader]:
        """Return readers of those of ``urls`` that exist, opened as in `reading`.

        Raises: as `reading`, but for files that are missing.
        """

        def open_if_there(url: str, limits: RequestLimits) -> HttpReader | None:
            try:
                return self._open(url, limits, None)
            except NotFoundError:
                return None

        with self._at_once(urls, open_if_there, budget) as readers:
            return [reader for reader in readers if reader is not None]

    def whole(self, sizes: Mapping[str, int]) -> list[HttpReader]:
        """Return readers of small files, by address with the bytes of each, which are asked for.

        What a file has beyond that is not read. Raises: as `reading`.
        """

        def open_whole(url: str, limits: RequestLimits) -> HttpReader:
            return HttpReader(self, url, first_read=max(1, sizes[url]), limits=limits)

        with self._at_once(list(sizes), open_whole, None) as readers:
            return list(readers)

    @contextmanager
    def _at_once(
        self, urls: Sequence[str], ask: Callable[[str, RequestLimits], _T], budget: Budget | None
    ) -> Iterator[Iterator[_T]]:
        for url in urls:
            self.start(url)  # checks it; the first one's origin gets the token
        limits_of_all = [self.limits(0, budget) for _ in urls]
        failures: list[BlobStoreError] = []

        def cancel() -> None:
            for limits in limits_of_all:
                limits.cancel()

        def ask_one(url: str, limits: RequestLimits) -> _T:
            try:
                return ask(url, limits)
            except BlobStoreError as error:
                failures.append(error)
                cancel()
                raise
            finally:
                limits.finish()

        workers = max(1, min(self.connections, len(urls)))
        with ThreadPoolExecutor(workers, thread_name_prefix="blobstore-remote") as pool:
            try:
                yield pool.map(ask_one, urls, limits_of_all)
            except BlobStoreError as error:
                if any(error is failure for failure in failures):  # else it is the caller's own
                    raise failures[0] from None
                raise
            finally:  # an interrupt does not wait for servers either
                cancel()
                pool.shutdown(wait=False, cancel_futures=True)

    def read_document(self, url: str, limit: int, budget: Budget | None = None) -> bytes:
        """Return all of the small file at ``url``, within ``budget``.

        Raises: LimitExceededError when it has more than ``limit`` bytes: of more than ``limit`` + 1
        nothing is asked, and with the replies' heads at most 64 KiB more are taken. NotFoundError,
        RemoteError: as `HttpClient.get`.
        """
        return self.read_page(url, limit, budget)[0]

    def read_page(
        self, url: str, limit: int, budget: Budget | None = None
    ) -> tuple[bytes, str | None]:
        """Return all of a small file, and the address of the next page (RFC 8288: ``rel="next"``).

        Raises: as `read_document`.
        """
        limits = self.limits(limit + 1 + _HEAD, budget)
        attempt = 0
        while True:
            with self.get(self.start(url), limits, accept=(_OK,)) as (reply, _):
                try:
                    return _whole(reply, limit), reply.next_page()
                except RemoteError as error:
                    if not error.temporary:
                        raise
                    failure = error
            self.pause(attempt, limits, failure)
            attempt += 1


def _whole(reply: Reply, limit: int) -> bytes:
    got = bytearray()
    for chunk in chain((b"",), reply.chunks()):  # the length is checked before any byte
        got += chunk
        if max(len(got), reply.length or 0) > limit:
            raise LimitExceededError(
                f"limit exceeded: {reply.address} has more than {limit:,} bytes",
                path=str(reply.address),
            )
    return bytes(got)
