"""Artifact: a stored model as an artifact of another kind, to be read by `transfer`.

An artifact has one manifest, under the model's name. Its blobs are made while they are read:
nothing is written to a disk. Their digests have to be known first, so each is made twice, once to
be hashed and once to be sent; a blob that the target has is made once. The model's own blobs are
hashed before that: damage in them would get a digest of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial

from blobstore.artifacts.forms import ArtifactForm, Layer, image_of, modelpack_of
from blobstore.errors import UsageError
from blobstore.export.contents import plan_export
from blobstore.export.planned_files import DEFAULT_SHARD, ExportOptions
from blobstore.export.streamed_files import check_copies
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.dtypes import DType
from blobstore.formats.ocimanifest import (
    ManifestLayer,
    artifact_manifest,
    blob_descriptor,
    under_oci,
)
from blobstore.hashing.stage import HashStage
from blobstore.io.budget import Budget
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.io.workers import Progress, begun, results_of, threads
from blobstore.names import Digest, ModelName
from blobstore.store.archive.archive import FixedManifests
from blobstore.store.ports import (
    Readable,
    blob_not_found,
    check_blob_size,
    check_document_size,
    checked_bytes,
    unique,
)
from blobstore.store.stored_model import StoredModel

Opened = Mapping[Digest, Callable[[], OpenReader]]


class ArtifactKind(StrEnum):
    """What a model becomes: files of an export, or its own blobs under an OCI manifest."""

    MODELPACK = "modelpack"
    IMAGE = "image"
    OCI = "oci"

    @classmethod
    def parse(cls, word: str) -> ArtifactKind:
        """Return the kind of a user's word. Raises: UsageError."""
        try:
            return cls(word)
        except ValueError:
            raise UsageError(
                f"unknown kind of artifact {word!r}", hint=f"Use one of: {', '.join(cls)}."
            ) from None


class _Blobs:
    """The blobs of an artifact. See `Blobs`."""

    def __init__(self, opened: Opened, descriptors: Iterable[Descriptor]) -> None:
        self._opened = opened
        self._sizes = {blob.digest: blob.size for blob in descriptors}

    def open(self, descriptor: Descriptor) -> OpenReader:
        if descriptor.digest not in self._opened:
            raise blob_not_found(descriptor.digest)
        check_blob_size(descriptor, self._sizes[descriptor.digest])
        return self._opened[descriptor.digest]()

    def read(self, descriptor: Descriptor) -> bytes:
        check_document_size(descriptor)
        with self.open(descriptor) as reader:
            return checked_bytes(reader.read(0, reader.size), descriptor)

    def headers(self, descriptors: Sequence[Descriptor], _budget: Budget) -> list[None]:
        return [None] * len(descriptors)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return [blob for blob in unique(descriptors) if self._sizes.get(blob.digest) != blob.size]

    def digests(self) -> set[str]:
        return {digest.hex for digest in self._opened}

    def sequence(self, descriptors: Sequence[Descriptor]) -> None:
        """Return None: any number can be read at once."""


class Artifact(Readable):
    """A stored model in another form. See `Readable`.

    ``notes``: sentences about what it leaves out or changes.
    """

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
        self.manifests = FixedManifests(address, {name: manifest.raw})

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """See `Readable`: the store's blobs are kept for as long as the artifact is open."""
        yield True


@contextmanager
def open_artifact(
    name: str | ModelName,
    store: Readable,
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

    ``jobs``: threads that hash (None: one a core). ``progress`` is told of the bytes that are
    hashed.

    Raises: UsageError (an unknown word); as `export_model`, except for its folder.
    """
    chosen = ArtifactKind.parse(kind)
    options = ExportOptions.parse(format, dequantize, max_shard_size)
    with store.lease():
        full = store.find(name)
        model = StoredModel(full, store.manifests.read(full), store)
        if chosen is ArtifactKind.OCI:
            yield _under_oci(full, model)
            return
        plan = plan_export(model, options, verify=True)
        check_copies(plan)
        form = (
            image_of(plan)
            if chosen is ArtifactKind.IMAGE
            else modelpack_of(full.model, model, plan, options.dequantize)
        )
        manifest, opened = _made(form, threads(jobs), progress)
        yield Artifact(full, store.address, manifest, opened, plan.notes)


def _under_oci(name: ModelName, model: StoredModel) -> Artifact:
    blobs = model.manifest.descriptors
    opened = {blob.digest: partial(model.home.blobs.open, blob) for blob in blobs}
    return Artifact(name, model.home.address, under_oci(model.manifest), opened, ())


def _made(form: ArtifactForm, jobs: int, progress: Progress | None) -> tuple[Manifest, Opened]:
    """Return the manifest of an artifact, and how each of its blobs is opened."""
    stage = HashStage()
    told = begun(progress, sum(layer.size for layer in form.layers))

    def hashed(layer: Layer) -> Digest:
        digest = layer.digest(stage)
        told(layer.size, layer.name)
        return digest

    digests = results_of(form.layers, hashed, jobs, name="artifact")
    opened: dict[Digest, Callable[[], OpenReader]] = {}
    layers = []
    for layer, digest in zip(form.layers, digests, strict=True):
        opened[digest] = layer.open
        descriptor = Descriptor(layer.media_type, digest, layer.size)
        layers.append(ManifestLayer(descriptor, layer.annotations))
    config = form.config(digests)
    described = blob_descriptor(config, form.config_media_type)
    opened[described.digest] = partial(BytesReader, config)
    return artifact_manifest(described, layers, artifact_type=form.artifact_type), opened
