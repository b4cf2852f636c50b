"""Blobs as answers: sent by the kernel where a file has the bytes, else in pieces.

Bytes that are decoded or fetched on the way (packed blobs, buckets) are hashed if all of the blob
is sent. The last piece of a blob with another digest is not sent: a client gets too few bytes, not
wrong ones. Files are not hashed: clients check what they get.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import anyio.to_thread
from anyio import CapacityLimiter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blobstore.errors import BlobStoreError
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest
from blobstore.web.byte_ranges import ByteSpan
from blobstore.web.file_sending import SENDS_FILES, BrokenOffError

_PIECE = 2**20


class BlobAnswer(Response):
    """A part of a blob. Closes the reader.

    ``place``: of the reader, or None. ``threads``: how many read or decode at once.
    """

    def __init__(
        self,
        reader: OpenReader,
        place: tuple[int, int] | None,
        digest: Digest,
        part: ByteSpan,
        fields: dict[str, str],
        threads: CapacityLimiter,
    ) -> None:
        ranged = {} if part.is_whole else {"content-range": part.content_range}
        about = {"content-length": str(part.nbytes), "content-type": "application/octet-stream"}
        status = 200 if part.is_whole else 206
        super().__init__(None, status, {**fields, **about, **ranged})
        self._reader = reader
        self._place = place
        self._digest = digest
        self._part = part
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises: BrokenOffError."""
        del receive
        start = {"type": "http.response.start", "status": self.status_code}
        with closing(self._reader):
            await send({**start, "headers": self.raw_headers})
            if scope["method"] == "GET":
                if self._place is not None and SENDS_FILES in scope.get("extensions", {}):
                    await self._send_file(send, *self._place)
                else:
                    await self._send_pieces(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_file(self, send: Send, fd: int, begin: int) -> None:
        with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            offset, count = begin + self._part.begin, self._part.nbytes
            message = {"file": file, "offset": offset, "count": count, "more_body": True}
            await send({"type": SENDS_FILES, **message})

    async def _send_pieces(self, send: Send) -> None:
        pieces = self._pieces()
        step = partial(next, pieces, None)
        run = partial(anyio.to_thread.run_sync, step, limiter=self._threads)
        while (piece := await run()) is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the part. Raises: BrokenOffError."""
        part, left = self._part, self._part.nbytes
        found = hashlib.sha256()
        try:
            for view in self._reader.pieces(memoryview(bytearray(_PIECE)), part.begin):
                piece = bytes(view[:left])
                left -= len(piece)
                if part.is_whole:
                    found.update(piece)
                    if not left and found.hexdigest() != self._digest.hex:
                        raise BrokenOffError(f"blob {self._digest} is damaged: it was not sent")
                yield piece
                if not left:
                    return
        except BlobStoreError as error:
            raise BrokenOffError(f"blob {self._digest} can't be sent: {error}") from error
