"""Models are signed and checked, in any home, and signatures go where their models go."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import RemoteError, SignatureError, UsageError
from blobstore.formats.oci import DockerReference, Signature
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
    def __init__(self) -> None:
        super().__init__()
        self.signatures = None  # type: ignore[assignment]


def with_model(home: Home, key: PrivateKey | None = KEY) -> Home:
    commit(home, "m", b"one")
    if key is not None:
        sign_model("m", home, key)
    return home


def check(home: Home, name: str = "m", policy: SignaturePolicy = POLICY) -> str:
    """Return why a policy refuses a model; "" if it does not."""
    (checked,) = check_signatures([name], home, policy)
    return "" if checked.error is None else str(checked.error)


def test_a_signed_model_is_accepted(tmp_path: Path) -> None:
    for home in (MemoryStore(), LayeredStore(Store(tmp_path), [MemoryStore()])):
        with_model(home, key=None)
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


def test_a_changed_model_is_not_signed() -> None:
    home = with_model(MemoryStore())
    commit(home, "m", b"two")
    assert "no signature" in check(home)


def test_another_name_is_not_signed_for() -> None:
    home = with_model(MemoryStore())
    commit(home, "n", b"one")
    (checked,) = check_signatures(["n"], home, POLICY)
    assert "registry.ollama.ai/library/m" in str(checked.error)
    assert checked.error is not None
    assert str(checked.error.hint).endswith("--identity registry.ollama.ai/library/n")
    identity = DockerReference.parse("registry.ollama.ai/library/m")
    assert check(home, "n", SignaturePolicy.of_key(KEY.public, identity)) == ""


def test_a_home_without_signatures() -> None:
    home = with_model(Unsigning(), key=None)
    with pytest.raises(UsageError, match="signatures"):
        sign_model("m", home, KEY)
    with pytest.raises(UsageError, match="signatures"):
        check_signatures(["m"], home, POLICY)
    assert LayeredStore(home, [MemoryStore()]).signatures is None


def test_lower_stores_have_signatures(tmp_path: Path) -> None:
    lower, upper = Store(tmp_path / "lower"), Store(tmp_path / "upper")
    with_model(lower)
    layered = LayeredStore(upper, [Unsigning(), lower])
    assert check(layered) == ""
    sign_model("m", layered, OTHER)
    assert check_signatures(["m"], layered, POLICY)[0].signatures == 2
    assert check_signatures(["m"], lower, POLICY)[0].signatures == 1


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


def test_signatures_come_before_the_model() -> None:
    source, target = with_model(MemoryStore()), Watched()
    (done,) = transfer("m", source, target, policy=POLICY)
    assert (target.manifests.names(), done.signatures) == ([M], 1)
    (again,) = transfer("m", source, target, policy=POLICY)
    assert again.signatures == 0


def test_the_signature_of_another_manifest_is_refused() -> None:
    source, target = MemoryStore(), MemoryStore()
    with_model(source)
    moved = source.signatures.read(M, source.manifests.read(M).digest)
    commit(source, "m", b"two")
    source.signatures.add(M, source.manifests.read(M).digest, moved)
    with pytest.raises(SignatureError, match="another manifest"):
        transfer("m", source, target, policy=POLICY)


def test_the_name_in_the_source_counts() -> None:
    source, target = MemoryStore(), MemoryStore()
    commit(source, "host.example/ns/m", b"one")
    sign_model("host.example/ns/m", source, KEY)
    transfer({"host.example/ns/m": "mine"}, source, target, policy=POLICY)
    assert target.manifests.names() == [ModelName.parse("mine")]


def test_homes_without_signatures_take_part() -> None:
    source, unsigning = with_model(MemoryStore()), Unsigning()
    (done,) = transfer("m", source, unsigning)
    assert done.signatures == 0
    assert unsigning.blobs.read(descriptor_of(b"one")) == b"one"
    with pytest.raises(SignatureError, match="no signature"):
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
    """But for a server that fails now: it ends the transfer, which can be made again."""
    source, target = with_model(MemoryStore(), key=None), MemoryStore()
    source.signatures = Broken(RemoteError("bad", status=403))
    with pytest.raises(RemoteError):
        transfer("m", source, target, policy=POLICY)
    assert target.manifests.names() == []
    transfer("m", source, target)
    assert len(logged) == 1
    assert target.manifests.names() == [M]
    source.signatures = Broken(RemoteError("down", temporary=True))
    with pytest.raises(RemoteError):
        transfer("m", source, MemoryStore())
