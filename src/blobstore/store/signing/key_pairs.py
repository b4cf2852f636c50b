"""Keys: public ones that verify, private ones that sign, and the files that hold them.

ECDSA (P-256, P-384, P-521), RSA (2048, 3072 or 4096 bits, PKCS #1 v1.5) and Ed25519. The hash is
always SHA-256: cosign's ``verify --key`` and containers/image take no other (sigstore/cosign@
d6d86c22 cmd/cosign/cli/verify/verify.go `Exec`; containers/image@df7e80d2
signature/internal/sigstore_payload.go). Ed25519 signs the payload itself, as both verify it.

A private key is PKCS #8 in PEM, encrypted or not, or cosign's own file: a PEM block whose contents
are JSON, with PKCS #8 in NaCl's secretbox under a key that scrypt makes of the password
(secure-systems-lab/go-securesystemslib@8b6ec9cb encrypted/encrypted.go; sigstore/cosign@0005a728
pkg/cosign/keys.go `LoadPrivateKey`). All arithmetic is done by cryptography, PyNaCl and hashlib.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import textwrap
from collections.abc import Callable
from typing import Annotated, Any

from blobstore.errors import DocumentError, UsageError, install_hint
from blobstore.formats.strictjson import encode, parse_object
from blobstore.names import Digest

MAX_KEY_FILE = 64 * 2**10
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
# As in cosign: sigstore/sigstore pkg/cryptoutils/goodkey.
_RSA_BITS = (2048, 3072, 4096)
_COSIGN = re.compile(
    rb"-----BEGIN (?P<label>ENCRYPTED (?:COSIGN|SIGSTORE) PRIVATE KEY)-----\s"
    rb"(?P<text>[A-Za-z0-9+/=\s]*)-----END (?P=label)-----\s*"
)
_LABEL = "ENCRYPTED SIGSTORE PRIVATE KEY"
# The only costs that cosign accepts: a file must not choose how much memory is taken.
_SCRYPT_COSTS = (2**15, 2**16, 2**17)
_NEW_COST = 2**16
_BLOCK, _LANES = 8, 1
_NONCE_BYTES, _SALT_BYTES = 24, 32

Password = Callable[[], str]
"""Returns the password of a key; called only if the key is encrypted."""


class PublicKey:
    """A key that verifies signatures.

    Raises: UsageError for a kind of key, curve or size that is not supported.
    """

    name: Annotated[str, "The key's file, or its place in the policy"]

    def __init__(self, key: Any, name: str) -> None:
        self.scheme = _scheme(key, name)
        self.name = name
        self._key = key

    @classmethod
    def parse(cls, raw: bytes, name: str) -> PublicKey:
        """Return the key in PEM (SubjectPublicKeyInfo).

        Raises: UsageError if it is not one, or not supported, or if cryptography is missing.
        """
        serialization = _module("cryptography.hazmat.primitives.serialization")
        return cls(_parse(lambda: serialization.load_pem_public_key(raw), name, "public"), name)

    @property
    def digest(self) -> Digest:
        """The sha256 of the key's SubjectPublicKeyInfo in DER."""
        return Digest.of(self._encode("DER"))

    @property
    def pem(self) -> bytes:
        """The key in PEM."""
        return self._encode("PEM")

    def verifies(self, data: bytes, value: bytes) -> bool:
        """Return True if ``value`` is a signature of ``data`` by this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(value, data, *self.scheme)
        except InvalidSignature:
            return False
        return True

    def _encode(self, form: str) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return bytes(
            self._key.public_bytes(getattr(Encoding, form), PublicFormat.SubjectPublicKeyInfo)
        )


class PrivateKey:
    """A key that signs: the same payload gives the same signature.

    Raises: UsageError for a kind of key, curve or size that is not supported.
    """

    def __init__(self, key: Any, name: str) -> None:
        self.public = PublicKey(getattr(key, "public_key", lambda: key)(), name)
        self._key = key

    @classmethod
    def parse(cls, raw: bytes, name: str, password: Password) -> PrivateKey:
        """Return the key in PEM. ``password`` is called if it is encrypted.

        Raises: UsageError if it is not a private key, if it is not supported, for a wrong password,
        or if cryptography or PyNaCl is missing; as ``password``.
        """
        serialization = _module("cryptography.hazmat.primitives.serialization")
        match = _COSIGN.fullmatch(raw)
        if match is not None:
            der = _decrypt(match["text"], name, password())
            load = lambda: serialization.load_der_private_key(der, None)  # noqa: E731
        else:
            secret = password().encode() if b"ENCRYPTED" in raw else None
            load = lambda: serialization.load_pem_private_key(raw, secret)  # noqa: E731
        return cls(_parse(load, name, "private"), name)

    @classmethod
    def generate(cls) -> PrivateKey:
        """Return a new key on P-256. Raises: UsageError if cryptography is missing."""
        ec = _module("cryptography.hazmat.primitives.asymmetric.ec")
        return cls(ec.generate_private_key(ec.SECP256R1()), "the new key")

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``; on a curve in DER, with the nonce of RFC 6979."""
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

        scheme = self.public.scheme
        if scheme and isinstance(scheme[0], ECDSA):
            scheme = (ECDSA(scheme[0].algorithm, deterministic_signing=True),)
        signature: bytes = self._key.sign(data, *scheme)
        return signature

    def encrypted(self, password: str) -> bytes:
        """Return the key as cosign's file. Raises: UsageError if PyNaCl is missing."""
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        der = self._key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
        box = _module("nacl.secret").SecretBox(_derive(password, salt, _NEW_COST))
        params = {"N": _NEW_COST, "r": _BLOCK, "p": _LANES}
        sealed = {
            "kdf": {"name": "scrypt", "params": params, "salt": _text(salt)},
            "cipher": {"name": "nacl/secretbox", "nonce": _text(nonce)},
            "ciphertext": _text(box.encrypt(der, nonce).ciphertext),
        }
        lines = textwrap.wrap(_text(encode(sealed)), 64)
        return "\n".join(
            [f"-----BEGIN {_LABEL}-----", *lines, f"-----END {_LABEL}-----", ""]
        ).encode()


