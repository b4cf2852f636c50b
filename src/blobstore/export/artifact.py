"""Artifacts: a stored model as an artifact of another kind, to be read by `transfer`.

An artifact has one manifest, under the model's name. Its blobs are made while they are read:
nothing is written to a disk. Their digests have to be known first, so each is made twice, once to
be hashed and once to be sent; a blob that the target has is made once. The model's own blobs are
hashed before that: damage in them would get a digest of its own.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from blobstore.errors import UsageError
from blobstore.export.contents import CONVERTED, plan_export
from blobstore.export.folder import open_file
from blobstore.export.planned_files import DEFAULT_SHARD, ExportOptions, ExportPlan, PlannedFile
from blobstore.formats import strictjson
from blobstore.formats.archives import END, in_blocks, member_header
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.dtypes import DType
from blobstore.formats.oci import (
    IMAGE_CONFIG_MEDIA_TYPE,
    IMAGE_LAYER_MEDIA_TYPE,
    MODELPACK_ARTIFACT_TYPE,
    MODELPACK_CONFIG_MEDIA_TYPE,
    PATH_ANNOTATIONS,
    OciDescriptor,
    artifact_manifest,
    layer_media_type,
    modelpack_config,
    under_oci,
)
from blobstore.hashing.stage import HashStage
from blobstore.io.ranges import BytesReader, JoinedReader, OpenReader, Segment
from blobstore.io.workers import Progress, results_of, start_progress, threads
from blobstore.names import Digest, ModelName
from blobstore.store.memory import KnownManifests
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Blobs, Readable, check_blob_size, unique
from blobstore.store.stored_model import StoredModel

FOLDER = "models"
MOST_LAYERS = 100
"""Most layers of shards."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer: what it is, its size in bytes, and how it is read.

    ``name`` is shown with the progress.
    """

    name: str
    media_type: str
    size: int
    open: Callable[[], OpenReader]
    annotations: Mapping[str, str] | None = None


def _modelpack_layers(plan: ExportPlan) -> list[_Layer]:
    """Return a layer for each file.

    Shards come first, in their order: a runtime that loads the first file of weights gets those of
    the model, not of its draft.
    """
    return [
        _Layer(
            file.path,
            layer_media_type(file.path),
            file.size,
            partial(open_file, file),
            dict.fromkeys(PATH_ANNOTATIONS, file.path),
        )
        for file in (*plan.shards, *sorted(plan.documents, key=lambda file: file.path))
    ]


def _modelpack_config(
    layers: Sequence[Digest], name: str, model: StoredModel, dequantize: DType | None
) -> bytes:
    dtypes, types, parameters = Counter[DType](), Counter[str](), 0
    for tensors in model.tensors_of_each(model.weight_layers):
        for tensor in tensors:
            parameters += tensor.parameters
            is_cast = tensor.quantization is not None or tensor.dtype in CONVERTED
            # The arrays of some codes do not say the dtype of their values.
            dtype = dequantize if dequantize is not None and is_cast else tensor.value_dtype
            if dtype is not None:
                dtypes[dtype] += tensor.parameters
            if dequantize is None and tensor.quant_type is not None:
                types[tensor.quant_type.value] += tensor.parameters
    said = model.source_config or {}
    architectures, family = said.get("architectures"), said.get("model_type")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return modelpack_config(
        layers,
        name=name,
        architecture=first if isinstance(first, str) else None,
        family=family if isinstance(family, str) else None,
        parameters=parameters,
        dtypes=_by_count(dtypes),
        quantization=_by_count(types),
    )


def _by_count(counted: Counter[Any]) -> list[Any]:
    return sorted(counted, key=lambda one: (-counted[one], str(one)))


def _image_layers(plan: ExportPlan) -> list[_Layer]:
    together = -(-len(plan.shards) // MOST_LAYERS) or 1
    groups: list[Sequence[PlannedFile]] = [
        plan.shards[begin : begin + together] for begin in range(0, len(plan.shards), together)
    ]
    if plan.documents:
        groups.append(sorted(plan.documents, key=lambda file: file.path))
    return [
        _Layer(
            f"{FOLDER}/{files[0].path}",
            IMAGE_LAYER_MEDIA_TYPE,
            sum(part.size for part in _parts(files)),
            partial(_open, files),
        )
        for files in groups
    ]


def _image_config(layers: Sequence[Digest]) -> bytes:
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


def _open(files: Sequence[PlannedFile]) -> JoinedReader:
    return JoinedReader(f"the layer of {FOLDER}/{files[0].path}", list(_parts(files)))


def _parts(files: Sequence[PlannedFile]) -> Iterator[Segment]:
    paths = [f"{FOLDER}/{file.path}" for file in files]
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents} - {"."}
    yield _bytes(b"".join(member_header(f"{path}/") for path in sorted(folders)))
    for path, file in zip(paths, files, strict=True):
        yield _bytes(member_header(path, file.size))
        yield Segment(file.size, partial(open_file, file))
        yield _bytes(bytes(in_blocks(file.size) - file.size))
    yield _bytes(END)


def _bytes(data: bytes) -> Segment:
    return Segment(len(data), partial(BytesReader, data))


Opened = Mapping[Digest, Callable[[], OpenReader]]
_KINDS = ("modelpack", "image", "oci")


class _Blobs(Blobs):
    def __init__(self, opened: Opened, descriptors: Iterable[Descriptor]) -> None:
        self._opened = opened
        self._sizes = {blob.digest: blob.size for blob in descriptors}

    def open(self, descriptor: Descriptor) -> OpenReader:
        check_blob_size(descriptor, self._sizes.get(descriptor.digest))
        return self._opened[descriptor.digest]()

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return [blob for blob in unique(descriptors) if self._sizes.get(blob.digest) != blob.size]

    def digests(self) -> set[str]:
        return {digest.hex for digest in self._opened}


class Artifact(Readable):
    """A stored model in another form. ``notes``: sentences about what it leaves out or changes."""

    open_blobs_stay = True  # for as long as the artifact is open

    def __init__(
        self,
        name: ModelName,
        address: str,
        manifest: Manifest,
        opened: Opened,
        notes: Sequence[str],
    ) -> None:
        self.address = address
        self.name = name
        self.notes = tuple(notes)
        self.blobs = _Blobs(opened, manifest.descriptors)
        self.manifests = KnownManifests(address, {name: manifest.raw})


@contextmanager
def open_artifact(
    name: str | ModelName,
    store: Readable | StorePlace,
    kind: str,
    *,
    format: str = "safetensors",  # noqa: A002  # the option's name
    dequantize: str | DType | None = None,
    max_shard_size: int | str = DEFAULT_SHARD,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Artifact]:
    """Yield a stored model as an artifact, which `push`, `save_models` and `transfer` send.

    ``kind``: "modelpack" for a CNCF ModelPack artifact, "image" for an OCI image, both of the files
    that `export_model` writes with the same ``format``, ``dequantize`` and ``max_shard_size``; or
    "oci" for the model's own blobs under an OCI manifest, which tools for containers copy. An
    artifact has no times: the same model and options give the same bytes.

    ``jobs``: threads that hash (None: one per core). ``progress`` is called with the bytes that are
    hashed.

    Raises: UsageError (an unknown word); as `export_model`, except for its folder.
    """
    store = opened_store(store)
    if kind not in _KINDS:
        raise UsageError(
            f"unknown kind of artifact {kind!r}", hint=f"Use one of: {', '.join(_KINDS)}."
        )
    options = ExportOptions.parse(format, dequantize, max_shard_size)
    with store.lease():
        full = store.find(name)
        model = StoredModel(full, store.manifests.read(full), store)
        if kind == "oci":
            opened: Opened = {
                blob.digest: partial(store.blobs.open, blob) for blob in model.manifest.descriptors
            }
            yield Artifact(full, store.address, under_oci(model.manifest), opened, ())
            return
        plan = plan_export(model, options, verify=True)

        if kind == "image":
            layers, config, artifact_type = _image_layers(plan), _image_config, None
            config_type = IMAGE_CONFIG_MEDIA_TYPE
        else:
            layers, artifact_type = _modelpack_layers(plan), MODELPACK_ARTIFACT_TYPE
            config_type = MODELPACK_CONFIG_MEDIA_TYPE
            config = partial(
                _modelpack_config, name=full.model, model=model, dequantize=options.dequantize
            )
        blobs = _hash_layers(layers, threads(jobs), progress)
        raw = config([blob.digest for blob in blobs])
        described = Descriptor(config_type, Digest.of(raw), len(raw))
        opened = {blob.digest: layer.open for blob, layer in zip(blobs, layers, strict=True)}
        opened[described.digest] = partial(BytesReader, raw)
        manifest = artifact_manifest(described, blobs, artifact_type=artifact_type)
        yield Artifact(full, store.address, manifest, opened, plan.notes)


def _hash_layers(
    layers: Sequence[_Layer], jobs: int, progress: Progress | None
) -> list[Descriptor]:
    stage = HashStage()
    report = start_progress(progress, sum(layer.size for layer in layers))

    def hashed(layer: _Layer) -> Descriptor:
        with layer.open() as reader:
            digest = reader.digest(stage)
        report(layer.size, layer.name)
        return OciDescriptor(layer.media_type, digest, layer.size, annotations=layer.annotations)

    return results_of(layers, hashed, jobs, name="artifact")
