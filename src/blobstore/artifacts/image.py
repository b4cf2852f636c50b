"""A model as an OCI image: layers of tar whose files are those of an export, for image volumes.

The files are in ``/models``, where KServe looks for them, in its sidecars and as the sub-path of an
image volume (kserve/kserve@aaac4e29 pkg/utils/storage.go ``ConfigureOciNativeToContainer``). An
image volume without a sub-path shows them below ``models/``.

Each shard is a layer, so that layers are pulled at the same time, and registries that limit a
layer's size take large models. Images of over a hundred shards have several in one layer: docker
takes 127 layers. Documents are the last layer, so that weights which have not changed keep their
place below it. The image has no program: it is mounted, not run.

Sources: opencontainers/image-spec layer.md ("Uncompressed tar"), config.md ("rootfs": the diff_ids
of uncompressed layers are their digests).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath

from blobstore.artifacts.layers import ArtifactForm, Layer
from blobstore.export.planned_files import ExportPlan
from blobstore.export.streamed_files import PlannedFile, open_file
from blobstore.formats import strictjson
from blobstore.formats.ocimanifest import IMAGE_CONFIG_MEDIA_TYPE, IMAGE_LAYER_MEDIA_TYPE
from blobstore.formats.tar import END, folder_header, in_blocks, member_header
from blobstore.hashing.stage import HashStage
from blobstore.io.ranges import BytesReader, JoinedReader, Segment
from blobstore.names import Digest

FOLDER = "models"
MOST_LAYERS = 100
"""Most layers of shards."""


def image_of(plan: ExportPlan) -> ArtifactForm:
    """Return an image of the files in ``plan``."""
    together = -(-len(plan.shards) // MOST_LAYERS) or 1
    groups: list[Sequence[PlannedFile]] = [
        plan.shards[begin : begin + together] for begin in range(0, len(plan.shards), together)
    ]
    if plan.documents:
        groups.append(sorted(plan.documents, key=lambda file: file.path))
    return ArtifactForm(tuple(map(_layer, groups)), IMAGE_CONFIG_MEDIA_TYPE, image_config)


def image_config(layers: Sequence[Digest]) -> bytes:
    """Return the config of an image of these layers, without a time.

    An image volume is mounted on any processor; amd64 is what Ollama's configs say too.
    """
    return strictjson.encode(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [str(digest) for digest in layers]},
        }
    )


def _layer(files: Sequence[PlannedFile]) -> Layer:
    name = f"{FOLDER}/{files[0].path}"
    return Layer(
        name,
        IMAGE_LAYER_MEDIA_TYPE,
        sum(part.size for part in _parts(files)),
        partial(_open, name, files),
        partial(_digest, name, files),
    )


def _open(name: str, files: Sequence[PlannedFile]) -> JoinedReader:
    return JoinedReader(f"the layer of {name}", list(_parts(files)))


def _digest(name: str, files: Sequence[PlannedFile], stage: HashStage) -> Digest:
    with _open(name, files) as reader:
        return reader.digest(stage)


def _parts(files: Sequence[PlannedFile]) -> Iterator[Segment]:
    """Yield the parts of a tar: the folders of the files, the files, and the end."""
    paths = [f"{FOLDER}/{file.path}" for file in files]
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents} - {"."}
    yield _bytes(b"".join(map(folder_header, sorted(folders))))
    for path, file in zip(paths, files, strict=True):
        yield _bytes(member_header(path, file.size))
        yield Segment(file.size, partial(open_file, file))
        yield _bytes(bytes(in_blocks(file.size) - file.size))
    yield _bytes(END)


def _bytes(data: bytes) -> Segment:
    return Segment(len(data), partial(BytesReader, data))
