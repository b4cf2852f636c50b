"""``export``, ``save`` and ``load``: models as files; ``metadata get``, ``set`` and ``rm``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from typer import Argument, Option

import blobstore
from blobstore.cli.output import (
    PLAIN,
    Jobs,
    JsonOption,
    Model,
    blobs,
    counted,
    emit,
    note,
    parse_size,
    printable,
    rate,
    replaced_line,
    show_facts,
    show_help,
    show_lines,
    show_result,
    show_table,
    size,
    with_bar,
)
from blobstore.cli.stores import (
    CacheOption,
    CacheSizeOption,
    LowerOption,
    StoreOption,
    WaitOption,
    store_at,
    stores_at,
)
from blobstore.errors import NotFoundError, UsageError, quoted
from blobstore.io.durable import os_errors

if TYPE_CHECKING:
    from blobstore.names import ModelName
    from blobstore.store.transfer import TransferResult
    from blobstore.views.results import ArchivedModel, LoadedModel


_PIPE = "-"


def save(
    names: Annotated[list[str], Argument(metavar="NAME", help="Models to save.")],
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write: .tar, or .tar.zst for zstandard; - is standard output.",
        ),
    ],
    force: Annotated[bool, Option("--force", help="Replace a file that already exists.")] = False,
    compress: Annotated[
        bool | None,
        Option(
            "--compress/--no-compress",
            help="Compress with zstandard or not [default: if the name ends in .zst].",
        ),
    ] = None,
    jobs: Jobs = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Save models to one file, an OCI image layout in a tar. It appears when it is complete.

    An existing file is kept, unless --force is given. skopeo reads the plain form: skopeo copy
    oci-archive:FILE:NAME …
    """
    if output == _PIPE:
        if as_json:
            raise UsageError("--json and -o - both need standard output")
        if sys.stdout.isatty():
            raise UsageError(
                "standard output is a terminal, not a pipe",
                hint="Use -o FILE, or a pipe: blobstore save NAME -o - | ssh HOST blobstore load -",
            )
    target: str | BinaryIO = sys.stdout.buffer if output == _PIPE else output
    done = with_bar(
        blobstore.save_models,
        names,
        target,
        store=stores_at(store, lower),
        compress=compress,
        replace=force,
        jobs=jobs,
    )
    if output != _PIPE:
        from blobstore.views.results import SavedArchive

        saved = SavedArchive(
            output,
            Path(output).stat().st_size,
            [one.name for one in done],
            sum(one.copied.blobs for one in done),
            sum(one.copied.nbytes for one in done),
        )
        show_lines(
            saved,
            as_json,
            f"Saved {', '.join(map(str, saved.models))} to {output}: "
            f"{blobs(saved.blobs, saved.blob_bytes)}, a file of {size(saved.nbytes)}",
        )


