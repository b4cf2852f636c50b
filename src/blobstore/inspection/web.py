"""Web: what lies at an address, or in a repository of the Hub, as an inspection. Headers come by HTTP Range."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import unquote

from blobstore.budget import Budget
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.inspection.files import InspectedFile
from blobstore.inspection.inspection import Inspection, TargetKind
from blobstore.inspection.places import Files, read_files, read_folder, read_indexed
from blobstore.inspection.reading import inspection_of
from blobstore.inspection.targets import WebTarget
from blobstore.remote import Remote, RemoteFolder, hub_folder
from blobstore.safetensors import read_header
from blobstore.source.folders import WebFolder
from blobstore.source.hub import HubTarget
from blobstore.source.shards import SUFFIX, is_index


def inspect_address(target: WebTarget | HubTarget, token: str | None, endpoint: str) -> Inspection:
    """Return what an address holds. Raises: as `blobstore.inspection.inspect`."""
    with Remote(token) as remote:
        if isinstance(target, HubTarget):
            return _hub(remote, target, endpoint, Budget(str(target)))
        return _web(remote, target, Budget(target.url.partition("?")[0]))


def _hub(remote: Remote, target: HubTarget, endpoint: str, budget: Budget) -> Inspection:
    root = hub_folder(remote, target.repository, target.revision, endpoint)
    path = PurePosixPath(target.path)
    if not path.name.endswith(SUFFIX) and not is_index(path.name):
        return _folder(str(target), WebFolder(_inner(remote, root, path), budget))
    return _named(str(target), WebFolder(_inner(remote, root, path.parent), budget), path.name)


def _inner(remote: Remote, folder: RemoteFolder, path: PurePosixPath) -> RemoteFolder:
    return RemoteFolder(remote, folder.url(str(path))) if path.parts else folder


def _named(name: str, folder: WebFolder, file: str) -> Inspection:
    notes: list[str] = []
    if is_index(file):
        return inspection_of(name, TargetKind.INDEX, read_indexed(folder, file), folder, notes)
    return inspection_of(name, TargetKind.FILE, Files((read_files(folder, [file]),)), folder, notes)


def _folder(name: str, folder: WebFolder) -> Inspection:
    notes: list[str] = []
    return inspection_of(name, TargetKind.FOLDER, read_folder(folder, notes), folder, notes)


def _web(remote: Remote, target: WebTarget, budget: Budget) -> Inspection:
    """Return what an address holds; one that does not end as a file's, and has nothing below it, may still be one."""
    last = unquote(target.path.rpartition("/")[2])
    if is_index(last):
        folder = WebFolder(RemoteFolder(remote, target.folder), budget)
        return _named(folder.place(last), folder, last)
    if last.endswith(SUFFIX) or target.has_query:
        return _file(remote, target, budget)
    try:
        return _folder(target.url, WebFolder(RemoteFolder(remote, target.url), budget))
    except NotFoundError as error:
        if error.rule is not None or not last:
            raise
        try:
            return _file(remote, target, budget)
        except BlobStoreError:
            raise error from None


def _file(remote: Remote, target: WebTarget, budget: Budget) -> Inspection:
    """Return what one file holds. Its address is asked for as it is: it may be signed, and spelt in its own way."""
    reader = remote.open(target.url, budget)
    name = unquote(target.path.rpartition("/")[2]) or reader.name
    file = InspectedFile(name, reader.name, reader.size, read_header(reader, budget))
    folder = WebFolder(RemoteFolder(remote, target.folder), budget)
    return inspection_of(reader.name, TargetKind.FILE, Files(((file,),)), folder, [])
