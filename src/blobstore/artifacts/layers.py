"""Layers: the blobs of an artifact that are made while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from blobstore.hashing.stage import HashStage
from blobstore.io.ranges import OpenReader
from blobstore.names import Digest


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what it is, its size in bytes, how it is read, and what gives its digest.

    ``name`` is shown with the progress.
    """

    name: str
    media_type: str
    size: int
    open: Callable[[], OpenReader]
    digest: Callable[[HashStage], Digest]
    annotations: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ArtifactForm:
    """The layers and documents of an artifact; the config needs the digests of the layers.

    ``config`` gives the bytes of the config blob.
    """

    layers: tuple[Layer, ...]
    config_media_type: str
    config: Callable[[list[Digest]], bytes]
    artifact_type: str | None = field(default=None)
