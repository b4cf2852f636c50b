"""``push`` and ``pull``, ``pack`` and ``unpack``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blobstore.cli.accounts import (
    CaFileOption,
    InsecureOption,
    RealmsOption,
    credentials,
    realms_of,
)
from blobstore.cli.buckets import folder_store_at
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    Model,
    StoreOption,
    WaitOption,
    counted,
    emit,
    note,
    parse_size,
    progress_bar,
    show_replaced,
    show_view,
    size,
    store_at,
)
from blobstore.cli.verification import KeyOption, PolicyOption, policy_of
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.io.workers import Progress
    from blobstore.store.ports import Readable
    from blobstore.store.registry.push_pull import RegistryAccess
    from blobstore.views.packs import PackView, UnpackView
    from blobstore.views.shared import SharedView


def push(
    name: Model,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="NAME",
            help="Where to: HOST/NAMESPACE/MODEL:TAG [default: as the model is named].",
        ),
    ] = None,
    artifact: Annotated[
        str | None,
        typer.Option(
            "--artifact",
            metavar="modelpack|image|oci",
            help="Send another form: a ModelPack artifact or an image of exported files, "
            "or the same blobs under an OCI manifest. Needs --to.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="safetensors|mlx",
            help="Files of --artifact: mlx is for mlx_lm.load [default: safetensors].",
        ),
    ] = None,
    dequantize: Annotated[
        str | None,
        typer.Option(
            "--dequantize",
            metavar="bfloat16|float16|float32",
            help="Dequantize the weights in files of --artifact to this type.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Largest file of --artifact, such as 5GB, or source [default: 5GB].",
        ),
    ] = None,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    realm: RealmsOption = None,
    jobs: Jobs = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a model to a registry. Only blobs that the registry lacks are sent."""
    from blobstore.store.registry.push_pull import push
    from blobstore.views.shared import SharedView

    access = _access(insecure=insecure, ca_file=ca_file, realm=realm)
    source = store_at(store)
    files = {"format": form, "dequantize": dequantize, "max_shard_size": max_shard_size}
    given = {key: value for key, value in files.items() if value is not None}
    _check_artifact(artifact, to, given)
    with progress_bar() as progress, ExitStack() as opened:
        model: Readable = source
        if artifact is not None:
            model = opened.enter_context(
                _opened_artifact(name, source, artifact, given, jobs=jobs, progress=progress)
            )
        done = push(
            name, model, to=to, neighbours=source, access=access, jobs=jobs, progress=progress
        )
    view = SharedView.of(done)
    show_view(view, lambda view: _show("Pushed", "sent", view), as_json=as_json)


def _check_artifact(kind: str | None, to: str | None, given: Mapping[str, str]) -> None:
    """Raise UsageError for options of an artifact without one, or an artifact without its name."""
    if kind is None and given:
        flag = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{flag} is for --artifact modelpack or image")
    if kind == "oci" and given:
        raise UsageError("--artifact oci has the blobs of the model, not the files of an export")
    if kind is not None and to is None:
        raise UsageError(
            "--artifact needs --to", hint="Under the model's own name it would replace the model."
        )


@contextmanager
def _opened_artifact(
    name: str,
    store: Readable,
    kind: str,
    given: Mapping[str, str],
    *,
    jobs: int | None,
    progress: Progress | None,
) -> Iterator[Readable]:
    from blobstore.artifacts.artifact import open_artifact
    from blobstore.export.planned_files import AS_SOURCE
    from blobstore.model.mlx_lm_package import delay_package

    options: dict[str, Any] = dict(given)
    if options.get("format") == "mlx":
        delay_package("mlx_lm")
    shard = options.get("max_shard_size", AS_SOURCE)
    if shard != AS_SOURCE:
        options["max_shard_size"] = parse_size(shard)
    with open_artifact(name, store, kind, **options, jobs=jobs, progress=progress) as made:
        for text in made.notes:
            note(text)
        yield made


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A model: [HOST/][NAMESPACE/]MODEL[:TAG][@sha256:DIGEST]."
        ),
    ],
    new_name: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Its name in the store [default: NAME]."),
    ] = None,
    key: KeyOption = None,
    policy: PolicyOption = None,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    realm: RealmsOption = None,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model from a registry. A pull that was interrupted continues where it stopped."""
    from blobstore.store.registry.push_pull import pull
    from blobstore.views.shared import SharedView

    access = _access(insecure=insecure, ca_file=ca_file, realm=realm)
    required = policy_of(key, policy) if key is not None or policy is not None else None
    target = store_at(store, wait, may_be_new=True)
    with progress_bar() as progress:
        done = pull(
            name,
            target,
            name=new_name,
            access=access,
            policy=required,
            jobs=jobs,
            progress=progress,
        )
    view = SharedView.of(done)
    show_view(view, lambda view: _show("Pulled", "fetched", view), as_json=as_json)


def _access(*, insecure: bool, ca_file: str | None, realm: list[str] | None) -> RegistryAccess:
    from blobstore.store.registry.push_pull import RegistryAccess

    return RegistryAccess(
        insecure=insecure, credentials=credentials(), realms=realms_of(realm), ca_file=ca_file
    )


def _show(done: str, moved: str, view: SharedView) -> None:
    ways = [
        f"{way.blobs:,} {how} ({size(way.bytes)})"
        for how, way in (("were there", view.there), (moved, view.moved))
        if way.blobs
    ]
    renamed = f" as {view.name}" if view.name != view.source else ""
    emit(f"{done} {view.source}{renamed}: {', '.join(ways) or 'no blobs'}")
    if view.signatures:
        emit(f"{done} {counted(view.signatures, 'signature')}")
    emit(f"Digest: {view.digest}")
    show_replaced(view.replaced)


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
