"""Pieces of a blob, cut at random and put by many threads in any order."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.store.local.blobs import FinishedBlob
from blobstore.store.local.session import BlobWriter

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


@contextmanager
def writing(
    folder: Path, size: int, name: str = "x", *, syncs: bool = False
) -> Iterator[tuple[BlobWriter, list[FinishedBlob]]]:
    """Yield a writer that hashes what is put, and the list that the finished blob comes to."""
    made: list[FinishedBlob] = []
    with closing(BlobWriter(folder, name, size, made.append, syncs=syncs)) as writer:
        yield writer, made


class Putter:
    """Puts pieces, each from a buffer that is overwritten once the writer has released it."""

    def __init__(self, writer: BlobWriter) -> None:
        """Put pieces into ``writer``."""
        self._writer = writer
        self._mutex = threading.Lock()
        self.given_back: list[int] = []

    def put_all(self, pieces: list[Piece], threads: int) -> None:
        """Put the pieces in that order, with so many threads.

        Raises: the error of the first that failed.
        """
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(self.put, piece) for piece in pieces]:
                done.result()

    def put(self, piece: Piece) -> None:
        """Put one piece, and what is written beside it."""
        buffer = self._buffer(piece)
        self._writer.put(
            piece.offset,
            buffer,
            extra=piece.asides,
            gap=piece.gap,
            aligned=piece.aligned,
            hashed=lambda: self._scribble(piece.offset, buffer),
        )

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
