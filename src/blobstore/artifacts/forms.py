"""Forms of artifacts: their layers and documents, made of the files of an export.

A **ModelPack** artifact has each file as a layer, byte for byte. An **image** has layers of tar,
for image volumes. Its files are in ``/models``, where KServe looks for them, in its sidecars and as
the sub-path of an image volume (kserve/kserve@aaac4e29 pkg/utils/storage.go
``ConfigureOciNativeToContainer``). An image volume without a sub-path shows them below ``models/``.

Each shard is a layer of an image, so that layers are pulled at the same time, and registries that
limit a layer's size take large models. Images of over a hundred shards have several in one layer:
docker takes 127 layers. Documents are the last layer, so that weights which have not changed keep
their place below it. The image has no program: it is mounted, not run.

Sources: opencontainers/image-spec layer.md ("Uncompressed tar"), config.md ("rootfs": the diff_ids
of uncompressed layers are their digests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

from blobstore.export.exported_arrays import CONVERTED
from blobstore.export.planned_files import ExportPlan
from blobstore.export.streamed_files import PlannedFile, digest_of, open_file
from blobstore.formats import strictjson
from blobstore.formats.dtypes import DType
from blobstore.formats.modelpackconfig import (
    MODELPACK_ARTIFACT_TYPE,
    MODELPACK_CONFIG_MEDIA_TYPE,
    PATH_ANNOTATIONS,
    ModelPackConfig,
    layer_media_type,
)
from blobstore.formats.ocimanifest import IMAGE_CONFIG_MEDIA_TYPE, IMAGE_LAYER_MEDIA_TYPE
from blobstore.formats.tar import END, folder_header, in_blocks, member_header
from blobstore.hashing.stage import HashStage
from blobstore.io.ranges import BytesReader, JoinedReader, OpenReader, Segment
from blobstore.names import Digest
from blobstore.store.stored import StoredTensor
from blobstore.store.stored_model import StoredModel

FOLDER = "models"
MOST_LAYERS = 100
"""Most layers of shards."""

_T = TypeVar("_T")


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
    artifact_type: str | None = None


def modelpack_of(
    name: str, model: StoredModel, plan: ExportPlan, dequantize: DType | None
) -> ArtifactForm:
    """Return a model as a ModelPack artifact of the files in ``plan``; ``name`` is for its config.

    Shards come first, in their order: a runtime that loads the first file of weights gets those of
    the model, not of its draft. Raises: as `StoredModel.source_config` and `StoredModel.opened`.
    """
    files = (*plan.shards, *sorted(plan.documents, key=lambda file: file.path))
    config = _config_of(name, model, dequantize)
    return ArtifactForm(
        tuple(map(_file_layer, files)),
        MODELPACK_CONFIG_MEDIA_TYPE,
        config.encode,
        MODELPACK_ARTIFACT_TYPE,
    )


def _file_layer(file: PlannedFile) -> Layer:
    return Layer(
        file.path,
        layer_media_type(file.path),
        file.size,
        partial(open_file, file),
        partial(digest_of, file),
        dict.fromkeys(PATH_ANNOTATIONS, file.path),
    )


def _config_of(name: str, model: StoredModel, dequantize: DType | None) -> ModelPackConfig:
    dtypes, types, parameters = Counter[DType](), Counter[str](), 0
    for tensors in model.tensors_of_each(model.weight_layers):
        for tensor in tensors:
            parameters += tensor.parameters
            if (dtype := _exported_dtype(tensor, dequantize)) is not None:
                dtypes[dtype] += tensor.parameters
            if dequantize is None and tensor.quant_type is not None:
                types[tensor.quant_type.value] += tensor.parameters
    said = model.source_config or {}
    architectures, family = said.get("architectures"), said.get("model_type")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return ModelPackConfig(
        name=name,
        architecture=first if isinstance(first, str) else None,
        family=family if isinstance(family, str) else None,
        parameters=parameters,
        dtypes=_by_count(dtypes),
        quantization=_by_count(types),
    )


def _exported_dtype(tensor: StoredTensor, dequantize: DType | None) -> DType | None:
    """Return the dtype of a tensor's values in the export; None if its arrays do not say it."""
    if dequantize is not None and (tensor.quantization is not None or tensor.dtype in CONVERTED):
        return dequantize
    return tensor.value_dtype


def _by_count(counted: Counter[_T]) -> list[_T]:
    """Return what was counted, the most frequent first; ties in the order of their names."""
    return sorted(counted, key=lambda one: (-counted[one], str(one)))


def image_of(plan: ExportPlan) -> ArtifactForm:
    """Return an image of the files in ``plan``."""
    together = -(-len(plan.shards) // MOST_LAYERS) or 1
    groups: list[Sequence[PlannedFile]] = [
        plan.shards[begin : begin + together] for begin in range(0, len(plan.shards), together)
    ]
    if plan.documents:
        groups.append(sorted(plan.documents, key=lambda file: file.path))
    return ArtifactForm(tuple(map(_tar_layer, groups)), IMAGE_CONFIG_MEDIA_TYPE, image_config)


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


def _tar_layer(files: Sequence[PlannedFile]) -> Layer:
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
