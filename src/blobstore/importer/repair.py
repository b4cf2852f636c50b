"""Repair: what is damaged of a stored model is made again from its source, byte for byte, and nothing else is touched.

The options are those that ``blobstore.json`` keeps. What is made counts only when its bytes have
the digest that the manifest names: another source, or another arithmetic, can't slip in.

Replan: the plan of an import that has been, from the source and from what the model keeps of its
options.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from operator import eq
from pathlib import Path
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    BusyError,
    ConflictError,
    DocumentError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.formats.checkpoint import settings_of
from blobstore.formats.documents import (
    FILE_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    Descriptor,
    Manifest,
    ModelConfig,
)
from blobstore.formats.modelfile import Modelfile
from blobstore.formats.provenance import OWN_DOCUMENT
from blobstore.formats.quant import QuantType
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob, PlannedCopy, PlannedFile
from blobstore.importer.planning.plan import make_plan
from blobstore.importer.planning.provenance import possible_options, recorded_import
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.policies.rules import Importance
from blobstore.importer.writing import copy_file, usual_memory, write_blobs
from blobstore.io.workers import Progress, begun, threads
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import Source, key_of
from blobstore.source.inventory import Inventory, read_inventory
from blobstore.store.care.checks import BlobChecks, Users
from blobstore.store.care.verify import manifest_bytes, read_manifest
from blobstore.store.local.session import LocalSession
from blobstore.store.local.store import Store
from blobstore.store.ports import Finished


@dataclass(frozen=True, slots=True)
class Files:
    """What the import read and its document does not hold, where it is given again."""

    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None
    draft: str | os.PathLike[str] | None = None
    modelfile: str | os.PathLike[str] | None = None


def replan(store: Store, manifest: Manifest, source: Source, files: Files) -> ImportPlan:
    """Return the plan of the import that made a model, from its source.

    Raises: as `plan_import`; UsageError when a file is missing that the import had, or its options
    can't be found out.
    """
    given = ImportOptions.parse(modelfile=files.modelfile)
    path = Path(files.draft) if files.draft is not None else given.draft
    inventory = read_inventory(source, without=path)
    draft = read_inventory(path) if path is not None else None
    importance = Importance.parse(files.importance) if files.importance is not None else None
    planner = _Planner(store, manifest, inventory, draft, importance, given.modelfile)
    return planner.plan()


@dataclass(frozen=True, slots=True)
class _Planner:
    """What is known of an import: its model, its source, what was given beside it."""

    store: Store
    manifest: Manifest
    inventory: Inventory
    draft: Inventory | None
    importance: Importance | None
    modelfile: Modelfile

    def plan(self) -> ImportPlan:
        layer = self.manifest.document(OWN_DOCUMENT)
        if layer is None:
            return self._fitting()
        try:
            raw = self.store.blobs.read(layer)
        except BlobStoreError:
            return self._giving(layer.digest)
        recorded = recorded_import(raw)
        if recorded.importance is not None and (
            self.importance is None or self.importance.digest != recorded.importance
        ):
            what = "with other" if self.importance is not None else "with"
            raise UsageError(
                f"the model was imported {what} importance",
                hint="Give the same file: `importance=FILE`.",
            )
        return make_plan(self.inventory, self._completed(recorded.options), self.draft)

    def _completed(self, options: ImportOptions) -> ImportOptions:
        """Return options with what was given: importance weighs a search only."""
        importance = self.importance if options.method == "search" else None
        return replace(options, importance=importance, modelfile=self.modelfile)

    def _giving(self, digest: Digest) -> ImportPlan:
        """Return the first plan of usual options whose own document, which is damaged in the store, has that digest."""
        for plan in self._plans(own_document=True):
            if Digest.of(plan.documents[OWN_DOCUMENT]) == digest:
                return plan
        raise self._unknown(f"its {OWN_DOCUMENT} is damaged, and nothing usual gives it")

    def _fitting(self) -> ImportPlan:
        """Return the first plan of usual options that gives the model's blobs their names and sizes."""
        wanted = {
            (layer.name, layer.size)
            for layer in self.manifest.layers
            if layer.media_type == TENSOR_MEDIA_TYPE
        }
        for plan in self._plans(own_document=False):
            if {(blob.name, blob.size) for blob in plan.blobs} == wanted:
                return plan
        raise self._unknown("it keeps none, and nothing usual gives its blobs")

    def _plans(self, *, own_document: bool) -> Iterator[ImportPlan]:
        """Yield the plans of usual options, of profiles that write a document of ours or of those that do not."""
        for options in self._possible():
            if options.profile.own_document is own_document:
                with suppress(BlobStoreError):  # such options can't have been asked for
                    yield make_plan(self.inventory, options, self.draft)

    def _possible(self) -> Iterator[ImportOptions]:
        draft_types = (None, *QuantType) if self.draft is not None else (None,)
        for options, draft_type in product(possible_options(self._file_type()), draft_types):
            yield replace(self._completed(options), draft_type=draft_type)

    def _file_type(self) -> str | None:
        if self.manifest.config is None:
            return ""
        try:
            return ModelConfig.parse(self.store.blobs.read(self.manifest.config)).file_type or ""
        except BlobStoreError:
            return None

    def _unknown(self, why: str) -> UsageError:
        message = f"the options of the import are not known: {why} from {self.inventory.path}"
        return UsageError(
            message, hint="If this is the source, import it again with the options of that time."
        )


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
    source: Source | None = None,
    *,
    store: Store,
    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    draft: str | os.PathLike[str] | None = None,
    modelfile: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> RepairResult:
    """Make the damaged and missing blobs of a stored model again from the checkpoint ``source``.

    Nothing else is written.

    Every blob is hashed first. ``importance``, ``draft`` and ``modelfile``: the files that the
    import had beside it, needed when what is damaged depends on them. A manifest that is damaged
    comes back from the store's copy of it. The source is not read when no blob is damaged, and may
    be None then. ``jobs``: threads (None: one a core). ``progress`` is told of what is hashed, and
    then of what is read of the source.

    Raises: NotFoundError for no such model; as `plan_import` for the source; UsageError when blobs
    are damaged and there is no source, or when the options of the import can't be found out;
    UnsupportedSourceError when no damaged blob could be made from the source; BusyError;
    StorageError.
    """
    full = store.manifests.spelled(ModelName.of(name))
    workers = threads(jobs)
    before = manifest_bytes(store, full)
    manifest, is_restored = _manifest(store, full)
    with store.session("" if source is None else key_of(source)) as session:
        checks = _checked(store, full, manifest, workers, progress)
        damaged = {
            blob.digest: blob for blob in manifest.descriptors if blob.digest.hex in checks.damaged
        }
        blobs: list[Finished] = []
        remaining: dict[Digest, str] = {}
        if damaged:
            if source is None:
                message = f"damaged or missing: {len(damaged):,} of the {len(checks.uses):,} blobs of {full}"
                hint = f"Make them again from the checkpoint: blobstore repair {full} --from SOURCE"
                raise UsageError(message, model=str(full), hint=hint)
            plan = replan(store, manifest, source, Files(importance, draft, modelfile))
            blobs, remaining = _made_again(plan, damaged, session, workers, progress)
            if not blobs:
                digest, reason = next(iter(remaining.items()))
                message = f"nothing of {full} could be made again from {plan.inventory.path}: blob {digest}: {reason}"
                raise UnsupportedSourceError(message, model=str(full), blob=str(digest))
        is_restored = is_restored and not remaining
        if is_restored:
            # It takes its time: what another has put there or removed meanwhile stays as it is now.
            _restore(session, full, manifest, before)
        elif blobs:
            session.replace(blobs)
    return RepairResult(
        name=full,
        checked=len(checks.uses),
        repaired=tuple(blob for digest, blob in damaged.items() if digest not in remaining),
        remaining=tuple(
            RemainingBlob(damaged[digest], reason) for digest, reason in remaining.items()
        ),
        manifest_restored=is_restored,
    )