def load(
    file: Annotated[
        str,
        Argument(metavar="FILE", help="The archive: plain, .zst or .gz; - is standard input."),
    ],
    names: Annotated[
        list[str] | None,
        Argument(metavar="NAME", help="Models to load [default: all].", show_default=False),
    ] = None,
    as_name: Annotated[
        str | None,
        Option("--as", metavar="NAME", help="Name in the store; only for an archive of one model."),
    ] = None,
    listed: Annotated[
        bool, Option("--list", help="List the archive's models; load nothing.")
    ] = False,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load models from an archive.

    Archives of skopeo and docker can be loaded too. Every byte is checked before a model is
    visible. A model of the same name is replaced.
    """
    if file == _PIPE and sys.stdin.isatty():
        raise UsageError(
            "standard input is a terminal, not a pipe",
            hint="Name a file, or use a pipe: ssh HOST blobstore save NAME -o - | blobstore load -",
        )
    source: str | BinaryIO = sys.stdin.buffer if file == _PIPE else file
    with blobstore.open_archive(source, name=as_name) as archive:
        wanted = {archive.find(name) for name in names or ()}
        chosen = [name for name in archive.manifests.in_order() if not names or name in wanted]
        if listed:
            _list(archive, chosen, as_json)
        else:
            target = store_at(store, wait, may_be_new=True)
            loaded = _load_models(archive, chosen, target, jobs)
            show_lines(loaded, as_json, *(line for one in loaded for line in _lines_of(one.done)))


def _list(archive: blobstore.Archive, names: Sequence[ModelName], as_json: bool) -> None:
    from blobstore.views.results import ArchivedModel

    manifests = {name: archive.manifests.read(name) for name in names}
    models = [
        ArchivedModel(name, manifest, len({blob.digest for blob in manifest.descriptors}))
        for name, manifest in manifests.items()
    ]
    show_result(models, _show_models, as_json)
    if archive.unnamed:
        ids = ", ".join(one.short for one in archive.unnamed)
        note(f"{counted(len(archive.unnamed), 'model')} without a name: {ids}")


def _show_models(models: list[ArchivedModel]) -> None:
    show_table(
        ["NAME", "ID", "SIZE", "BLOBS"],
        [
            (model.name, model.manifest.digest.short, size(model.manifest.size), f"{model.blobs:,}")
            for model in models
        ],
    )


def _load_models(
    archive: blobstore.Archive,
    names: Sequence[ModelName],
    target: blobstore.Store,
    jobs: int | None,
) -> list[LoadedModel]:
    from blobstore.formats.oci import check_is_model
    from blobstore.store.ports import id_of, replaced_id
    from blobstore.views.results import LoadedModel

    if not names and archive.unnamed:
        raise UsageError(
            f"the model in {archive.address} has no name", hint="Give it one: --as NAME."
        )
    before = [id_of(target, target.target(name)) for name in names]
    done = with_bar(blobstore.transfer, names, archive, target, check=check_is_model, jobs=jobs)
    return [
        LoadedModel(replace(one, replaced=replaced_id(old, one.digest)))
        for one, old in zip(done, before, strict=True)
    ]


def _lines_of(done: TransferResult) -> list[str]:
    there = f", {done.there.blobs:,} reused" if done.there else ""
    loaded = f"Loaded {done.name}: {blobs(done.copied.blobs, done.copied.nbytes)}{there}"
    return [loaded, replaced_line(done.replaced)]


def export(
    name: Model,
    folder: Annotated[
        str, Argument(metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    form: Annotated[
        str,
        Option("--format", metavar="safetensors|mlx", help="mlx is for mlx_lm.load."),
    ] = "safetensors",
    dequantize: Annotated[
        str | None,
        Option(
            metavar="bfloat16|float16|float32",
            help="Write all weights as this type.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str,
        Option(
            metavar="SIZE",
            help="Largest file size, such as 5GB, or source for the same files as in the import.",
        ),
    ] = "5GB",
    verify: Annotated[bool, Option("--verify", help="Hash every blob before using it.")] = False,
    jobs: Jobs = None,
    cache: CacheOption = None,
    cache_size: CacheSizeOption = None,
    store: StoreOption = None,
    lower: LowerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a checkpoint folder.

    It contains shards and their index, the config and the tokenizer.
    """
    result = with_bar(
        blobstore.export_model,
        name,
        folder,
        store=stores_at(store, lower, cache=(cache, cache_size)),
        jobs=jobs,
        verify=verify,
        **export_options(format=form, dequantize=dequantize, max_shard_size=max_shard_size),
    )
    note(*result.notes)
    others = ""
    if result.loads_in == ("blobstore",):
        others = "; mlx-lm needs --format mlx, transformers --dequantize bfloat16"
    elif "transformers" not in result.loads_in:
        others = "; transformers needs --dequantize bfloat16, without --format mlx"
    show_lines(
        result,
        as_json,
        f"{result.name} in {result.folder}: {len(result.files)} files",
        f"{size(result.nbytes)} in {result.seconds:.2f} s, {rate(result.nbytes, result.seconds)}",
        f"Loads in {', '.join(result.loads_in)}{others}",
    )


def export_options(**given: str | None) -> dict[str, Any]:
    """Return those of an export's options that are given, as `export_model` takes them."""
    from blobstore.export.planned_files import AS_SOURCE

    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.get("format") == "mlx":
        from blobstore.model.on_mlx_lm import without_package_code

        without_package_code()
    if (most := options.get("max_shard_size", AS_SOURCE)) != AS_SOURCE:
        options["max_shard_size"] = parse_size(most)
    return options


_MOST_INPUT = 100_000_000
File = Annotated[str, Argument(metavar="FILE", help="A .safetensors file.")]
InPlace = Annotated[
    bool,
    Option("--in-place", help="Fail if the change needs a new file."),
]
metadata = typer.Typer(
    help="Read and edit the metadata of a .safetensors file.", callback=show_help, **PLAIN
)


@metadata.command("get")
def get_metadata(
    file: File,
    key: Annotated[
        str | None, Argument(metavar="KEY", help="One key [default: all of them].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show all metadata, or the value of one key."""
    values = blobstore.read_metadata(file)
    if key is None:
        show_result(values, show_facts, as_json)
    elif key in values:
        show_result(values[key], lambda value: emit(printable(value, keep="\n\t")), as_json)
    else:
        raise NotFoundError(f"{file} has no metadata {quoted(key)}", path=file)


@metadata.command("set")
def set_metadata(
    file: File,
    key: Annotated[
        str,
        Argument(
            metavar="KEY_OR_JSON",
            help="A key; or, without VALUE, a JSON object or - to read one from stdin.",
        ),
    ],
    value: Annotated[str | None, Argument(metavar="VALUE", help="The new value.")] = None,
    replace: Annotated[bool, Option("--replace", help="Remove all other keys.")] = False,
    in_place: InPlace = False,
    as_json: JsonOption = False,
) -> None:
    """Set one key, or all keys of a JSON object of strings."""
    changes: Mapping[str, str | None] = _parse(key) if value is None else {key: value}
    _edit(file, changes, replace, in_place, as_json)


@metadata.command("rm")
def remove_metadata(
    file: File,
    keys: Annotated[
        list[str] | None,
        Argument(metavar="KEY", help="Keys to remove; if one is missing, nothing changes."),
    ] = None,
    everything: Annotated[bool, Option("--all", help="Remove every key.")] = False,
    in_place: InPlace = False,
    as_json: JsonOption = False,
) -> None:
    """Remove keys."""
    if bool(keys) == everything:
        raise UsageError("name the keys to remove, or use --all")
    _edit(file, dict.fromkeys(keys or ()), everything, in_place, as_json)


def _parse(text: str) -> dict[str, str | None]:
    from blobstore.formats.strictjson import parse_object

    if text == _PIPE:
        with os_errors("read", "standard input"):
            raw = sys.stdin.buffer.read(_MOST_INPUT + 1)
    elif text.lstrip().startswith("{"):
        raw = text.encode(errors="surrogatepass")
    else:
        raise UsageError(
            f"the value for {quoted(text)} is missing",
            hint="Give KEY and VALUE, a JSON object, or - for stdin.",
        )
    value = parse_object(raw, "the metadata", rule="F9", limit=_MOST_INPUT)
    if wrong := [key for key, item in value.items() if not isinstance(item, str)]:
        raise UsageError(f"the value of {quoted(wrong[0])} is not a string", rule="F9")
    return value


def _edit(
    file: str, changes: Mapping[str, str | None], replace: bool, in_place: bool, as_json: bool
) -> None:
    edit = with_bar(blobstore.edit_metadata, file, changes, replace=replace, in_place=in_place)
    if edit.copied_bytes is not None:
        speed = rate(edit.copied_bytes, edit.seconds)
        says = f"Rewrote {file}: {size(edit.copied_bytes)} in {edit.seconds:.2f} s, {speed}"
    elif edit.changed:
        says = f"Edited {file} in place"
    else:
        says = f"{file} already has this metadata"
    show_lines(dict(edit.metadata), as_json, says)
