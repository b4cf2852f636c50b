"""Addresses: a user's text for a source, local or remote, opened as a folder.

A path, ``http://``, ``https://``, ``hf://ORG/NAME[@REVISION][/PATH]`` (web.py), or a bucket's
``s3://``, ``gs://``, ``az://``. Each may name a .safetensors file, a shard index, or a
folder.

In the Hugging Face cache ``models--ORG--NAME/snapshots/COMMIT`` is a folder of links, one for each
commit that was used. ``refs/REVISION`` holds the commit that a branch or tag stood for. No name on
the Hub contains ``--``, so the folder's name is the repository's. Source: huggingface_hub
file_download.py `repo_folder_name`, `_cache_commit_hash_for_specific_revision`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from blobstore.errors import (
    BlobStoreError,
    MissingFileError,
    NotFoundError,
    StorageError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.io.durable import os_errors
from blobstore.io.objects import CLOUDS, is_bucket, open_bucket
from blobstore.source.files import split_file
from blobstore.source.folders import (
    GGUF,
    HUB,
    HUB_SCHEME,
    MAIN,
    REPOSITORY,
    SNAPSHOTS,
    SUFFIX,
    BucketFolder,
    Folder,
    LocalFolder,
)

_T = TypeVar("_T")
Source = str | os.PathLike[str] | Folder
"""The source of functions that read a checkpoint: a path, an address, or an open folder."""

# The scheme has one slash if the text was a `Path`.
_ADDRESS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?P<rest>.*)", re.ASCII | re.DOTALL
)
FILE_ENDS = (SUFFIX, GGUF, ".json")
_USER = re.compile(r"(?<=:)//[^/]*@")
OpenSource = Callable[[str], Source]
"""A function that opens the source at an address."""


def is_web_address(text: str) -> bool:
    """Return True for an address of a web server."""
    return text.lower().startswith(("http://", "https://"))


def is_address(text: str) -> bool:
    """Return True for an address of a web server, of the Hub or of a bucket."""
    return text.lower().startswith(HUB_SCHEME) or is_web_address(text) or is_bucket(text)


def without_secrets(text: str) -> str:
    """Return an address without what may be a secret in it: a web address's query, a password."""
    return _USER.sub("//", text.partition("?")[0]) if is_web_address(text) else text


def open_folder(
    address: Source,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    ca_file: str | None = None,
    proxies: Mapping[str, str] | None = None,
    bucket_options: Mapping[str, str] | None = None,
) -> Folder:
    """Return the folder that ``address`` names, or that the named file is in, as `Folder.file`.

    A shard index stands for its folder with the files that it names, and a repository's folder in
    the Hugging Face cache for its snapshot. An open folder is returned as it is. ``token`` is sent
    to the address's origin and to no other; ``endpoint`` is the Hub's address, if it is not the
    default; ``ca_file`` names certificates (PEM) to trust besides the system's: files and folders
    of them, with colons between. ``proxies``: as `urllib.request.getproxies_environment` returns
    them, None for none; those of buckets are the environment's. ``bucket_options``: as for
    `open_bucket`.

    No request is sent yet. Raises: UsageError (an empty or invalid address, an unknown kind of
    address, an invalid token); NotFoundError (no such path); StorageError.
    """
    if not isinstance(address, str | os.PathLike):
        return address
    text = os.fspath(address)
    if not text:
        raise UsageError("the source is empty", hint="Is a variable unset?")
    if not isinstance(address, str) or not is_address(text):
        return _local(text)
    if is_bucket(text):
        path, file = split_file(text.rstrip("/"))
        scheme, _, rest = path.partition("://")
        options = {**(bucket_options or {}), **({"ca_file": ca_file} if ca_file else {})}
        return BucketFolder(open_bucket(f"{scheme.lower()}://{rest}", options), file=file)
    from blobstore.io.http.remote_files import Remote
    from blobstore.source.web import open_web_folder

    return open_web_folder(Remote(token, ca_file=ca_file, proxies=proxies), text, endpoint or HUB)