def _manifest(store: Store, name: ModelName) -> tuple[Manifest, bool]:
    """Return a model's manifest, and whether it is a copy of what should be there."""
    manifest, reason = read_manifest(store, name)
    if manifest is not None and reason is None:
        return manifest, False
    copies = [
        Manifest.parse(raw, f"the copy of the manifest of {name}") for raw in store.copies.of(name)
    ]
    if copies:
        return min(copies, key=lambda copy: _strangeness(copy, store, name)), True
    store.manifests.require(name)
    raise DocumentError(
        f"{reason}, and there is no copy of it",
        model=str(name),
        hint="Import the model again; its blobs that are sound are not made twice.",
    )


def _restore(session: LocalSession, name: ModelName, manifest: Manifest, before: bytes) -> None:
    try:
        session.publish(name, manifest, expected=(before,) if before else (None, before))
    except ConflictError as error:
        message = f"the manifest of {name} has been replaced or removed during the repair, or could not be read"
        raise BusyError(message, model=str(name), hint="Repair it again.") from error


def _strangeness(copy: Manifest, store: Store, name: ModelName) -> tuple[int, int]:
    """Return how little a copy looks like what was there: a killed import leaves one whose manifest was never linked."""
    missing = sum(not store.blobs.has(blob.digest, blob.size) for blob in copy.descriptors)
    return -sum(map(eq, copy.raw, manifest_bytes(store, name))), missing


