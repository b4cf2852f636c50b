"""SHA-256: every method gives hashlib's digests, for any lengths, pieces and number of streams."""

import hashlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from blobstore import hashing
from blobstore.errors import UsageError
from blobstore.hashing import Sha256


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


def test_more_than_four_gigabytes_have_a_length_of_64_bits() -> None:
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
