"""Models are signed and checked, in any home, and signatures go where their models go."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from blobstore.errors import (
    DocumentError,
    LimitExceededError,
    MissingFileError,
    RemoteError,
    SignatureError,
    UsageError,
)
from blobstore.formats.oci import DockerReference, Payload, Signature
from blobstore.names import Digest, ModelName
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.store.signing.key_pairs import PrivateKey
from blobstore.store.signing.signed_models import (
    MAX_POLICY,
    SignaturePolicy,
    check_signatures,
    sign_model,
)
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, blobs_of, commit

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


def test_lower_stores_have_signatures(tmp_path: Path) -> None:
    lower, upper = Store(tmp_path / "lower"), Store(tmp_path / "upper")
    with_model(lower)
    layered = LayeredStore(upper, [Unsigning(), lower])
    assert check(layered) == ""
    sign_model("m", layered, OTHER)
    assert check_signatures(["m"], layered, POLICY)[0].signatures == 2
    assert check_signatures(["m"], lower, POLICY)[0].signatures == 1


def test_signatures_come_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = with_model(MemoryStore()), MemoryStore()
    add = target.signatures.add

    def added(*arguments: Any) -> int:
        assert target.manifests.names() == []
        return add(*arguments)

    monkeypatch.setattr(target.signatures, "add", added)
    (done,) = transfer("m", source, target, policy=POLICY)
    assert (target.manifests.names(), done.signatures) == ([M], 1)


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
    assert blobs_of(unsigning, "m") == [b"one"]
    assert LayeredStore(unsigning, [MemoryStore()]).signatures is None
    with pytest.raises(UsageError, match="signatures"):
        sign_model("m", unsigning, KEY)
    with pytest.raises(UsageError, match="signatures"):
        check_signatures(["m"], unsigning, POLICY)
    with pytest.raises(SignatureError, match="no signature"):
        transfer("m", unsigning, MemoryStore(), policy=POLICY)
    transfer("m", unsigning, MemoryStore())


def test_signatures_that_cannot_be_read_matter_only_to_a_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for a server that fails now: it ends the transfer, which can be made again."""
    source, target = with_model(MemoryStore(), key=None), MemoryStore()
    source.signatures = broken = Mock(read=Mock(side_effect=RemoteError("bad", status=403)))
    with pytest.raises(RemoteError):
        transfer("m", source, target, policy=POLICY)
    assert target.manifests.names() == []
    transfer("m", source, target)
    assert capsys.readouterr().err.count("\n") == 1  # logged
    assert target.manifests.names() == [M]
    broken.read.side_effect = RemoteError("down", temporary=True)
    with pytest.raises(RemoteError):
        transfer("m", source, MemoryStore())


# Policies: which requirements a model meets, and which files are refused (rule S2)


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


OTHERS = (f"{REPOSITORY}:v2", f"{REPOSITORY}m", "host.example:5000/n", "*.host.example", "ns/m")
MATCHING = (f"{REPOSITORY}:v1", "host.example:5000/ns", "host.example:5000", "*.example", "")
"""The most specific comes first."""


def test_the_most_specific_scope_of_the_model_counts() -> None:
    for scope in OTHERS:
        assert not accepts(policy(REJECT, **{scope: ANYTHING}))
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
