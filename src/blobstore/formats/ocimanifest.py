"""OCI image manifests of artifacts, and the kinds of artifacts that are not stored models. Pure.

Sources: opencontainers/image-spec manifest.md, descriptor.md ("annotations"), layer.md, config.md;
modelpack/model-spec@d78bf323 specs-go/v1/mediatype.go; docker/model-runner@642c7211
pkg/distribution/types/config.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from blobstore.errors import UnsupportedSourceError
from blobstore.formats import strictjson
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import Digest

OCI_MANIFEST_MEDIA_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
IMAGE_CONFIG_MEDIA_TYPE: Final = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER_MEDIA_TYPE: Final = "application/vnd.oci.image.layer.v1.tar"
_IMAGE = "a container image"
_FOREIGN = {
    "application/vnd.cncf.model.": "a ModelPack artifact",
    "application/vnd.oci.image.layer.": _IMAGE,
    "application/vnd.docker.image.rootfs.": _IMAGE,
    "application/vnd.docker.ai.": "a model of Docker Model Runner",
    "application/vnd.kitops.": "a ModelKit of KitOps",
}
"""The kinds of manifests, by how the media types of their layers begin."""


@dataclass(frozen=True, slots=True)
class ManifestLayer:
    """A layer of an artifact."""

    descriptor: Descriptor
    annotations: Mapping[str, str] | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The entry of a manifest."""
        said = {} if self.annotations is None else {"annotations": dict(self.annotations)}
        return self.descriptor.document | said


def artifact_manifest(
    config: Descriptor, layers: Iterable[ManifestLayer], *, artifact_type: str | None = None
) -> Manifest:
    """Return the manifest of an artifact: a line of compact JSON, without a time."""
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST_MEDIA_TYPE,
        **({} if artifact_type is None else {"artifactType": artifact_type}),
        "config": config.document,
        "layers": [layer.document for layer in layers],
    }
    return Manifest.parse(strictjson.encode(document), "the manifest of an artifact")


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
    for layer in manifest.layers:
        for prefix, kind in _FOREIGN.items():
            if layer.media_type.startswith(prefix):
                raise UnsupportedSourceError(
                    f"{what} is {kind}, not a stored model",
                    hint="Extract its files with its own tool, then import the folder.",
                )


def blob_descriptor(data: bytes, media_type: str) -> Descriptor:
    """Return the descriptor of a blob in memory."""
    return Descriptor(media_type, Digest.of(data), len(data))
