"""OCI's documents: artifacts, image layouts, ModelPack's config, and signatures. Pure.

Rule A2: ``oci-layout`` has the version 1.0.0, and ``index.json`` is an image index whose entries
are image manifests. A nested index is refused, and so are digests other than sha256.

An entry is a descriptor of OCI's media type for manifests, also where the manifest's own bytes say
docker's, as those of Ollama and of this package do. containers/image finds a named entry of
docker's media type since v5.35 only, and refuses Ollama's media types of layers in it. Under OCI's
media type, skopeo copies the manifest, and keeps its bytes.

Two annotations hold a model's name. ``org.opencontainers.image.ref.name`` is the short one, which
follows the file's name in ``skopeo copy oci-archive:FILE:NAME``. ``io.containerd.image.name`` is
the full one.

ModelPack: each file of a model is one layer: its raw bytes, and its path as an annotation. So a
file that is a blob of the store is the same blob in the artifact.

*Signatures* have cosign's form. What is signed is a *payload*: a small JSON document ("simple
signing") with the digest of a manifest and the repository for which it is signed. A signature is
the payload and annotations, one of which is the signature of the payload's bytes in base64. A
registry keeps the signatures of a manifest as layers of an OCI manifest under the tag
``sha256-<hex>.sig``. In a file, a signature is such a layer's descriptor, which contains the
payload as ``data`` (OCI image-spec, descriptor.md).

Rule S1: a payload has exactly the keys of `Payload.encode`, and a digest and identity that are
valid; a manifest of signatures follows rule M1, and annotations are texts. Layers of other media
types are kept, and are not signatures. Sources: sigstore/cosign@d6d86c22 specs/SIGNATURE_SPEC.md,
pkg/oci/static; containers/image@df7e80d2 signature/internal/sigstore_payload.go, which is as
strict.

Other sources: opencontainers/image-spec manifest.md, descriptor.md ("annotations"), layer.md,
config.md, image-layout.md, annotations.md ("ref.name"), image-index.md; containers/image@df7e80d2
oci/layout/oci_transport.go ``getManifestDescriptor`` (and v5.22.0); containerd/containerd
images/annotations.go ``AnnotationImageName``; modelpack/model-spec@d78bf323 docs/spec.md,
docs/config.md, docs/annotations.md, schema/config-schema.json, specs-go/v1/mediatype.go. What
ModelPack's readers need beyond that: docker/model-runner@642c7211
pkg/distribution/internal/bundle/unpack.go ``UnpackFromLayers`` (the artifact type, a path in each
layer), pkg/distribution/types/config.go and modelpack/types.go ``GetFormat``;
modelpack/modctl@c8e484d6 pkg/codec/raw.go ``Decode``, pkg/modelfile/constants.go (which files are
what).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from blobstore.errors import (
    DigestMismatchError,
    DocumentError,
    InvalidNameError,
    UnsupportedSourceError,
    quoted,
)
from blobstore.formats.documents import (
    MANIFEST_MEDIA_TYPE,
    MAX_MANIFEST,
    Descriptor,
    Manifest,
)
from blobstore.formats.dtypes import DType
from blobstore.formats.strictjson import (
    Document,
    Key,
    check_limit,
    encode,
    parse_document,
    parse_object,
    without_none,
)
from blobstore.names import Digest, ModelName

OCI_MANIFEST_MEDIA_TYPE = "application/vnd.oci.image.manifest.v1+json"
IMAGE_CONFIG_MEDIA_TYPE = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER_MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar"
_IMAGE = "container image"
# The kinds of manifests, by how the media types of their layers begin.
_FOREIGN = {
    "application/vnd.cncf.model.": "ModelPack artifact",
    "application/vnd.oci.image.layer.": _IMAGE,
    "application/vnd.docker.image.rootfs.": _IMAGE,
    "application/vnd.docker.ai.": "model of Docker Model Runner",
    "application/vnd.kitops.": "ModelKit of KitOps",
}


@dataclass(frozen=True, slots=True)
class OciDescriptor(Descriptor):
    """A layer of an artifact, or a manifest of an index."""

    annotations: Mapping[str, str] | None = field(default=None, compare=False)

    @property
    def document(self) -> dict[str, Any]:
        annotations = without_none({"annotations": self.annotations})
        return super(OciDescriptor, self).document | annotations

    @property
    def model(self) -> ModelName | None:
        for key in (_FULL_NAME, _SHORT_NAME):
            try:
                return ModelName.parse((self.annotations or {})[key])
            except (KeyError, InvalidNameError):
                continue
        return None


def artifact_manifest(
    config: Descriptor, layers: Iterable[Descriptor], *, artifact_type: str | None = None
) -> Manifest:
    """Return the manifest of an artifact: a line of compact JSON, without a time."""
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST_MEDIA_TYPE,
        "artifactType": artifact_type,
        "config": config.document,
        "layers": [layer.document for layer in layers],
    }
    raw = encode(without_none(document))
    return Manifest.parse(raw, "the manifest of an artifact")


def under_oci(manifest: Manifest) -> Manifest:
    """Return a model's manifest under OCI's media types: of the same blobs, with another digest.

    Tools for containers refuse layers of unknown types under docker's media type. Its config is
    one of an image already.
    """
    config = manifest.config
    if config is not None:
        config = replace(config, media_type=IMAGE_CONFIG_MEDIA_TYPE)
    return replace(manifest, media_type=OCI_MANIFEST_MEDIA_TYPE, config=config, parsed=b"")


def check_is_model(manifest: Manifest, what: str) -> None:
    """Raise UnsupportedSourceError for an artifact that holds files, not a stored model.

    ``what`` names it.
    """
    if kind := foreign_kind(manifest):
        raise UnsupportedSourceError(
            f"{what} is a {kind}, not a stored model",
            hint="Extract its files with its own tool, then import the folder.",
        )


def foreign_kind(manifest: Manifest) -> str:
    """Return what an artifact of another program is; "" for a stored model."""
    types = [layer.media_type for layer in manifest.layers]
    return next(
        (kind for begin, kind in _FOREIGN.items() for one in types if one.startswith(begin)), ""
    )


LAYOUT_PATH = "oci-layout"
INDEX_PATH = "index.json"
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
MAX_INDEX = 16 * 2**20
"""Bytes of an index.json."""
MAX_ENTRIES = 10_000
# Bytes of all manifests of an index, which are kept in memory.
_MAX_MANIFESTS = 256 * 2**20

_SHORT_NAME = "org.opencontainers.image.ref.name"
_FULL_NAME = "io.containerd.image.name"


def blob_path(digest: Digest) -> str:
    """Return the path of a blob in a layout."""
    return f"blobs/sha256/{digest.hex}"


@dataclass(frozen=True, slots=True)
class _Layout(Document):
    version: Annotated[Literal["1.0.0"], Key("imageLayoutVersion")]


@dataclass(frozen=True, slots=True)
class _Index(Document):
    schema_version: Annotated[Literal[2], Key("schemaVersion")]
    manifests: list[OciDescriptor]
    media_type: Annotated[
        Literal["application/vnd.oci.image.index.v1+json"] | None, Key("mediaType")
    ] = None


def parse_index(raw: bytes, what: str) -> list[OciDescriptor]:
    """Return the manifests of the image index in ``raw``, in order.

    Raises: DocumentError (rule A2), also for two models of one name; LimitExceededError for
    more than 10,000 manifests, or more than 256 MiB of them.
    """
    value = parse_object(raw, what, rule="A2", limit=MAX_INDEX)
    if isinstance(entries := value.get("manifests"), list):
        check_limit(what, len(entries), "manifests", MAX_ENTRIES, "A2")
    manifests = parse_document(_Index, value, what, "A2").manifests
    for number, entry in enumerate(manifests):
        if entry.media_type not in (OCI_MANIFEST_MEDIA_TYPE, MANIFEST_MEDIA_TYPE):
            place = f"{what}: manifests.{number}.mediaType"
            raise DocumentError(f"{place}: not that of an image manifest (rule A2)", rule="A2")
        check_limit(what, entry.size, "bytes of a manifest", MAX_MANIFEST, "A2")
    unique = {entry.digest: entry.size for entry in manifests}
    check_limit(what, sum(unique.values()), "bytes of manifests", _MAX_MANIFESTS, "A2")
    names = [entry.model for entry in manifests if entry.model is not None]
    if len(set(names)) < len(names):
        raise DocumentError(f"{what}: two models have the same name (rule A2)", rule="A2")
    return manifests


def check_layout(raw: bytes, what: str) -> None:
    """Raise DocumentError (rule A2) unless ``raw`` is an ``oci-layout`` of version 1.0.0."""
    parse_document(_Layout, parse_object(raw, what, rule="A2", limit=MAX_INDEX), what, "A2")


def encode_index(models: Iterable[tuple[ModelName, bytes]]) -> bytes:
    """Return the index.json of models, each with its manifest's bytes, in their order."""
    entries = [
        {
            "mediaType": OCI_MANIFEST_MEDIA_TYPE,
            "digest": str(Digest.of(raw)),
            "size": len(raw),
            "annotations": {_FULL_NAME: "/".join(name.path_parts[:3]) + f":{name.tag}"}
            | {_SHORT_NAME: str(name)},
        }
        for name, raw in models
    ]
    return encode(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": entries,
        }
    )


