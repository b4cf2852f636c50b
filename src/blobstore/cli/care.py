"""``verify``, ``repair``, ``prune`` and ``du``, ``pack`` and ``unpack``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import blobstore
from blobstore.cli.output import (
    LONGEST_REASON,
    Jobs,
    JsonOption,
    Model,
    blobs,
    counted,
    duration,
    emit_lines,
    say_empty,
    show_lines,
    show_result,
    show_table,
    size,
    with_bar,
    with_flags,
)
from blobstore.cli.sharing import KeyOption, PolicyOption, verify_signatures
from blobstore.cli.stores import (
    CaFileOption,
    LowerOption,
    StoreOption,
    WaitOption,
    folder_store_at,
    is_new,
    source_at,
    store_at,
    stores_at,
)
from blobstore.errors import UsageError
from blobstore.names import ModelName, shortened

if TYPE_CHECKING:
    from blobstore.importer.repair import RepairResult
    from blobstore.store.care.prune import PruneResult, UndoResult
    from blobstore.store.care.usage import ModelUsage, Usage
    from blobstore.store.care.verify import VerifyResult


EXIT_DAMAGED = 3
_WOULD, _DID = ("Would move", "Would remove", "Would free"), ("Moved", "Removed", "Freed")


_DURATION = re.compile(
    r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?) ?(?P<unit>|[smhd])", re.ASCII | re.IGNORECASE
)
# Blobs, models or tensors that are shown; --json shows more.
_SHOWN = 20


def verify(
    names: Annotated[
        list[str] | None,
        Argument(metavar="NAME", help="Models to check [default: the whole store]."),
    ] = None,
    quick: Annotated[
        bool,
        Option(
            "--quick", help="Check sizes, headers and documents only; do not hash tensor blobs."
        ),
    ] = False,
    sample: Annotated[
        str | None,
        Option(metavar="N/T", help="Check only part N of T of the blobs, such as 1/7."),
    ] = None,
    key: KeyOption = None,
    policy: PolicyOption = None,
    identity: Annotated[
        str | None,
        Option(
            metavar="REFERENCE",
            help="With --key: the repository that was signed [default: the model's own].",
        ),
    ] = None,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check every blob, manifest and document for damage. Exits with 3 if something is damaged.

    With --key or --policy only the signatures of manifests are checked, and no blob is read or
    hashed. Exits with 3 if a model is not signed as required.
    """
    if key is not None or policy is not None or identity is not None:
        if quick or sample is not None or jobs is not None:
            raise UsageError("--quick, --sample and --jobs do not apply to signatures")
        is_signed = verify_signatures(
            stores_at(store, lower), names, key, policy, identity, as_json
        )
        return 0 if is_signed else EXIT_DAMAGED
    from blobstore.store.care.verify import Sample
    from blobstore.views.records import keep_verify

    part = Sample.parse(sample) if sample is not None else None
    layers, upper = stores_at(store, lower), store_at(store)
    if is_new(upper) and not (names or layers.lower or as_json):
        say_empty(upper.address)
        return 0
    result = with_bar(
        blobstore.verify,
        upper,
        names or (),
        quick=quick,
        sample=part,
        jobs=jobs,
        lower=layers.lower,
    )
    if not names:
        keep_verify(upper, result, quick=quick, sample=sample)
    show_result(result, _show_verify, as_json)
    return 0 if result.is_sound else EXIT_DAMAGED


def _show_verify(result: VerifyResult) -> None:
    damage = len(result.damaged) + len(result.broken)
    verdict = f"{damage} damaged" if damage else "all sound"
    verdict += f", {len(result.odd)} odd" if result.odd else ""
    emit_lines(
        *(f"{broken.name}: {broken.reason}" for broken in result.broken),
        *(
            line
            for blob in result.damaged
            for line in (
                f"{blob.digest}: {blob.reason}",
                _affected("models", blob.models),
                _affected("tensors", blob.tensors),
            )
        ),
        *(f"Odd: {odd.path}: {odd.reason}" for odd in result.odd),
        f"Checked {counted(result.checked, 'blob')}, hashed {size(result.nbytes)}: {verdict}",
    )


