"""Tests of a home's signatures, and of how they travel; a home may keep none."""

from __future__ import annotations

import pytest

from blobstore.errors import SignatureError
from blobstore.formats.signatures import Signature
from blobstore.names import Digest
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.store.signing.signed_models import SignaturePolicy
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import HomeTests, M, commit, manifest_of

ONE = Signature.of(b"a payload", b"\x00\xff")
TWO = Signature(b"another", {**ONE.annotations, "dev.sigstore.cosign/bundle": "{}\n\u00e9"})
_REFUSED = SignaturePolicy.parse(b'{"default": [{"type": "reject"}]}')
_DIGEST = manifest_of(b"one").digest


def signatures_of(home: Home, digest: Digest = _DIGEST) -> list[Signature] | None:
    """Return the signatures of a model ``m``, sorted by payload; None if the home keeps none."""
    if home.signatures is None:
        return None
    return sorted(home.signatures.read(M, digest), key=lambda one: one.payload)


class SignatureTests(HomeTests):
    """Tests of signatures: added once, read as they were, copied with their model."""

    def test_an_unsigned_model(self, home: Home) -> None:
        commit(home, "m", b"one")
        assert signatures_of(home) in ([], None)

    def test_signatures_come_back(self, home: Home) -> None:
        commit(home, "m", b"one")
        if home.signatures is not None:
            assert home.signatures.add(M, _DIGEST, [ONE, TWO, ONE]) == 2
            assert signatures_of(self.other_reader(home)) == [ONE, TWO]
            assert home.signatures.add(M, _DIGEST, [TWO, ONE]) == 0
            assert signatures_of(home) == [ONE, TWO]

    def test_signatures_are_added(self, home: Home) -> None:
        commit(home, "m", b"one")
        if home.signatures is not None:
            for one in (ONE, TWO):
                assert home.signatures.add(M, _DIGEST, [one]) == 1
            assert signatures_of(home) == [ONE, TWO]
            assert signatures_of(home, Digest.of(b"another manifest")) == []

    def test_signatures_may_come_before_the_model(self, home: Home) -> None:
        if home.signatures is not None:
            with home.session() as session:
                session.put(b"one")
                home.signatures.add(M, _DIGEST, [ONE])
                assert home.manifests.names() == []
                session.publish(M, manifest_of(b"one"))
            assert signatures_of(home) == [ONE]

    def test_transfer_brings_signatures(self, home: Home) -> None:
        source = MemoryStore()
        commit(source, "m", b"one")
        source.signatures.add(M, _DIGEST, [ONE, TWO])
        (done,) = transfer("m", source, home)
        assert (done.signatures, signatures_of(home)) in ((2, [ONE, TWO]), (0, None))
        (again,) = transfer("m", source, home)
        assert again.signatures == 0
        other = MemoryStore()
        transfer("m", home, other)
        assert signatures_of(other) == (signatures_of(home) or [])

    def test_transfer_refuses_by_policy(self, home: Home) -> None:
        source = MemoryStore()
        commit(source, "m", b"one")
        source.signatures.add(M, _DIGEST, [ONE])
        with pytest.raises(SignatureError):
            transfer("m", source, home, policy=_REFUSED)
        assert home.manifests.names() == []
        assert home.blobs.digests() == set()
        assert signatures_of(home) in ([], None)
