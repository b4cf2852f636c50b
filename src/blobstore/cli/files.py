"""``export``, ``save`` and ``load``: models as files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from blobstore.cli.output import (
    Jobs,
    JsonOption,
    Model,
    counted,
    emit,
    note,
    parse_size,
    printable,
    progress_bar,
    rate,
    show_replaced,
    show_result,
    show_table,
    size,
)
from blobstore.cli.stores import (
    CacheOption,
    CacheSizeOption,
    LowerOption,
    StoreOption,
    WaitOption,
    cached_stores_at,
    store_at,
    stores_at,
)
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.export.folder import ExportResult
    from blobstore.names import ModelName
    from blobstore.store.archive.archive import Archive
    from blobstore.store.local.store import Store
    from blobstore.views.command_results import ArchivedModel, LoadedModel, SavedArchive


_PIPE = "-"


def save(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Models to save.")],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write: .tar, or .tar.zst for zstandard; - is standard output.",
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that already exists.")
    ] = False,
    compress: Annotated[
        bool | None,
        typer.Option(
            "--compress/--no-compress",
            help="Compress with zstandard, or don't [default: as the file's name says].",
        ),
    ] = None,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Save models to one file, an OCI image layout in a tar. It appears when it is complete.

    A file that exists is kept, unless --force. skopeo reads the plain form: skopeo copy
    oci-archive:FILE:NAME …
    """
    from blobstore.store.archive.saving import save_models

    if output == _PIPE:
        if as_json:
            raise UsageError("--json and -o - both need the standard output")
        if sys.stdout.isatty():
            hint = "Use -o FILE, or a pipe: blobstore save NAME -o - | ssh HOST blobstore load -"
            raise UsageError("standard output is a terminal, not a pipe", hint=hint)
    target: str | BinaryIO = sys.stdout.buffer if output == _PIPE else output
    opened = stores_at(store, lower)
    with progress_bar() as progress:
        done = save_models(
            names,
            target,
            store=opened,
            compress=compress,
            replace=force,
            jobs=jobs,
            progress=progress,
        )
    if output != _PIPE:
        from blobstore.views.command_results import SavedArchive

        nbytes = os.path.getsize(output)  # noqa: PTH202  # as it was given
        show_result(SavedArchive(output, nbytes, done), _show_saved, as_json=as_json)


def _show_saved(saved: SavedArchive) -> None:
    names = ", ".join(map(str, saved.models))
    what = f"{counted(saved.blobs, 'blob')} ({size(saved.blob_bytes)})"
    emit(f"Saved {names} to {printable(saved.file)}: {what}, a file of {size(saved.nbytes)}")


def load(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="The archive, plain, .zst or .gz; - is standard input."
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Models to load [default: all].", show_default=False),
    ] = None,
    as_name: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="Its name in the store; for an archive of one model."
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the archive's models; load nothing.")
    ] = False,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load models from an archive.

    The archive may also be one of skopeo or docker. Every byte is checked before a model is
    visible. A model of the same name is replaced.
    """
    from blobstore.store.archive.archive import open_archive

    if file == _PIPE and sys.stdin.isatty():
        hint = "Name a file, or use a pipe: ssh HOST blobstore save NAME -o - | blobstore load -"
        raise UsageError("standard input is a terminal, not a pipe", hint=hint)
    source: str | BinaryIO = sys.stdin.buffer if file == _PIPE else file
    with open_archive(source, name=as_name) as archive:
        chosen = _chosen(archive, names or [])
        if listed:
            archive.finish()
            _list(archive, chosen, as_json=as_json)
        else:
            target = store_at(store, wait, may_be_new=True)
            show_result(_loaded(archive, chosen, target, jobs), _show_loaded, as_json=as_json)


def _chosen(archive: Archive, names: Sequence[str]) -> list[ModelName]:
    """Return the models that are named, all without names, in the archive's order."""
    wanted = {archive.find(name) for name in names}
    return [name for name in archive.manifests.in_order() if not names or name in wanted]


