"""Repair: what is damaged of a stored model is made again from its source, byte for byte, and nothing else is touched.

The options are those that ``blobstore.json`` keeps. What is made counts only when its bytes have the digest that the
manifest names: another source, or another arithmetic, can't slip in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import eq
from typing import Any

from blobstore.care.blob_check import Users
from blobstore.care.checks import BlobChecks, silent
from blobstore.care.manifests import manifest_bytes, read_manifest
from blobstore.care.replan import Files, replan
from blobstore.care.verify import Bar
from blobstore.digest import Digest
from blobstore.documents import FILE_MEDIA_TYPE, TENSOR_MEDIA_TYPE, Descriptor, Manifest
from blobstore.errors import BusyError, DocumentError, UnsupportedSourceError, UsageError
from blobstore.importer import ImportPlan, threads
from blobstore.importer.planning.outputs import PlannedBlob, PlannedCopy, PlannedFile
from blobstore.importer.writing.copying import copy_file
from blobstore.importer.writing.write import usual_memory, write_blobs
from blobstore.mlx_settings import settings_of
from blobstore.names import ModelName
from blobstore.ranges import real_path
from blobstore.store import FinishedBlob, Ingest, Store


@dataclass(frozen=True, slots=True)
class RemainingBlob:
    """A damaged blob that could not be made again, and why not."""

    blob: Descriptor
    reason: str


@dataclass(frozen=True, slots=True)
class RepairResult:
    """What a repair did: of ``checked`` blobs those that were damaged and are ``repaired``, and those that are not.

    ``manifest_restored``: the manifest was damaged or gone, and is again what was written.
    """

    name: ModelName
    checked: int
    repaired: tuple[Descriptor, ...]
    remaining: tuple[RemainingBlob, ...]
    manifest_restored: bool


def repair_model(
    name: str | ModelName,
    source: str | os.PathLike[str] | None = None,
    *,
    store: Store,
    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    draft: str | os.PathLike[str] | None = None,
    modelfile: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    bar: Bar | None = None,
) -> RepairResult:
    """Make the damaged and missing blobs of a stored model again from the checkpoint ``source``; nothing else is written.

    Every blob is hashed first. ``importance``, ``draft`` and ``modelfile``: the files that the import had beside it, needed
    when what is damaged depends on them. A manifest that is damaged comes back from the store's copy of it. The source is
    not read when no blob is damaged, and may be None then. ``jobs``: threads (None: one a core). ``bar``: as in `verify`.

    Raises: NotFoundError for no such model; as `plan_import` for the source; UsageError when blobs are damaged and there is
    no source, or when the options of the import can't be found out; UnsupportedSourceError when no damaged blob could be
    made from the source; BusyError; StorageError.
    """
    full = store.manifests.spelled(ModelName.parse(name) if isinstance(name, str) else name)
    workers = threads(jobs)
    before = manifest_bytes(store, full)
    manifest, is_restored = _manifest(store, full)
    with store.ingest("" if source is None else real_path(source)) as ingest:
        checks = _checked(store, full, manifest, workers, bar)
        damaged = {blob.digest: blob for blob in manifest.descriptors if blob.digest.hex in checks.damaged}
        blobs: list[FinishedBlob] = []
        remaining: dict[Digest, str] = {}
        if damaged:
            if source is None:
                message = f"damaged or missing: {len(damaged):,} of the {len(checks.uses):,} blobs of {full}"
                hint = f"Make them again from the checkpoint: blobstore repair {full} --from SOURCE"
                raise UsageError(message, model=str(full), hint=hint)
            plan = replan(store, manifest, source, Files(importance, draft, modelfile))
            blobs, remaining = _made_again(plan, damaged, ingest, workers, bar)
            if not blobs:
                digest, reason = next(iter(remaining.items()))
                message = f"nothing of {full} could be made again from {os.fspath(source)}: blob {digest}: {reason}"
                raise UnsupportedSourceError(message, model=str(full), blob=str(digest))
        is_restored = is_restored and not remaining
        if is_restored:
            # It takes its time: what another has put there or removed meanwhile stays as it is now.
            ingest.commit(blobs, full, manifest, check=lambda: _refuse_change(store, full, before))
        elif blobs:
            ingest.publish(blobs)
    return RepairResult(
        name=full,
        checked=len(checks.uses),
        repaired=tuple(blob for digest, blob in damaged.items() if digest not in remaining),
        remaining=tuple(RemainingBlob(damaged[digest], reason) for digest, reason in remaining.items()),
        manifest_restored=is_restored,
    )


def _manifest(store: Store, name: ModelName) -> tuple[Manifest, bool]:
    """Return a model's manifest, and whether it is a copy of what should be there."""
    manifest, reason = read_manifest(store, name)
    if manifest is not None and reason is None:
        return manifest, False
    copies = [Manifest.parse(raw, f"the copy of the manifest of {name}") for raw in store.copies.of(name)]
    if copies:
        return min(copies, key=lambda copy: _strangeness(copy, store, name)), True
    store.manifests.require(name)
    raise DocumentError(
        f"{reason}, and there is no copy of it",
        model=str(name),
        hint="Import the model again; its blobs that are sound are not made twice.",
    )


