"""SHA-256: every method gives hashlib's digests, for any lengths, pieces and number of streams."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator

import pytest

from blobstore import hashing
from blobstore.errors import UsageError
from blobstore.hashing import Sha256, _native

HERE = [*_native.families(), "openssl", "fastest"]
DATA = random.Random(1).randbytes(2**20)
COUNTS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 40)


@pytest.fixture(params=HERE, autouse=True)
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each method that this processor has."""
    hashing.use_method(request.param)
    yield request.param
    hashing.use_method("fastest")


def expected(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def test_the_examples_of_the_standard() -> None:
    """FIPS 180-4's examples, published by NIST as SHA256.pdf."""
    assert [digest.hex() for digest in hashing.digests([b"abc", b""])] == [
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    ]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_every_length_at_any_address(at: int) -> None:
    pieces = [memoryview(DATA)[at : at + length] for length in range(301)]
    assert hashing.digests(pieces) == [expected(piece) for piece in pieces]
    for piece in pieces:
        assert hashing.digests([piece]) == [expected(piece)]


@pytest.mark.parametrize("count", COUNTS)
def test_streams_of_different_lengths_in_any_pieces(count: int) -> None:
    chance = random.Random(count)
    streams = [hashing.stream() for _ in range(count)]
    taken = [b""] * count
    for _ in range(12):
        chosen = chance.sample(range(count), chance.randint(1, count))
        pieces = []
        for _number in chosen:
            start = chance.randrange(1000)
            length = chance.choice([0, 1, 55, 63, 64, 65, 128, chance.randrange(5000)])
            pieces.append(DATA[start : start + length])
        hashing.update_all([streams[number] for number in chosen], pieces)
        for number, piece in zip(chosen, pieces, strict=True):
            taken[number] += piece
        assert [stream.digest() for stream in streams] == [expected(data) for data in taken]


@pytest.mark.parametrize("count", [1, 7, 16])
def test_long_streams(count: int) -> None:
    pieces = [DATA[number : len(DATA) - number * number] for number in range(count)]
    assert hashing.digests(pieces) == [expected(piece) for piece in pieces]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_a_stream_goes_on_in_another_process(length: int) -> None:
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
    assert stream.state().hex() == (
        "6a09e667bb67ae853c6ef372a54ff53a510e527f9b05688c1f83d9ab5be0cd190000000000000000"
    )
    stream.update(b"a" * 65)
    assert stream.state()[32:] == (65).to_bytes(8, "big") + b"a"


@pytest.mark.parametrize("length", [0, 39, 41])
def test_a_state_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="another length"):
        Sha256.resumed(bytes(length))


def test_more_than_four_gigabytes_have_a_length_of_64_bits() -> None:
    state = bytes(range(32)) + (2**32 * 64).to_bytes(8, "big")
    short = bytes(range(32)) + (64).to_bytes(8, "big")
    assert Sha256.resumed(state).digest() != Sha256.resumed(short).digest()


def test_what_is_not_bytes_is_refused() -> None:
    with pytest.raises((TypeError, BufferError)):
        hashing.digests(["text"])  # type: ignore[list-item]
    with pytest.raises((TypeError, BufferError)):
        hashing.digests([memoryview(bytes(100))[::2]])


def test_as_many_pieces_as_streams() -> None:
    with pytest.raises(ValueError, match=r"pieces|shorter"):
        hashing.update_all([hashing.stream(), hashing.stream()], [b"a"])


def test_one_stream_twice_is_refused() -> None:
    stream = Sha256()
    if hashing.in_use() != "openssl":
        with pytest.raises(RuntimeError, match="already"):
            hashing.update_all([stream, stream], [b"a", b"b"])
    assert stream.digest() == expected(b"")


def test_streams_of_several_threads() -> None:
    found: dict[int, bool] = {}

    def work(number: int) -> None:
        pieces = [DATA[number * 1000 + i :] for i in range(20)]
        found[number] = hashing.digests(pieces) == [expected(piece) for piece in pieces]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


def test_the_method_in_use(method: str) -> None:
    if method != "fastest":
        assert method in hashing.in_use()
    assert hashing.width() >= 1


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown SHA-256 method 'md5'"):
        hashing.use_method("md5")


def test_a_method_of_another_processor_is_refused() -> None:
    (absent, *_) = [name for name in hashing.METHODS if name not in HERE]
    with pytest.raises(UsageError, match=f"no SHA-256 method '{absent}'"):
        hashing.use_method(absent)