def _list(archive: Archive, names: Sequence[ModelName], *, as_json: bool) -> None:
    from blobstore.views.command_results import ArchivedModel

    models = [ArchivedModel(name, archive.manifests.read(name)) for name in names]
    show_result(models, _show_listed, as_json=as_json)
    if archive.unnamed:
        manifests = counted(len(archive.unnamed), "model")
        note(f"{manifests} without a name: {', '.join(one.short for one in archive.unnamed)}")


def _show_listed(models: list[ArchivedModel]) -> None:
    rows = [
        (str(one.name), one.manifest.digest.short, size(one.manifest.size), f"{one.blobs:,}")
        for one in models
    ]
    show_table(["NAME", "ID", "SIZE", "BLOBS"], rows)


def _loaded(
    archive: Archive, names: Sequence[ModelName], target: Store, jobs: int | None
) -> list[LoadedModel]:
    from blobstore.formats.oci import check_is_model
    from blobstore.store.ports import id_of, replaced_id
    from blobstore.store.transfer import transfer
    from blobstore.views.command_results import LoadedModel

    if not names and archive.unnamed:
        message = f"the model of {archive.address} has no name"
        raise UsageError(message, hint="Give it one: --as NAME.")
    before = [id_of(target, target.target(name)) for name in names]
    with progress_bar() as progress:
        done = transfer(names, archive, target, check=check_is_model, jobs=jobs, progress=progress)
        archive.finish()
    return [
        LoadedModel(replace(one, replaced=replaced_id(old, one.digest)))
        for one, old in zip(done, before, strict=True)
    ]


def _show_loaded(models: list[LoadedModel]) -> None:
    for done in (model.done for model in models):
        copied = f"{counted(done.copied.blobs, 'blob')} ({size(done.copied.nbytes)})"
        there = f", {done.there.blobs:,} were there" if done.there else ""
        emit(f"Loaded {done.name}: {copied}{there}")
        show_replaced(done.replaced)


def export(
    name: Model,
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    form: Annotated[
        str,
        typer.Option("--format", metavar="safetensors|mlx", help="mlx is for mlx_lm.load."),
    ] = "safetensors",
    dequantize: Annotated[
        str | None,
        typer.Option(
            "--dequantize",
            metavar="bfloat16|float16|float32",
            help="Write all weights as this type.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest size of a file, such as 5GB, "
            "or source for the same files as were imported.",
        ),
    ] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every blob before using it.")
    ] = False,
    jobs: Jobs = None,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a checkpoint folder.

    It gets shards and their index, config and tokenizer.
    """
    from blobstore.export.folder import export_model
    from blobstore.export.planned_files import AS_SOURCE
    from blobstore.model.mlx_lm_package import delay_package

    if form == "mlx":
        delay_package("mlx_lm")
    with progress_bar() as progress:
        result = export_model(
            name,
            folder,
            store=cached_stores_at(store, lower, cache, cache_size),
            format=form,
            dequantize=dequantize,
            max_shard_size=AS_SOURCE if max_shard_size == AS_SOURCE else parse_size(max_shard_size),
            jobs=jobs,
            verify=verify,
            progress=progress,
        )
    for text in result.notes:
        note(text)
    show_result(result, _show_export, as_json=as_json)


def _show_export(result: ExportResult) -> None:
    emit(f"{result.name} in {printable(str(result.folder))}: {len(result.files)} files")
    emit(f"{size(result.nbytes)} in {result.seconds:.2f} s, {rate(result.nbytes, result.seconds)}")
    if result.loads_in == ("blobstore",):
        others = "; mlx-lm needs --format mlx, transformers --dequantize bfloat16"
    elif "transformers" not in result.loads_in:
        others = "; transformers needs --dequantize bfloat16, without --format mlx"
    else:
        others = ""
    emit(f"Loads in {', '.join(result.loads_in)}{others}")
