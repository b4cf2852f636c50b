"""Remote: files on web servers, one or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self, TypeVar

from blobstore.budget import Budget
from blobstore.errors import BlobStoreError, LimitExceededError
from blobstore.remote.reader import FIRST_READ, HttpReader
from blobstore.transport import Allowance, HttpClient, Patience, is_public

_T = TypeVar("_T")

_HEAD = 64 * 2**10
_OK = 200


class Remote:
    """Reads files of web servers over kept-alive connections. A context manager; safe to share between threads.

    ``token`` is sent to the origin of the first address that is asked for (of `hub_folder`: its endpoint), and to no
    other. ``connections`` is how many requests are made at once, ``first_read`` how many bytes opening a file asks for,
    ``patience`` how long servers are waited for, ``ca_file`` certificates to trust beside the system's; ``is_public``
    says which IP addresses are public, for rule R2. What may be asked, and how: `blobstore.transport`.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        connections: int = 16,
        first_read: int = FIRST_READ,
        patience: Patience | None = None,
        ca_file: str | None = None,
        is_public: Callable[[str], bool] = is_public,
    ) -> None:
        """Raises: UsageError when ``token`` is invalid; StorageError or NotFoundError when ``ca_file`` can't be read."""
        self.client = HttpClient(
            token=token, connections=connections, patience=patience, ca_file=ca_file, is_public=is_public
        )
        self._first_read = first_read

    def open(self, url: str, budget: Budget | None = None) -> HttpReader:
        """Return a reader of the file at ``url``, with its header read, within ``budget``. Raises: as `HttpReader`."""
        allowance = self.client.allowance(0, budget)
        return HttpReader(self.client, url, first_read=self._first_read, allowance=allowance)

    def open_all(self, urls: Sequence[str]) -> list[HttpReader]:
        """Return readers of all ``urls``, in their order, opened as in `reading`. Raises: as `reading`."""
        with self.reading(urls, lambda reader: reader) as readers:
            return list(readers)

    @contextmanager
    def reading(
        self, urls: Sequence[str], read: Callable[[HttpReader], _T], budget: Budget | None = None
    ) -> Iterator[Iterator[_T]]:
        """Give what ``read`` makes of a reader of each of ``urls``, in their order; ``connections`` are read at once.

        The first file that fails, in whatever order, ends the others where they wait, and so does leaving the block.
        ``budget``: what they may take in all.

        Raises: UsageError when one of ``urls`` is not a web address, before any request; as `HttpReader` and ``read``.
        """
        for url in urls:
            self.client.start(url)  # checks it; the first one's origin gets the token
        allowances = [self.client.allowance(0, budget) for _ in urls]
        failures: list[BlobStoreError] = []

        def cancel() -> None:
            for allowance in allowances:
                allowance.cancel()

        def read_one(url: str, allowance: Allowance) -> _T:
            try:
                return read(HttpReader(self.client, url, first_read=self._first_read, allowance=allowance))
            except BlobStoreError as error:
                failures.append(error)
                cancel()
                raise
            finally:
                allowance.finish()

        workers = max(1, min(self.client.connections, len(urls)))
        with ThreadPoolExecutor(workers, thread_name_prefix="blobstore-remote") as pool:
            try:
                yield pool.map(read_one, urls, allowances)
            except BlobStoreError as error:
                if any(error is failure for failure in failures):  # else it is the caller's own
                    raise failures[0] from None
                raise
            finally:  # an interrupt does not wait for servers either
                cancel()
                pool.shutdown(wait=False, cancel_futures=True)

    def read_document(self, url: str, limit: int, budget: Budget | None = None) -> bytes:
        """Return all of the small file at ``url``, within ``budget``.

        Raises: LimitExceededError when it has more than ``limit`` bytes: of more than ``limit`` + 1 nothing is
        asked, and with the replies' heads at most 64 KiB more are taken. NotFoundError, RemoteError: as `HttpClient.get`.
        """
        allowance = self.client.allowance(limit + 1 + _HEAD, budget)
        got = bytearray()
        with self.client.get(self.client.start(url), allowance, accept=(_OK,)) as (reply, _):
            if (reply.length or 0) > limit:
                raise _too_long(str(reply.address), limit)
            for chunk in reply.chunks():
                got += chunk
                if len(got) > limit:
                    raise _too_long(str(reply.address), limit)
        return bytes(got)

    def close(self) -> None:
        """Close all connections; readers can't read on."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _too_long(name: str, limit: int) -> LimitExceededError:
    return LimitExceededError(f"limit exceeded: {name} has more than {limit:,} bytes", path=name)
