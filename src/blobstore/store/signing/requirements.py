"""Requirements: what the signatures of a model must be for the model to be accepted.

A signature counts if a known key made it, if it is of the digest of the model's manifest, and if
the identity that it was made for fits the model's name. Its payload is read only after a key has
verified it. cosign compares no identity (specs/SIGNATURE_SPEC.md, "Simple Signing"); here it has
to fit, because a registry could otherwise serve one signed model under the name of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from blobstore.errors import BlobStoreError, SignatureError
from blobstore.formats.signatures import DockerReference, Payload, Signature
from blobstore.names import Digest, ModelName
from blobstore.store.signing.key_pairs import PublicKey

Match = Callable[[DockerReference, DockerReference], bool]
"""Whether a model, the first identity, accepts a signature that was made for the second."""

_MOST_REASONS = 3
_MADE_FOR = "was made for"


def same_repository(model: DockerReference, signed: DockerReference) -> bool:
    """Accept a signature for the model's repository, with any tag or, as cosign's, without one."""
    return model.repository == signed.repository


def same_identity(model: DockerReference, signed: DockerReference) -> bool:
    """Accept a signature for the model's repository and tag."""
    return model == signed


@dataclass(frozen=True, slots=True)
class Accepted:
    """A signature that counts: the identity that it was made for, and the key that made it."""

    identity: DockerReference
    key: PublicKey


class Requirement(Protocol):
    """One requirement of a policy."""

    def accepted(
        self, name: ModelName, digest: Digest, signatures: Sequence[Signature]
    ) -> list[Accepted]:
        """Return the signatures that count; an empty list if none is required.

        Raises: SignatureError if the requirement is not met; UsageError for a key that can't be
        read.
        """


@dataclass(frozen=True, slots=True)
class Anything:
    """Every model is accepted, signed or not."""

    def accepted(
        self, _name: ModelName, _digest: Digest, _signatures: Sequence[Signature]
    ) -> list[Accepted]:
        return []


@dataclass(frozen=True, slots=True)
class Nothing:
    """No model is accepted, for a reason."""

    reason: str

    def accepted(
        self, name: ModelName, _digest: Digest, _signatures: Sequence[Signature]
    ) -> list[Accepted]:
        raise SignatureError(f"{name} is refused: {self.reason}", model=str(name))


@dataclass(frozen=True, slots=True)
class SignedBy:
    """A signature by one of the keys, for an identity that fits.

    ``keys`` reads them when they are needed: a policy may name keys for other models, too.
    """

    keys: Callable[[], Sequence[PublicKey]]
    match: Match = same_repository

    def accepted(
        self, name: ModelName, digest: Digest, signatures: Sequence[Signature]
    ) -> list[Accepted]:
        """See `Requirement`: one signature that counts is enough."""
        keys = self.keys()
        found = [self._judged(signature, name, digest, keys) for signature in signatures]
        accepted = [one for one in found if isinstance(one, Accepted)]
        if not accepted:
            reasons = [one for one in found if isinstance(one, str)]
            wanted = " or ".join(key.name for key in keys)
            message = f"{name} ({digest}) is not signed by {wanted}: {_summary(reasons)}"
            raise SignatureError(message, model=str(name), hint=_hint(name, reasons))
        return accepted

    def _judged(
        self, signature: Signature, name: ModelName, digest: Digest, keys: Sequence[PublicKey]
    ) -> Accepted | str:
        """Return the signature as accepted, or why it does not count."""
        try:
            value = signature.value
            key = next((key for key in keys if key.verifies(signature.payload, value)), None)
            if key is None:
                return "is by another key"
            payload = Payload.parse(signature.payload)
        except BlobStoreError as error:
            return f"is not valid: {error.message}"
        if payload.digest != digest:
            return f"is of another manifest, {payload.digest}"
        if not self.match(DockerReference.of(name), payload.identity):
            return f"{_MADE_FOR} {payload.identity}"
        return Accepted(payload.identity, key)


def _hint(name: ModelName, reasons: Sequence[str]) -> str | None:
    """Return what to do if the model is signed, but for another identity."""
    if not any(reason.startswith(_MADE_FOR) for reason in reasons):
        return None
    repository = DockerReference.of(name).repository
    return f"Sign it for its repository: blobstore sign NAME --key FILE --identity {repository}"


def _summary(reasons: Sequence[str]) -> str:
    """Return why no signature counts, each reason once."""
    if not reasons:
        return "it has no signature"
    counted = Counter(reasons)
    said = [
        f"{'a signature' if number == 1 else f'{number:,} signatures: each'} {reason}"
        for reason, number in counted.most_common(_MOST_REASONS)
    ]
    more = len(counted) - len(said)
    return "; ".join(said) + (f"; and {more:,} other reasons" if more > 0 else "")
