"""Signed models, and policies: which have to be signed, and by whom, in containers' policy.json.

The file is that of podman, skopeo and CRI-O (containers-policy.json(5); containers/image@df7e80d2
signature/policy_config.go, docker/policyconfiguration/naming.go). A model HOST/NAMESPACE/MODEL:TAG
is looked up among the scopes of the transport ``docker``: by its whole name, its repository, the
namespace, the host, and ``*.`` with the host's domains; then the transport's scope ``""`` and the
default. Only the first list that is found counts, and all of its requirements must be met.

Case is ignored in scopes, as a store ignores it in names.

Rule S2: as there, an unknown or missing key, a key that is given twice and an unknown type are
errors, and so is a scope of ``docker`` that no model name can match. Requirements that are valid
there but not supported here (GPG, Fulcio, Rekor, PKI) refuse the models that they are for. Scopes
of other transports are checked, and are for no model.

A signature counts if a known key made it, if it is of the digest of the model's manifest, and if
the identity that it was made for fits the model's name. Its payload is read only after a key has
verified it. cosign compares no identity (specs/SIGNATURE_SPEC.md, "Simple Signing"); here it has
to fit, because a registry could otherwise serve one signed model under the name of another.

What is signed is the digest of a manifest. No blob is read or hashed: the manifest has the digest
of each, and `blobstore.verify` compares their bytes. So a signature stays valid under every name of
the manifest; for which names it counts, its identity says.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from blobstore.errors import BlobStoreError, DocumentError, SignatureError, UsageError, quoted
from blobstore.formats.oci import DockerReference, Payload, Signature
from blobstore.formats.strictjson import InvalidError, parse_object
from blobstore.io.durable import read_own
from blobstore.names import Digest, ModelName
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Home, Signatures, all_names
from blobstore.store.signing.key_pairs import MAX_KEY_FILE, PrivateKey, PublicKey

Match = Callable[[DockerReference, DockerReference], bool]
"""Whether a model, the first identity, accepts a signature that was made for the second."""

_MOST_REASONS = 3
_MADE_FOR = "was made for"
MAX_POLICY = 2**20
_TRANSPORT = "docker"
_KEY_SOURCES = ("keyPath", "keyPaths", "keyData", "keyDatas")
_UNSUPPORTED_KEYS = (
    "fulcio",
    "pki",
    "rekorPublicKeyPath",
    "rekorPublicKeyPaths",
    "rekorPublicKeyData",
    "rekorPublicKeyDatas",
)
_UNSUPPORTED_TYPES = ("signedBy", "signedBaseLayer")
# Every model, hosts under a domain, or a host with perhaps a namespace, a model and a tag: the
# characters are those of names (rule N1), in lower case.
_PART = r"[a-z0-9_][a-z0-9_.-]*"
_SCOPE = re.compile(
    rf"|\*(\.[a-z0-9_-]+)+|{_PART}(:[0-9]{{1,5}})?(/[a-z0-9_][a-z0-9_-]*(/{_PART}(:{_PART})?)?)?",
    re.ASCII,
)


def same_repository(model: DockerReference, signed: DockerReference) -> bool:
    """Accept a signature for the model's repository, with any tag or, as cosign's, without one."""
    return model.repository == signed.repository


def same_identity(model: DockerReference, signed: DockerReference) -> bool:
    """Accept a signature for the model's repository and tag."""
    return model == signed


@dataclass(frozen=True, slots=True)
class AcceptedSignature:
    """A signature that counts: the identity that it was made for, and the key that made it."""

    KEYS = ("identity", "key=key.name")

    identity: DockerReference
    key: PublicKey


