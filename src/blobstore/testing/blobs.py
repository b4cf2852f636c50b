"""Tests of what models are read from, and of a home's blobs; the helpers that all tests share.

Models are read from homes, and from archives, which are written once. Each test gets its own home,
and writes models of a few bytes.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from blobstore.errors import (
    AmbiguousNameError,
    CorruptDataError,
    DigestMismatchError,
    InvalidNameError,
    LimitExceededError,
    NotFoundError,
)
from blobstore.formats.documents import MAX_DOCUMENT, Descriptor, Manifest
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import TensorEntry, encode_header, header_of
from blobstore.hashing.stage import HashStage
from blobstore.io.budget import Budget
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest, ModelName
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Finished, Home, Readable, Session
from blobstore.store.transfer import transfer

SIZES = (0, 1, 4097, 2**20 + 1)
"""Sizes of blobs: below and beyond pages and buffers."""
HOSTILE = (
    "",
    ".",
    "..",
    "../m",
    "/etc/passwd",
    "a/b/c/d/e",
    "m:",
    "m:..",
    "m\\n",
    "m\0",
    "a//b",
    "\u212a",
)
"""Invalid names, and names that would lead out of the store."""
M, N = ModelName.parse("m"), ModelName.parse("n")


@cache
def data_of(size: int, seed: int = 0) -> bytes:
    """Return ``size`` bytes, the same for every call."""
    return random.Random(f"{size} {seed}").randbytes(size)


def descriptor_of(data: bytes, name: str | None = None) -> Descriptor:
    """Return the descriptor of a blob."""
    return Descriptor(
        media_type="application/octet-stream", digest=Digest.of(data), size=len(data), name=name
    )


def manifest_of(*blobs: bytes, with_config: bool = True) -> Manifest:
    """Return a manifest with a layer for each blob. The first is its config, too.

    Without it a registry refuses the manifest. With it `verify` finds that it is not a config.
    """
    layers = [descriptor_of(data, f"layer{number}") for number, data in enumerate(blobs)]
    config = descriptor_of(blobs[0]) if with_config and blobs else None
    return Manifest(config=config, layers=tuple(layers))


def commit(
    home: Home, name: str, *blobs: bytes, expected: Any = None, with_config: bool = True
) -> set[Digest]:
    """Write a model of ``blobs`` and publish it; return the digests that are new."""
    with home.session() as session:
        for data in blobs:
            session.put(data)
        manifest = manifest_of(*blobs, with_config=with_config)
        return session.publish(home.target(name), manifest, expected=expected)


def blobs_of(home: Home, name: str) -> list[bytes]:
    """Return the bytes of a model's blobs, checked against their digests."""
    return [home.blobs.read(layer) for layer in home.manifests.read(home.find(name)).layers]


def check_published(home: Home, session: Session, *blobs: bytes) -> None:
    """Publish a model of blobs that the session has, and compare what is read."""
    session.publish(M, manifest_of(*blobs))
    assert blobs_of(home, "m") == [*blobs]


def check_empty(home: Home) -> None:
    """Check that a home shows no models and no blobs."""
    assert home.manifests.names() == []
    assert home.blobs.digests() == set()


class HomeNames:
    """The names of the tests' models.

    ``names``: of models that the home can have. ``spellings``: of one model's name, the first as it
    is written. ``checks_manifests``: the home refuses manifests without a config or a media type.
    """

    names: ClassVar[Sequence[str]] = (
        "m",
        "m:tag",
        "ns/m:tag",
        "host.example/ns/m:tag",
        "host.example:5000/ns/m:tag",
    )
    spellings: ClassVar[tuple[str, str, str]] = ("Qwen:Q4", "qwen:q4", "QWEN:q4")
    checks_manifests: ClassVar[bool] = False


ONE, TWO = data_of(70_000), b"two"


