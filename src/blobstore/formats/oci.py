"""OCI's documents: manifests of artifacts, image layouts, and ModelPack's config. Pure.

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

Sources: opencontainers/image-spec manifest.md, descriptor.md ("annotations"), layer.md, config.md,
image-layout.md, annotations.md ("ref.name"), image-index.md; containers/image@df7e80d2
oci/layout/oci_transport.go ``getManifestDescriptor`` (and v5.22.0); containerd/containerd
images/annotations.go ``AnnotationImageName``; modelpack/model-spec@d78bf323 docs/spec.md,
docs/config.md, docs/annotations.md, schema/config-schema.json, specs-go/v1/mediatype.go. What
ModelPack's readers need beyond that: docker/model-runner@642c7211
pkg/distribution/internal/bundle/unpack.go ``UnpackFromLayers`` (the artifact type, a path in each
layer), pkg/distribution/types/config.go and modelpack/types.go ``GetFormat``;
modelpack/modctl@c8e484d6 pkg/codec/raw.go ``Decode``, pkg/modelfile/constants.go (which files are
what).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from blobstore.errors import DocumentError, InvalidNameError, UnsupportedSourceError
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
MAX_MANIFESTS = 256 * 2**20
"""Bytes of all manifests of an index, which are kept in memory."""

_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
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
    check_limit(what, sum(unique.values()), "bytes of manifests", MAX_MANIFESTS, "A2")
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
    return encode({"schemaVersion": 2, "mediaType": _INDEX_TYPE, "manifests": entries})


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