def _affected(kind: str, names: Sequence[object]) -> str:
    return f"  {kind}: {shortened(names, _SHOWN)}" if names else ""


def repair(
    name: Model,
    source: Annotated[
        str | None,
        Option(
            "--from",
            metavar="SOURCE",
            help="The checkpoint that the model was imported from, if blobs are damaged.",
        ),
    ] = None,
    importance: Annotated[
        str | None,
        Option(metavar="FILE", help="The --importance of the import."),
    ] = None,
    draft: Annotated[str | None, Option(metavar="DIR", help="The --draft of the import.")] = None,
    adapter: Annotated[
        str | None, Option(metavar="DIR", help="The --adapter of the import.")
    ] = None,
    modelfile: Annotated[
        str | None,
        Option("--modelfile", "-f", metavar="FILE", help="The import's Modelfile, for its texts."),
    ] = None,
    config: Annotated[str | None, Option(metavar="DIR", help="The --config of the import.")] = None,
    jobs: Jobs = None,
    ca_file: CaFileOption = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Restore a model's manifest and damaged blobs. Exits with 3 if some could not be rebuilt."""
    opened = folder_store_at("repair", store, wait)
    open_source = partial(source_at, ca_file=ca_file)
    result = with_bar(
        blobstore.repair_model,
        name,
        source and open_source(source),
        store=opened,
        importance=importance,
        draft=draft,
        adapter=adapter,
        modelfile=modelfile,
        config=config,
        jobs=jobs,
        open_source=open_source,
    )
    show_result(result, _show_repair, as_json)
    return EXIT_DAMAGED if result.remaining else 0


def _show_repair(result: RepairResult) -> None:
    verdict = "all sound"
    if result.repaired or result.remaining:
        verdict = (
            f"{len(result.repaired)} rebuilt ({size(result.repaired_bytes)}), "
            f"{len(result.remaining)} still damaged"
        )
    emit_lines(
        f"Restored the manifest of {result.name}" if result.manifest_restored else "",
        *(
            f"Not repaired: {left.blob.digest}: {with_flags(left.reason)}"
            for left in result.remaining
        ),
        f"Checked {counted(result.checked, 'blob')} of {result.name}: {verdict}",
    )


def prune(
    dry_run: Annotated[bool, Option("--dry-run", help="Show what would be removed.")] = False,
    grace: Annotated[
        str | None,
        Option(
            metavar="TIME",
            help="Keep blobs younger than this, such as 24h or 2d [default: 24h].",
        ),
    ] = None,
    sole_owner: Annotated[
        bool,
        Option(
            "--sole-owner",
            help="Confirm that neither Ollama nor another machine is using the store; allows"
            " a grace time under 1h.",
        ),
    ] = False,
    forget: Annotated[
        bool,
        Option(
            "--forget",
            help="Remove the blobs of models whose manifests are missing, no matter how many.",
        ),
    ] = False,
    undo: Annotated[
        bool, Option("--undo", help="Restore what the last prune moved to the trash.")
    ] = False,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move blobs that no model needs to the trash. What the previous prune put there is deleted."""
    opened = store_at(store, wait)
    if undo:
        opened = folder_store_at("prune --undo", store, wait)
        if dry_run or sole_owner or forget or grace is not None:
            raise UsageError(
                "--undo restores all that the last prune moved: leave out --dry-run, --forget,"
                " --grace and --sole-owner"
            )
        show_result(blobstore.undo_prune(opened), _show_undo, as_json)
        return
    result = blobstore.prune(
        opened,
        grace_s=_parse_duration(grace),
        sole_owner=sole_owner,
        forget=forget,
        dry_run=dry_run,
    )
    show_result(result, partial(_show_prune, opened.root is not None), as_json)


def _parse_duration(text: str | None) -> float:
    """Return the seconds of a time span such as 24h, 90m or 2d; a number alone is seconds."""
    match = _DURATION.fullmatch("24h" if text is None else text.strip())
    if match is None:
        raise UsageError(
            f"invalid time span {text!r}", hint="Write a number with s, m, h or d, such as 24h."
        )
    return (
        float(match["number"])
        * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match["unit"].lower() or "s"]
    )


def _show_prune(has_trash: bool, result: PruneResult) -> None:
    rows = [
        (blob.digest.short, size(blob.size), duration(blob.age), blob.reason)
        for blob in result.removed[:_SHOWN]
    ]
    if rows:
        show_table(("BLOB", "SIZE", "AGE", "WHY"), rows)
    more = len(result.removed) - len(rows)
    move, remove, free = _WOULD if result.dry_run else _DID
    undo = ": prune --undo restores it, the next prune deletes it"
    gone = blobs(len(result.removed), result.removed_bytes)
    leftovers = sum(leftover.nbytes for leftover in result.leftovers)
    emit_lines(
        f"… and {more} more" if more else "",
        f"{move} {gone} to the trash{undo if rows and not result.dry_run else ''}"
        if has_trash
        else f"{remove} {gone}",
        f"{move} the copies of the manifests of {_models(result.forgotten)} to the trash as well"
        if result.forgotten
        else "",
        f"Spared {blobs(len(result.spared), result.spared_bytes)} within the grace time"
        if result.spared
        else "",
        f"{remove} {counted(len(result.leftovers), 'leftover')} ({size(leftovers)})"
        if result.leftovers
        else "",
        f"{free} {size(result.freed)} from the previous trash" if result.freed else "",
    )


def _models(names: Sequence[ModelName]) -> str:
    return f"{counted(len(names), 'model')} ({shortened(names, _SHOWN)})"


def _show_undo(result: UndoResult) -> None:
    kept, lost = len(result.kept), result.without_manifest
    emit_lines(
        f"Restored {blobs(len(result.restored), result.nbytes)}",
        f"Left {kept} in the trash: the store has them again, or they are damaged" if kept else "",
        f"Still without a manifest: {_models(lost)}" if lost else "",
        "Mount the disk with their manifests, or restore each model: blobstore repair NAME"
        if lost
        else "",
    )


def du(
    names: Annotated[
        list[str] | None, Argument(metavar="NAME", help="Models to show [default: all].")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the disk usage of models.

    UNIQUE is what rm would free, SHARED is needed by other models too.
    """
    opened = store_at(store)
    show = partial(_show_usage, opened.address)
    show_result(blobstore.measure_usage(opened, names or ()), show, as_json)


def _show_usage(address: str, usage: Usage) -> None:
    if not (usage.models or usage.blobs):
        say_empty(address)
        return
    show_table(("NAME", "SIZE", "UNIQUE", "SHARED"), list(map(_usage_row, usage.models)))
    emit_lines(
        f"{counted(usage.blobs, 'blob')}, {size(usage.nbytes)}; "
        f"{size(usage.reclaimable)} not needed by any model",
        f"{size(usage.trash)} in the trash" if usage.trash else "",
        f"{size(usage.packed)} in packed files" if usage.packed else "",
    )


def _usage_row(model: ModelUsage) -> tuple[object, ...]:
    name = f"{model.name} (packed)" if model.is_packed else model.name
    if model.nbytes is None or model.unique is None or model.shared is None:
        return (name, "broken", "", (model.error.message if model.error else "")[:LONGEST_REASON])
    return (name, size(model.nbytes), size(model.unique), size(model.shared))


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
    done = with_bar(blobstore.pack, folder_store_at("pack", store, wait), name, jobs=jobs)
    share = f"{done.stored / done.nbytes:.0%} of {size(done.nbytes)}" if done.nbytes else "no bytes"
    kept, reason = done.removal.kept_bytes, done.removal.reason
    show_lines(
        done,
        as_json,
        f"Packed {done.name}: {counted(done.blobs, 'blob')}, {size(done.stored)} ({share})",
        f"Freed {size(done.removal.removed_bytes)}",
        "" if reason is None else f"Kept {size(kept)} of plain blobs: {reason}",
    )


def unpack(
    name: Model,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restore a packed model's plain blobs."""
    done = with_bar(blobstore.unpack, folder_store_at("unpack", store, wait), name, jobs=jobs)
    show_lines(
        done,
        as_json,
        f"Unpacked {done.name}: {counted(done.blobs, 'blob')}, {size(done.nbytes)}",
    )
