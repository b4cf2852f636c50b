"""Tests of what models are read from: homes, and archives, which are written once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.errors import (
    AmbiguousNameError,
    CorruptDataError,
    DigestMismatchError,
    InvalidNameError,
    LimitExceededError,
    NotFoundError,
)
from blobstore.formats.documents import MAX_DOCUMENT, Manifest
from blobstore.io.budget import Budget
from blobstore.names import Digest, ModelName
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Readable
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import (
    HOSTILE,
    SIZES,
    HomeNames,
    M,
    N,
    commit,
    data_of,
    descriptor_of,
)

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
        named = {Digest.of(data).hex for data in (ONE, TWO, b"three")}
        assert named <= readable.blobs.digests()

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
        large = replace(descriptor_of(TWO), size=MAX_DOCUMENT + 1)
        with pytest.raises(LimitExceededError):
            readable.blobs.read(large)

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
