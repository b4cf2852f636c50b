"""An obstacle to every removal: an unreadable file that may be a manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blobstore.store.local.store import Store
from support.stores import manifest_path


def broken_manifest(store: Store) -> Path:
    """Write a manifest that is no JSON, of the model ``other``.

    Return its path, as all of these do.
    """
    path = manifest_path(store, "other")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    return path


def stray_file(store: Store) -> Path:
    """Write a file whose name is no model's."""
    path = manifest_path(store, "other").with_name("latest~")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"may be an older Ollama's")
    return path


def linked_manifest(store: Store) -> Path:
    """Make a link where a manifest would lie."""
    path = manifest_path(store, "other")
    path.parent.mkdir(parents=True)
    path.symlink_to("/nowhere")
    return path


def linked_folder(store: Store) -> Path:
    """Link a folder of manifests to one that contains the model ``m`` again."""
    outside = store.root.parent / "outside" / "other"
    outside.mkdir(parents=True)
    (outside / "latest").write_bytes(manifest_path(store, "m").read_bytes())
    path = manifest_path(store, "other").parent
    path.symlink_to(outside)
    return path


def newer_manifests(store: Store) -> Path:
    """Make a link to a missing blob in the tree of manifests that newer Ollamas have."""
    path = store.root / "manifests-v2" / "ollama.com" / "library" / "other" / "latest"
    path.parent.mkdir(parents=True)
    path.symlink_to(f"../../../../blobs/sha256-{'0' * 64}")
    return path


OBSTACLES: tuple[Callable[[Store], Path], ...] = (
    broken_manifest,
    stray_file,
    linked_manifest,
    linked_folder,
    newer_manifests,
)