def _checked(
    store: Store, name: ModelName, manifest: Manifest, jobs: int, progress: Progress | None
) -> BlobChecks:
    checks = BlobChecks(store)
    checks.add(Users(b"", settings_of(store.blobs.read, manifest), [name]), manifest)
    chosen = checks.chosen(lambda _: True)
    checks.run(chosen, jobs, begun(progress, sum(map(checks.size, chosen))))
    return checks


def _made_again(
    plan: ImportPlan,
    damaged: Mapping[Digest, Descriptor],
    session: LocalSession,
    jobs: int,
    progress: Progress | None,
) -> tuple[list[Finished], dict[Digest, str]]:
    """Return what was made of the damaged blobs, not yet visible, and why the others could not be made."""
    texts = [layer.data for layer in plan.layers if isinstance(layer, PlannedFile)]
    config = plan.config.encode()
    by_digest = {
        Digest.of(data): data for data in (*texts, config, config + b"\n")
    }  # newer Ollamas end it with a newline
    made: list[Finished] = [
        session.put(by_digest[digest]) for digest in damaged if digest in by_digest
    ]
    lost = {
        (blob.name, blob.size) for blob in damaged.values() if blob.media_type == FILE_MEDIA_TYPE
    }
    copies = (
        layer
        for layer in plan.layers
        if isinstance(layer, PlannedCopy) and (layer.name, layer.size) in lost
    )
    made += [copy_file(layer, session) for layer in copies]
    wanted = {blob.name: blob for blob in damaged.values() if blob.media_type == TENSOR_MEDIA_TYPE}
    chosen = [
        layer
        for layer in plan.blobs
        if layer.name in wanted and layer.size == wanted[layer.name].size
    ]
    made += _written(replace(plan, layers=tuple(chosen)), session, jobs, progress) if chosen else []
    right = [blob for blob in made if blob.digest in damaged]
    found = {blob.digest for blob in right}
    return right, {
        digest: _reason(blob, plan, chosen)
        for digest, blob in damaged.items()
        if digest not in found
    }


def _written(
    plan: ImportPlan, session: LocalSession, jobs: int, progress: Progress | None
) -> list[Finished]:
    total = sum(blob.source_bytes for blob in plan.blobs)
    # The journal would say that the damaged blob is what is wanted: so it is hashed first.
    return write_blobs(
        plan, session, jobs, usual_memory(jobs), begun(progress, total), verify_reuse=True
    ).blobs


def _reason(blob: Descriptor, plan: ImportPlan, chosen: list[PlannedBlob]) -> str:
    """Say why a blob could not be made again."""
    if blob.media_type != TENSOR_MEDIA_TYPE:
        what = f"{blob.name or blob.media_type.rpartition('.')[2]}"
        return f"{what} is not in the source as it was; what came from a Modelfile needs it again (`modelfile`)"
    if any(layer.name == blob.name for layer in chosen):
        return "the source gives it other bytes: it is another source, or another version of blobstore wrote the model"
    if any(layer.name == blob.name for layer in plan.blobs):
        return "the source gives it another size: it is another source"
    draft = (
        "; a draft model is needed too (`draft`)" if (blob.name or "").startswith("draft.") else ""
    )
    return f"the source has no {blob.name}{draft}"
