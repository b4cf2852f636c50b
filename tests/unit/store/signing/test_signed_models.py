"""Models are signed and checked, in any home, and signatures go where their models go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import (
    RemoteError,
    SignatureError,
    UsageError,
)
from blobstore.formats.documents import Descriptor
from blobstore.formats.signatures import DockerReference, Signature
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest, ModelName
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.store.signing.key_pairs import PrivateKey
from blobstore.store.signing.signed_models import SignaturePolicy, check_signatures, sign_model
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, commit, descriptor_of

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()
POLICY = SignaturePolicy.of_key(KEY.public)


class Unsigning(MemoryStore):
    """A home that keeps no signatures."""

    signatures = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.signatures = None


@pytest.fixture(params=["memory", "layered"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "memory":
        return MemoryStore()
    return LayeredStore(Store(tmp_path / "store"), [MemoryStore()])


def test_a_signed_model_is_accepted(home: Home) -> None:
    commit(home, "m", b"one")
    signed = sign_model("M", home, KEY)
    digest = home.manifests.read(M).digest
    assert (signed.name, signed.digest, signed.is_new) == (M, digest, True)
    assert str(signed.identity) == "registry.ollama.ai/library/m"
    assert signed.key == KEY.public.digest
    (checked,) = check_signatures(["m"], home, POLICY)
    assert (checked.name, checked.signatures, checked.error) == (M, 1, None)
    assert [one.identity for one in checked.accepted] == [signed.identity]
    assert sign_model("m", home, KEY).is_new is False
    assert sign_model("m", home, OTHER).is_new
    assert check_signatures(["m"], home, POLICY)[0].signatures == 2


def test_a_changed_model_is_not_signed(home: Home) -> None:
    commit(home, "m", b"one")
    sign_model("m", home, KEY)
    commit(home, "m", b"two")
    (checked,) = check_signatures(["m"], home, POLICY)
    assert "it has no signature" in str(checked.error)


def test_another_name_is_not_signed_for(home: Home) -> None:
    commit(home, "m", b"one")
    sign_model("m", home, KEY)
    commit(home, "n", b"one")
    (checked,) = check_signatures(["n"], home, POLICY)
    assert "was made for registry.ollama.ai/library/m" in str(checked.error)
    assert checked.error is not None
    assert str(checked.error.hint).endswith("--identity registry.ollama.ai/library/n")
    elsewhere = SignaturePolicy.of_key(
        KEY.public, DockerReference.parse("registry.ollama.ai/library/m")
    )
    assert check_signatures(["n"], home, elsewhere)[0].error is None


def test_a_home_without_signatures() -> None:
    home = Unsigning()
    commit(home, "m", b"one")
    with pytest.raises(UsageError, match="keeps no signatures"):
        sign_model("m", home, KEY)
    with pytest.raises(UsageError, match="keeps no signatures"):
        check_signatures(["m"], home, POLICY)
    assert LayeredStore(home, [MemoryStore()]).signatures is None


def test_lower_stores_have_signatures(tmp_path: Path) -> None:
    lower, upper = Store(tmp_path / "lower"), Store(tmp_path / "upper")
    commit(lower, "m", b"one")
    sign_model("m", lower, KEY)
    layered = LayeredStore(upper, [Unsigning(), lower])
    assert check_signatures(["m"], layered, POLICY)[0].error is None
    sign_model("m", layered, OTHER)
    assert len(layered.signatures.read(M, lower.manifests.read(M).digest)) == 2  # type: ignore[union-attr]
    assert len(lower.signatures.read(M, lower.manifests.read(M).digest)) == 1


# Transfers


class Watched(MemoryStore):
    """A home whose models appear with their signatures, or not at all."""

    @contextmanager
    def session(self, *, name: ModelName | None = None) -> Iterator[Any]:
        with super().session(name=name) as session:
            publish = session.publish

            def published(*args: Any, **options: Any) -> Any:
                assert self.signatures.all
                return publish(*args, **options)

            session.publish = published  # type: ignore[method-assign]
            yield session


class Reading(MemoryStore):
    """A home that notes which blobs are read."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Digest] = []
        inner = self.blobs.open

        def opened(descriptor: Descriptor) -> BytesReader:
            self.opened.append(descriptor.digest)
            return inner(descriptor)

        self.blobs.open = opened  # type: ignore[method-assign]


