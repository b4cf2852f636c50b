"""Repair: the damaged blobs of a stored model are made again from its source, byte for byte.

Nothing else is changed. The options are those in ``blobstore.json``, or, where that is lost, the
first usual ones that fit. A blob counts only when it has the digest that the manifest names, so
another source, or another arithmetic, can't slip in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import eq
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
    OWN_DOCUMENT,
    OWN_RULE,
    TENSOR_MEDIA_TYPE,
    Descriptor,
    Manifest,
    ModelConfig,
    Provenance,
)
from blobstore.formats.dtypes import QuantType
from blobstore.formats.modelfile import Modelfile
from blobstore.importer.options import PROFILES, ImportOptions
from blobstore.importer.outputs import ImportPlan, PlannedBlob, PlannedCopy, PlannedFile
from blobstore.importer.plan import make_plan
from blobstore.importer.rules import Importance
from blobstore.importer.writing import Means, copy_file, write_blobs
from blobstore.io.workers import Progress, start_progress, threads
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.source.inventory import Inventory, read_model
from blobstore.store.care.checks import BlobChecks, Users
from blobstore.store.care.verify import read_manifest
from blobstore.store.local.session import LocalSession
from blobstore.store.local.store import Store, open_store
from blobstore.store.ports import Finished


@dataclass(frozen=True, slots=True)
class _Given:
    """What repeats an import besides its options: the source and its other files."""

    inventory: Inventory
    draft: Inventory | None
    importance: Importance | None
    modelfile: Modelfile

    @classmethod
    def read(
        cls,
        source: Source,
        importance: str | os.PathLike[str] | Mapping[str, Any] | None,
        draft: str | os.PathLike[str] | None,
        adapter: str | os.PathLike[str] | None,
        modelfile: str | os.PathLike[str] | None,
        config: str | os.PathLike[str] | None,
        open_source: OpenSource,
    ) -> _Given:
        options = ImportOptions.parse(modelfile=modelfile, config=config, adapter=adapter)
        draft_source = os.fspath(draft) if draft is not None else options.draft
        drafted = read_model(open_source(draft_source)) if draft_source is not None else None
        return cls(
            read_model(
                source,
                without=drafted.folder if drafted is not None else None,
                config=open_source(options.config) if options.config is not None else None,
                adapter=open_source(options.adapter) if options.adapter is not None else None,
            ),
            drafted,
            Importance.parse(importance) if importance is not None else None,
            options.modelfile,
        )

    def plan(self, options: ImportOptions) -> ImportPlan:
        importance = self.importance if options.method == "search" else None
        options = replace(options, importance=importance, modelfile=self.modelfile)
        return make_plan(self.inventory, options, self.draft)


def replan(store: Store, manifest: Manifest, given: _Given) -> ImportPlan:
    """Return the plan of the import that made a model.

    Raises: as `make_plan`; DocumentError (rule B1); UsageError when a file is missing that the
    import had, or its options can't be found out.
    """
    layer = manifest.document(OWN_DOCUMENT)
    try:
        raw = store.blobs.read(layer) if layer is not None else None
    except BlobStoreError:
        raw = None
    if raw is None:
        return _guess_plan(store, manifest, given)
    options, importance = recorded_import(raw)
    if importance is not None and (
        given.importance is None or given.importance.digest != importance
    ):
        raise UsageError(
            f"the model was imported with {'other ' if given.importance else ''}importance",
            hint="Give the same file: importance=FILE.",
        )
    if Provenance.parse(raw).adapter is not None and given.inventory.adapter is None:
        raise UsageError(
            "the model was imported with an adapter", hint="Give the same one: adapter=DIR."
        )
    return given.plan(options)


def recorded_import(raw: bytes) -> tuple[ImportOptions, Digest | None]:
    """Return the options in ``blobstore.json``, and the digest of the importance that it had.

    Raises: DocumentError (rule B1), for another version too.
    """
    provenance = Provenance.parse(raw)
    record, draft = provenance.options or {}, provenance.draft
    quant = draft.quant if draft is not None else None
    try:
        options = replace(
            ImportOptions.from_record(record),
            draft_type=None if quant is None else QuantType.parse(quant),
        )
        digest = record["importance"]
        return options, None if digest is None else Digest.parse(digest)
    except (LookupError, TypeError, ValueError, AttributeError, BlobStoreError) as error:
        raise DocumentError(
            f"{OWN_DOCUMENT} has no options of an import: {error} (rule {OWN_RULE})", rule=OWN_RULE
        ) from None


def _guess_plan(store: Store, manifest: Manifest, given: _Given) -> ImportPlan:
    """Return the first plan of usual options that gives the model what can be known of it.

    That is the digest of its ``blobstore.json``, or, without one, the names and sizes of its blobs.
    """
    own = manifest.document(OWN_DOCUMENT)
    wanted = {(layer.name, layer.size) for layer in manifest.tensor_layers}
    profile = PROFILES["ollama" if own is None else "default"]
    for options in _usual_options(_file_type(store, manifest)):
        with suppress(BlobStoreError):  # such options can't have been asked for
            plan = given.plan(replace(options, profile=profile))
            if own is None and {(blob.name, blob.size) for blob in plan.blobs} == wanted:
                return plan
            if own is not None and Digest.of(plan.documents[OWN_DOCUMENT]) == own.digest:
                return plan
    what = "its blobs" if own is None else f"its {OWN_DOCUMENT}, which is damaged"
    raise UsageError(
        f"the options of the import are unknown: no common set of options gives {what} from"
        f" {given.inventory.path}",
        hint="If this is the source, import it again with the original options.",
    )


def _file_type(store: Store, manifest: Manifest) -> str | None:
    if manifest.config is None:
        return ""
    try:
        return ModelConfig.parse(store.blobs.read(manifest.config)).file_type or ""
    except BlobStoreError:
        return None


def _usual_options(file_type: str | None) -> Iterator[ImportOptions]:
    kinds = [kind for kind in QuantType if file_type in (kind.value, None)]
    for kind in (*kinds, None):
        for method in ("minmax", "search"):
            for size in kind.group_sizes if kind is not None else (None,):
                yield ImportOptions(quant_type=kind, group_size=size, method=method)


@dataclass(frozen=True, slots=True)
class RemainingBlob:
    """A damaged blob that could not be made again, and why not."""

    KEYS = ("digest=blob.digest", "name=blob.name", "reason")

    blob: Descriptor
    reason: str


@dataclass(frozen=True, slots=True)
class RepairResult:
    """What a repair did: of ``checked`` blobs the damaged ones, ``repaired`` or ``remaining``.

    ``manifest_restored``: the manifest was damaged or gone, and is again what was written.
    """

    KEYS = (
        "name",
        "checked",
        "repaired=repaired_digests",
        "bytes=repaired_bytes",
        "manifest_restored",
        "remaining",
    )

    name: ModelName
    checked: int
    repaired: tuple[Descriptor, ...]
    remaining: tuple[RemainingBlob, ...]
    manifest_restored: bool

    @property
    def repaired_digests(self) -> list[Digest]:
        """The digests of the blobs that were rebuilt."""
        return [blob.digest for blob in self.repaired]

    @property
    def repaired_bytes(self) -> int:
        """Their bytes."""
        return sum(blob.size for blob in self.repaired)


def repair_model(
    name: str | ModelName,
    source: Source | None = None,
    *,
    store: Store | str | os.PathLike[str] | None = None,
    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    draft: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    modelfile: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    open_source: OpenSource = open_folder,
) -> RepairResult:
    """Make the damaged and missing blobs of a stored model again from the checkpoint ``source``.

    Nothing else is written.

    Every blob is hashed first. ``importance``, ``draft``, ``adapter``, ``modelfile`` and
    ``config``: what the import had with it, needed when what is damaged depends on them. A manifest
    that is damaged comes back from the store's copy of it. The source is not read when no blob is
    damaged, and may be None then. ``jobs``: threads (None: one per core). ``progress`` is called
    with the hashed bytes, and then of what is read of the source. ``open_source``: as in
    `plan_import`.

    Raises: NotFoundError for no such model; as `plan_import` for the source; UsageError when blobs
    are damaged and no source is given, or the options of the import are unknown;
    UnsupportedSourceError when no damaged blob could be made from the source; BusyError;
    StorageError.
    """
    store = open_store(store)
    full = store.manifests.stored_name(ModelName.of(name))
    workers = threads(jobs)
    before = store.manifests.raw(full) or b""
    manifest, is_restored = _manifest(store, full)
    with store.session() as session:
        checks = _check_blobs(store, full, manifest, workers, progress)
        damaged = {
            blob.digest: blob for blob in manifest.descriptors if blob.digest.hex in checks.damaged
        }
        blobs: list[Finished] = []
        remaining: dict[Digest, str] = {}
        if damaged:
            if source is None:
                raise UsageError(
                    f"damaged or missing: {len(damaged):,} of the {len(checks.uses):,} blobs "
                    f"of {full}",
                    model=str(full),
                    hint=f"Rebuild them from the checkpoint: blobstore repair {full} --from SOURCE",
                )
            plan = replan(
                store,
                manifest,
                _Given.read(source, importance, draft, adapter, modelfile, config, open_source),
            )
            blobs, remaining = _made_again(plan, damaged, session, workers, progress)
            if not blobs:
                digest, reason = next(iter(remaining.items()))
                raise UnsupportedSourceError(
                    f"nothing of {full} could be rebuilt from {plan.inventory.path}: "
                    f"blob {digest}: {reason}",
                    model=str(full),
                    blob=str(digest),
                )
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
    manifest, reason = read_manifest(store.care(), name)
    if manifest is not None and reason is None:
        return manifest, False
    copies = [
        Manifest.parse(raw, f"the copy of the manifest of {name}") for raw in store.copies.of(name)
    ]
    if copies:
        return min(copies, key=lambda copy: _strangeness(copy, store, name)), True
    store.manifests.require(name)
    raise DocumentError(
        f"model {name}: {reason}, and the store has no copy of it",
        model=str(name),
        hint="Import the model again; undamaged blobs are reused.",
    )


def _restore(session: LocalSession, name: ModelName, manifest: Manifest, before: bytes) -> None:
    try:
        session.publish(name, manifest, expected=(before,) if before else (None, before))
    except ConflictError as error:
        raise BusyError(
            f"the manifest of {name} was replaced, removed or unreadable during the repair",
            model=str(name),
            hint="Run the repair again.",
        ) from error


def _strangeness(copy: Manifest, store: Store, name: ModelName) -> tuple[int, int]:
    missing = sum(not store.blobs.has(blob.digest, blob.size) for blob in copy.descriptors)
    return -sum(map(eq, copy.raw, store.manifests.raw(name) or b"")), missing


def _check_blobs(
    store: Store, name: ModelName, manifest: Manifest, jobs: int, progress: Progress | None
) -> BlobChecks:
    checks = BlobChecks(store.care())
    checks.add(Users(b"", settings_of(store.blobs.read, manifest), [name]), manifest)
    chosen = checks.largest_first(lambda _: True)
    checks.run(chosen, jobs, start_progress(progress, sum(map(checks.size, chosen))))
    return checks


def _made_again(
    plan: ImportPlan,
    damaged: Mapping[Digest, Descriptor],
    session: LocalSession,
    jobs: int,
    progress: Progress | None,
) -> tuple[list[Finished], dict[Digest, str]]:
    """Return the blobs that were made again, not yet visible, and why the others were not."""
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
    if chosen:
        # The journal would say that the damaged blob is what is wanted: so it is hashed first.
        shown = start_progress(progress, sum(blob.source_bytes for blob in chosen))
        only, means = replace(plan, layers=tuple(chosen)), Means(jobs, None, shown, verify=True)
        made += write_blobs(only, session, means, checks_source=False)[0]
    right = [blob for blob in made if blob.digest in damaged]
    digests = {blob.digest for blob in right}
    return right, {
        digest: _reason(blob, plan, chosen)
        for digest, blob in damaged.items()
        if digest not in digests
    }


def _reason(blob: Descriptor, plan: ImportPlan, chosen: list[PlannedBlob]) -> str:
    if blob.media_type != TENSOR_MEDIA_TYPE:
        what = blob.name or blob.media_type.rpartition(".")[2]
        return f"{what} differs in the source; texts of a Modelfile need the Modelfile"
    if any(layer.name == blob.name for layer in chosen):
        return (
            "the source gives different bytes for it: it is a different source, or another"
            " version of blobstore wrote the model"
        )
    if any(layer.name == blob.name for layer in plan.blobs):
        return "the source gives a different size for it: it is a different source"
    draft = "; a draft model is needed too" if (blob.name or "").startswith("draft.") else ""
    return f"the source has no {blob.name}{draft}"
