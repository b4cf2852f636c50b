"""SHA-256 by every method; the stage hashes pieces from any threads in the order of their blob."""

import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from blobstore import hashing
from blobstore.errors import CorruptDataError, UsageError
from blobstore.hashing import Sha256
from blobstore.hashing.stage import BlobHash, HashStage, Piece


def is_here(name: str) -> bool:
    try:
        hashing.use_method(name)
    except UsageError:
        return False
    hashing.use_method("fastest")
    return True


HERE = [name for name in hashing.METHODS if is_here(name)]
DATA = random.Random(1).randbytes(2**18)


@pytest.fixture(params=HERE)
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each method that this processor has."""
    hashing.use_method(request.param)
    yield request.param
    hashing.use_method("fastest")


def expected(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def test_the_examples_of_the_standard(method: str) -> None:
    """FIPS 180-4's examples, published by NIST as SHA256.pdf."""
    assert [digest.hex() for digest in hashing.digests([b"abc", b""])] == [
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ]
    assert method == "fastest" or method in hashing.in_use()
    assert hashing.width() >= 1


@pytest.mark.usefixtures("method")
def test_every_length_at_any_address() -> None:
    for at in (0, 1, 3):
        pieces = [memoryview(DATA)[at : at + length] for length in range(0, 301, at + 1)]
        assert hashing.digests(pieces) == [expected(piece) for piece in pieces]
        for piece in pieces:
            assert hashing.digests([piece]) == [expected(piece)]


@pytest.mark.usefixtures("method")
def test_streams_of_different_lengths_in_any_pieces() -> None:
    for count in (1, 2, 4, 5, 9, 16, 17, 40):
        chance = random.Random(count)
        streams = [hashing.stream() for _ in range(count)]
        taken = [b""] * count
        for _ in range(8):
            chosen = chance.sample(range(count), chance.randint(1, count))
            lengths = [chance.choice([0, 1, 55, 64, 65, chance.randrange(5000)]) for _ in chosen]
            pieces = [DATA[(at := chance.randrange(1000)) : at + length] for length in lengths]
            hashing.update_all([streams[number] for number in chosen], pieces)
            for number, piece in zip(chosen, pieces, strict=True):
                taken[number] += piece
        assert [stream.digest() for stream in streams] == [expected(data) for data in taken]


@pytest.mark.usefixtures("method")
def test_long_streams_of_several_threads() -> None:
    def is_right(first: int) -> bool:
        pieces = [DATA[number : len(DATA) - number * number] for number in range(first, 16)]
        return hashing.digests(pieces) == [expected(piece) for piece in pieces]

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(is_right, (0, 9, 15)))


@pytest.mark.usefixtures("method")
def test_a_stream_goes_on_in_another_process() -> None:
    for length in (0, 1, 63, 64, 65, 1000):
        first = Sha256()
        first.update(DATA[:length])
        state = first.state()
        assert len(state) == 40 + length % 64
        second = Sha256.resumed(state)
        second.update(DATA[length:5000])
        first.update(b"other")
        assert second.digest() == expected(DATA[:5000])
        assert Sha256.resumed(second.state()).digest() == second.digest()


def test_the_state_is_written_the_same_way_everywhere() -> None:
    stream = Sha256()
    start = "6a09e667bb67ae853c6ef372a54ff53a510e527f9b05688c1f83d9ab5be0cd190000000000000000"
    assert stream.state().hex() == start
    stream.update(b"a" * 65)
    assert stream.state()[32:] == (65).to_bytes(8, "big") + b"a"
    for length in (0, 39, 41):
        with pytest.raises(ValueError, match="another length"):
            Sha256.resumed(bytes(length))
    # More than four gigabytes have a length of 64 bits.
    long, short = (bytes(range(32)) + size.to_bytes(8, "big") for size in (2**32 * 64, 64))
    assert Sha256.resumed(long).digest() != Sha256.resumed(short).digest()


@pytest.mark.usefixtures("method")
def test_what_is_not_bytes_is_refused() -> None:
    for wrong in ("text", memoryview(bytes(100))[::2]):
        with pytest.raises((TypeError, BufferError)):
            hashing.digests([wrong])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"pieces|shorter"):
        hashing.update_all([hashing.stream(), hashing.stream()], [b"a"])


def test_one_stream_twice_is_refused() -> None:
    stream = Sha256()
    with pytest.raises(RuntimeError, match="already"):
        hashing.update_all([stream, stream], [b"a", b"b"])
    assert stream.digest() == expected(b"")


def test_unknown_methods_and_those_of_another_processor_are_refused() -> None:
    assert {"fastest", "plain", "openssl"} <= {*HERE}
    for name in ("md5", *(name for name in hashing.METHODS if name not in HERE)):
        with pytest.raises(UsageError, match=f"'{name}'"):
            hashing.use_method(name)


DATA_STAGE = random.Random(3).randbytes(100_000)


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
        pieces += [
            (blob, at, DATA_STAGE[at:end]) for at, end in zip(cuts, cuts[1:] or [0], strict=False)
        ]
    chance.shuffle(pieces)

    def put(item: tuple[BlobHash, int, bytes]) -> None:
        blob, at, data = item
        blob.add(at, piece_of(data))
        stage.work_while(lambda: stage.is_full)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, pieces))
        list(pool.map(lambda _: stage.work_while(lambda: True), range(4)))
    assert found == {n: hashlib.sha256(DATA_STAGE[:size]).digest() for n, size in enumerate(sizes)}


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
