"""Import: a checkpoint becomes blobs and a manifest. Read (inventory.py), decide (plan.py), do (write.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.digest import Digest
from blobstore.documents import CONFIG_MEDIA_TYPE, JSON_MEDIA_TYPE, TENSOR_MEDIA_TYPE, Descriptor, Manifest
from blobstore.errors import InvalidNameError, UsageError
from blobstore.importer.inventory import Inventory, read_inventory
from blobstore.importer.options import Experts, ImportOptions
from blobstore.importer.plan import ImportPlan, OutputTensor, make_plan, plan_blobs
from blobstore.importer.write import Progress, SourceReaders, write_blobs
from blobstore.names import ModelName
from blobstore.store import FinishedBlob, Store

__all__ = [
    "Experts",
    "ImportOptions",
    "ImportPlan",
    "ImportResult",
    "OutputTensor",
    "Progress",
    "SourceReaders",
    "default_name",
    "import_model",
    "outputs_of",
    "plan_import",
    "read_inventory",
    "run_plan",
    "threads",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """What an import did. ``created`` blobs are new to the store, ``reused`` ones were there; sizes are in bytes."""

    name: ModelName
    digest: Digest
    manifest: Manifest
    created: int
    reused: int
    source_bytes: int
    stored_bytes: int
    new_bytes: int
    bits_per_weight: float
    seconds: float

    @property
    def blobs(self) -> int:
        """Number of different blobs of the model."""
        return self.created + self.reused


def plan_import(
    source: str | os.PathLike[str],
    *,
    quant: str | None = None,
    group_size: int | None = None,
    method: str = "minmax",
    dtype: str | None = None,
    profile: str = "default",
    experts: str | None = None,
    alignment: int | None = None,
    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    global_scale: bool = False,
) -> ImportPlan:
    """Return what an import of ``source`` would write. Only headers and JSON documents are read; nothing is written.

    ``source``: a .safetensors file or a checkpoint folder. ``quant``: int4, int8, nvfp4, mxfp4, mxfp8, or None to keep
    the weights. ``group_size``: of that type; None is the profile's. ``dtype``: bfloat16, float16 or float32, to convert
    float weights first. ``profile``: "default" or "ollama". ``experts``: "packed" or "stacked"; None is the profile's.
    ``alignment``: of the data in each blob, bytes. ``method``: how scales are chosen, "minmax" or "search".
    ``importance``, for "search": what each input column's squared error counts; a .safetensors file, or a mapping, with
    one vector a tensor, by the source's names. ``global_scale``: nvfp4 weights get one, a power of two a tensor.

    Raises: UsageError (options), NotFoundError, HeaderError, DocumentError, CorruptDataError, UnsupportedSourceError,
    LimitExceededError, StorageError: see `read_inventory` and `make_plan`.
    """
    options = ImportOptions.parse(
        quant=quant,
        group_size=group_size,
        method=method,
        dtype=dtype,
        profile=profile,
        experts=experts,
        alignment=alignment,
        importance=importance,
        global_scale=global_scale,
    )
    return make_plan(read_inventory(source), options)


def import_model(
    source: str | os.PathLike[str],
    name: str | ModelName | None = None,
    *,
    store: Store,
    quant: str | None = None,
    group_size: int | None = None,
    method: str = "minmax",
    dtype: str | None = None,
    profile: str = "default",
    experts: str | None = None,
    alignment: int | None = None,
    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    global_scale: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> ImportResult:
    """Import a checkpoint into ``store`` under ``name`` (None: `default_name`), replacing an older model of that name.

    Options as in `plan_import`; ``jobs`` is the number of threads (None: one a core), ``progress`` is told of every
    chunk. The same source and options give the same bytes and digests with any number of threads.

    Raises: as `plan_import`; InvalidNameError; NonFiniteWeightError with tensor and index; BusyError. After an error the
    store holds what it held before.
    """
    plan = plan_import(
        source,
        quant=quant,
        group_size=group_size,
        method=method,
        dtype=dtype,
        profile=profile,
        experts=experts,
        alignment=alignment,
        importance=importance,
        global_scale=global_scale,
    )
    target = default_name(source, plan.options) if name is None else name
    return run_plan(plan, ModelName.parse(target) if isinstance(target, str) else target, store, jobs, progress)


def outputs_of(inventory: Inventory, experts: Experts) -> dict[str, OutputTensor]:
    """Return the tensors that an import of ``inventory`` without quantization makes, by name. Raises: as `plan_import`."""
    blobs = plan_blobs(inventory, ImportOptions(experts=experts))
    return {tensor.name: tensor for blob in blobs for tensor in blob.tensors}


def default_name(source: str | os.PathLike[str], options: ImportOptions) -> ModelName:
    """Return the file's or folder's stem, with the type (or ``latest``) as tag.

    Raises: InvalidNameError when the stem is no model name.
    """
    path = Path(os.path.abspath(source))  # noqa: PTH100  # resolve() would follow a link to another name
    stem = path.stem if path.name.endswith(".safetensors") else path.name
    try:
        return _named(stem, options)
    except InvalidNameError as error:
        error.hint = "Give the model a name: blobstore import SOURCE NAME."
        raise


def _named(stem: str, options: ImportOptions) -> ModelName:
    return ModelName(model=stem, tag=options.quant_type.value if options.quant_type is not None else "latest")


def run_plan(
    plan: ImportPlan, name: ModelName, store: Store, jobs: int | None = None, progress: Progress | None = None
) -> ImportResult:
    """Carry a plan out: write its blobs, then make them and the manifest visible. Raises: as `import_model`."""
    workers = threads(jobs)
    started = time.monotonic()
    with store.ingest() as ingest:
        tensor_blobs = write_blobs(plan, ingest, workers, progress or _silent)
        document_blobs = [ingest.put(data) for data in plan.documents.values()]
        config_blob = ingest.put(plan.config.encode())
        manifest = _manifest(plan, tensor_blobs, document_blobs, config_blob)
        written = [*tensor_blobs, *document_blobs, config_blob]
        created = ingest.commit(written, name, manifest)
    sizes = {blob.digest: blob.size for blob in written}
    return ImportResult(
        name=name,
        digest=manifest.digest,
        manifest=manifest,
        created=len(created),
        reused=len(sizes) - len(created),
        source_bytes=plan.inventory.nbytes,
        stored_bytes=sum(sizes.values()),
        new_bytes=sum(sizes[digest] for digest in created),
        bits_per_weight=plan.bits_per_weight,
        seconds=time.monotonic() - started,
    )


def threads(jobs: int | None) -> int:
    """Return how many threads a user asks for: None is one for each core that this process may use.

    Raises: UsageError for none or fewer.
    """
    if jobs is not None:
        if jobs < 1:
            raise UsageError(f"at least one thread is needed, not {jobs}")
        return jobs
    # A container or taskset may leave fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _manifest(
    plan: ImportPlan, tensors: list[FinishedBlob], documents: list[FinishedBlob], config: FinishedBlob
) -> Manifest:
    return Manifest(
        config=_descriptor(config, CONFIG_MEDIA_TYPE),
        layers=(
            *(_descriptor(blob, TENSOR_MEDIA_TYPE, planned.name) for blob, planned in zip(tensors, plan.blobs, strict=True)),
            *(_descriptor(blob, JSON_MEDIA_TYPE, name) for blob, name in zip(documents, plan.documents, strict=True)),
        ),
    )


def _descriptor(blob: FinishedBlob, media_type: str, name: str | None = None) -> Descriptor:
    return Descriptor(media_type=media_type, digest=blob.digest, size=blob.size, name=name)


def _silent(nbytes: int, blob: str) -> None:
    """Progress for nobody."""
