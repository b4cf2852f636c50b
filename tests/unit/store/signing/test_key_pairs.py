"""Keys: what is read, what is refused, and that only the right key and data verify."""

import base64
import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa

from blobstore.errors import UsageError
from blobstore.store.signing.key_pairs import PrivateKey, PublicKey

PLAIN = serialization.NoEncryption()
P256 = ec.generate_private_key(ec.SECP256R1())
KEYS: list[Callable[[], Any]] = [
    lambda: P256,
    lambda: ec.generate_private_key(ec.SECP384R1()),
    lambda: ec.generate_private_key(ec.SECP521R1()),
    lambda: rsa.generate_private_key(65537, 2048),
    ed25519.Ed25519PrivateKey.generate,
]
REFUSED: list[Callable[[], Any]] = [
    lambda: ec.generate_private_key(ec.SECP256K1()),
    lambda: rsa.generate_private_key(65537, 1024),  # noqa: S505  # it is refused
    ed448.Ed448PrivateKey.generate,
    lambda: dsa.generate_private_key(1024),  # noqa: S505  # it is refused
]


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a password is cosign's (test_foreign.py), which takes half a second."""
    real = hashlib.scrypt
    monkeypatch.setattr(hashlib, "scrypt", lambda *words, **more: real(*words, **more | {"n": 2}))


def pem_of(key: Any, protection: serialization.KeySerializationEncryption = PLAIN) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, protection))


def public_pem_of(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))


@pytest.mark.parametrize("generate", KEYS)
def test_signatures_verify(generate: Callable[[], Any]) -> None:
    key = generate()
    private = PrivateKey.parse(pem_of(key), "a.key", lambda: pytest.fail("not encrypted"))
    public = PublicKey.parse(public_pem_of(key), "a.pub")
    assert public.digest == private.public.digest
    assert public.pem == private.public.pem == public_pem_of(key)
    value = private.sign(b"data")
    assert private.sign(b"data") == value  # the same payload gives the same signature
    assert public.verifies(b"data", value)
    assert not public.verifies(b"datb", value)
    assert not PrivateKey.generate().public.verifies(b"data", value)
    wrong = [b"", value[:-1], value[1:], value + b"\0", b"\0" + value, value * 2, bytes(2**16)]
    for at in range(0, len(value), 5):
        wrong.append(bytes((*value[:at], value[at] ^ 1, *value[at + 1 :])))
    assert [one for one in wrong if public.verifies(b"data", one)] == []


@pytest.mark.parametrize("generate", REFUSED)
def test_keys_that_are_not_supported(generate: Callable[[], Any]) -> None:
    key = generate()
    with pytest.raises(UsageError, match="not supported"):
        PublicKey.parse(public_pem_of(key), "a.pub")
    with pytest.raises(UsageError, match="not supported"):
        PrivateKey.parse(pem_of(key), "a.key", str)


def test_an_encrypted_key() -> None:
    raw = pem_of(P256, serialization.BestAvailableEncryption(b"secret"))
    key = PrivateKey.parse(raw, "a.key", lambda: "secret")
    assert key.public.pem == public_pem_of(P256)
    for wrong in ("", "Secret"):
        with pytest.raises(UsageError, match=r"a\.key"):
            PrivateKey.parse(raw, "a.key", partial(str, wrong))


@pytest.fixture
def sealed() -> dict[str, Any]:
    """What our file of the key P256 says."""
    raw = PrivateKey(P256, "a.key").encrypted("päss")
    begin, *lines, end, _ = raw.split(b"\n")
    assert begin == b"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----"
    assert end == b"-----END ENCRYPTED SIGSTORE PRIVATE KEY-----"
    return dict(json.loads(base64.b64decode(b"".join(lines))))


def cosign_file(value: Any) -> bytes:
    """Return a private key's file, as older versions of cosign label it."""
    label = b"ENCRYPTED COSIGN PRIVATE KEY-----\n"
    text = base64.encodebytes(json.dumps(value).encode())
    return b"-----BEGIN " + label + text + b"-----END " + label


def test_cosigns_file(sealed: dict[str, Any]) -> None:
    raw = cosign_file(sealed)
    assert PrivateKey.parse(raw, "c.key", lambda: "päss").public.pem == public_pem_of(P256)
    with pytest.raises(UsageError, match=r"c\.key: wrong password"):
        PrivateKey.parse(raw, "c.key", lambda: "pass")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kdf", None),
        ("ciphertext", "AAAA"),
        ("kdf", {"name": "pbkdf2"}),
        ("kdf", {"params": {"N": 2**30, "r": 8, "p": 1}}),
        ("cipher", {"nonce": "AAAA"}),
    ],
)
def test_files_of_cosign_that_are_refused(sealed: dict[str, Any], key: str, value: Any) -> None:
    sealed[key] = {**sealed[key], **value} if isinstance(value, dict) else value
    with pytest.raises(UsageError, match=r"c\.key"):
        PrivateKey.parse(cosign_file(sealed), "c.key", lambda: "x")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        public_pem_of(P256)[:-30],
        b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    ],
)
def test_files_that_are_not_keys(raw: bytes) -> None:
    with pytest.raises(UsageError, match=r"a\.pub is not a public key"):
        PublicKey.parse(raw, "a.pub")
    with pytest.raises(UsageError, match=r"a\.pub is not a private key"):
        PrivateKey.parse(raw, "a.pub", lambda: "x")


def test_a_private_key_is_not_a_public_one() -> None:
    with pytest.raises(UsageError, match=r"a\.pub is not a public key"):
        PublicKey.parse(pem_of(P256), "a.pub")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nacl.secret", None)
    with pytest.raises(UsageError, match="PyNaCl") as caught:
        PrivateKey.parse(cosign_file({}), "c.key", lambda: "x")
    assert "pip install" in str(caught.value.hint)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    with pytest.raises(UsageError, match="cryptography"):
        PublicKey.parse(public_pem_of(P256), "a.pub")
