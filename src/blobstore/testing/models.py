"""Tests of a home's models and their signatures; a home may keep no signatures.

They are published, replaced, removed, and transferred from another home.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    InvalidNameError,
    NotFoundError,
    SignatureError,
    UsageError,
)
from blobstore.formats.documents import Manifest
from blobstore.formats.oci import Signature
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest, ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.usage import measure_usage
from blobstore.store.care.verify import verify
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home, Session
from blobstore.store.signing.signed_models import SignaturePolicy
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import (
    HOSTILE,
    HomeTests,
    M,
    N,
    blobs_of,
    check_empty,
    commit,
    data_of,
    descriptor_of,
    manifest_of,
)

SIGNATURE = Signature.of(b"a payload", b"\x00\xff")
ANOTHER = Signature(
    b"another", {**SIGNATURE.annotations, "dev.sigstore.cosign/bundle": "{}\n\u00e9"}
)
_REFUSED = SignaturePolicy.parse(b'{"default": [{"type": "reject"}]}')
_DIGEST = manifest_of(b"one").digest


class ModelTests(HomeTests):
    """Tests of models: visible completely or not at all, under one name."""

    # Publishing

    def test_nothing_is_visible_before(self, home: Home, session: Session) -> None:
        session.put(b"one")
        session.add(descriptor_of(b"two"), BytesReader(b"two"))
        seen = self.other_reader(home)
        check_empty(seen)
        session.publish(M, manifest_of(b"one", b"two"))
        assert seen.manifests.names() == [M]
        assert blobs_of(seen, "m") == [b"one", b"two"]

    def test_a_session_that_fails_leaves_nothing(self, home: Home) -> None:
        for error in (ValueError, KeyboardInterrupt):
            with suppress(error), home.session() as session:
                session.put(b"one")
                raise error
            check_empty(home)

    def test_what_no_manifest_names_stays_invisible(self, home: Home) -> None:
        with home.session() as session:
            session.put(b"one")
            session.put(b"two")
            session.publish(M, manifest_of(b"one"))
        assert home.blobs.digests() == {Digest.of(b"one").hex}

    def test_a_manifest_of_missing_blobs_is_refused(self, home: Home) -> None:
        commit(home, "m", b"one")
        with home.session() as session:
            session.put(b"two")
            with pytest.raises(NotFoundError) as caught:
                session.publish(M, manifest_of(b"two", b"three"))
        assert caught.value.blob == str(Digest.of(b"three"))
        assert blobs_of(home, "m") == [b"one"]

    def test_a_manifest_with_another_size_is_refused(self, home: Home) -> None:
        with home.session() as session:
            session.put(b"one")
            with pytest.raises(CorruptDataError):
                session.publish(M, Manifest(layers=(replace(descriptor_of(b"one"), size=4),)))
        assert home.manifests.names() == []

    def test_publishing_tells_what_is_new(self, home: Home) -> None:
        assert commit(home, "m", b"one", b"two", b"one") == {Digest.of(b"one"), Digest.of(b"two")}
        assert commit(home, "n", b"one", b"three") == {Digest.of(b"three")}
        assert commit(home, "n", b"one", b"three") == set()

    def test_a_session_may_publish_again(self, home: Home) -> None:
        with home.session() as session:
            session.put(b"one")
            assert session.publish(M, manifest_of(b"one")) == {Digest.of(b"one")}
            session.put(b"two")
            assert session.publish(N, manifest_of(b"one", b"two")) == {Digest.of(b"two")}
            for _ in range(2):
                with pytest.raises(ConflictError):
                    session.publish(N, manifest_of(b"two"), expected=(None,))
            session.publish(N, manifest_of(b"two"))
        assert home.manifests.names() == [M, N]
        assert blobs_of(home, "n") == [b"two"]

    def test_a_model_of_no_blobs(self, home: Home) -> None:
        if self.checks_manifests:
            with pytest.raises(BlobStoreError):
                commit(home, "m")
            return
        assert commit(home, "m") == set()
        assert home.manifests.read(M).layers == ()

    # Who was faster

    def test_a_name_that_is_expected_to_be_free(self, home: Home) -> None:
        commit(home, "m", b"one", expected=(None,))
        with pytest.raises(ConflictError) as caught:
            commit(home, "m", b"two", expected=(None,))
        assert caught.value.model is not None
        assert blobs_of(home, "m") == [b"one"]

    def test_a_name_that_is_expected_to_have_a_model(self, home: Home) -> None:
        with pytest.raises(ConflictError):
            commit(home, "m", b"two", expected=(manifest_of(b"one").raw,))
        commit(home, "m", b"one")
        commit(home, "m", b"two", expected=(b"", manifest_of(b"one").raw))
        with pytest.raises(ConflictError):
            commit(home, "m", b"three", expected=(manifest_of(b"one").raw,))
        assert blobs_of(home, "m") == [b"two"]

    def test_one_of_many_is_first(self, home: Home) -> None:
        def one(number: int) -> bool:
            try:
                commit(home, "m", data_of(100, number), expected=(None,))
            except ConflictError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(one, range(8)))
        assert sum(won) == 1
        assert blobs_of(home, "m") == [data_of(100, won.index(True))]

    def test_no_update_is_lost(self, home: Home) -> None:
        """Each process adds a layer to the manifest that it read; the slower one reads again."""
        commit(home, "m", b"0")

        def add(number: int) -> None:
            while True:
                before = home.manifests.read(M)
                layer = descriptor_of(b"%d" % number, f"layer{number}")
                with suppress(ConflictError), home.session() as session:
                    session.put(b"%d" % number)
                    more = Manifest(config=before.config, layers=(*before.layers, layer))
                    session.publish(M, more, expected=(before.raw,))
                    return

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, range(1, 7)))
        assert {layer.name for layer in home.manifests.read(M).layers} == {
            f"layer{number}" for number in range(7)
        }

    def test_sessions_at_once(self, home: Home) -> None:
        with ThreadPoolExecutor(6) as pool:
            list(
                pool.map(
                    lambda number: commit(home, f"m{number}", b"shared", data_of(5000, number)),
                    range(6),
                )
            )
        assert len(home.manifests.names()) == 6
        for number in range(6):
            assert blobs_of(home, f"m{number}") == [b"shared", data_of(5000, number)]

    def test_readers_see_one_model_or_the_other(self, home: Home) -> None:
        commit(home, "m", b"a" * 5000)
        other = self.other_reader(home)

        def write(number: int) -> None:
            with suppress(ConflictError):  # the slower of two writers may be refused
                commit(home, "m", (b"a" if number % 2 else b"b") * 5000)

        with ThreadPoolExecutor(2) as pool:
            writing = [pool.submit(write, number) for number in range(6)]
            while not all(one.done() for one in writing):
                assert blobs_of(other, "m") in ([b"a" * 5000], [b"b" * 5000])
            for one in writing:
                one.result()

    # Names

    def test_hostile_names(self, home: Home, tmp_path: Path) -> None:
        before = sorted(tmp_path.rglob("*"))
        for name in HOSTILE:
            for ask in (home.target, home.remove):  # find: see `ReadingTests`
                with pytest.raises(InvalidNameError):
                    ask(name)
        assert sorted(tmp_path.rglob("*")) == before

    def test_case_tells_no_models_apart(self, home: Home) -> None:
        written, second, third = self.spellings
        commit(home, written, b"one")
        assert home.find(second) == home.target(third) == ModelName.parse(written)
        commit(home, second, b"two")
        assert home.manifests.names() == [ModelName.parse(written)]
        assert blobs_of(home, third) == [b"two"]

    def test_two_spellings_are_not_written(self, home: Home) -> None:
        written, second, _ = self.spellings
        commit(home, written, b"one")
        with home.session() as session, pytest.raises(UsageError):
            session.publish(ModelName.parse(second), manifest_of(b"one"))
        assert home.manifests.names() == [ModelName.parse(written)]

    # Removal

    def test_a_removed_model_is_gone(self, home: Home) -> None:
        commit(home, "m", b"one", b"two")
        removal = home.remove("m")
        left = {blob.digest for blob in (*removal.removed, *removal.kept)}
        assert left == {Digest.of(b"one"), Digest.of(b"two")}
        assert self.other_reader(home).manifests.names() == []
        with pytest.raises(NotFoundError):
            home.find("m")

    # Care

    def test_care(self, home: Home) -> None:
        """Blobs are checked, counted, and spared by a clean-up as long as a model needs them."""
        commit(home, "m", b"{}", b"one", b"shared")
        commit(home, "n", b"{}", b"three", b"shared")
        found = verify(home)
        assert (found.is_sound, found.checked, found.nbytes) == (True, 4, 16)
        usage = measure_usage(home)
        assert (usage.blobs, usage.nbytes) == (4, 16)
        counted = {model.name.model: (model.nbytes, model.unique) for model in usage.models}
        assert counted == {"m": (11, 3), "n": (13, 5)}
        home.remove("m")
        if home.upper.care().can_prune:
            prune(home, grace_s=0, sole_owner=True)
            assert measure_usage(home).reclaimable == 0
        else:
            with pytest.raises(UsageError):
                prune(home)
        assert verify(home, ["n"]).is_sound
        assert blobs_of(home, "n") == [b"{}", b"three", b"shared"]


class TransferTests(HomeTests):
    """Tests of models copied from another home, and to one."""

    # Faults

    def test_a_reader_that_fails(self, home: Home) -> None:
        blobs = [data_of(3000, number) for number in range(3)]
        with suppress(BlobStoreError), home.session() as session:
            for number, data in enumerate(blobs):
                reader = _Failing(data) if number == 1 else BytesReader(data)
                session.add(descriptor_of(data), reader)
            session.publish(M, manifest_of(*blobs))
        assert home.manifests.names() == []
        commit(home, "m", *blobs)
        assert blobs_of(home, "m") == blobs

    def test_a_transfer_that_fails_goes_on(self, home: Home) -> None:
        blobs = [data_of(3000, number) for number in range(3)]
        source = MemoryStore()
        commit(source, "m", *blobs)
        lost = source.blobs.all.pop(Digest.of(blobs[1]))
        with pytest.raises(NotFoundError):
            transfer(["m"], source, home, jobs=1)
        assert home.manifests.names() == []
        source.blobs.all[Digest.of(lost)] = lost
        transfer(["m"], source, home)
        assert blobs_of(home, "m") == blobs

    # Transfer

    def test_transfer_brings_what_is_missing(self, home: Home) -> None:
        source = MemoryStore()
        commit(source, "m", b"one", data_of(100_000), b"one")
        commit(home, "n", b"one")
        told: list[int] = []
        (done,) = transfer(["m"], source, home, progress=lambda nbytes, _: told.append(nbytes))
        assert (done.name, done.there.blobs, done.copied.blobs) == (M, 1, 1)
        assert sum(told) == 100_000
        assert home.manifests.read(M).raw == source.manifests.read(M).raw
        (again,) = transfer(["m"], source, home)
        assert (again.there.blobs, again.moved.blobs) == (2, 0)


class _Failing(BytesReader):
    """A reader whose reads fail."""

    def read(self, offset: int, length: int) -> bytes:
        raise CorruptDataError(f"{self.name}: an I/O error at {offset}, {length}")

    def pieces(self, buffer: memoryview, begin: int = 0) -> Iterator[memoryview]:
        yield from list(super().pieces(buffer[:1], begin))[:1]
        raise CorruptDataError(f"{self.name}: an I/O error")


def signatures_of(home: Home, digest: Digest = _DIGEST) -> list[Signature] | None:
    """Return the signatures of a model ``m``, sorted by payload; None if the home keeps none."""
    if home.signatures is None:
        return None
    return sorted(home.signatures.read(M, digest), key=lambda one: one.payload)


def _signed(*signatures: Signature) -> MemoryStore:
    source = MemoryStore()
    commit(source, "m", b"one")
    source.signatures.add(M, _DIGEST, signatures)
    return source


class SignatureTests(HomeTests):
    """Tests of signatures: added once, read as they were, copied with their model."""

    def test_signatures_come_back(self, home: Home) -> None:
        commit(home, "m", b"one")
        assert signatures_of(home) in ([], None)
        if home.signatures is not None:
            assert home.signatures.add(M, _DIGEST, [SIGNATURE, SIGNATURE]) == 1
            assert home.signatures.add(M, _DIGEST, [ANOTHER, SIGNATURE]) == 1
            assert signatures_of(self.other_reader(home)) == [SIGNATURE, ANOTHER]
            assert home.signatures.add(M, _DIGEST, [ANOTHER, SIGNATURE]) == 0
            assert signatures_of(home, Digest.of(b"another manifest")) == []

    def test_signatures_may_come_before_the_model(self, home: Home) -> None:
        if home.signatures is not None:
            with home.session() as session:
                session.put(b"one")
                home.signatures.add(M, _DIGEST, [SIGNATURE])
                assert home.manifests.names() == []
                session.publish(M, manifest_of(b"one"))
            assert signatures_of(home) == [SIGNATURE]

    def test_transfer_brings_signatures(self, home: Home) -> None:
        source = _signed(SIGNATURE, ANOTHER)
        (done,) = transfer("m", source, home)
        assert (done.signatures, signatures_of(home)) in ((2, [SIGNATURE, ANOTHER]), (0, None))
        (again,) = transfer("m", source, home)
        assert again.signatures == 0
        other = MemoryStore()
        transfer("m", home, other)
        assert signatures_of(other) == (signatures_of(home) or [])

    def test_transfer_refuses_by_policy(self, home: Home) -> None:
        with pytest.raises(SignatureError):
            transfer("m", _signed(SIGNATURE), home, policy=_REFUSED)
        check_empty(home)
        assert signatures_of(home) in ([], None)
