"""Remote: files on web servers, one or many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from blobstore.errors import BlobStoreError, LimitExceededError
from blobstore.remote.reader import FIRST_READ, HttpReader
from blobstore.transport import Allowance, HttpClient, Patience, is_public

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
        """Raises: UsageError when ``token`` is none; StorageError or NotFoundError when ``ca_file`` can't be read."""
        self.client = HttpClient(
            token=token, connections=connections, patience=patience, ca_file=ca_file, is_public=is_public
        )
        self._first_read = first_read

    def open(self, url: str) -> HttpReader:
        """Return a reader of the file at ``url``, with its header read. Raises: as `HttpReader`."""
        return HttpReader(self.client, url, first_read=self._first_read)

    def open_all(self, urls: Sequence[str]) -> list[HttpReader]:
        """Return readers of all ``urls``, in their order; ``connections`` of them are opened at once.

        Raises: as `HttpReader`, for the first that fails; the others end then, where they wait too.
        """
        if not urls:
            return []
        for url in urls:
            self.client.start(url)  # all addresses are looked at before anything is asked, and the token is the first one's
        allowances = [self.client.allowance(0) for _ in urls]
        failures: list[BlobStoreError] = []

        def cancel() -> None:
            for allowance in allowances:
                allowance.cancel()

        def open_one(url: str, allowance: Allowance) -> HttpReader:
            try:
                return HttpReader(self.client, url, first_read=self._first_read, allowance=allowance)
            except BlobStoreError as error:
                failures.append(error)
                cancel()
                raise

        with ThreadPoolExecutor(min(self.client.connections, len(urls)), thread_name_prefix="blobstore-remote") as pool:
            try:
                return list(pool.map(open_one, urls, allowances))
            except BlobStoreError:
                raise failures[0] from None
            except BaseException:  # an interrupt: nobody waits for a server then
                cancel()
                raise

    def read_document(self, url: str, limit: int) -> bytes:
        """Return all of the small file at ``url``.

        Raises: LimitExceededError when it has more than ``limit`` bytes: of more than ``limit`` + 1 nothing is
        asked, and with the replies' heads at most 64 KiB more are taken. NotFoundError, RemoteError: as `HttpClient.get`.
        """
        allowance = self.client.allowance(limit + 1 + _HEAD)
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