@dataclass(frozen=True, slots=True)
class SignedBy:
    """A signature by one of the keys, for an identity that fits.

    ``keys`` reads them when they are needed: a policy may name keys for other models, too.
    """

    keys: Callable[[], Sequence[PublicKey]]
    match: Match = same_repository

    def valid_signatures(
        self, name: ModelName, digest: Digest, signatures: Sequence[Signature]
    ) -> list[AcceptedSignature]:
        """Return the signatures of a model that count; one is enough.

        Raises: SignatureError without one; UsageError for a key that can't be read.
        """
        keys = self.keys()
        judgements = [self._judge(signature, name, digest, keys) for signature in signatures]
        accepted = [one for one in judgements if isinstance(one, AcceptedSignature)]
        if not accepted:
            reasons = [one for one in judgements if isinstance(one, str)]
            wanted = " or ".join(key.name for key in keys)
            message = f"{name} ({digest}) is not signed by {wanted}: {_summary(reasons)}"
            raise SignatureError(message, model=str(name), hint=_hint(name, reasons))
        return accepted

    def _judge(
        self, signature: Signature, name: ModelName, digest: Digest, keys: Sequence[PublicKey]
    ) -> AcceptedSignature | str:
        try:
            value = signature.value
            key = next((key for key in keys if key.verifies(signature.payload, value)), None)
            if key is None:
                return "is by another key"
            payload = Payload.parse(signature.payload)
        except BlobStoreError as error:
            return f"is not valid: {error.message}"
        if payload.digest != digest:
            return f"is for another manifest, {payload.digest}"
        if not self.match(DockerReference.of(name), payload.identity):
            return f"{_MADE_FOR} {payload.identity}"
        return AcceptedSignature(payload.identity, key)


def _hint(name: ModelName, reasons: Sequence[str]) -> str | None:
    if not any(reason.startswith(_MADE_FOR) for reason in reasons):
        return None
    repository = DockerReference.of(name).repository
    return f"Sign it for its repository: blobstore sign NAME --key FILE --identity {repository}"


def _summary(reasons: Sequence[str]) -> str:
    counted = Counter(reasons)
    said = [
        f"{'a signature' if number == 1 else f'{number:,} signatures: each'} {reason}"
        for reason, number in counted.most_common(_MOST_REASONS)
    ]
    if len(counted) > len(said):
        said.append(f"and {len(counted) - len(said):,} other reasons")
    return "; ".join(said) or "it has no signature"


Requirement = SignedBy | str | None
"""Signatures that a model needs; why it is refused; or None."""
_Scopes = Mapping[str, Sequence[Requirement]]


@dataclass(frozen=True, slots=True)
class SignaturePolicy:
    """What models need to be accepted: requirements by scope, and a default for all others."""

    default: Sequence[Requirement]
    scopes: _Scopes

    @classmethod
    def of_key(cls, key: PublicKey, identity: DockerReference | None = None) -> SignaturePolicy:
        """Return the policy that every model is signed by ``key``.

        ``identity``: signatures are to be for its repository, and its tag if it has one, instead
        of for the model's own repository.
        """
        match = same_repository if identity is None else _equal_to(identity)
        return cls([SignedBy(lambda: [key], match)], {})

    @classmethod
    def parse(cls, raw: bytes, what: str = "the policy") -> SignaturePolicy:
        """Return the policy in a policy.json. Keys are read when they are needed.

        Raises: DocumentError (rule S2); LimitExceededError over 1 MiB.
        """
        try:
            return _policy(parse_object(raw, what, rule="S2", limit=MAX_POLICY))
        except InvalidError as error:
            raise DocumentError(f"{what}: {error} (rule S2)", rule="S2") from None

    @classmethod
    def read(cls, path: Path) -> SignaturePolicy:
        """Return the policy in a file. Raises: as `parse`; NotFoundError; StorageError."""
        return cls.parse(read_own(path, MAX_POLICY, follow=True), str(path))

    def check(
        self, name: ModelName, digest: Digest, signatures: Sequence[Signature]
    ) -> list[AcceptedSignature]:
        """Return the signatures by which a model is accepted; an empty list if it needs none.

        Raises: SignatureError if the model is refused; UsageError for a key that can't be read.
        """
        scopes = (self.scopes[scope] for scope in _scopes_of(name) if scope in self.scopes)
        accepted: list[AcceptedSignature] = []
        for requirement in next(scopes, self.default):
            if isinstance(requirement, str):
                raise SignatureError(f"{name} is refused: {requirement}", model=str(name))
            if requirement is not None:
                accepted += requirement.valid_signatures(name, digest, signatures)
        return accepted


