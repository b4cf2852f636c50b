"""Signatures in a registry: under cosign's tag, beside those of others, whatever a server sends."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from support.servers import Asked, reply, server
from support.small_registry import SmallRegistry

from blobstore.errors import BlobStoreError, ConflictError
from blobstore.formats.oci import MAX_PAYLOAD, Signature, SignatureManifest, tag_of
from blobstore.io.http.client import HttpClient
from blobstore.names import Digest, ModelName
from blobstore.store.memory import MemoryStore
from blobstore.store.registry.store import RegistryStore
from blobstore.store.signing.key_pairs import PrivateKey
from blobstore.store.signing.signed_models import SignaturePolicy, sign_model
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import commit

NAME = ModelName.parse("h.example/ns/m:t")
KEY = PrivateKey.generate()
POLICY = SignaturePolicy.of_key(KEY.public)
ONE, TWO = Signature.of(b"one", b"\x01"), Signature.of(b"one", b"\x02")
OF_ONE, OF_TWO = SignatureManifest.of([ONE]), SignatureManifest.of([TWO])
DIGEST = Digest("ab" * 32)


@pytest.fixture
def registry() -> SmallRegistry:
    return SmallRegistry()


@pytest.fixture
def home(registry: SmallRegistry) -> Iterator[RegistryStore]:
    with server() as running, HttpClient() as client:
        running.play(registry)
        yield RegistryStore("h.example", client, address=running.at("").rstrip("/"))


@pytest.fixture
def source() -> MemoryStore:
    source = MemoryStore()
    commit(source, str(NAME), b"blob")
    sign_model(NAME, source, KEY)
    return source


def is_manifest(asked: Asked) -> bool:
    return "/manifests/" in asked.target


def layers_in(registry: SmallRegistry, digest: Digest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(registry.manifests["ns/m", tag_of(digest)])["layers"]
    return found


def test_cosign_finds_them(
    home: RegistryStore, registry: SmallRegistry, source: MemoryStore
) -> None:
    tags: list[str] = []

    def note(asked: Asked) -> None:
        if asked.method == "PUT" and is_manifest(asked):
            tags.append(asked.target.rpartition("/")[2])

    registry.changes.append(note)
    transfer(str(NAME), source, home)
    digest = source.manifests.read(NAME).digest
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
def test_what_another_machine_replaced_is_added_again(
    home: RegistryStore, registry: SmallRegistry, is_always: bool
) -> None:
    """Another machine sets the tag just after we did: once, or whenever we did."""
    puts = 0

    def replaced(asked: Asked) -> None:
        nonlocal puts
        if asked.method == "PUT" and is_manifest(asked):
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
