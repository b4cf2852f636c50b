"""``verify``, ``repair``, ``prune`` and ``du``, ``pack`` and ``unpack``."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.output import (
    Jobs,
    JsonOption,
    Model,
    ReaderGoneError,
    counted,
    duration,
    emit,
    printable,
    progress_bar,
    reason,
    short,
    shortened,
    show_json,
    show_table,
    show_view,
    size,
    with_flags,
)
from blobstore.cli.signing import KeyOption, PolicyOption, verify_signatures
from blobstore.cli.stores import (
    LowerOption,
    StoreOption,
    WaitOption,
    folder_store_at,
    source_at,
    store_at,
    stores_at,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.store.care.verify import VerifyResult
    from blobstore.views.packs import PackView, UnpackView
    from blobstore.views.stores import ModelUsageView, PruneView, RepairView, UndoView, UsageView


EXIT_DAMAGED = 3


_WOULD, _DID = ("Would move", "Would remove", "Would free"), ("Moved", "Removed", "Freed")


_DURATION = re.compile(
    r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?P<unit>|[smhd])", re.ASCII | re.IGNORECASE
)
_SHOWN = 20
"""Blobs, models or tensors that are shown; --json shows more."""


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Models to check [default: the whole store]."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Check sizes, headers and documents only; do not hash tensor blobs."
        ),
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample", metavar="N/T", help="Check only part N of T of the blobs, such as 1/7."
        ),
    ] = None,
    key: KeyOption = None,
    policy: PolicyOption = None,
    identity: Annotated[
        str | None,
        typer.Option(
            "--identity",
            metavar="REFERENCE",
            help="With --key: the repository that was signed [default: the model's own].",
        ),
    ] = None,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every blob, manifest and document for damage. Exits with 3 if something is damaged.

    With --key or --policy only the signatures of manifests are checked, and no blob is read or
    hashed. Exits with 3 if a model is not signed as required.
    """
    if key is not None or policy is not None or identity is not None:
        if quick or sample is not None or jobs is not None:
            raise UsageError("signatures are checked without --quick, --sample and --jobs")
        if not verify_signatures(stores_at(store, lower), names, key, policy, identity, as_json):
            raise typer.Exit(EXIT_DAMAGED)
        return
    from blobstore.store.care.verify import Sample, verify as check
    from blobstore.store.care.verify_record import verify_record

    part = Sample.parse(sample) if sample is not None else None
    layers, upper = stores_at(store, lower), store_at(store)
    options: dict[str, Any] = {"quick": quick, "sample": part, "jobs": jobs}
    with progress_bar() as progress:
        result = check(upper, names or (), **options, progress=progress, lower=layers.lower)
    is_whole = not quick and sample is None  # another one does not know what it has not read
    kept = None if names else upper.results
    if kept is not None and (is_whole or not result.is_sound or kept.read_verify() is None):
        kept.keep_verify(verify_record(upper, result, quick=quick, sample=sample))
    with suppress(ReaderGoneError):  # the exit code tells the result, too
        if as_json:
            from blobstore.views.stores import VerifyView

            show_json(VerifyView.model_validate(result))
        else:
            _show_verify(result)
    if not result.is_sound:
        raise typer.Exit(EXIT_DAMAGED)


def _show_verify(found: VerifyResult) -> None:
    for broken in found.broken:
        emit(printable(f"{broken.name}: {broken.reason}"))
    for blob in found.damaged:
        emit(printable(f"{blob.digest}: {blob.reason}"))
        if blob.models:
            emit(printable(f"  models: {shortened(list(map(str, blob.models)), _SHOWN)}"))
        if blob.tensors:
            emit(printable(f"  tensors: {shortened(blob.tensors, _SHOWN)}"))
    for odd in found.odd:
        emit(printable(f"Odd: {odd.path}: {odd.reason}"))
    damage = len(found.damaged) + len(found.broken)
    verdict = f"{damage} damaged" if damage else "all sound"
    verdict += f", {len(found.odd)} odd" if found.odd else ""
    emit(f"Checked {counted(found.checked, 'blob')}, hashed {size(found.nbytes)}: {verdict}")


