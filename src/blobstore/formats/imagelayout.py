"""The documents of an OCI image layout: ``oci-layout`` and ``index.json``. Pure.

Rule A2: ``oci-layout`` has the version 1.0.0, and ``index.json`` is an image index whose entries
are image manifests. A nested index is refused, and so are digests other than sha256.

An entry is a descriptor of OCI's media type for manifests, also where the manifest's own bytes say
docker's, as those of Ollama and of this package do. containers/image finds a named entry of
docker's media type since v5.35 only, and refuses Ollama's media types of layers in it. Under OCI's
media type, skopeo copies the manifest, and keeps its bytes.

Two annotations hold a model's name. ``org.opencontainers.image.ref.name`` is the short one, which
follows the file's name in ``skopeo copy oci-archive:FILE:NAME``. ``io.containerd.image.name`` is
the full one.

Sources: opencontainers/image-spec image-layout.md, annotations.md ("ref.name"), image-index.md;
containers/image@df7e80d2 oci/layout/oci_transport.go ``getManifestDescriptor`` (and v5.22.0);
containerd/containerd images/annotations.go ``AnnotationImageName``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from blobstore.errors import DocumentError, InvalidNameError
from blobstore.formats import strictjson
from blobstore.formats.documents import (
    MANIFEST_MEDIA_TYPE,
    MAX_BLOB,
    MAX_MANIFEST,
    Descriptor,
)
from blobstore.formats.ocimanifest import OCI_MANIFEST_MEDIA_TYPE
from blobstore.formats.strictdocument import Between, Document, InvalidError, Key, validated
from blobstore.formats.strictjson import check_limit, parse_object
from blobstore.names import Digest, ModelName

LAYOUT_PATH: Final = "oci-layout"
INDEX_PATH: Final = "index.json"
BLOBS_PATH: Final = "blobs/sha256"
LAYOUT: Final = b'{"imageLayoutVersion":"1.0.0"}'
MAX_INDEX: Final = 16 * 2**20
"""Bytes of an index.json."""
MAX_ENTRIES: Final = 10_000
MAX_MANIFESTS: Final = 256 * 2**20
"""Bytes of all manifests of an index, which are held in memory."""

_IndexType = Literal["application/vnd.oci.image.index.v1+json"]
_OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
_SHORT_NAME = "org.opencontainers.image.ref.name"
_FULL_NAME = "io.containerd.image.name"


def blob_path(digest: Digest) -> str:
    """Return the path of a blob in a layout."""
    return f"{BLOBS_PATH}/{digest.hex}"


@dataclass(frozen=True, slots=True)
class _Layout(Document):
    version: Annotated[Literal["1.0.0"], Key("imageLayoutVersion")]


@dataclass(frozen=True, slots=True)
class IndexEntry(Document):
    """A manifest of an index, and what its annotations say."""

    media_type: Annotated[str, Key("mediaType")]
    digest: Digest
    size: Annotated[int, Between(0, MAX_BLOB)]
    annotations: Mapping[str, str] | None = None

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that an object gives. Raises: InvalidError."""
        kind = value.get("mediaType")
        if kind in (_OCI_INDEX, _DOCKER_LIST):
            raise InvalidError("an index in an index is not supported", "mediaType")
        if kind is not None and kind not in (OCI_MANIFEST_MEDIA_TYPE, MANIFEST_MEDIA_TYPE):
            raise InvalidError("not the media type of an image manifest", "mediaType")
        return super(IndexEntry, cls).fields_of(value)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of the manifest."""
        return Descriptor(self.media_type, self.digest, self.size)

    @property
    def name(self) -> ModelName | None:
        """The model's name; None if no annotation has a valid one."""
        for key in (_FULL_NAME, _SHORT_NAME):
            try:
                return ModelName.parse((self.annotations or {})[key])
            except (KeyError, InvalidNameError):
                continue
        return None


@dataclass(frozen=True, slots=True)
class Index(Document):
    """An image index: its manifests in order."""

    schema_version: Annotated[Literal[2], Key("schemaVersion")]
    entries: Annotated[list[IndexEntry], Key("manifests")]
    media_type: Annotated[_IndexType | None, Key("mediaType")] = None

    @classmethod
    def parse(cls, raw: bytes, what: str) -> Index:
        """Return the index in ``raw``.

        Raises: DocumentError (rule A2), also for two models of one name; LimitExceededError for
        more than 10,000 manifests, or more than 256 MiB of them.
        """
        value = parse_object(raw, what, rule="A2", limit=MAX_INDEX)
        if isinstance(entries := value.get("manifests"), list):
            check_limit(what, len(entries), "manifests", MAX_ENTRIES, "A2")
        index = validated(cls, value, what, "A2")
        for entry in index.entries:
            check_limit(what, entry.size, "bytes of a manifest", MAX_MANIFEST, "A2")
        unique = {entry.digest: entry.size for entry in index.entries}
        check_limit(what, sum(unique.values()), "bytes of manifests", MAX_MANIFESTS, "A2")
        names = [entry.name for entry in index.entries if entry.name is not None]
        if len(set(names)) < len(names):
            raise DocumentError(f"{what}: two models have one name (rule A2)", rule="A2")
        return index


def check_layout(raw: bytes, what: str) -> None:
    """Raise DocumentError (rule A2) unless ``raw`` is an ``oci-layout`` of version 1.0.0."""
    validated(_Layout, parse_object(raw, what, rule="A2", limit=MAX_INDEX), what, "A2")


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
    return strictjson.encode({"schemaVersion": 2, "mediaType": _OCI_INDEX, "manifests": entries})