def _scopes_of(name: ModelName) -> Iterator[str]:
    identity = DockerReference.of(name)
    yield str(identity).lower()
    parts = identity.repository.split("/")
    for length in range(len(parts), 0, -1):
        yield "/".join(parts[:length])
    domains = parts[0].partition(":")[0].split(".")
    for first in range(1, len(domains)):
        yield f"*.{'.'.join(domains[first:])}"
    yield ""


def _equal_to(wanted: DockerReference) -> Match:
    match = same_repository if wanted.tag is None else same_identity
    return lambda _model, signed: match(wanted, signed)


# The JSON of a policy: these functions raise InvalidError (rule S2)


def _policy(value: dict[str, Any]) -> SignaturePolicy:
    _check_keys(value, "the policy", ("default",), ("transports",))
    transports = {
        transport: {
            scope: _requirements(found, f"{transport}: scope {quoted(scope)}")
            for scope, found in _object(scopes, transport).items()
        }
        for transport, scopes in _object(value.get("transports", {}), "transports").items()
    }
    default = _requirements(value["default"], "default")
    return SignaturePolicy(default, _lower_case(transports.get(_TRANSPORT, {})))


def _lower_case(scopes: _Scopes) -> _Scopes:
    """Return the scopes in lower case, the spelling in which `_scopes_of` looks them up."""
    lowered: dict[str, Sequence[Requirement]] = {}
    for scope, requirements in scopes.items():
        place = f"{_TRANSPORT}: scope {quoted(scope)}"
        if _SCOPE.fullmatch(scope.lower()) is None:
            expected = "HOST[/NAMESPACE[/MODEL[:TAG]]]"
            raise InvalidError(f"no model name can match; expected {expected}", place)
        if scope.lower() in lowered:
            raise InvalidError("differs only in case from another scope", place)
        lowered[scope.lower()] = requirements
    return lowered


def _requirements(value: Any, place: str) -> list[Requirement]:
    if not isinstance(value, list) or not value:
        raise InvalidError("expected a list of at least one requirement", place)
    return [_requirement(each, place) for each in value]


def _requirement(value: Any, place: str) -> Requirement:
    kind = _object(value, place).get("type")
    if kind == "sigstoreSigned":
        return _key_requirement(value, place)
    if kind in _UNSUPPORTED_TYPES:
        return f"the policy requires {kind!r}, which is not supported"
    if kind not in ("insecureAcceptAnything", "reject"):
        raise InvalidError(f"unknown type of requirement {quoted(kind)}", place)
    _check_keys(value, place, ("type",))
    return "the policy rejects it" if kind == "reject" else None


def _key_requirement(value: dict[str, Any], place: str) -> Requirement:
    _check_keys(value, place, ("type",), (*_KEY_SOURCES, *_UNSUPPORTED_KEYS, "signedIdentity"))
    match = _match(value.get("signedIdentity"), place)
    if unsupported := [key for key in _UNSUPPORTED_KEYS if key in value]:
        return f"the policy requires {unsupported[0]!r}, which is not supported"
    given = [key for key in _KEY_SOURCES if key in value]
    if len(given) != 1:
        raise InvalidError(f"expected one of {', '.join(_KEY_SOURCES)}", place)
    (source,) = given
    texts = value[source] if source.endswith("s") else [value[source]]
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        raise InvalidError(f"{source}: expected text", place)
    is_path = source.startswith("keyPath")
    load = _key_at if is_path else partial(_key_in, name=f"the key of {place}")
    # Once for all models: a store may have thousands.
    return SignedBy(cache(lambda: [load(text) for text in texts]), match)


