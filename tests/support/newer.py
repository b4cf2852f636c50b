"""Trees of manifests as the Ollamas of PRs 15735 and 16590 write them, made by hand."""

import json
from pathlib import Path
from typing import Any

from blobstore.store.local.store import Store
from support.stores import layer_by_hand

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.ollama.manifest.list.v2+json"
PLACE = "ollama.com/library/new/latest"
"""Where the name ``new`` lies."""


def manifest_of(store: Store, *blobs: bytes) -> dict[str, Any]:
    """Write blobs and return the manifest that names them; the last is its config."""
    *layers, config = (layer_by_hand(store, "x", data) for data in blobs)
    head = {"schemaVersion": 2, "mediaType": MANIFEST, "runner": "mlx"}
    return {**head, "config": config, "layers": layers}


def written(store: Store, document: dict[str, Any]) -> str:
    return str(layer_by_hand(store, "", json.dumps(document).encode())["digest"])


def reference(store: Store, document: dict[str, Any]) -> dict[str, Any]:
    entry = {"mediaType": MANIFEST, "digest": written(store, document)}
    return {**entry, "runner": "mlx", "format": "safetensors"}


def list_of(*manifests: dict[str, Any]) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": LIST, "manifests": list(manifests)}


def linked(store: Store, document: dict[str, Any], place: str = PLACE) -> Path:
    """Write a manifest's blob, and a link to it below ``manifests-v2/``; return the link's path."""
    blob = store.root / "blobs" / written(store, document).replace(":", "-")
    path = store.root / "manifests-v2" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(Path(*[".."] * len(Path(place).parts), "blobs", blob.name))
    return path
