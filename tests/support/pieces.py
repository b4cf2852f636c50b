"""Pieces of a blob, cut at random and put by many threads in any order."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from blobstore.store.local.blobs import BlobWriter, FinishedBlob

_PAGE = mmap.PAGESIZE
Aside = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """One `BlobWriter.put`, and the parts of gaps that are put aside before it."""

    offset: int
    data: bytes
    gap: int
    aligned: bool
    asides: list[Aside] = field(default_factory=list)


def cut(data: bytes, lengths: list[tuple[int, int, bool]], chance: random.Random) -> list[Piece]:
    """Return pieces by ``(length, gap behind it, aligned)`` in the order of their bytes.

    They cover ``data``.

    Each gap is cut again, and its parts go to any pieces before it: those are the ones that may
    fill it.
    """
    pieces: list[Piece] = []
    at = 0
    for length, gap, aligned in lengths:
        pieces.append(Piece(at, data[at : at + length], gap, aligned))
        at += length
        for part in _parts(at, data[at : at + gap], chance):
            chance.choice(pieces).asides.append(part)
        at += gap
    assert at == len(data)
    return pieces


def _parts(offset: int, data: bytes, chance: random.Random) -> Iterator[Aside]:
    start = 0
    while start < len(data):
        end = start + chance.randint(1, len(data) - start)
        yield offset + start, data[start:end]
        start = end


class Putter:
    """Puts pieces, each from a buffer that is overwritten once the writer has released it."""

    def __init__(self, writer: BlobWriter) -> None:
        """Put pieces into ``writer``."""
        self._writer = writer
        self._mutex = threading.Lock()
        self.given_back: list[int] = []
        self.finished: list[FinishedBlob] = []

    def put_all(self, pieces: list[Piece], threads: int) -> None:
        """Put the pieces in that order, with so many threads.

        Raises: the error of the first that failed.
        """
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(self.put, piece) for piece in pieces]:
                done.result()

    def put(self, piece: Piece) -> None:
        """Put one piece, and before it what is put aside with it."""
        for offset, part in piece.asides:
            self._writer.put_aside(offset, part)
        buffer = self._buffer(piece)
        finished = self._writer.put(
            piece.offset,
            buffer,
            gap=piece.gap,
            aligned=piece.aligned,
            hashed=lambda: self._scribble(piece.offset, buffer),
        )
        if finished is not None:
            with self._mutex:
                self.finished.append(finished)

    def _buffer(self, piece: Piece) -> memoryview:
        # Aligned as the writer wants it, or off by one.
        start = (piece.offset + (not piece.aligned)) % _PAGE
        memory = memoryview(mmap.mmap(-1, len(piece.data) + 2 * _PAGE))
        buffer = memory[start : start + len(piece.data)]
        buffer[:] = piece.data
        return buffer

    def _scribble(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = b"\xee" * len(buffer)
        with self._mutex:
            self.given_back.append(offset)
