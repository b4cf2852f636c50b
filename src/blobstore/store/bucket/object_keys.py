"""Keys: where a bucket has blobs, manifests and our own objects."""

from __future__ import annotations

import hashlib
import re

from blobstore.names import Digest, ModelName

BLOBS = "blobs/"
MANIFESTS = "manifests/"
PRIVATE = ".blobstore/"
LEASES = f"{PRIVATE}leases/"
MADE = f"{PRIVATE}made/"
PROBES = f"{PRIVATE}probes/"
SIGNATURES = f"{PRIVATE}signatures/"
SWEEP = f"{PRIVATE}sweep"

_PLAIN = re.compile(r"[0-9A-Za-z]{1,128}", re.ASCII)


def blob_key(digest: Digest) -> str:
    """Return the key of a blob."""
    return BLOBS + digest.file_name


def manifest_key(name: ModelName) -> str:
    """Return the key of a model's manifest."""
    return MANIFESTS + "/".join(name.path_parts)


def made_key(key: str) -> str:
    """Return the key of the note about the blob that was made for ``key``."""
    return MADE + (key if _PLAIN.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest())


def digest_in(key: str) -> Digest | None:
    """Return the digest of the blob with a key, None if it is not the key of a blob."""
    return Digest.from_file_name(key.removeprefix(BLOBS)) if key.startswith(BLOBS) else None


def model_of(key: str) -> ModelName | None:
    """Return the name of the model whose manifest has a key, None if it is not that of a model."""
    if not key.startswith(MANIFESTS):
        return None
    return ModelName.of_path(key.removeprefix(MANIFESTS).split("/"))
