"""Models to push and pull: valid tensors in a store."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from support.checkpoints import safetensors_bytes
from support.small_registry import digest_of

from blobstore.formats import documents
from blobstore.names import ModelName
from blobstore.store.local.store import Store

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"


def tensor_blob(name: str, size: int, seed: object = 0) -> bytes:
    """Return a blob of one tensor of ``size`` random bytes."""
    values = np.frombuffer(Random(f"{name} {size} {seed}").randbytes(size), np.uint8)
    return safetensors_bytes({name: values})


def commit_tensors(
    store: Store, name: str, sizes: Sequence[int], *, oci: bool = False, seed: object = 0
) -> documents.Manifest:
    """Store a model of a config and tensors of these sizes; return its manifest.

    ``oci``: of the OCI's media types, which skopeo reads; its bytes are not as we write them.
    """
    blobs = [tensor_blob(f"layer{number}", size, seed) for number, size in enumerate(sizes)]
    manifest = documents.Manifest.parse(manifest_of(b"{}", blobs, oci=oci))
    with store.session() as session:
        for data in (b"{}", *blobs):
            session.put(data)
        session.publish(ModelName.parse(name), manifest)
    return manifest


def manifest_of(config: bytes, blobs: Sequence[bytes], *, oci: bool = False) -> bytes:
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST if oci else documents.MANIFEST_MEDIA_TYPE,
        "config": _entry(config, OCI_CONFIG if oci else documents.CONFIG_MEDIA_TYPE),
        "layers": [
            {**_entry(data, documents.TENSOR_MEDIA_TYPE), "name": f"layer{number}"}
            for number, data in enumerate(blobs)
        ],
    }
    return json.dumps(document, indent=1).encode()


def _entry(data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def contents(store: Store, name: str) -> dict[str, bytes]:
    """Return the bytes of a model's blobs by digest, each checked by its digest."""
    manifest = store.manifests.read(store.find(name))
    return {str(blob.digest): store.blobs.read(blob) for blob in manifest.descriptors}


def same(one: Store, other: Store, name: str, other_name: str | None = None) -> bool:
    found = str(other.find(other_name or name))
    is_same = one.manifest(name).raw == other.manifest(found).raw
    return is_same and contents(one, name) == contents(other, found)