class ReadingTests(HomeNames):
    """Tests of everything that a `Readable` promises. Subclass it, and define `filled`."""

    def fill(self, folder: Path, source: MemoryStore, names: Sequence[str]) -> Readable:
        """Return a new home with these models of ``source``; ``folder`` is an empty folder."""
        raise NotImplementedError

    @pytest.fixture
    def source(self) -> MemoryStore:
        source = MemoryStore()
        commit(source, "m", ONE, TWO)
        commit(source, "n", TWO, b"three")
        return source

    @pytest.fixture
    def readable(self, tmp_path: Path, source: MemoryStore) -> Readable:
        return self.fill(tmp_path, source, ["m", "n"])

    def test_models_and_blobs(self, readable: Readable, source: MemoryStore) -> None:
        assert readable.address
        assert readable.manifests.names() == [M, N]
        for name in (M, N):
            assert readable.find(str(name)) == name
            assert readable.manifests.read(name) == source.manifests.read(name)
            assert readable.manifests.text(name) == source.manifests.text(name)
        found = [readable.blobs.read(layer) for layer in readable.manifests.read(M).layers]
        assert found == [ONE, TWO]
        assert source.blobs.digests() <= readable.blobs.digests()

    def test_raw_bytes_of_a_manifest(self, tmp_path: Path, source: MemoryStore) -> None:
        raw = source.manifests.text(M).replace(b'"layers"', b'"later": {"a": 1},\n  "layers"')
        with source.session() as session:
            session.publish(M, Manifest.parse(raw, "raw"))
        readable = self.fill(tmp_path, source, ["m"])
        assert readable.manifests.text(M) == raw
        assert readable.manifests.read(M).digest == Digest.of(raw)

    def test_blobs_of_any_size(self, tmp_path: Path) -> None:
        source, blobs = MemoryStore(), [data_of(size) for size in SIZES]
        commit(source, "m", b"config", *blobs, b"more")
        readable = self.fill(tmp_path, source, ["m"])
        for data in blobs:
            with readable.blobs.open(descriptor_of(data)) as reader:
                assert (reader.size, reader.read(0, len(data))) == (len(data), data)
                pieces = [bytes(piece) for piece in reader.pieces(memoryview(bytearray(1000)))]
                assert b"".join(pieces) == data
                assert reader.digest() == Digest.of(data)

    def test_damage_is_refused(self, tmp_path: Path, source: MemoryStore) -> None:
        source.blobs.all[Digest.of(TWO)] = b"owt"
        with pytest.raises(DigestMismatchError) as caught:
            self.fill(tmp_path, source, ["m"])
        assert caught.value.blob == str(Digest.of(TWO))

    def test_a_missing_blob_is_refused(self, tmp_path: Path, source: MemoryStore) -> None:
        del source.blobs.all[Digest.of(TWO)]
        with pytest.raises(NotFoundError):
            self.fill(tmp_path, source, ["m"])

    def test_parts_of_a_blob(self, readable: Readable) -> None:
        with readable.blobs.open(descriptor_of(ONE)) as reader:
            for begin, end in ((0, 1), (69_999, 70_000), (100, 100), (60_000, 69_000), (3, 5)):
                assert reader.read(begin, end - begin) == ONE[begin:end]
                buffer = bytearray(end - begin)
                reader.readinto(begin, memoryview(buffer))
                assert buffer == ONE[begin:end]

    def test_beyond_the_end_of_a_blob(self, readable: Readable) -> None:
        with readable.blobs.open(descriptor_of(TWO)) as reader:
            for offset, length in ((0, 4), (3, 1), (2, 2), (100, 1), (0, 2**40)):
                with pytest.raises(CorruptDataError):
                    reader.read(offset, length)

    def test_missing_blobs(self, readable: Readable) -> None:
        one, missing = descriptor_of(ONE), descriptor_of(b"missing")
        longer = replace(one, size=70_001)
        assert readable.blobs.missing([one, missing, missing, one]) == [missing]
        assert readable.blobs.missing([longer]) == [longer]
        assert readable.blobs.missing([]) == []
        with pytest.raises(NotFoundError) as caught:
            readable.blobs.open(missing)
        assert caught.value.blob == str(missing.digest)
        with pytest.raises(CorruptDataError):
            readable.blobs.open(longer)
        asked = [descriptor_of(TWO), missing]
        assert list(readable.blobs.headers(asked, Budget.of_stored("m"))) == [None, None]

    def test_a_large_document(self, readable: Readable) -> None:
        with pytest.raises(LimitExceededError):
            readable.blobs.read(replace(descriptor_of(TWO), size=MAX_DOCUMENT + 1))

    def test_an_unknown_model(self, readable: Readable) -> None:
        for ask in (readable.find, lambda name: readable.manifests.read(ModelName.of(name))):
            with pytest.raises(NotFoundError) as caught:
                ask("unknown")
            assert caught.value.model is not None

    def test_a_hostile_name(self, readable: Readable) -> None:
        for name in HOSTILE:
            with pytest.raises(InvalidNameError):
                readable.find(name)

    def test_all_kinds_of_names(self, tmp_path: Path) -> None:
        source = MemoryStore()
        for name in self.names:
            commit(source, name, name.encode())
        readable = self.fill(tmp_path, source, self.names)
        parsed = [ModelName.parse(name) for name in self.names]
        assert readable.manifests.names() == sorted(parsed)
        assert [readable.find(name) for name in self.names] == parsed

    def test_case(self, tmp_path: Path) -> None:
        source, (written, *others) = MemoryStore(), self.spellings
        commit(source, written, b"one")
        readable = self.fill(tmp_path, source, [written])
        for name in (written, *others):
            assert readable.find(name) == ModelName.parse(written)
        other = ModelName.parse("other")
        with suppress(AmbiguousNameError):
            assert readable.manifests.stored_name(other) == other

    def test_transfer_to_another_home(self, readable: Readable, source: MemoryStore) -> None:
        target = MemoryStore()
        transfer({"m": "other", "n": "n"}, readable, target, jobs=4)
        assert target.manifests.text(ModelName.parse("other")) == source.manifests.text(M)
        assert target.manifests.text(N) == source.manifests.text(N)
        assert target.blobs.digests() == source.blobs.digests()

    def test_blobs_that_are_read_at_once(self, readable: Readable) -> None:
        asked = [descriptor_of(data) for data in (ONE, TWO, b"three")] * 8

        def read(number: int) -> bytes:
            return readable.blobs.read(asked[number])

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, range(24))) == [ONE, TWO, b"three"] * 8

    def test_a_lease(self, readable: Readable) -> None:
        with readable.lease() as one, readable.lease() as other:
            assert isinstance(one, bool)
            assert isinstance(other, bool)
            assert readable.blobs.read(descriptor_of(TWO)) == TWO


