"""Policies: which requirements a model meets, and which files are refused (rule S2).

test_foreign.py has skopeo decide some of the same cases.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import (
    DocumentError,
    LimitExceededError,
    MissingFileError,
    SignatureError,
    UsageError,
)
from blobstore.formats.signatures import DockerReference, Payload, Signature
from blobstore.names import Digest, ModelName
from blobstore.store.signing.key_pairs import PrivateKey
from blobstore.store.signing.signed_models import MAX_POLICY, SignaturePolicy

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()
DIGEST = Digest("ab" * 32)
NAME = ModelName.parse("host.example:5000/ns/m:v1")
DATA = base64.b64encode(KEY.public.pem).decode()
OTHER_DATA = base64.b64encode(OTHER.public.pem).decode()
ANYTHING = [{"type": "insecureAcceptAnything"}]
REJECT = [{"type": "reject"}]


def signed(
    reference: str = "host.example:5000/ns/m", key: PrivateKey = KEY, digest: Digest = DIGEST
) -> Signature:
    payload = Payload(digest, DockerReference.parse(reference)).encode()
    return Signature.of(payload, key.sign(payload))


def by_key(identity: dict[str, str] | None = None, **source: Any) -> list[dict[str, Any]]:
    """Return requirements: a signature by a key (`KEY` if none is given)."""
    requirement = {"type": "sigstoreSigned", **(source or {"keyData": DATA})}
    return [requirement if identity is None else {**requirement, "signedIdentity": identity}]


REPOSITORY = {"type": "matchRepository"}


def policy(default: Any, **scopes: Any) -> SignaturePolicy:
    value = {"default": default, "transports": {"docker": scopes}}
    return SignaturePolicy.parse(json.dumps(value).encode())


def accepts(found: SignaturePolicy, *signatures: Signature, name: ModelName = NAME) -> bool:
    try:
        found.check(name, DIGEST, signatures)
    except SignatureError:
        return False
    return True


# Scopes


@pytest.mark.parametrize(
    ("scope", "found"),
    [
        ("host.example:5000/ns/m:v1", True),
        ("*.example", True),
        ("", True),
        ("host.example:5000/ns/m:v2", False),
        ("host.example:5000/ns/mm", False),
        ("host.example:5000/n", False),
        ("*.host.example", False),
        ("ns/m", False),
    ],
)
def test_a_scope(scope: str, found: bool) -> None:
    assert accepts(policy(REJECT, **{scope: ANYTHING})) is found


def test_the_most_specific_scope_counts() -> None:
    scopes = [
        "host.example:5000/ns/m:v1",
        "host.example:5000/ns",
        "host.example:5000",
        "*.example",
        "",
    ]
    for number, scope in enumerate(scopes):
        wider: dict[str, Any] = dict.fromkeys(scopes[number + 1 :], ANYTHING)
        assert not accepts(policy(ANYTHING, **wider, **{scope: REJECT}))
        wider = dict.fromkeys(scopes[number + 1 :], REJECT)
        assert accepts(policy(REJECT, **wider, **{scope: ANYTHING}))


@pytest.mark.parametrize(
    "scope",
    [
        "registry.ollama.ai/Library/qwen",
        "*.Ollama.ai",
    ],
)
def test_case_is_ignored_in_scopes(scope: str) -> None:
    found = policy(ANYTHING, **{scope: REJECT})
    assert not accepts(found, name=ModelName.parse("qwen"))


@pytest.mark.parametrize(
    "scope",
    ["https://registry.ollama.ai", "host/ns/m/more", "*", "host/ns/m:"],
)
def test_a_scope_that_no_model_can_match(scope: str) -> None:
    with pytest.raises(DocumentError, match="no model name can match"):
        policy(REJECT, **{scope: ANYTHING})


def test_scopes_that_differ_only_in_case() -> None:
    with pytest.raises(DocumentError, match="differs only in case"):
        policy(REJECT, **{"host/ns": ANYTHING, "host/NS": REJECT})


# Keys


def test_a_signature_is_required() -> None:
    found = policy(by_key(REPOSITORY))
    assert [one.key.digest for one in found.check(NAME, DIGEST, [signed()])] == [KEY.public.digest]
    with pytest.raises(SignatureError, match="it has no signature"):
        found.check(NAME, DIGEST, [])
    with pytest.raises(SignatureError, match="is by another key"):
        found.check(NAME, DIGEST, [signed(key=OTHER)])
    with pytest.raises(SignatureError, match="is of another manifest, sha256:cd"):
        found.check(NAME, DIGEST, [signed(digest=Digest("cd" * 32))])
    with pytest.raises(SignatureError, match=r"was made for host\.example:5000/ns/other"):
        found.check(NAME, DIGEST, [signed("host.example:5000/ns/other")])
    wrong = [signed(key=OTHER), signed(digest=Digest("cd" * 32)), signed(key=OTHER)]
    message = "2 signatures: each is by another key; a signature is of"
    with pytest.raises(SignatureError, match=message):
        found.check(NAME, DIGEST, wrong)
    assert accepts(found, signed(key=OTHER), signed(), Signature(b"", {}))


@pytest.mark.parametrize(
    "bad",
    [
        Signature(signed().payload, {}),
        Signature(signed().payload + b" ", signed().annotations),
        Signature.of(b"not json", KEY.sign(b"not json")),
        Signature.of(b"[" * 60_000, KEY.sign(b"[" * 60_000)),
    ],
)
def test_signatures_that_do_not_count(bad: Signature) -> None:
    assert not accepts(policy(by_key(REPOSITORY)), bad)


def test_any_of_several_keys_and_all_requirements(tmp_path: Path) -> None:
    for name, key in (("a.pub", KEY), ("b.pub", OTHER)):
        (tmp_path / name).write_bytes(key.public.pem)
    paths = [str(tmp_path / "a.pub"), str(tmp_path / "b.pub")]
    for source in ({"keyDatas": [DATA, OTHER_DATA]}, {"keyPaths": paths}):
        found = policy(by_key(REPOSITORY, **source))
        assert accepts(found, signed(key=OTHER))
        assert accepts(found, signed())
    both = policy(by_key(REPOSITORY, keyPath=paths[0]) + by_key(REPOSITORY, keyPath=paths[1]))
    assert not accepts(both, signed())
    assert not accepts(both, signed(key=OTHER))
    assert len(both.check(NAME, DIGEST, [signed(), signed(key=OTHER)])) == 2


def test_keys_are_read_when_they_are_needed(tmp_path: Path) -> None:
    found = policy(ANYTHING, **{"other.example": by_key(keyPath=str(tmp_path / "none.pub"))})
    assert accepts(found)
    with pytest.raises(UsageError, match=r"none\.pub"):
        found.check(ModelName.parse("other.example/ns/m"), DIGEST, [signed()])
    for bad in ("!", "AAAA", base64.b64encode(b"x").decode()):
        with pytest.raises(UsageError, match="the key of default"):
            policy(by_key(keyData=bad)).check(NAME, DIGEST, [])


# Identities


@pytest.mark.parametrize(
    ("identity", "reference", "expected"),
    [
        (None, "host.example:5000/ns/m", False),
        (None, "host.example:5000/ns/m:v1", True),
        ({"type": "matchRepoDigestOrExact"}, "host.example:5000/ns/m:v2", False),
        (REPOSITORY, "host.example:5000/ns/m:v2", True),
        (REPOSITORY, "host.example:5000/ns/mm", False),
        ({"type": "exactReference", "dockerReference": "a.b/c:d"}, "a.b/c:d", True),
        ({"type": "exactReference", "dockerReference": "a.b/c:d"}, "a.b/c", False),
        ({"type": "exactRepository", "dockerRepository": "a.b/c"}, "a.b/c:d", True),
        ({"type": "exactRepository", "dockerRepository": "a.b/c"}, "host.example:5000/ns/m", False),
        (
            {"type": "remapIdentity", "prefix": "host.example:5000/ns", "signedPrefix": "a.b/c"},
            "a.b/c/m:v1",
            True,
        ),
        (
            {"type": "remapIdentity", "prefix": "host.example:5000/ns", "signedPrefix": "a.b/c"},
            "a.b/c/m",
            False,
        ),
    ],
)
def test_identities(identity: dict[str, str] | None, reference: str, expected: bool) -> None:
    assert accepts(policy(by_key(identity)), signed(reference)) is expected


# Files


@pytest.mark.parametrize(
    "requirement",
    [
        {"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/a.gpg"},
        {"type": "sigstoreSigned", "keyData": DATA, "rekorPublicKeyPath": "/rekor.pub"},
        {"type": "sigstoreSigned", "fulcio": {"caPath": "/ca"}, "rekorPublicKeyData": "x"},
        {"type": "sigstoreSigned", "pki": {}},
    ],
)
def test_what_is_not_supported_refuses(requirement: dict[str, Any]) -> None:
    with pytest.raises(SignatureError, match="not supported"):
        policy([requirement]).check(NAME, DIGEST, [signed()])
    assert accepts(policy(ANYTHING, **{"other.example": [requirement]}))


@pytest.mark.parametrize(
    "value",
    [
        {"default": []},
        {"default": [{"type": "Reject"}]},
        {"default": [{"type": "reject", "more": 1}]},
        {"default": REJECT, "transport": {}},
        {"default": REJECT, "transports": {"oci": {"": [{"type": "x"}]}}},
        {"default": [{"type": "sigstoreSigned"}]},
        {"default": by_key(keyPath="a", keyData=DATA)},
        {"default": by_key(keyPaths=[])},
        {"default": by_key({"type": "matchRepository", "x": "y"})},
        {"default": by_key({"type": "exactReference", "dockerReference": "a.b/c"})},
        {"default": by_key({"type": "remapIdentity", "prefix": "a.b"})},
    ],
)
def test_files_with_mistakes(value: Any) -> None:
    with pytest.raises(DocumentError) as caught:
        SignaturePolicy.parse(json.dumps(value).encode())
    assert caught.value.rule == "S2"


def test_files_that_are_not_json(tmp_path: Path) -> None:
    for raw in (b"", b"default = []", b'{"default":[{"type":"reject"}],"default":[]}', b"\xff"):
        with pytest.raises(DocumentError):
            SignaturePolicy.parse(raw)
    path = tmp_path / "policy.json"
    with pytest.raises(MissingFileError):
        SignaturePolicy.read(path)
    path.write_bytes(b" " * (MAX_POLICY + 1))
    with pytest.raises(LimitExceededError):
        SignaturePolicy.read(path)
    path.write_text('{"default": [{"type": "reject"}]}')
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert not accepts(SignaturePolicy.read(link))


# One key


def test_the_policy_of_a_key() -> None:
    found = SignaturePolicy.of_key(KEY.public)
    assert accepts(found, signed())
    assert accepts(found, signed("host.example:5000/ns/m:v2"))
    assert not accepts(found, signed("host.example:5000/ns/n"))
    assert not accepts(found, signed(key=OTHER))
    elsewhere = SignaturePolicy.of_key(KEY.public, DockerReference.parse("a.b/c"))
    assert accepts(elsewhere, signed("a.b/c:x"))
    assert not accepts(elsewhere, signed())
    exact = SignaturePolicy.of_key(KEY.public, DockerReference.parse("a.b/c:d"))
    assert accepts(exact, signed("a.b/c:d"))
    assert not accepts(exact, signed("a.b/c"))
