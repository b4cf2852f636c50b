"""Pieces of a blob, cut at random and put by many threads in any order."""

import mmap
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.io.durable import PAGE
from blobstore.store.local.blobs import FinishedBlob
from blobstore.store.local.session import BlobWriter


@dataclass(frozen=True, slots=True)
class Piece:
    """One `BlobWriter.put`, and the parts of gaps that are put aside before it."""

    offset: int
    data: bytes
    gap: int
    aligned: bool
    asides: list[tuple[int, bytes]] = field(default_factory=list)


def cut(data: bytes, lengths: list[tuple[int, int, bool]], chance: random.Random) -> list[Piece]:
    """Return pieces by ``(length, gap behind it, aligned)``, in the order of their bytes.

    Each gap is cut again, and its parts go to any pieces before it: those are the ones that may
    fill it.
    """
    pieces: list[Piece] = []
    at = 0
    for length, gap, aligned in lengths:
        pieces.append(Piece(at, data[at : at + length], gap, aligned))
        at += length
        end = at + gap
        while at < end:
            part = data[at : at + chance.randint(1, end - at)]
            chance.choice(pieces).asides.append((at, part))
            at += len(part)
    return pieces


@contextmanager
def writing(
    folder: Path, size: int, name: str = "x", *, syncs: bool = False
) -> Iterator[tuple[BlobWriter, list[FinishedBlob]]]:
    """Yield a writer that hashes what is put, and the list that the finished blob comes to."""
    made: list[FinishedBlob] = []
    with closing(BlobWriter(folder, name, size, made.append, syncs=syncs)) as writer:
        yield writer, made


def put_all(writer: BlobWriter, pieces: list[Piece], threads: int) -> list[int]:
    """Put pieces in that order by threads, overwrite what is given back, return its offsets."""
    given_back: list[int] = []

    def put(piece: Piece) -> None:
        start = (piece.offset + (not piece.aligned)) % PAGE  # as the writer wants it, or off by one
        memory = memoryview(mmap.mmap(-1, len(piece.data) + 2 * PAGE))
        buffer = memory[start : start + len(piece.data)]
        buffer[:] = piece.data

        def give_back() -> None:
            buffer[:] = b"\xee" * len(buffer)
            given_back.append(piece.offset)

        writer.put(
            piece.offset,
            buffer,
            extra=piece.asides,
            gap=piece.gap,
            aligned=piece.aligned,
            hashed=give_back,
        )

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, pieces))
    return given_back