def _match(value: Any, place: str) -> Match:
    """Return what ``signedIdentity`` says; a signature for the same tag if it is missing.

    Names of models always have a tag, so matchRepoDigestOrExact is matchExact.
    """
    value = _object({"type": "matchExact"} if value is None else value, place)
    kind = value.get("type")
    if kind in ("matchExact", "matchRepoDigestOrExact", "matchRepository"):
        _check_keys(value, place, ("type",))
        return same_repository if kind == "matchRepository" else same_identity
    if kind in ("exactReference", "exactRepository"):
        key = f"docker{kind.removeprefix('exact')}"
        _check_keys(value, place, ("type", key))
        try:
            exact = DockerReference.parse(str(value[key]))
        except UsageError as error:
            raise InvalidError(f"{key}: {error.message}", place) from None
        if kind == "exactReference" and exact.tag is None:
            raise InvalidError("dockerReference: expected a tag", place)
        return _equal_to(exact)
    if kind == "remapIdentity":
        _check_keys(value, place, ("type", "prefix", "signedPrefix"))
        return _remap(str(value["prefix"]), str(value["signedPrefix"]))
    raise InvalidError(f"unknown signedIdentity {quoted(kind)}", place)


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidError("expected an object", place)
    return value


def _check_keys(
    value: dict[str, Any], place: str, needed: Sequence[str], others: Sequence[str] = ()
) -> None:
    for key in sorted(value.keys() - {*needed, *others}):
        raise InvalidError(f"unknown key {quoted(key)}", place)
    for key in needed:
        if key not in value:
            raise InvalidError(f"no {key}", place)


def _remap(prefix: str, signed_prefix: str) -> Match:
    def matches(model: DockerReference, signed: DockerReference) -> bool:
        repository = model.repository
        if repository == prefix or repository.startswith(f"{prefix}/"):
            repository = signed_prefix + repository.removeprefix(prefix)
        return signed == DockerReference(repository, model.tag)

    return matches


def _key_at(path: str) -> PublicKey:
    try:
        raw = read_own(Path(path), MAX_KEY_FILE, follow=True)
    except BlobStoreError as error:
        raise UsageError(f"a key of the policy: {error.message}", path=path) from error
    return PublicKey.parse(raw, path)


def _key_in(data: str, name: str) -> PublicKey:
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:
        raise UsageError(f"{name} is not base64", path=name) from None
    return PublicKey.parse(raw, name)


# Models


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
    accepted: Annotated[Sequence[AcceptedSignature], "those that count"] = ()
    error: Annotated[SignatureError | None, "what is missing"] = None

    @property
    def is_accepted(self) -> bool:
        """True without an error."""
        return self.error is None


def sign_model(
    name: str | ModelName,
    store: Home | StorePlace,
    key: PrivateKey,
    *,
    identity: DockerReference | None = None,
) -> SignedModel:
    """Sign the digest of a model's manifest, and keep the signature in the home.

    The model may be packed.

    ``identity``: of the signature (None: the repository of the model, as cosign writes it).

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError; UsageError for a
    home that keeps no signatures; LimitExceededError; StorageError.
    """
    home = opened_store(store)
    holder = home.holder(name)
    stored = holder.find(name)
    digest = holder.manifests.read(stored).digest
    wanted = identity or DockerReference(DockerReference.of(stored).repository)
    payload = Payload(digest, wanted).encode()
    signature = Signature.of(payload, key.sign(payload))
    added = _signatures(home).add(stored, digest, [signature])
    return SignedModel(stored, digest, wanted, key.public.digest, is_new=added > 0)


def check_signatures(
    names: Iterable[str | ModelName], store: Home | StorePlace, policy: SignaturePolicy
) -> list[CheckedModel]:
    """Check the signatures of models; those of all models if ``names`` is empty, packed ones too.

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError; UsageError for a
    home that keeps no signatures, or a key that can't be read; CorruptDataError for a signature
    that can't be read; StorageError.
    """
    home = opened_store(store)
    kept = _signatures(home)
    holders = [(home.holder(name), name) for name in list(names) or all_names(home)]
    stored = [(holder, holder.find(name)) for holder, name in holders]
    return [
        _check_model(name, one.manifests.read(name).digest, kept, policy) for one, name in stored
    ]


def _check_model(
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
