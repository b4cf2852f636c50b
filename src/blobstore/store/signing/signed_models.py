"""Signs models, and checks their signatures. What is signed is the digest of a manifest.

No blob is read or hashed: the manifest has the digest of each, and `blobstore.verify` compares
their bytes. A signature of a digest stays valid under every name of the manifest; for which names
it counts, its identity says (signature_policy.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from blobstore.errors import SignatureError, UsageError
from blobstore.formats.signatures import DockerReference, Payload, Signature
from blobstore.names import Digest, ModelName
from blobstore.store.holders import holder_of
from blobstore.store.ports import Home, Readable, Signatures
from blobstore.store.signing.key_pairs import PrivateKey
from blobstore.store.signing.signature_policy import Accepted, SignaturePolicy


@dataclass(frozen=True, slots=True)
class SignedModel:
    """A model that was signed."""

    name: ModelName
    digest: Annotated[Digest, "of its manifest, which is what is signed"]
    identity: Annotated[DockerReference, "for which it is signed"]
    key: Annotated[Digest, "sha256 of the public key, as SubjectPublicKeyInfo in DER"]
    is_new: Annotated[bool, "false if it had this signature"]


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """Whether a model is signed as a key or a policy requires.

    Without an error, ``accepted`` is empty where the policy requires no signature.
    """

    KEYS = (
        "name",
        "digest",
        "accepted=is_accepted",
        "found=signatures",
        "signatures=accepted",
        "error?",
    )

    name: ModelName
    digest: Annotated[Digest, "of its manifest, which is what is signed"]
    signatures: Annotated[int, "signatures that the model has"]
    accepted: Annotated[Sequence[Accepted], "those that count"] = ()
    error: Annotated[SignatureError | None, "what is missing"] = None

    @property
    def is_accepted(self) -> bool:
        """True without an error."""
        return self.error is None


def sign_model(
    name: str | ModelName, home: Home, key: PrivateKey, *, identity: DockerReference | None = None
) -> SignedModel:
    """Sign the digest of a model's manifest, and keep the signature in the home.

    The model may be packed.

    ``identity``: of the signature (None: the repository of the model, as cosign writes it).

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError; UsageError for a
    home that keeps no signatures; LimitExceededError; StorageError.
    """
    holder = holder_of(name, home)
    found = holder.find(name)
    digest = holder.manifests.read(found).digest
    whole = DockerReference.of(found)
    wanted = DockerReference(whole.repository) if identity is None else identity
    payload = Payload(digest, wanted).encode()
    signature = Signature.of(payload, key.sign(payload))
    added = _signatures(home).add(found, digest, [signature])
    return SignedModel(found, digest, wanted, key.public.digest, is_new=added > 0)


def check_signatures(
    names: Iterable[str | ModelName], home: Home, policy: SignaturePolicy
) -> list[CheckedModel]:
    """Check the signatures of models; those of all models if ``names`` is empty, packed ones too.

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError; UsageError for a
    home that keeps no signatures, or a key that can't be read; CorruptDataError for a signature
    that can't be read; StorageError.
    """
    kept = _signatures(home)
    holders = [(holder_of(name, home), name) for name in names]
    found = [(holder, holder.find(name)) for holder, name in holders] or _all_models(home)
    return [_checked(name, one.manifests.read(name).digest, kept, policy) for one, name in found]


def _all_models(home: Home) -> list[tuple[Readable, ModelName]]:
    whole = home.manifests.names()
    found: list[tuple[Readable, ModelName]] = [(home, name) for name in whole]
    if (packed := home.packed) is not None:
        found += ((packed, name) for name in packed.manifests.names() if name not in whole)
    return found


def _checked(
    name: ModelName, digest: Digest, kept: Signatures, policy: SignaturePolicy
) -> CheckedModel:
    signatures = kept.read(name, digest)
    try:
        accepted = policy.check(name, digest, signatures)
    except SignatureError as error:
        return CheckedModel(name, digest, len(signatures), error=error)
    return CheckedModel(name, digest, len(signatures), accepted)


def _signatures(home: Home) -> Signatures:
    if home.signatures is None:
        raise UsageError(f"{home.address} keeps no signatures")
    return home.signatures
