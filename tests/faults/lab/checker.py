"""The contents of a store, read without our code.

The format: a file in ``blobs/`` is named ``sha256-`` and the sha256 of its bytes; a file four
folders deep in ``manifests/`` is a manifest, whose config and layers name blobs by digest and size
(shared/FORMAT.md, section 4).
"""

import hashlib
import json
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard
from support.packed_format import decoded

_BLOB = re.compile(r"sha256-[0-9a-f]{64}", re.ASCII)
_SHORT = "registry.ollama.ai/library/"
_DEPTH = 4
_NAME = len("sha256-") + 64


@dataclass(frozen=True, slots=True)
class Found:
    """A store: its ``models`` (name: sha256 of the manifest), and its faults and leftovers.

    ``corrupt``: blobs whose bytes are not their digest's · ``dangling``: what manifests name and is
    not there with its size · ``strays``: files that have no business in ``blobs/`` or
    ``manifests/`` · ``orphans``: blobs of no manifest · ``temporary``: what lies in
    ``.blobstore/tmp`` · ``half_written``: its folders with other files than finished blobs ·
    ``trash``: names of the blobs there · ``broken``: models with a blob that is corrupt or not
    there · ``packed``: those of ``models`` that are packed.
    """

    models: dict[str, str] = field(default_factory=dict)
    corrupt: list[str] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    half_written: list[str] = field(default_factory=list)
    trash: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    packed: list[str] = field(default_factory=list)


SOUND = Found()
"""An empty store."""


def look(root: Path) -> Found:
    """Return what the store at ``root`` holds; blobs are hashed. An absent store is empty."""
    found = Found()
    sizes = dict(_blobs(root / "blobs", found))
    named: set[str] = set()
    for path in _files(root / "manifests"):
        name = path.relative_to(root / "manifests").as_posix()
        if not _is_regular(path) or name.count("/") != _DEPTH - 1:
            found.strays.append(f"manifests/{name}")
            continue
        raw = path.read_bytes()
        found.models[_short(name)] = hashlib.sha256(raw).hexdigest()
        for layer in _layers(raw):
            blob = str(layer.get("digest")).replace(":", "-")
            named.add(blob)
            if blob in found.corrupt:
                found.broken.add(_short(name))
            if sizes.get(blob) != layer.get("size"):
                found.broken.add(_short(name))
                found.dangling.append(
                    f"{_short(name)} names {blob} of {layer.get('size')} bytes: {sizes.get(blob)}"
                )
    found.orphans.extend(sorted(set(sizes) - named))
    _look_at_packed(root / ".blobstore" / "packed", found)
    _look_at_files(root, found)
    for folder in sorted((root / ".blobstore" / "tmp").glob("*")):
        found.temporary.append(folder.name)
        if any(not _BLOB.fullmatch(path.name) for path in folder.glob("*")):
            found.half_written.append(folder.name)
    found.trash.extend(
        path.name[:_NAME] for path in sorted((root / ".blobstore" / "trash").glob("*/sha256-*"))
    )
    return found


def _look_at_packed(folder: Path, found: Found) -> None:
    """Add the packed models whose names no whole model has; every packed blob is decoded."""
    files: set[str] = set()
    for path in filter(_is_regular, sorted((folder / "blobs").glob("*"))):
        try:
            digest = hashlib.sha256(decoded(path.read_bytes())).hexdigest()
        except (AssertionError, ValueError, struct.error, zstandard.ZstdError):
            digest = ""
        if path.name == f"sha256-{digest}":
            files.add(digest)
        else:
            found.corrupt.append(path.name)
    for path in filter(_is_regular, _files(folder / "manifests")):
        raw, name = path.read_bytes(), _short(path.relative_to(folder / "manifests").as_posix())
        digests = {str(layer.get("digest")).removeprefix("sha256:") for layer in _layers(raw)}
        if name not in found.models:
            found.models[name] = hashlib.sha256(raw).hexdigest()
            found.packed.append(name)
            if missing := digests - files:
                found.broken.add(name)
                found.dangling.append(f"packed {name} names {sorted(missing)}")


def _look_at_files(root: Path, found: Found) -> None:
    """Add what commands wrote elsewhere, as models: a folder, an archive, and edited metadata.

    Other files beside the store are temporary ones.
    """
    for path in sorted(root.parent.glob(f"*{root.name}-out*")):
        if path.name not in (f"{root.name}-out", f"{root.name}-out.tar"):
            found.temporary.append(path.name)
            continue
        files = [(one.name, one.read_bytes()) for one in sorted(path.glob("*"))]
        data = repr(files).encode() if path.is_dir() else path.read_bytes()
        found.models["written"] = hashlib.sha256(data).hexdigest()
    path = root / "m.safetensors"
    if path.exists() and _is_regular(path):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        content = f"{json.loads(data[8:end])}".encode() + data[end:]
        found.models[path.name] = hashlib.sha256(content).hexdigest()


def _blobs(folder: Path, found: Found) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.glob("*")):
        if not _is_regular(path) or not _BLOB.fullmatch(path.name):
            found.strays.append(f"blobs/{path.name}")
            continue
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.name.removeprefix("sha256-"):
            found.corrupt.append(path.name)
        yield path.name, len(data)


def _layers(raw: bytes) -> list[dict[str, Any]]:
    """Return a manifest's descriptors; one that is no JSON names a blob that can't be there."""
    try:
        document = json.loads(raw)
        config = document.get("config")
        return [*([config] if config else []), *document["layers"]]
    except (ValueError, KeyError, AttributeError):
        return [{"digest": "nothing: the manifest is damaged", "size": 0}]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if not stat.S_ISDIR(path.lstat().st_mode))


def _is_regular(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _short(name: str) -> str:
    """Return a model's name as users write it: without the default host and namespace."""
    model, _, tag = name.removeprefix(_SHORT).rpartition("/")
    return f"{model}:{tag}"
