"""Signatures of models, in cosign's form: what is signed, and how registries and files keep it.

What is signed is a *payload*: a small JSON document ("simple signing") with the digest of a
manifest and the repository for which it is signed. A signature is the payload and annotations, one
of which is the signature of the payload's bytes in base64. A registry keeps the signatures of a
manifest as layers of an OCI manifest under the tag ``sha256-<hex>.sig``. In a file, a signature is
such a layer's descriptor, which contains the payload as ``data`` (OCI image-spec, descriptor.md).

Rule S1: a payload has exactly the keys below, and a digest and identity that are valid; a manifest
of signatures follows rule M1, and annotations are texts. Layers of other media types are kept, and
are not signatures. Sources: sigstore/cosign@d6d86c22 specs/SIGNATURE_SPEC.md, pkg/oci/static;
containers/image@df7e80d2 signature/internal/sigstore_payload.go, which is as strict.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.errors import DigestMismatchError, DocumentError, InvalidNameError, quoted
from blobstore.formats.documents import Manifest
from blobstore.formats.oci import (
    IMAGE_CONFIG_MEDIA_TYPE,
    OCI_MANIFEST_MEDIA_TYPE,
    OciDescriptor,
)
from blobstore.formats.strictjson import (
    check_limit,
    encode,
    parse_document,
    parse_object,
)
from blobstore.names import Digest, ModelName

SIGNATURE_MEDIA_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE_KEY = "dev.cosignproject.cosign/signature"
"""The annotation that has the signature of the payload's bytes, in base64."""
PAYLOAD_TYPE = "cosign container image signature"

MAX_PAYLOAD = 64 * 2**10
MAX_ANNOTATIONS = 64 * 2**10
"""Bytes of the annotations of one signature: certificates and entries of a log, too."""
MAX_SIGNATURES = 1000
"""Signatures of one manifest, as in cosign (pkg/oci/remote/signatures.go `maxLayers`)."""
MAX_SIGNATURES_MANIFEST = 4 * 2**20
"""Bytes of a manifest of signatures: what every registry takes (OCI distribution-spec, "Push")."""
MAX_FILE = 2 * (MAX_PAYLOAD + MAX_ANNOTATIONS)

