"""Push and pull: what is sent, mounted, fetched and refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.servers import Server, reply
from support.small_registry import SmallRegistry

from blobstore.errors import CorruptDataError, LimitExceededError, ModelNotFoundError, UsageError
from blobstore.formats.documents import Manifest
from blobstore.io.http.client import HttpClient
from blobstore.names import Digest, ModelName
from blobstore.store.hints import Share
from blobstore.store.local.store import Store
from blobstore.store.registry.api import Reference
from blobstore.store.registry.store import RegistryAccess, RegistryStore, pull, push
from blobstore.testing.blobs import blobs_of, commit, data_of, descriptor_of

BLOBS = [data_of(size) for size in (10, 5000, 70_000)]


@pytest.fixture
def registry(server: Server) -> SmallRegistry:
    made = SmallRegistry()
    server.play(made)
    return made


@pytest.fixture
def host(server: Server, registry: SmallRegistry) -> str:  # it answers
    return f"{server.host}:{server.port}"


@pytest.fixture
def home(server: Server, host: str) -> Iterator[RegistryStore]:
    with HttpClient() as http, RegistryStore(host, http, address=server.at("").rstrip("/")) as home:
        yield home


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    commit(made, "m", *BLOBS)
    return made


def noted(registry: SmallRegistry) -> list[str]:
    methods: list[str] = []
    registry.changes.append(lambda asked: methods.append(asked.method))
    return methods


def test_a_model_comes_back_and_a_second_push_sends_its_manifest_only(
    store: Store, host: str, registry: SmallRegistry, tmp_path: Path
) -> None:
    done = push("m", store, to=f"{host}/ns/m:a")
    assert (str(done.name), done.copied.blobs) == (f"{host}/ns/m:a", 3)
    other = Store(tmp_path / "other")
    pulled = pull(f"{host}/ns/m:a", other, name="n")
    assert (pulled.digest, pulled.copied.blobs) == (done.digest, 3)
    assert blobs_of(other, "n") == BLOBS
    assert other.manifest("n").raw == store.manifest("m").raw
    methods = noted(registry)
    assert push("m", store, to=f"{host}/ns/m:b").there.blobs == 3
    assert methods.count("PUT") == 1
    assert "POST" not in methods


def test_blobs_are_mounted_from_where_they_were(store: Store, host: str, tmp_path: Path) -> None:
    push("m", store, to=f"{host}/ns/m:a")
    assert push("m", Store(store.root), to=f"{host}/other/n:a").there.blobs == 3
    other = Store(tmp_path / "other")
    pull(f"{host}/ns/m:a", other, name="n")
    assert push("n", other, to=f"{host}/third/n:a").there.blobs == 3


def test_notes_that_are_wrong_do_no_harm(store: Store, host: str) -> None:
    wrong = Share(host, "never/was", store.manifest("m").digest)
    store.shares.add(wrong)
    path = store.root / ".blobstore" / "hints" / "shares"
    path.write_text(f"{path.read_text()}{wrong.manifest.hex} {host} ../? nonsense\n")
    assert store.shares.read() == {wrong}
    assert push("m", store, to=f"{host}/ns/m:a").copied.blobs == 3
    path.write_bytes(b"x" * 2**21)
    assert store.shares.read() == set()


def test_a_manifest_that_is_asked_for_by_digest(store: Store, host: str, tmp_path: Path) -> None:
    first = push("m", store, to=f"{host}/ns/m:a").digest
    commit(store, "m", b"another")
    assert push("m", store, to=f"{host}/ns/m:a").digest != first
    other = Store(tmp_path / "other")
    assert pull(f"{host}/ns/m:a@{first}", other).digest == first
    with pytest.raises(ModelNotFoundError):
        pull(f"{host}/ns/m:a@{Digest.of(b'nothing')}", other)
    assert other.manifest(f"{host}/ns/m:a").digest == first
    with pytest.raises(UsageError, match="tag"):
        push("m", store, to=f"{host}/n/m@{first}")


def test_another_size(
    store: Store, host: str, home: RegistryStore, registry: SmallRegistry
) -> None:
    """Also if the session knows the blob, or has just found it in the repository."""
    push("m", store, to=f"{host}/ns/m:a")
    name = ModelName.parse(f"{host}/ns/m:b")
    sizes = (len(BLOBS[0]), len(BLOBS[0]) + 1)
    right, wrong = (Manifest(layers=(replace(descriptor_of(BLOBS[0]), size=n),)) for n in sizes)
    for known in ((), right.layers):
        with home.session(name=name) as session:
            assert session.missing(known) == []
            with pytest.raises(CorruptDataError):
                session.publish(name, wrong)
    assert ("ns/m", "b") not in registry.manifests


@pytest.mark.parametrize(
    ("reference", "address"),
    [
        ("localhost:5000/n/m", "http://localhost:5000"),
        ("https://localhost/n/m", "https://localhost"),
        ("example.com/n/m", "https://example.com"),
        ("m", "https://registry.ollama.ai"),
    ],
)
def test_tls_except_on_this_machine(reference: str, address: str) -> None:
    with RegistryAccess().open(Reference.parse(reference)) as home:
        assert home.address == address


def test_http_elsewhere_has_to_be_allowed() -> None:
    reference = Reference.parse("http://example.com/n/m")
    with pytest.raises(UsageError, match="without TLS"):
        RegistryAccess().open(reference)
    with RegistryAccess(insecure=True).open(reference) as home:
        assert home.address == "http://example.com"


def test_a_manifest_that_is_too_large_is_refused_before_any_blob(
    store: Store, host: str, registry: SmallRegistry
) -> None:
    methods = noted(registry)
    layers = [descriptor_of(b"one", f"layer{number}" + "x" * 90_000) for number in range(50)]
    with store.session() as session:
        session.put(b"one")
        session.publish(ModelName.parse("m"), Manifest(layers=tuple(layers)))
    with pytest.raises(LimitExceededError, match="4,194,304"):
        push("m", store, to=f"{host}/ns/m:a")
    assert set(methods) <= {"GET", "HEAD"}


@pytest.mark.parametrize("status", [401, 404])
def test_an_unmounted_blob_is_sent(
    status: int, store: Store, host: str, registry: SmallRegistry
) -> None:
    push("m", store, to=f"{host}/ns/m:a")
    registry.changes.append(lambda asked: reply(status) if "mount=" in asked.target else None)
    assert push("m", Store(store.root), to=f"{host}/other/n:a").copied.blobs == 3
