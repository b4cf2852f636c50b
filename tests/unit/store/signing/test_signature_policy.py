"""Policies: which requirements a model meets, and which files are refused (rule S2)."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import DocumentError, LimitExceededError, MissingFileError, SignatureError
from blobstore.formats.oci import DockerReference, Payload, Signature
from blobstore.names import Digest, ModelName
from blobstore.store.signing.key_pairs import PrivateKey
from blobstore.store.signing.signed_models import MAX_POLICY, SignaturePolicy

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()
DIGEST = Digest("ab" * 32)
REPOSITORY = "host.example:5000/ns/m"
NAME = ModelName.parse(f"{REPOSITORY}:v1")
DATA = base64.b64encode(KEY.public.pem).decode()
ANYTHING = [{"type": "insecureAcceptAnything"}]
REJECT = [{"type": "reject"}]


def signed(
    reference: str = REPOSITORY, key: PrivateKey = KEY, digest: Digest = DIGEST
) -> Signature:
    payload = Payload(digest, DockerReference.parse(reference)).encode()
    return Signature.of(payload, key.sign(payload))


def by_key(
    identity: dict[str, str] | None = {"type": "matchRepository"},  # noqa: B006
    **source: Any,
) -> list[dict[str, Any]]:
    """Return requirements: a signature by a key (`KEY` if none is given)."""
    requirement = {"type": "sigstoreSigned", **(source or {"keyData": DATA})}
    return [requirement if identity is None else {**requirement, "signedIdentity": identity}]


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

MATCHING = (f"{REPOSITORY}:v1", "host.example:5000/ns", "host.example:5000", "*.example", "")
"""The most specific comes first."""


@pytest.mark.parametrize(
    "scope",
    [*(f"{REPOSITORY}:v2", f"{REPOSITORY}m", "host.example:5000/n", "*.host.example", "ns/m")],
)
def test_scopes_of_other_models(scope: str) -> None:
    assert not accepts(policy(REJECT, **{scope: ANYTHING}))


def test_the_most_specific_scope_counts() -> None:
    assert accepts(policy(REJECT, **{MATCHING[-1]: ANYTHING}))
    for scope, wider in itertools.pairwise(MATCHING):
        assert not accepts(policy(ANYTHING, **{wider: ANYTHING, scope: REJECT}))
        assert accepts(policy(REJECT, **{wider: REJECT, scope: ANYTHING}))


@pytest.mark.parametrize("scope", ["registry.ollama.ai/Library/qwen", "*.Ollama.ai"])
def test_case_is_ignored_in_scopes(scope: str) -> None:
    found = policy(ANYTHING, **{scope: REJECT})
    assert not accepts(found, name=ModelName.parse("qwen"))
    with pytest.raises(DocumentError, match="case"):
        policy(REJECT, **{"host/ns": ANYTHING, "host/NS": REJECT})


# Keys


@pytest.mark.parametrize(
    ("signatures", "reason"),
    [
        ([], "it has no signature"),
        ([signed(key=OTHER)], "is by another key"),
        ([signed(digest=Digest("cd" * 32))], "is for another manifest, sha256:cd"),
        ([signed("host.example:5000/ns/o")], r"was made for host\.example:5000/ns/o"),
        ([signed(key=OTHER), signed(digest=Digest("cd" * 32))], "another key; a signature is for"),
        ([Signature(signed().payload, {})], "signature"),
        ([Signature(signed().payload + b" ", signed().annotations)], "key"),
        ([Signature.of(b"[" * 60_000, KEY.sign(b"[" * 60_000))], "signature"),
    ],
)
def test_a_signature_is_required(signatures: list[Signature], reason: str) -> None:
    found = policy(by_key())
    with pytest.raises(SignatureError, match=reason):
        found.check(NAME, DIGEST, signatures)
    (accepted,) = found.check(NAME, DIGEST, [*signatures, signed()])
    assert accepted.key.digest == KEY.public.digest


def test_any_of_several_keys_and_all_requirements(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.pub", "b.pub")]
    for path, key in zip(paths, (KEY, OTHER), strict=True):
        Path(path).write_bytes(key.public.pem)
    datas = [DATA, base64.b64encode(OTHER.public.pem).decode()]
    for found in (policy(by_key(keyDatas=datas)), policy(by_key(keyPaths=paths))):
        assert accepts(found, signed(key=OTHER))
        assert accepts(found, signed())
    both = policy(by_key(keyPath=paths[0]) + by_key(keyPath=paths[1]))
    assert not accepts(both, signed())
    assert not accepts(both, signed(key=OTHER))
    assert len(both.check(NAME, DIGEST, [signed(), signed(key=OTHER)])) == 2


# Identities

EXACT = {"type": "exactReference", "dockerReference": "a.b/c:d"}
ANY_TAG = {"type": "exactRepository", "dockerRepository": "a.b/c"}
MOVED = {"type": "remapIdentity", "prefix": "host.example:5000/ns", "signedPrefix": "a.b/c"}


@pytest.mark.parametrize(
    ("identity", "accepted", "refused"),
    [
        (None, f"{REPOSITORY}:v1", REPOSITORY),
        ({"type": "matchRepoDigestOrExact"}, f"{REPOSITORY}:v1", f"{REPOSITORY}:v2"),
        ({"type": "matchRepository"}, f"{REPOSITORY}:v2", f"{REPOSITORY}m"),
        (EXACT, "a.b/c:d", "a.b/c"),
        (ANY_TAG, "a.b/c:d", REPOSITORY),
        (MOVED, "a.b/c/m:v1", "a.b/c/m"),
    ],
)
def test_identities(identity: dict[str, str] | None, accepted: str, refused: str) -> None:
    assert accepts(policy(by_key(identity)), signed(accepted))
    assert not accepts(policy(by_key(identity)), signed(refused))


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
    "default",
    [
        [],
        [{"type": "Reject"}],
        [{"type": "reject", "more": 1}],
        [{"type": "sigstoreSigned"}],
        by_key(keyPath="a", keyData=DATA),
        by_key(keyPaths=[]),
        by_key({"type": "matchRepository", "x": "y"}),
        by_key({"type": "exactReference", "dockerReference": "a.b/c"}),
    ],
)
def test_files_with_mistakes(default: Any) -> None:
    with pytest.raises(DocumentError) as caught:
        policy(default)
    assert caught.value.rule == "S2"


def test_files_that_are_not_policies(tmp_path: Path) -> None:
    for raw in (b"", b'{"default":[{"type":"reject"}],"default":[]}', b"\xff"):
        with pytest.raises(DocumentError):
            SignaturePolicy.parse(raw)
    path = tmp_path / "policy.json"
    with pytest.raises(MissingFileError):
        SignaturePolicy.read(path)
    path.write_bytes(b" " * (MAX_POLICY + 1))
    with pytest.raises(LimitExceededError):
        SignaturePolicy.read(path)
    path.write_text('{"default": [{"type": "reject"}]}')
    assert not accepts(SignaturePolicy.read(path))