def folder_or_file(
    folder: Folder, read: Callable[[Folder], _T], read_file: Callable[[Folder, str], _T]
) -> _T:
    """Return ``read`` of the folder; if nothing is found in it, ``read_file`` of it as a file.

    An address without a file's suffix may still name a file. Raises: as ``read``.
    """
    try:
        return read(folder)
    except NotFoundError as error:
        other = folder.as_file()
        if error.rule is not None or other is None or other.file is None:
            raise
        try:
            return read_file(other, other.file)
        except BlobStoreError:
            raise error from None


def _local(text: str) -> LocalFolder:
    path, match = Path(text), _ADDRESS.fullmatch(text)
    if match is not None and not os.path.lexists(text):
        scheme, rest = match["scheme"].lower(), match["rest"]
        address = f"{scheme}://{rest}"
        hint = "Download it to a folder first, then: blobstore import FOLDER"
        if scheme == "file":
            hint = f"Give the path: {rest}"
        elif scheme in ("docker", "oci", "ollama"):
            hint = f"A registry's model has no scheme: blobstore inspect {rest}"
        elif scheme in ("http", "https", "hf", *CLOUDS):
            hint = f"Give the address as a text, not as a path: {address}"
        raise UsageError(
            f"can't read {quoted(address)}: sources are paths and http, https, hf, s3, gs and az"
            " addresses",
            hint=hint,
            path=address,
        )
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise absent(text) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StorageError(f"can't access {quoted(text)}: {error}", path=text) from error
    return LocalFolder(snapshot_in(path)) if is_folder else LocalFolder(path.parent, path.name)


def absent(source: str) -> NotFoundError:
    """Return the error for a path that does not exist.

    If the path may be a repository of the Hub, the hint gives the command for it.
    """
    from blobstore.source.web import HubTarget, is_repository

    hint, repository = None, source.removeprefix("hf.co/").removeprefix("huggingface.co/")
    # A path in a folder that exists is misspelt.
    is_near = os.path.isdir(os.path.dirname(source))  # noqa: PTH112, PTH120
    may_be_one = "/" in repository and is_repository(repository) and not is_near
    if may_be_one and not source.endswith(FILE_ENDS):
        hint = f"A model of the Hugging Face Hub is {HubTarget(repository, MAIN, '')}."
    return MissingFileError(f"no file or folder at {source}", path=source, hint=hint)


def snapshot_in(folder: Path) -> Path:
    """Return the snapshot of a repository's folder in the cache; other folders unchanged.

    The snapshot is the one that ``refs/main`` names, else the only one. Raises: NotFoundError when
    it is missing; UnsupportedSourceError when there are several and no ``refs/main``; StorageError.
    """
    snapshots = folder / SNAPSHOTS
    with os_errors("access", snapshots):
        name = os.path.basename(os.path.abspath(folder))  # noqa: PTH100, PTH119
        if not name.startswith(REPOSITORY) or not snapshots.is_dir():
            return folder
        present = sorted(path.name for path in snapshots.iterdir() if path.is_dir())
    try:
        wanted = [LocalFolder(folder / "refs").read(MAIN, 1024).decode(errors="replace").strip()]
    except NotFoundError:
        wanted = present
    if len(wanted) == 1 and wanted[0] in present:
        return snapshots / wanted[0]
    hint = f"Give one of them: {', '.join(str(snapshots / name) for name in present[:5])}"
    if len(wanted) > 1:
        raise UnsupportedSourceError(
            f"{folder} has {len(present)} snapshots, and no refs/main names one of them",
            path=str(folder),
            hint=hint,
        )
    if not present:
        hint = "Download the model again."
    what = f"refs/main names {quoted(wanted[0])}, which is missing" if wanted else "it is empty"
    raise NotFoundError(f"{folder} has no snapshot: {what}", path=str(snapshots), hint=hint)