def test_signatures_come_before_the_model(home: Home) -> None:
    commit(home, "m", b"one")
    sign_model("m", home, KEY)
    target = Watched()
    (done,) = transfer("m", home, target, policy=POLICY)
    assert (target.manifests.names(), done.signatures) == ([M], 1)
    (again,) = transfer("m", home, target, policy=POLICY)
    assert again.signatures == 0


@pytest.mark.parametrize(
    ("signer", "identity", "message"),
    [
        (None, None, "it has no signature"),
        (OTHER, None, "a signature is by another key"),
        (KEY, DockerReference("a.b/c"), "a signature was made for a.b/c"),
    ],
)
def test_a_transfer_says_what_is_missing(
    signer: PrivateKey | None, identity: DockerReference | None, message: str
) -> None:
    source, target = Reading(), MemoryStore()
    commit(source, "m", b"one")
    if signer is not None:
        sign_model("m", source, signer, identity=identity)
    source.opened.clear()
    with pytest.raises(SignatureError, match=message) as caught:
        transfer("m", source, target, policy=POLICY)
    assert caught.value.model == "m:latest"
    assert (target.manifests.names(), source.opened) == ([], [])


def test_the_signature_of_another_manifest_is_refused() -> None:
    source, target = MemoryStore(), MemoryStore()
    commit(source, "m", b"one")
    sign_model("m", source, KEY)
    moved = source.signatures.read(M, source.manifests.read(M).digest)
    commit(source, "m", b"two")
    source.signatures.add(M, source.manifests.read(M).digest, moved)
    with pytest.raises(SignatureError, match="is of another manifest"):
        transfer("m", source, target, policy=POLICY)


def test_the_name_in_the_source_counts() -> None:
    source, target = MemoryStore(), MemoryStore()
    commit(source, "host.example/ns/m", b"one")
    sign_model("host.example/ns/m", source, KEY)
    transfer({"host.example/ns/m": "mine"}, source, target, policy=POLICY)
    assert target.manifests.names() == [ModelName.parse("mine")]


def test_homes_without_signatures_take_part() -> None:
    source, unsigning = MemoryStore(), Unsigning()
    commit(source, "m", b"one")
    sign_model("m", source, KEY)
    (done,) = transfer("m", source, unsigning)
    assert done.signatures == 0
    assert unsigning.blobs.read(descriptor_of(b"one")) == b"one"
    with pytest.raises(SignatureError, match="it has no signature"):
        transfer("m", unsigning, MemoryStore(), policy=POLICY)
    transfer("m", unsigning, MemoryStore())


class Broken:
    """Signatures that can't be read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self, _name: ModelName, _digest: Digest) -> list[Signature]:
        raise self._error

    def add(self, _name: ModelName, _digest: Digest, _signatures: Sequence[Signature]) -> int:
        raise self._error


def test_signatures_that_cannot_be_read_matter_only_to_a_policy(logged: list[str]) -> None:
    source, target = MemoryStore(), MemoryStore()
    commit(source, "m", b"one")
    source.signatures = Broken(RemoteError("bad", status=403))  # type: ignore[assignment]
    with pytest.raises(RemoteError):
        transfer("m", source, target, policy=POLICY)
    assert target.manifests.names() == []
    transfer("m", source, target)
    assert logged == ["the signatures of m:latest are not copied: bad"]
    assert target.manifests.names() == [M]


def test_a_server_that_fails_ends_a_transfer() -> None:
    source, target = MemoryStore(), MemoryStore()
    commit(source, "m", b"one")
    source.signatures = Broken(RemoteError("down", temporary=True))  # type: ignore[assignment]
    with pytest.raises(RemoteError):
        transfer("m", source, target)
    assert target.manifests.names() == []