def repair(
    name: Model,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="The checkpoint that the model was imported from, if blobs are damaged.",
        ),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option("--importance", metavar="FILE", help="The --importance of the import."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="DIR", help="The --draft of the import.")
    ] = None,
    modelfile: Annotated[
        str | None,
        typer.Option(
            "--modelfile", "-f", metavar="FILE", help="The Modelfile of the import, for its texts."
        ),
    ] = None,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a model's manifest and damaged blobs. Exits with 3 if some could not be rebuilt."""
    from blobstore.importer.repair import repair_model
    from blobstore.views.stores import RepairView

    opened = folder_store_at("repair", store, wait)
    beside = {"importance": importance, "draft": draft, "modelfile": modelfile}
    with progress_bar() as progress:
        result = repair_model(
            name,
            source and source_at(source),
            store=opened,
            **beside,
            jobs=jobs,
            progress=progress,
            open_source=source_at,
        )
    with suppress(ReaderGoneError):
        show_view(RepairView.model_validate(result), _show_repair, as_json=as_json)
    if result.remaining:
        raise typer.Exit(EXIT_DAMAGED)


def _show_repair(view: RepairView) -> None:
    if view.manifest_restored:
        emit(f"Restored the manifest of {view.name}")
    for left in view.remaining:
        emit(printable(f"Not repaired: {left.digest}: {with_flags(left.reason)}"))
    verdict = "all sound"
    if view.repaired or view.remaining:
        made = f"{len(view.repaired)} made again ({size(view.bytes)})"
        verdict = f"{made}, {len(view.remaining)} still damaged"
    emit(f"Checked {counted(view.checked, 'blob')} of {view.name}: {verdict}")


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="Keep blobs younger than this, such as 24h or 2d [default: 24h].",
        ),
    ] = None,
    sole_owner: Annotated[
        bool,
        typer.Option(
            "--sole-owner",
            help="State that neither Ollama nor another machine uses the store, "
            "which allows a grace time under 1h.",
        ),
    ] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Remove the blobs of models whose manifests are gone, "
            "however many models that are.",
        ),
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Restore what the last prune moved to the trash.")
    ] = False,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move blobs that no model needs to the trash. What the previous prune put there is deleted."""
    from blobstore.store.care import prune as care
    from blobstore.views.stores import PruneView, UndoView

    opened = store_at(store, wait)
    if undo:
        opened = folder_store_at("prune --undo", store, wait)
        if dry_run or sole_owner or forget or grace is not None:
            others = "--dry-run, --forget, --grace and --sole-owner"
            raise UsageError(f"--undo restores all that the last prune took: leave out {others}")
        show_view(UndoView.of(care.undo_prune(opened)), _show_undo, as_json=as_json)
        return
    grace_s = _parse_duration(grace) if grace is not None else care.DAY_S
    options: dict[str, Any] = {
        "grace_s": grace_s,
        "sole_owner": sole_owner,
        "forget": forget,
        "dry_run": dry_run,
    }
    view = PruneView.of(care.prune(opened, **options), dry_run=dry_run)
    has_trash = opened.root is not None
    show_view(view, partial(_show_prune, has_trash=has_trash), as_json=as_json)


def _parse_duration(text: str) -> float:
    """Return the seconds of a time span such as 24h, 90m or 2d; a number alone is seconds.

    Raises: UsageError.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"invalid time span {text!r}", hint="Write a number with s, m, h or d, such as 24h."
        )
    return (
        float(match["number"])
        * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match["unit"].lower() or "s"]
    )