MODELPACK_ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
MODELPACK_CONFIG_MEDIA_TYPE = "application/vnd.cncf.model.config.v1+json"
PATH_ANNOTATIONS = ("org.cncf.model.filepath", "org.opencontainers.image.title")
"""Where a layer's path is: ModelPack's key, and the one that oras reads (opencontainers/image-spec
annotations.md)."""

# What files are, by their suffixes.
_KINDS = {
    **dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".gguf"), "weight"),
    **dict.fromkeys((".md", ".pdf", ".rst"), "doc"),
    **dict.fromkeys((".py", ".sh", ".ipynb"), "code"),
}
_TEXTS = ("license", "licence", "copying", "notice", "readme")
_PRECISIONS = {
    DType.F32: "float32",
    DType.F64: "float64",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3",
    DType.F8_E5M2: "float8_e5m2",
}
_SCALES = (("Q", 10**15), ("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))


def layer_media_type(path: str) -> str:
    """Return the media type of a file's layer: weights, documentation, code, else configuration."""
    name = PurePosixPath(path.lower())
    otherwise = "doc" if name.stem.startswith(_TEXTS) else "weight.config"
    return f"application/vnd.cncf.model.{_KINDS.get(name.suffix, otherwise)}.v1.raw"


def modelpack_config(
    layers: Iterable[Digest],
    *,
    name: str,
    architecture: str | None,
    family: str | None,
    parameters: int,
    dtypes: Sequence[DType] = (),
    quantization: Sequence[str] = (),
) -> bytes:
    """Return the config of the artifact that has these layers: compact JSON, without a time.

    ``dtypes``: of its values, the most frequent first. ``quantization``: the types of its codes, in
    the same order. ``architecture`` and ``family``: those of its config.json, None if unknown.
    """
    precisions = [_PRECISIONS[dtype] for dtype in dtypes if dtype in _PRECISIONS]
    config = {
        "architecture": architecture,
        "format": "safetensors",
        "paramSize": param_size(parameters),
        "precision": ",".join(precisions) or None,
        "quantization": ",".join(quantization) or None,
    }
    return encode(
        {
            "descriptor": without_none({"family": family, "name": name}),
            "modelfs": {"type": "layers", "diffIds": [str(digest) for digest in layers]},
            "config": without_none(config),
        }
    )


def param_size(parameters: int) -> str | None:
    """Return a number of parameters as ModelPack writes it, such as ``6.7B``; None below 1,000."""
    for letter, scale in _SCALES:
        if parameters >= scale:
            tenths = (10 * parameters + scale // 2) // scale
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth}{letter}" if tenth else f"{whole}{letter}"
    return None


SIGNATURE_MEDIA_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE_KEY = "dev.cosignproject.cosign/signature"
"""The annotation that has the signature of the payload's bytes, in base64."""
PAYLOAD_TYPE = "cosign container image signature"

MAX_PAYLOAD = 64 * 2**10
MAX_ANNOTATIONS = 64 * 2**10
"""Bytes of the annotations of one signature: certificates and entries of a log, too."""
MAX_SIGNATURES = 1000
"""Signatures of one manifest, as in cosign (pkg/oci/remote/signatures.go `maxLayers`)."""
# Bytes of a manifest of signatures: what every registry takes (OCI distribution-spec, "Push").
_MAX_SIGNATURES_MANIFEST = 4 * 2**20
MAX_SIGNATURE_FILE = 2 * (MAX_PAYLOAD + MAX_ANNOTATIONS)

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
        value = parse_object(raw, what, rule="S1", limit=MAX_SIGNATURE_FILE)
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
        value = parse_object(raw, what, rule="M1", limit=_MAX_SIGNATURES_MANIFEST)
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
