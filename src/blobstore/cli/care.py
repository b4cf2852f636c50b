"""``verify``, ``repair`` and ``prune``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.output import (
    Jobs,
    JsonOption,
    LowerOption,
    ReaderGoneError,
    StoreOption,
    WaitOption,
    counted,
    duration,
    emit,
    parse_duration,
    printable,
    progress_bar,
    show_json,
    show_table,
    size,
    source_at,
    store_at,
    stores_at,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.importer.repair import RepairResult
    from blobstore.names import ModelName
    from blobstore.store.care.prune import PruneResult, UndoResult, UnneededBlob
    from blobstore.store.care.verify import VerifyResult


EXIT_DAMAGED = 3
_SHOWN = 20
"""Blobs, models or tensors that are shown; --json shows more."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("verify")(verify)
    app.command("repair")(repair)
    app.command("prune")(prune)


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
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every blob, manifest and document for damage. Exits with 3 if something is damaged."""
    from blobstore.store.care.verify import Sample
    from blobstore.store.care.verify import verify as check

    part = Sample.parse(sample) if sample is not None else None
    layers = stores_at(store, lower)
    below = getattr(layers, "lower", ())
    with progress_bar() as progress:
        result = check(
            store_at(store),
            names or (),
            quick=quick,
            sample=part,
            jobs=jobs,
            progress=progress,
            lower=below,
        )
    with suppress(ReaderGoneError):  # what was found is told by the exit code too
        if as_json:
            from blobstore.views.care import VerifyView

            show_json(VerifyView.of(result))
        else:
            _show_verify(result)
    if not result.is_sound:
        raise typer.Exit(EXIT_DAMAGED)


def _show_verify(result: VerifyResult) -> None:
    for broken in result.broken:
        emit(printable(f"{broken.name}: {broken.reason}"))
    for blob in result.damaged:
        emit(printable(f"{blob.digest}: {blob.reason}"))
        for what, found in (("models", blob.models), ("tensors", blob.tensors)):
            if found:
                more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
                emit(printable(f"  {what}: {', '.join(map(str, found[:_SHOWN]))}{more}"))
    for odd in result.odd:
        emit(printable(f"Odd: {odd.path}: {odd.reason}"))
    damage = len(result.damaged) + len(result.broken)
    verdict = f"{damage} damaged" if damage else "all sound"
    emit(f"Checked {counted(result.checked, 'blob')}, hashed {size(result.nbytes)}: {verdict}")


def repair(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A stored model.")],
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

    opened = store_at(store, wait)
    beside = {"importance": importance, "draft": draft, "modelfile": modelfile}
    with progress_bar() as progress:
        result = repair_model(
            name, source_at(source), store=opened, **beside, jobs=jobs, progress=progress
        )
    with suppress(ReaderGoneError):
        if as_json:
            from blobstore.views.care import RepairView

            show_json(RepairView.of(result))
        else:
            _show_repair(result)
    if result.remaining:
        raise typer.Exit(EXIT_DAMAGED)


def _show_repair(result: RepairResult) -> None:
    if result.manifest_restored:
        emit(f"Restored the manifest of {result.name}")
    for left in result.remaining:
        emit(printable(f"Not repaired: {left.blob.digest}: {left.reason}"))
    repaired = (
        f"{len(result.repaired)} made again ({size(sum(blob.size for blob in result.repaired))})"
    )
    verdict = (
        f"{repaired}, {len(result.remaining)} still damaged"
        if result.repaired or result.remaining
        else "all sound"
    )
    emit(f"Checked {counted(result.checked, 'blob')} of {result.name}: {verdict}")


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
            help="State that neither Ollama nor another machine uses the store, which allows a grace time under 1h.",
        ),
    ] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Remove the blobs of models whose manifests are gone, however many models that are.",
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

    opened = store_at(store, wait)
    if undo:
        if dry_run or sole_owner or forget or grace is not None:
            others = "--dry-run, --forget, --grace and --sole-owner"
            raise UsageError(f"--undo restores all that the last prune took: leave out {others}")
        undone = care.undo(opened)
        if as_json:
            from blobstore.views.care import UndoView

            show_json(UndoView.of(undone))
        else:
            _show_undo(undone)
        return
    grace_s = parse_duration(grace) if grace is not None else care.DAY_S
    result = care.prune(
        opened, grace_s=grace_s, sole_owner=sole_owner, forget=forget, dry_run=dry_run
    )
    if as_json:
        from blobstore.views.care import PruneView

        show_json(PruneView.of(result, dry_run=dry_run))
    else:
        _show_prune(result, dry_run=dry_run)


def _show_prune(result: PruneResult, *, dry_run: bool) -> None:
    rows = [
        (blob.digest.short, size(blob.size), duration(blob.age_s), blob.reason)
        for blob in result.removed[:_SHOWN]
    ]
    if rows:
        show_table(("BLOB", "SIZE", "AGE", "WHY"), rows)
    if len(result.removed) > _SHOWN:
        emit(f"… and {len(result.removed) - _SHOWN} more")
    would = "Would move" if dry_run else "Moved"
    until = (
        ": prune --undo brings back what is there, the next prune deletes it"
        if result.removed and not dry_run
        else ""
    )
    emit(f"{would} {_blobs(result.removed)} to the trash{until}")
    if result.forgotten:
        emit(f"{would} the copies of the manifest of {_models(result.forgotten)} to the trash, too")
    if result.spared:
        emit(f"Spared {_blobs(result.spared)} within the grace time")
    if result.leftovers:
        found = f"{counted(len(result.leftovers), 'leftover')} of imports"
        nbytes = sum(leftover.nbytes for leftover in result.leftovers)
        emit(f"{'Would remove' if dry_run else 'Removed'} {found} ({size(nbytes)})")
    if result.freed:
        emit(f"{'Would free' if dry_run else 'Freed'} {size(result.freed)} of the trash before")


def _blobs(blobs: tuple[UnneededBlob, ...]) -> str:
    return f"{counted(len(blobs), 'blob')} ({size(sum(blob.size for blob in blobs))})"


def _models(names: tuple[ModelName, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{counted(len(names), 'model')} ({', '.join(map(str, names[:_SHOWN]))}{more})"


def _show_undo(undone: UndoResult) -> None:
    emit(
        f"Gave back {counted(len(undone.restored), 'blob')} ({size(sum(nbytes for _, nbytes in undone.restored))})"
    )
    if undone.kept:
        emit(f"Left {len(undone.kept)} in the trash: the store has them again, or they are damaged")
    if undone.without_manifest:
        emit(f"Still without a manifest: {_models(undone.without_manifest)}")
        emit("Mount the disk on which their manifests lie, or restore each: blobstore repair NAME")
