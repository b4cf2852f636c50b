"""Servers that give out checkpoints: nginx, the stand-in for the Hub, moto's S3, azurite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from blobstore.source.addresses import open_folder
from blobstore.source.folders import Folder
from support.cloud_services import SERVICES, CloudService
from support.hub_stand_in import hub_stand_in
from support.nginx import nginx

Opener = Callable[[str], Folder]
"""Opens a checkpoint on a server by its name. A web server has no list of its files."""
Place = Callable[[Path, Mapping[str, Path]], AbstractContextManager[Opener]]
"""Runs a server, which writes below a folder, of checkpoints by name."""


@contextmanager
def on_nginx(work: Path, sources: Mapping[str, Path]) -> Iterator[Opener]:
    """Run a plain web server, which lists nothing."""
    root = work / "root"
    root.mkdir(parents=True)
    for name, folder in sources.items():
        (root / name).symlink_to(folder)
    with nginx(work / "nginx", root) as server:
        yield lambda name: open_folder(f"{server.url}/{name}")


@contextmanager
def on_hub(work: Path, sources: Mapping[str, Path]) -> Iterator[Opener]:
    """Run the stand-in for the Hub, with a repository for each checkpoint."""
    with hub_stand_in(work, {f"org/{name}": path for name, path in sources.items()}) as hub:
        yield lambda name: open_folder(f"hf://org/{name}", endpoint=hub.url)


@contextmanager
def in_bucket(service: CloudService, work: Path, sources: Mapping[str, Path]) -> Iterator[Opener]:
    """Run a service, with a prefix of its bucket for each checkpoint."""
    with service(work) as bucket:
        for name, folder in sources.items():
            bucket.upload(folder, name)
        yield lambda name: open_folder(f"{bucket.address}/{name}", bucket_options=bucket.options)


PLACES: dict[str, Place] = {
    "nginx": on_nginx,
    "hub": on_hub,
    **{name: partial(in_bucket, service) for name, service in SERVICES.items()},
}
