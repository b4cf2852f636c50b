"""Signatures in a registry: under cosign's tag, beside those of others, whatever a server sends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from support.servers import Asked, Server, reply, server
from support.small_registry import SmallRegistry

from blobstore.errors import BlobStoreError, ConflictError, SignatureError
from blobstore.formats.signatures import (
    MAX_PAYLOAD,
    Signature,
    SignatureManifest,
    tag_of,
)
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
DIGEST = Digest("ab" * 32)


@pytest.fixture
def running() -> Iterator[Server]:
    with server() as started:
        yield started


@pytest.fixture
def registry() -> SmallRegistry:
    return SmallRegistry()


@pytest.fixture
def home(running: Server, registry: SmallRegistry) -> Iterator[RegistryStore]:
    running.play(registry)
    with HttpClient() as client:
        yield RegistryStore("h.example", client, address=running.at("").rstrip("/"))


def raw_of(registry: SmallRegistry, digest: Digest = DIGEST) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(registry.manifests["ns/m", tag_of(digest)])
    return found


def signed_source() -> MemoryStore:
    source = MemoryStore()
    commit(source, str(NAME), b"blob")
    sign_model(NAME, source, KEY)
    return source


def test_they_lie_where_cosign_looks(home: RegistryStore, registry: SmallRegistry) -> None:
    source, tags = signed_source(), list[str]()

    def note(asked: Asked) -> None:
        if asked.method == "PUT" and "/manifests/" in asked.target:
            tags.append(asked.target.rpartition("/")[2])

    registry.changes.append(note)
    transfer(str(NAME), source, home)
    digest = source.manifests.read(NAME).digest
    assert tags == [tag_of(digest), "t"]  # that of the model comes last
    (layer,) = raw_of(registry, digest)["layers"]
    assert layer == source.signatures.read(NAME, digest)[0].layer
    assert ("ns/m", layer["digest"]) in registry.blobs
    assert home.manifests.names() == [NAME]


def test_those_of_others_are_kept(home: RegistryStore, registry: SmallRegistry) -> None:
    foreign = {"mediaType": "application/x", "size": 1, "digest": str(Digest.of(b"x"))}
    value = json.loads(SignatureManifest.of([ONE]).raw)
    value["layers"].append(foreign)
    config = SignatureManifest.of([ONE]).config or b""
    registry.put("ns/m", tag_of(DIGEST), json.dumps(value).encode(), [b"one", b"x", config])
    assert home.signatures.add(NAME, DIGEST, [TWO]) == 1
    assert raw_of(registry)["layers"] == [ONE.layer, foreign, TWO.layer]
    assert home.signatures.read(NAME, DIGEST) == [ONE, TWO]


def test_what_another_machine_replaced_is_added_again(
    home: RegistryStore, registry: SmallRegistry
) -> None:
    other = SignatureManifest.of([TWO])
    puts = 0

    def replaced(asked: Asked) -> Iterable[bytes] | None:
        """Another machine sets the tag just after the first time that we did."""
        nonlocal puts
        if asked.method == "PUT" and "/manifests/" in asked.target:
            puts += 1
        elif asked.method == "GET" and puts == 1:
            puts += 1
            registry.put("ns/m", tag_of(DIGEST), other.raw, [b"one", other.config or b""])
        return None

    registry.changes.append(replaced)
    assert home.signatures.add(NAME, DIGEST, [ONE]) == 1
    assert home.signatures.read(NAME, DIGEST) == [TWO, ONE]


def test_a_tag_that_is_always_replaced(home: RegistryStore, registry: SmallRegistry) -> None:
    other = SignatureManifest.of([TWO])

    def replaced(asked: Asked) -> Iterable[bytes] | None:
        if asked.method == "GET" and "/manifests/" in asked.target:
            registry.put("ns/m", tag_of(DIGEST), other.raw, [b"one", other.config or b""])
        return None

    registry.changes.append(replaced)
    with pytest.raises(ConflictError, match="other machines keep replacing"):
        home.signatures.add(NAME, DIGEST, [ONE])


# A hostile server

HOSTILE: dict[str, dict[str, Any]] = {
    "no layers": {"layers": None},
    "large payload": {"layers": [{**ONE.layer, "size": MAX_PAYLOAD + 1}]},
    "missing payload": {"layers": [{**ONE.layer, "digest": str(DIGEST)}]},
    "other size": {"layers": [{**ONE.layer, "size": 2}]},
    "index": {"manifests": [], "layers": []},
    "too large": {"padding": "x" * 2**22},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_manifests_of_a_hostile_server(
    home: RegistryStore, registry: SmallRegistry, kind: str
) -> None:
    source = signed_source()
    transfer(str(NAME), source, home)
    digest = source.manifests.read(NAME).digest
    value = {**json.loads(SignatureManifest.of([ONE]).raw), **HOSTILE[kind]}
    registry.put("ns/m", tag_of(digest), json.dumps(value).encode(), [b"one"])
    with pytest.raises(BlobStoreError):
        home.signatures.read(NAME, digest)
    refusing, lenient = MemoryStore(), MemoryStore()
    with pytest.raises(BlobStoreError):
        transfer(str(NAME), home, refusing, policy=POLICY)
    assert refusing.manifests.names() == []
    transfer(str(NAME), home, lenient)  # nothing was asked of the signatures
    assert lenient.manifests.names() == [NAME]


def test_the_signatures_of_another_model(home: RegistryStore, registry: SmallRegistry) -> None:
    """A registry that serves one signed model's signatures under another's tag gains nothing."""
    source = signed_source()
    transfer(str(NAME), source, home)
    signed = source.manifests.read(NAME).digest
    other = ModelName.parse("h.example/ns/m:other")
    commit(source, str(other), b"evil")
    transfer(str(other), source, home)
    evil = source.manifests.read(other).digest
    registry.manifests["ns/m", tag_of(evil)] = registry.manifests["ns/m", tag_of(signed)]
    with pytest.raises(SignatureError, match="is of another manifest"):
        transfer(str(other), home, MemoryStore(), policy=POLICY)


def test_a_registry_that_refuses_the_tag(home: RegistryStore, registry: SmallRegistry) -> None:
    source = signed_source()
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
