"""The hash stage: pieces in any order, from any threads, are hashed in the order of their blob."""

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from blobstore.errors import CorruptDataError
from blobstore.hashing.stage import BlobHash, HashStage, Piece

DATA = random.Random(3).randbytes(100_000)


def piece_of(data: bytes, back: list[int] | None = None) -> Piece:
    back = [] if back is None else back
    return Piece(len(data), lambda: data, lambda: back.append(len(data)))


def test_pieces_wait_for_those_before_them() -> None:
    stage, found, back = HashStage(), list[bytes](), list[int]()
    blob = BlobHash(stage, 6, found.append)
    blob.add(4, piece_of(b"ef", back))
    assert not stage.work()
    blob.add(0, piece_of(b"abcd", back))
    assert stage.work()
    assert (found, back) == ([], [4])
    assert stage.work()
    assert (found, back) == ([hashlib.sha256(b"abcdef").digest()], [4, 2])
    assert not stage.work()


def test_many_blobs_by_many_threads() -> None:
    chance = random.Random(5)
    stage = HashStage()
    found: dict[int, bytes] = {}
    pieces: list[tuple[BlobHash, int, bytes]] = []
    sizes = [0, *(chance.randrange(1, 60_000) for _ in range(40))]
    for number, size in enumerate(sizes):
        blob = BlobHash(stage, size, partial(found.__setitem__, number))
        cuts = sorted({0, size, *(chance.randint(0, size) for _ in range(3))})
        pieces += [(blob, at, DATA[at:end]) for at, end in zip(cuts, cuts[1:] or [0], strict=False)]
    chance.shuffle(pieces)

    def put(item: tuple[BlobHash, int, bytes]) -> None:
        blob, at, data = item
        blob.add(at, piece_of(data))
        stage.work_while(lambda: stage.is_full)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, pieces))
        list(pool.map(lambda _: stage.work_while(lambda: True), range(4)))
    assert found == {n: hashlib.sha256(DATA[:size]).digest() for n, size in enumerate(sizes)}


def test_what_an_abandoned_blob_has_is_given_back() -> None:
    stage, found, back = HashStage(), list[bytes](), list[int]()
    blob = BlobHash(stage, 6, found.append)
    blob.add(2, piece_of(b"cd", back))
    blob.add(0, piece_of(b"ab", back))
    blob.abandon()
    assert back == [2, 2]
    blob.add(4, piece_of(b"ef", back))
    assert back == [2, 2, 2]
    stage.work_while(lambda: True)
    assert found == []


def test_a_piece_that_can_not_be_read_abandons_its_blob() -> None:
    def fail() -> bytes:
        raise CorruptDataError("the file ends")

    stage, found, back = HashStage(), list[bytes](), list[int]()
    blob = BlobHash(stage, 6, found.append)
    blob.add(0, Piece(3, fail, lambda: back.append(1)))
    blob.add(3, piece_of(b"def", back))
    with pytest.raises(CorruptDataError):
        stage.work()
    assert sorted(back) == [1, 3]
    assert not stage.work()
    assert found == []


def test_the_error_of_one_blob_does_not_stop_the_others() -> None:
    stage, found = HashStage(), list[bytes]()

    def refuse(_digest: bytes) -> None:
        raise CorruptDataError("the disk is full")

    BlobHash(stage, 1, refuse).add(0, piece_of(b"a"))
    BlobHash(stage, 1, found.append).add(0, piece_of(b"b"))
    with pytest.raises(CorruptDataError, match="the disk is full"):
        stage.work_while(lambda: True)
    stage.work_while(lambda: True)
    assert found == [hashlib.sha256(b"b").digest()]