def _refuse_change(store: Store, name: ModelName, before: bytes) -> None:
    if manifest_bytes(store, name) != before:
        message = f"the manifest of {name} has been replaced or removed during the repair, or could not be read"
        raise BusyError(message, model=str(name), hint="Repair it again.")


def _strangeness(copy: Manifest, store: Store, name: ModelName) -> tuple[int, int]:
    """Return how little a copy looks like what was there: a killed import leaves one whose manifest was never linked."""
    missing = sum(not store.blobs.has(blob.digest, blob.size) for blob in copy.descriptors)
    return -sum(map(eq, copy.raw, manifest_bytes(store, name))), missing


def _checked(store: Store, name: ModelName, manifest: Manifest, jobs: int, bar: Bar | None) -> BlobChecks:
    checks = BlobChecks(store)
    checks.add(Users(b"", settings_of(store, manifest), [name]), manifest)
    chosen = checks.chosen(lambda _: True)
    with bar(sum(map(checks.size, chosen))) if bar is not None else nullcontext() as progress:
        checks.run(chosen, jobs, progress or silent)
    return checks


def _made_again(
    plan: ImportPlan, damaged: Mapping[Digest, Descriptor], ingest: Ingest, jobs: int, bar: Bar | None
) -> tuple[list[FinishedBlob], dict[Digest, str]]:
    """Return what was made of the damaged blobs, not yet visible, and why the others could not be made."""
    texts = [layer.data for layer in plan.layers if isinstance(layer, PlannedFile)]
    config = plan.config.encode()
    by_digest = {Digest.of(data): data for data in (*texts, config, config + b"\n")}  # newer Ollamas end it with a newline
    made = [ingest.put(by_digest[digest]) for digest in damaged if digest in by_digest]
    lost = {(blob.name, blob.size) for blob in damaged.values() if blob.media_type == FILE_MEDIA_TYPE}
    copies = (layer for layer in plan.layers if isinstance(layer, PlannedCopy) and (layer.name, layer.size) in lost)
    made += [copy_file(layer, ingest) for layer in copies]
    wanted = {blob.name: blob for blob in damaged.values() if blob.media_type == TENSOR_MEDIA_TYPE}
    chosen = [layer for layer in plan.blobs if layer.name in wanted and layer.size == wanted[layer.name].size]
    made += _written(replace(plan, layers=tuple(chosen)), ingest, jobs, bar) if chosen else []
    right = [blob for blob in made if blob.digest in damaged]
    found = {blob.digest for blob in right}
    return right, {digest: _reason(blob, plan, chosen) for digest, blob in damaged.items() if digest not in found}


def _written(plan: ImportPlan, ingest: Ingest, jobs: int, bar: Bar | None) -> list[FinishedBlob]:
    total = sum(blob.source_bytes for blob in plan.blobs)
    with bar(total) if bar is not None else nullcontext() as progress:
        # The journal would say that the damaged blob is what is wanted: so it is hashed first.
        written = write_blobs(plan, ingest, jobs, usual_memory(jobs), progress or silent, verify_reuse=True)
    return written.blobs


def _reason(blob: Descriptor, plan: ImportPlan, chosen: list[PlannedBlob]) -> str:
    """Say why a blob could not be made again."""
    if blob.media_type != TENSOR_MEDIA_TYPE:
        what = f"{blob.name or blob.media_type.rpartition('.')[2]}"
        return f"{what} is not in the source as it was; what came from a Modelfile needs it again (--modelfile)"
    if any(layer.name == blob.name for layer in chosen):
        return "the source gives it other bytes: it is another source, or another version of blobstore wrote the model"
    if any(layer.name == blob.name for layer in plan.blobs):
        return "the source gives it another size: it is another source"
    draft = "; a draft model is needed too (--draft)" if (blob.name or "").startswith("draft.") else ""
    return f"the source has no {blob.name}{draft}"