def _scheme(key: Any, name: str) -> tuple[Any, ...]:
    """Return the arguments that follow the data and its signature when a public key verifies.

    Raises: UsageError for a kind of key, curve or size that is not supported.
    """
    asymmetric = "cryptography.hazmat.primitives.asymmetric"
    ec, rsa, ed25519 = (_module(f"{asymmetric}.{kind}") for kind in ("ec", "rsa", "ed25519"))
    sha256 = _module("cryptography.hazmat.primitives.hashes").SHA256()
    kind = type(key).__name__.strip("_")
    if isinstance(key, ec.EllipticCurvePublicKey):
        if key.curve.name in _CURVES:
            return (ec.ECDSA(sha256),)
        kind = f"a key on {key.curve.name}"
    elif isinstance(key, rsa.RSAPublicKey):
        if key.key_size in _RSA_BITS:
            return (_module(f"{asymmetric}.padding").PKCS1v15(), sha256)
        kind = f"an RSA key of {key.key_size} bits"
    elif isinstance(key, ed25519.Ed25519PublicKey):
        return ()
    hint = "Use ECDSA on P-256, P-384 or P-521, RSA of 2048, 3072 or 4096 bits, or Ed25519."
    raise UsageError(f"{name} is {kind}, which is not supported", path=name, hint=hint)


def _parse(load: Callable[[], Any], name: str, kind: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason = str(error).partition("\n")[0][:200]
        message = f"{name} is not a {kind} key in PEM that can be read: {reason}"
        raise UsageError(message, path=name) from None


def _decrypt(text: bytes, name: str, password: str) -> bytes:
    secret, crypto = _module("nacl.secret"), _module("nacl.exceptions")
    try:
        sealed = parse_object(base64.b64decode(text), name, rule="S1", limit=MAX_KEY_FILE)
        kdf, cipher = sealed["kdf"], sealed["cipher"]
        cost, block, lanes = (kdf["params"][key] for key in ("N", "r", "p"))
        salt, nonce = base64.b64decode(kdf["salt"]), base64.b64decode(cipher["nonce"])
        ciphertext = base64.b64decode(sealed["ciphertext"])
        is_known = (kdf["name"], cipher["name"]) == ("scrypt", "nacl/secretbox")
        is_known &= cost in _SCRYPT_COSTS and (block, lanes) == (_BLOCK, _LANES)
    except (DocumentError, ValueError, TypeError, KeyError):
        raise UsageError(f"{name} is damaged: it is not cosign's key file", path=name) from None
    if not is_known or len(nonce) != _NONCE_BYTES:
        raise UsageError(f"{name} is encrypted in a way that cosign does not use", path=name)
    try:
        box = secret.SecretBox(_derive(password, salt, cost))
        return bytes(box.decrypt(ciphertext, nonce))
    except crypto.CryptoError:
        raise UsageError(f"{name}: wrong password, or the file is damaged", path=name) from None


def _derive(password: str, salt: bytes, cost: int) -> bytes:
    memory = 128 * cost * _BLOCK + 2**20  # RFC 7914, section 5, and some room
    return hashlib.scrypt(
        password.encode(), salt=salt, n=cost, r=_BLOCK, p=_LANES, maxmem=memory, dklen=32
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _module(name: str) -> Any:
    """Import a module of the extra ``sign``. Raises: UsageError if it is missing."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        package = "PyNaCl" if name.startswith("nacl") else "cryptography"
        hint = install_hint("sign")
        raise UsageError(f"keys need the package {package}", hint=hint) from None
