"""Push and pull: what is sent, mounted, fetched and refused."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.servers import Asked, Server, reply
from support.small_registry import SmallRegistry

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    LimitExceededError,
    ModelNotFoundError,
    UsageError,
)
from blobstore.formats.documents import Manifest
from blobstore.formats.oci import MAX_PAYLOAD, Signature, SignatureManifest, tag_of
from blobstore.io.http.client import HttpClient
from blobstore.names import Digest, ModelName
from blobstore.store.hints import Share
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.registry.api import Reference
from blobstore.store.registry.store import RegistryAccess, RegistryStore, pull, push
from blobstore.store.signing.key_pairs import PrivateKey
from blobstore.store.signing.signed_models import SignaturePolicy, sign_model
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, blobs_of, commit, data_of, descriptor_of

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
def store(store: Store) -> Store:
    commit(store, "m", *BLOBS)
    return store


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "other")


def noted(registry: SmallRegistry) -> list[str]:
    methods: list[str] = []
    registry.changes.append(lambda asked: methods.append(asked.method))
    return methods


def test_a_model_comes_back(store: Store, host: str, registry: SmallRegistry, other: Store) -> None:
    done = push("m", store, to=f"{host}/ns/m:a")
    assert (str(done.name), done.copied.blobs) == (f"{host}/ns/m:a", 3)
    pulled = pull(f"{host}/ns/m:a", other, name="n")
    assert (pulled.digest, pulled.copied.blobs) == (done.digest, 3)
    assert blobs_of(other, "n") == BLOBS
    assert other.manifest("n").raw == store.manifest("m").raw
    methods = noted(registry)
    assert push("m", store, to=f"{host}/ns/m:b").there.blobs == 3
    assert methods.count("PUT") == 1
    assert "POST" not in methods


def test_blobs_are_mounted_from_where_they_were(store: Store, host: str, other: Store) -> None:
    push("m", store, to=f"{host}/ns/m:a")
    assert push("m", Store(store.root), to=f"{host}/other/n:a").there.blobs == 3
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


def test_a_manifest_that_is_asked_for_by_digest(store: Store, host: str, other: Store) -> None:
    first = push("m", store, to=f"{host}/ns/m:a").digest
    commit(store, "m", b"another")
    assert push("m", store, to=f"{host}/ns/m:a").digest != first
    assert pull(f"{host}/ns/m:a@{first}", other).digest == first
    with pytest.raises(ModelNotFoundError):
        pull(f"{host}/ns/m:a@{Digest.of(b'nothing')}", other)
    assert other.manifest(f"{host}/ns/m:a").digest == first
    with pytest.raises(UsageError, match="tag"):
        push("m", store, to=f"{host}/n/m@{first}")


def test_another_size(store: Store, host: str, registry: SmallRegistry) -> None:
    """Also if the session knows the blob, or has just found it in the repository."""
    push("m", store, to=f"{host}/ns/m:a")
    reference, right = Reference.parse(f"{host}/ns/m:b"), descriptor_of(BLOBS[0])
    wrong = Manifest(layers=(replace(right, size=right.size + 1),))
    for known in ([], [right]):
        with RegistryAccess().open(reference) as home, home.session(name=reference.name) as session:
            assert session.missing(known) == []
            with pytest.raises(CorruptDataError):
                session.publish(reference.name, wrong)
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


def test_large_manifests_are_refused(store: Store, host: str, registry: SmallRegistry) -> None:
    methods = noted(registry)
    layers = [descriptor_of(BLOBS[0], f"layer{number}" + "x" * 90_000) for number in range(50)]
    with store.session() as session:
        session.publish(M, Manifest(layers=tuple(layers)))
    with pytest.raises(LimitExceededError, match="4,194,304"):
        push("m", store, to=f"{host}/ns/m:a")
    assert set(methods) <= {"GET", "HEAD"}


def refuse_mounts(status: int, asked: Asked) -> Iterable[bytes] | None:
    return reply(status) if "mount=" in asked.target else None


def test_an_unmounted_blob_is_sent(store: Store, host: str, registry: SmallRegistry) -> None:
    push("m", store, to=f"{host}/ns/m:a")
    for status in (401, 404):
        registry.changes = [partial(refuse_mounts, status)]
        assert push("m", Store(store.root), to=f"{host}/other/n{status}").copied.blobs == 3


# Signatures in a registry: under cosign's tag, beside those of others, whatever a server sends


NAME = ModelName.parse("h.example/ns/m:t")
KEY = PrivateKey.generate()
POLICY = SignaturePolicy.of_key(KEY.public)
ONE, TWO = Signature.of(b"one", b"\x01"), Signature.of(b"one", b"\x02")
OF_ONE, OF_TWO = SignatureManifest.of([ONE]), SignatureManifest.of([TWO])
DIGEST = Digest("ab" * 32)


@pytest.fixture
def home(server: Server, registry: SmallRegistry) -> Iterator[RegistryStore]:
    with HttpClient() as client:  # the registry answers
        yield RegistryStore("h.example", client, address=server.at("").rstrip("/"))


@pytest.fixture
def source() -> MemoryStore:
    source = MemoryStore()
    commit(source, str(NAME), b"blob")
    sign_model(NAME, source, KEY)
    return source


def layers_in(registry: SmallRegistry, digest: Digest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(registry.manifests["ns/m", tag_of(digest)])["layers"]
    return found


def test_cosigns_tag(home: RegistryStore, registry: SmallRegistry, source: MemoryStore) -> None:
    transfer(str(NAME), source, home)
    digest = source.manifests.read(NAME).digest
    tags = [tag for _, tag in registry.manifests if ":" not in tag]
    assert tags == [tag_of(digest), "t"]  # that of the model comes last
    (layer,) = layers_in(registry, digest)
    assert layer == source.signatures.read(NAME, digest)[0].layer
    assert ("ns/m", layer["digest"]) in registry.blobs
    assert home.manifests.names() == [NAME]


def test_those_of_others_are_kept(home: RegistryStore, registry: SmallRegistry) -> None:
    foreign = {"mediaType": "application/x", "size": 1, "digest": str(Digest.of(b"x"))}
    value = json.loads(OF_ONE.raw)
    value["layers"].append(foreign)
    blobs = [b"one", b"x", OF_ONE.config or b""]
    registry.put("ns/m", tag_of(DIGEST), json.dumps(value).encode(), blobs)
    assert home.signatures.add(NAME, DIGEST, [TWO]) == 1
    assert layers_in(registry, DIGEST) == [ONE.layer, foreign, TWO.layer]
    assert home.signatures.read(NAME, DIGEST) == [ONE, TWO]


@pytest.mark.parametrize("is_always", [False, True])
def test_what_others_replaced_is_added(
    home: RegistryStore, registry: SmallRegistry, is_always: bool
) -> None:
    """Another machine sets the tag just after we did: once, or whenever we did."""
    puts = 0

    def replaced(asked: Asked) -> None:
        nonlocal puts
        if asked.method == "PUT" and "/manifests/" in asked.target:
            puts += 1
        elif asked.method == "GET" and (is_always or puts == 1):
            puts += 1
            registry.put("ns/m", tag_of(DIGEST), OF_TWO.raw, [b"one", OF_TWO.config or b""])

    registry.changes.append(replaced)
    if is_always:
        with pytest.raises(ConflictError):
            home.signatures.add(NAME, DIGEST, [ONE])
    else:
        assert home.signatures.add(NAME, DIGEST, [ONE]) == 1
        assert home.signatures.read(NAME, DIGEST) == [TWO, ONE]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": None},
        {"layers": [{**ONE.layer, "size": MAX_PAYLOAD + 1}]},
        {"layers": [{**ONE.layer, "digest": str(DIGEST)}]},
        {"layers": [{**ONE.layer, "size": 2}]},
        {"padding": "x" * 2**22},
    ],
)
def test_manifests_of_a_hostile_server(
    home: RegistryStore, registry: SmallRegistry, source: MemoryStore, change: dict[str, Any]
) -> None:
    transfer(str(NAME), source, home)
    tag = tag_of(source.manifests.read(NAME).digest)
    raw = json.dumps({**json.loads(OF_ONE.raw), **change}).encode()
    registry.put("ns/m", tag, raw, [b"one"])
    refusing, lenient = MemoryStore(), MemoryStore()
    with pytest.raises(BlobStoreError):
        transfer(str(NAME), home, refusing, policy=POLICY)
    assert refusing.manifests.names() == []
    transfer(str(NAME), home, lenient)  # nothing was asked of the signatures
    assert lenient.manifests.names() == [NAME]


def test_the_refused_tag(home: RegistryStore, registry: SmallRegistry, source: MemoryStore) -> None:
    transfer(str(NAME), source, home)

    def refused(asked: Asked) -> Iterable[bytes] | None:
        return reply(403) if asked.target.endswith(".sig") else None

    registry.changes.append(refused)
    transfer(str(NAME), home, MemoryStore())
    with pytest.raises(BlobStoreError):
        transfer(str(NAME), home, MemoryStore(), policy=POLICY)
    commit(source, str(NAME), b"changed")
    sign_model(NAME, source, KEY)
    with pytest.raises(BlobStoreError):
        transfer(str(NAME), source, home)
    assert home.manifests.read(NAME).digest != source.manifests.read(NAME).digest