def _show_prune(view: PruneView, *, has_trash: bool = True) -> None:
    rows = [
        (short(blob.digest), size(blob.size), duration(blob.age), blob.reason)
        for blob in view.blobs[: min(view.removed, _SHOWN)]
    ]
    if rows:
        show_table(("BLOB", "SIZE", "AGE", "WHY"), rows)
    if view.removed > _SHOWN:
        emit(f"… and {view.removed - _SHOWN} more")
    move, remove, free = _WOULD if view.dry_run else _DID
    until = ": prune --undo brings back what is there, the next prune deletes it"
    told = until if view.removed and not view.dry_run else ""
    blobs = _blobs(view.removed, view.bytes)
    emit(f"{move} {blobs} to the trash{told}" if has_trash else f"{remove} {blobs}")
    if view.forgotten:
        copies = f"the copies of the manifest of {_models(view.forgotten)}"
        emit(f"{move} {copies} to the trash, too")
    if view.kept:
        emit(f"Spared {_blobs(view.kept, view.kept_bytes)} within the grace time")
    if view.leftovers:
        nbytes = sum(leftover.size for leftover in view.leftovers)
        emit(f"{remove} {counted(len(view.leftovers), 'leftover')} ({size(nbytes)})")
    if view.freed:
        emit(f"{free} {size(view.freed)} of the trash before")


def _blobs(number: int, nbytes: int) -> str:
    return f"{counted(number, 'blob')} ({size(nbytes)})"


def _models(names: list[str]) -> str:
    return f"{counted(len(names), 'model')} ({shortened(names, _SHOWN)})"


def _show_undo(view: UndoView) -> None:
    emit(f"Gave back {_blobs(view.restored, view.bytes)}")
    if view.kept:
        emit(f"Left {view.kept} in the trash: the store has them again, or they are damaged")
    if view.without_manifest:
        emit(f"Still without a manifest: {_models(view.without_manifest)}")
        emit("Mount the disk on which their manifests lie, or restore each: blobstore repair NAME")


def du(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Models to show [default: all].")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the disk space of models.

    UNIQUE is what rm would free, SHARED is needed by other models too.
    """
    from blobstore.store.care.usage import measure_usage
    from blobstore.views.stores import UsageView

    opened = store_at(store)
    show_view(UsageView.of(measure_usage(opened, names or ())), _show_usage, as_json=as_json)


def _show_usage(view: UsageView) -> None:
    show_table(("NAME", "SIZE", "UNIQUE", "SHARED"), list(map(_usage_row, view.models)))
    needless = f"{size(view.reclaimable)} needed by no model"
    emit(f"{counted(view.blobs, 'blob')}, {size(view.bytes)}; {needless}")
    if view.trash:
        emit(f"{size(view.trash)} in the trash")
    if view.packed:
        emit(f"{size(view.packed)} in packed files")


def _usage_row(view: ModelUsageView) -> tuple[str, ...]:
    name = f"{view.name} (packed)" if view.packed else view.name
    if view.bytes is None or view.unique is None or view.shared is None:
        return (name, "broken", "", reason(view.error))
    return (name, size(view.bytes), size(view.unique), size(view.shared))


def pack(
    name: Model,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a model compressed in the store.

    Opening the model unpacks it. Ollama does not see it while it is packed.
    """
    from blobstore.names import ModelName
    from blobstore.store.packing import pack as pack_model
    from blobstore.views.packs import PackView

    asked = ModelName.parse(name)
    with progress_bar() as progress:
        done = pack_model(folder_store_at("pack", store, wait), asked, jobs=jobs, progress=progress)
    show_view(PackView.of(done), _show_pack, as_json=as_json)


def _show_pack(view: PackView) -> None:
    share = f"{view.stored / view.size:.0%} of {size(view.size)}" if view.size else "no bytes"
    emit(f"Packed {view.name}: {counted(view.blobs, 'blob')}, {size(view.stored)} ({share})")
    emit(f"Freed {size(view.freed)}")
    if view.reason is not None:
        emit(f"Kept {size(view.kept)} of plain blobs: {view.reason}")


def unpack(
    name: Model,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a packed model's plain blobs."""
    from blobstore.names import ModelName
    from blobstore.store.packing import unpack as unpack_model
    from blobstore.views.packs import UnpackView

    asked = ModelName.parse(name)
    with progress_bar() as progress:
        done = unpack_model(
            folder_store_at("unpack", store, wait), asked, jobs=jobs, progress=progress
        )
    show_view(UnpackView.model_validate(done), _show_unpack, as_json=as_json)


def _show_unpack(view: UnpackView) -> None:
    emit(f"Unpacked {view.name}: {counted(view.blobs, 'blob')}, {size(view.bytes)}")
