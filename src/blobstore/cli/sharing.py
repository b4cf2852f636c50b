"""``push`` and ``pull``, ``pack`` and ``unpack``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.accounts import (
    CaFileOption,
    InsecureOption,
    RealmsOption,
    credentials,
    realms_of,
)
from blobstore.cli.output import (
    Jobs,
    JsonOption,
    Model,
    StoreOption,
    WaitOption,
    counted,
    emit,
    progress_bar,
    show_view,
    size,
    store_at,
)

if TYPE_CHECKING:
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
    with progress_bar() as progress:
        done = push(name, store_at(store), to=to, access=access, jobs=jobs, progress=progress)
    view = SharedView.of(done)
    show_view(view, lambda view: _show("Pushed", "sent", view), as_json=as_json)


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
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Refuse the model unless it is signed by this public key, for its repository.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="FILE",
            help="Refuse the model unless it is signed as this containers policy.json requires.",
        ),
    ] = None,
    insecure: InsecureOption = False,
    ca_file: CaFileOption = None,
    realm: RealmsOption = None,
    jobs: Jobs = None,
    wait: WaitOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a model from a registry. A pull that was cut off goes on where it stopped."""
    from blobstore.cli.signing import policy_of
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


def pack(
    name: Model,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The model that this one was made from: store the difference where it is smaller.",
        ),
    ] = None,
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

    asked, against = ModelName.parse(name), ModelName.parse(base) if base is not None else None
    with progress_bar() as progress:
        done = pack_model(store_at(store, wait), asked, base=against, jobs=jobs, progress=progress)
    show_view(PackView.of(done), _show_pack, as_json=as_json)


def _show_pack(view: PackView) -> None:
    share = f"{view.stored / view.size:.0%} of {size(view.size)}" if view.size else "no bytes"
    emit(f"Packed {view.name}: {counted(view.blobs, 'blob')}, {size(view.stored)} ({share})")
    if view.base_stored:
        emit(f"Blobs of its base stay packed for it: {size(view.base_stored)}")
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
    """Bring a packed model back."""
    from blobstore.names import ModelName
    from blobstore.store.packing import unpack as unpack_model
    from blobstore.views.packs import UnpackView

    asked = ModelName.parse(name)
    with progress_bar() as progress:
        done = unpack_model(store_at(store, wait), asked, jobs=jobs, progress=progress)
    show_view(UnpackView.model_validate(done), _show_unpack, as_json=as_json)


def _show_unpack(view: UnpackView) -> None:
    emit(f"Unpacked {view.name}: {counted(view.blobs, 'blob')}, {size(view.bytes)}")