class HomeTests(HomeNames):
    """Base of the tests; each test has its own home."""

    def new_home(self, folder: Path) -> Home:
        """Return a new, empty home; ``folder`` is an empty folder for it."""
        raise NotImplementedError

    def other_reader(self, home: Home) -> Home:
        """Return the same home as another process would see it; by default the home itself."""
        return home

    @pytest.fixture
    def home(self, tmp_path: Path) -> Home:
        return self.new_home(tmp_path)

    @pytest.fixture
    def session(self, home: Home) -> Iterator[Session]:
        with home.session() as session:
            yield session


class BlobTests(HomeTests):
    """Tests of blobs: written in pieces, copied from another place, read, missing."""

    def test_an_empty_home(self, home: Home) -> None:
        check_empty(home)
        for ask in (home.find, home.remove):
            with pytest.raises(NotFoundError):
                ask("m")

    def test_pieces_in_any_order(self, home: Home, session: Session) -> None:
        size = 2**20 + 1
        data = data_of(size)
        cuts = sorted({0, size, *(random.Random(size).randrange(1, size) for _ in range(5))})
        pieces = list(pairwise(cuts))
        random.Random(size).shuffle(pieces)
        told: list[int] = []
        made: list[Finished] = []
        with closing(session.writer(size, made.append)) as writer:
            for a, b in pieces:
                assert not made
                writer.put(a, data[a:b], hashed=lambda: told.append(1))
        (blob,) = made
        assert (blob.digest, blob.size, len(told)) == (Digest.of(data), size, len(pieces))
        check_published(home, session, data)

    def test_buffers_of_early_pieces_do_not_wait(self, session: Session) -> None:
        data = data_of(2**20 + 1)
        at, made = 2**19, list[Finished]()
        buffer = bytearray(data[at:])

        def clear() -> None:
            buffer[:] = bytes(len(buffer))

        with closing(session.writer(len(data), made.append)) as writer:
            writer.put(at, buffer, waits=False, hashed=clear)
            assert not any(buffer), "the buffer was not released"
            writer.put(0, data[:at])
        (blob,) = made
        assert (blob.digest, blob.size) == (Digest.of(data), len(data))

    def test_a_gap_is_written_before_the_piece_before_it(
        self, home: Home, session: Session
    ) -> None:
        gap, half = 100_000, 50_000
        data = data_of(8192 + gap)
        made: list[Finished] = []
        with closing(session.writer(len(data), made.append)) as writer:
            writer.put(4096 + gap, data[4096 + gap :], extra=[(4096, data[4096 : 4096 + half])])
            writer.put(
                0, data[:4096], extra=[(4096 + half, data[4096 + half : 4096 + gap])], gap=gap
            )
        (blob,) = made
        assert blob.digest == Digest.of(data)
        check_published(home, session, data)

    def test_a_blob_by_many_threads(self, home: Home, session: Session) -> None:
        data = data_of(2**18)
        made: list[Finished] = []
        writer = session.writer(len(data), made.append)
        with closing(writer), ThreadPoolExecutor(8) as pool:
            places = range(0, len(data), 1024)
            list(pool.map(lambda at: writer.put(at, data[at : at + 1024]), places))
        (blob,) = made
        assert blob.digest == Digest.of(data)
        check_published(home, session, data)

    def test_blobs_that_are_hashed_together(self, home: Home, session: Session) -> None:
        data = [data_of(size, 1) for size in SIZES if size]
        made: list[Finished] = []
        stage = HashStage()
        with ExitStack() as open_writers:
            for one in data:
                writer = session.writer(len(one), made.append, stage)
                open_writers.enter_context(closing(writer)).put(0, one)
            stage.work_while(lambda: True)
        assert {blob.digest for blob in made} == {Digest.of(one) for one in data}
        check_published(home, session, *data)

    def test_several_small_blobs(self, home: Home, session: Session) -> None:
        data = [b"one", b"", b"two", b"one"]
        made = session.put_all([memoryview(one) for one in data])
        assert [(blob.digest, blob.size) for blob in made] == [
            (Digest.of(one), len(one)) for one in data
        ]
        check_published(home, session, *data)

    def test_an_empty_blob_may_be_missing_too(self, home: Home) -> None:
        empty = descriptor_of(b"")
        assert home.blobs.missing([empty]) == [empty]
        commit(home, "m", b"")
        assert home.blobs.missing([empty]) == []

    def test_headers_are_those_of_the_blobs(self, home: Home) -> None:
        name, entry = "w", TensorEntry(DType.U8, (3,), 0, 3)
        one, other = encode_header({name: entry}, {}, 8) + b"one", b"not a file of tensors"
        commit(home, "m", one, other)
        found, missing = descriptor_of(one), descriptor_of(one + b"?")
        asked = [found, replace(found, size=4), missing, descriptor_of(other)]
        headers = home.blobs.headers(asked, Budget.of_stored("m"))
        assert list(headers) in ([None] * 4, [header_of(BytesReader(one)), None, None, None])

    def test_a_reader_outlives_its_blob(self, home: Home) -> None:
        data = data_of(2**20)
        commit(home, "m", data)
        with home.blobs.open(descriptor_of(data)) as reader:
            first = reader.read(0, 10)
            home.remove("m")
            assert first + reader.read(10, len(data) - 10) == data

    # A blob from elsewhere

    def test_a_copy_of_all_that_a_reader_gives(self, home: Home, session: Session) -> None:
        blobs = [data_of(size) for size in SIZES]
        for data in blobs:
            blob = session.copy(BytesReader(data))
            assert (blob.digest, blob.size) == (Digest.of(data), len(data))
        check_published(home, session, *blobs)

    def test_damage_that_has_the_bytes_of_another_blob(self, home: Home, session: Session) -> None:
        session.put(b"one")
        with pytest.raises(DigestMismatchError):
            session.add(descriptor_of(b"two"), BytesReader(b"one"))
        check_published(home, session, b"one")

    def test_other_bytes_from_elsewhere(self, home: Home, session: Session) -> None:
        for size in (0, 5, 70_000):
            said = replace(descriptor_of(data_of(max(size, 1))), size=size)
            with pytest.raises(DigestMismatchError):
                session.add(said, BytesReader(bytes(size)))
            with pytest.raises(NotFoundError):
                session.publish(M, Manifest(layers=(said,)))
        check_empty(home)
        data = data_of(1000)
        for size in (999, 1001):
            with pytest.raises(CorruptDataError):
                session.add(replace(descriptor_of(data), size=size), BytesReader(data))
