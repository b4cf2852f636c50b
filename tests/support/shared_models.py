"""Models to push and pull: valid tensors in a store, and processes that move them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from blobstore import open_store
from blobstore.formats.documents import (
    CONFIG_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    Manifest,
)
from blobstore.names import ModelName
from blobstore.store.local.store import Store
from support.checkpoints import safetensors_bytes
from support.small_registry import digest_of

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"


def tensor_blob(name: str, size: int, seed: object = 0) -> bytes:
    """Return a blob of one tensor of ``size`` random bytes."""
    values = np.frombuffer(Random(f"{name} {size} {seed}").randbytes(size), np.uint8)
    return safetensors_bytes({name: values})


def commit_tensors(
    store: Store, name: str, sizes: Sequence[int], *, oci: bool = False, seed: object = 0
) -> Manifest:
    """Store a model of a config and tensors of these sizes; return its manifest.

    ``oci``: of the OCI's media types, which skopeo reads; its bytes are not as we write them.
    """
    blobs = [tensor_blob(f"layer{number}", size, seed) for number, size in enumerate(sizes)]
    raw = manifest_of(b"{}", blobs, oci=oci)
    with store.session() as session:
        for data in (b"{}", *blobs):
            session.put(data)
        manifest = Manifest.parse(raw)
        session.publish(ModelName.parse(name), manifest)
    return manifest


def manifest_of(config: bytes, blobs: Sequence[bytes], *, oci: bool = False) -> bytes:
    """Return a manifest of tensors, written by hand."""
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST if oci else MANIFEST_MEDIA_TYPE,
        "config": _entry(config, OCI_CONFIG if oci else CONFIG_MEDIA_TYPE),
        "layers": [
            {**_entry(data, TENSOR_MEDIA_TYPE), "name": f"layer{number}"}
            for number, data in enumerate(blobs)
        ],
    }
    return json.dumps(document, indent=1).encode()


def _entry(data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def pushing(root: Path, name: str, reference: str) -> subprocess.Popen[str]:
    """Start ``blobstore push``."""
    return _started("push", name, "--to", reference, "--store", str(root))


def pulling(root: Path, name: str, reference: str) -> subprocess.Popen[str]:
    """Start ``blobstore pull``."""
    return _started("pull", reference, "--as", name, "--store", str(root))


def _started(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"DOCKER_CONFIG": "/there/is/none"}
    return subprocess.Popen(
        [sys.executable, "-m", "blobstore", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a process that has to succeed."""
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def contents(store: Store, name: str) -> dict[str, bytes]:
    """Return the bytes of a model's blobs by digest, each checked by its digest."""
    manifest = store.manifests.read(store.find(name))
    return {str(blob.digest): store.blobs.read(blob) for blob in manifest.descriptors}


def same(one: Path, other: Path, name: str, other_name: str | None = None) -> bool:
    """Return True if two stores have a model with the same manifest and the same bytes."""
    first, second = open_store(one), open_store(other)
    found = second.find(other_name or name)
    return first.manifests.text(first.find(name)) == second.manifests.text(found) and contents(
        first, name
    ) == contents(second, str(found))