_DOCKER = "docker.io"
_REFERENCE = re.compile(
    r"(?P<repository>(?:[a-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9._/-]+)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_MAX_REFERENCE = 512
_TAG = re.compile(r"sha256-[0-9a-f]{64}\.sig", re.ASCII)


@dataclass(frozen=True, slots=True)
class DockerReference:
    """The identity of a signature: a repository with its host, and a tag or None.

    As text it is a docker reference. Case is ignored in a repository, as in the names of models.
    """

    repository: str
    tag: str | None = None

    @classmethod
    def parse(cls, reference: str) -> DockerReference:
        """Return the identity in a docker reference; a digest in it is checked and left out.

        Docker Hub's host may be missing, or be index.docker.io. Source: containers/image@df7e80d2
        docker/reference/normalize.go `splitDockerDomain`. Raises: InvalidNameError (rule S1).
        """
        match = (
            _REFERENCE.fullmatch(reference.lower()) if len(reference) <= _MAX_REFERENCE else None
        )
        if match is None:
            raise InvalidNameError(f"not a docker reference: {quoted(reference)}", rule="S1")
        host, _, path = match["repository"].partition("/")
        if not path or not ({".", ":"} & {*host} or host == "localhost"):
            host, path = _DOCKER, match["repository"]
        if host in (_DOCKER, f"index.{_DOCKER}"):
            host, path = _DOCKER, path if "/" in path else f"library/{path}"
        tag = match["tag"] and reference[match.start("tag") : match.end("tag")]
        return cls(f"{host}/{path}", tag)

    @classmethod
    def of(cls, name: ModelName) -> DockerReference:
        *repository, tag = name.path_parts
        return cls("/".join(repository).lower(), tag)

    def __str__(self) -> str:
        return self.repository if self.tag is None else f"{self.repository}:{self.tag}"


@dataclass(frozen=True, slots=True)
class Payload:
    """What is signed: the digest of a manifest, and the identity for which it is signed."""

    digest: Digest
    identity: DockerReference

    @classmethod
    def parse(cls, raw: bytes, what: str = "the payload") -> Payload:
        """Return what a payload says; user-defined keys under ``optional`` are ignored.

        Raises: DocumentError (rule S1); LimitExceededError over 64 KiB.
        """
        whole = parse_object(raw, what, rule="S1", limit=MAX_PAYLOAD)
        try:
            optional, critical = whole["optional"], whole["critical"]
            digest = critical["image"]["docker-manifest-digest"]
            identity = critical["identity"]["docker-reference"]
            payload = cls(Digest.parse(digest), DockerReference.parse(identity))
        except (LookupError, TypeError, AttributeError):
            payload = None
        except ValueError as error:  # errors of names and digests are ValueErrors
            raise DocumentError(f"{what}: {error} (rule S1)", rule="S1") from None
        if payload is None or whole != _payload(digest, identity, optional):
            raise DocumentError(f"{what}: not a payload, or with other keys (rule S1)", rule="S1")
        if not isinstance(optional, dict | None):
            raise DocumentError(f"{what}: optional is not an object (rule S1)", rule="S1")
        return payload

    def encode(self) -> bytes:
        return encode(_payload(str(self.digest), str(self.identity), None))


def _payload(digest: str, identity: str, optional: object) -> dict[str, Any]:
    critical = {
        "identity": {"docker-reference": identity},
        "image": {"docker-manifest-digest": digest},
        "type": PAYLOAD_TYPE,
    }
    return {"critical": critical, "optional": optional}


@dataclass(frozen=True, slots=True)
class Signature:
    """A payload's bytes, and annotations. Nothing in it is trusted before a key verifies it."""

    payload: bytes
    annotations: Mapping[str, str]

    @classmethod
    def of(cls, payload: bytes, value: bytes) -> Signature:
        return cls(payload, {SIGNATURE_KEY: base64.b64encode(value).decode()})

    @classmethod
    def parse(cls, raw: bytes, what: str) -> Signature:
        """Return the signature in a file: a descriptor with ``data``.

        Raises: DocumentError (rule S1), DigestMismatchError, LimitExceededError.
        """
        value = parse_object(raw, what, rule="S1", limit=MAX_FILE)
        layer = SignatureLayer.read(value, what)
        if layer is None:
            raise DocumentError(f"{what} is not the descriptor of a signature (rule S1)", rule="S1")
        return layer.signature(_decode(value.get("data"), f"{what}: data"))

    @property
    def value(self) -> bytes:
        return _decode(self.annotations.get(SIGNATURE_KEY), "the signature")

    @property
    def layer(self) -> dict[str, Any]:
        """Its descriptor as a layer of a manifest, in go-containerregistry's order of keys."""
        return {
            "mediaType": SIGNATURE_MEDIA_TYPE,
            "size": len(self.payload),
            "digest": str(Digest.of(self.payload)),
            "annotations": dict(sorted(self.annotations.items())),
        }

    def encode(self) -> bytes:
        data = base64.b64encode(self.payload).decode()
        return encode({**self.layer, "data": data})


class SignatureLayer(OciDescriptor):
    """A layer with a signature: the descriptor of its payload, and its annotations."""

    __slots__ = ()

    @classmethod
    def read(cls, value: object, what: str) -> SignatureLayer | None:
        """Return the layer that a descriptor describes, None for another media type.

        Raises: DocumentError (rule S1); LimitExceededError for a large payload or annotations.
        """
        layer = parse_document(cls, value, what, "S1")
        if layer.media_type != SIGNATURE_MEDIA_TYPE:
            return None
        nbytes = sum(len(part) for item in (layer.annotations or {}).items() for part in item)
        check_limit(f"{what}: its annotations", nbytes, "characters", MAX_ANNOTATIONS, "S1")
        check_limit(f"{what}: its payload", layer.size, "bytes", MAX_PAYLOAD, "S1")
        return layer

    def signature(self, payload: bytes) -> Signature:
        """Return the signature with its payload. Raises: DigestMismatchError for other bytes."""
        if len(payload) != self.size or Digest.of(payload) != self.digest:
            message = f"the payload of a signature does not match its digest {self.digest}"
            raise DigestMismatchError(message, blob=str(self.digest))
        return Signature(payload, self.annotations or {})


@dataclass(frozen=True, slots=True)
class SignatureManifest:
    """The manifest under a ``.sig`` tag, and its config's bytes if the manifest is new.

    To read: fetch the tag, `parse`, fetch each layer's payload, and make `SignatureLayer.signature`
    of both. To add: `of` or `extended`; upload payloads, ``config`` and ``raw`` if it is another.
    """

    value: dict[str, Any]
    raw: bytes
    layers: tuple[SignatureLayer, ...]
    config: bytes | None = None

    @classmethod
    def parse(
        cls, raw: bytes, what: str = "the manifest of signatures", config: bytes | None = None
    ) -> SignatureManifest:
        """Return the manifest in ``raw``.

        Raises: DocumentError (rule M1 or S1); LimitExceededError over 4 MiB, 1000 layers, or the
        limits of a layer.
        """
        value = parse_object(raw, what, rule="M1", limit=MAX_SIGNATURES_MANIFEST)
        if isinstance(layers := value.get("layers"), list):
            check_limit(what, len(layers), "layers", MAX_SIGNATURES, "S1")
        parse_document(Manifest, value, what, "M1")
        signed = (SignatureLayer.read(layer, what) for layer in value["layers"])
        return cls(value, raw, tuple(layer for layer in signed if layer is not None), config)

    @classmethod
    def of(cls, signatures: Sequence[Signature]) -> SignatureManifest:
        """Return a new manifest of them; of none, its ``raw`` is empty."""
        shell = dict.fromkeys(("schemaVersion", "mediaType", "config", "layers"))
        return cls(shell | {"schemaVersion": 2, "layers": []}, b"", ()).with_signatures(signatures)

    def with_signatures(self, signatures: Sequence[Signature]) -> SignatureManifest:
        """Return the manifest with those signatures added that it lacks; itself if it has all.

        Payloads are stored as they are, so their digests are also the config's ``diff_ids``.
        Raises: LimitExceededError for more than 1000 layers.
        """
        there = [(layer.digest, layer.annotations or {}) for layer in self.layers]
        layers = list(self.value["layers"])
        for one in signatures:
            if (key := (Digest.of(one.payload), one.annotations)) not in there:
                there.append(key)
                layers.append(one.layer)
        if len(there) == len(self.layers):
            return self
        rootfs = {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]}
        config = encode({"architecture": "", "os": "", "config": {}, "rootfs": rootfs})
        digest = str(Digest.of(config))
        entry = {"mediaType": IMAGE_CONFIG_MEDIA_TYPE, "size": len(config), "digest": digest}
        # It may be missing (OCI manifest.md).
        kind = self.value.get("mediaType") or OCI_MANIFEST_MEDIA_TYPE
        changes = {"mediaType": kind, "config": entry, "layers": layers}
        return self.parse(encode(self.value | changes), config=config)


def tag_of(digest: Digest) -> str:
    """Return the tag under which a repository has the signatures of a manifest."""
    return f"{digest.file_name}.sig"


def is_tag_of_signatures(tag: str) -> bool:
    """Return True for a tag that `tag_of` makes."""
    return _TAG.fullmatch(tag) is not None


def _decode(value: Any, what: str) -> bytes:
    """Return the bytes of a text in base64 (RFC 4648, section 4). Raises: DocumentError.

    It may have line breaks, as for Go's encoding/base64: signatures that openssl wrote have some.
    """
    try:
        return base64.b64decode("".join(value.splitlines()), validate=True)
    except (AttributeError, ValueError):  # a binascii.Error is a ValueError
        raise DocumentError(f"{what} is not base64 (rule S1)", rule="S1") from None
