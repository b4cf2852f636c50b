"""The Hugging Face cache: ``models--ORG--NAME/snapshots/COMMIT`` is a folder of links, one for each commit that was used.

``refs/REVISION`` holds the commit that a branch or tag stood for. No name on the Hub contains ``--``, so the folder's name
is the repository's. Source: huggingface_hub file_download.py `repo_folder_name`, `_cache_commit_hash_for_specific_revision`.
"""

from __future__ import annotations

import os
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError, UnsupportedSourceError, from_os_error
from blobstore.names import file_name
from blobstore.source.folders import LocalFolder

_PREFIX = "models--"
_SNAPSHOTS = "snapshots"
_MAIN = "main"
_LONGEST_REF = 1024
_SHOWN = 5


def repository_name(folder: Path) -> str | None:
    """Return the NAME of ORG/NAME for a snapshot in the cache; None for every other folder."""
    repository = folder.parent.parent.name
    is_snapshot = folder.parent.name == _SNAPSHOTS and repository.startswith(_PREFIX)
    return repository.rpartition("--")[2] if is_snapshot else None


def snapshot_in(folder: Path) -> Path:
    """Return the snapshot that a repository's folder in the cache stands for; every other folder as it is.

    That is the one that ``refs/main`` names, else the only one. Raises: NotFoundError when that is missing;
    UnsupportedSourceError when there are several and no ``refs/main``; StorageError.
    """
    snapshots = folder / _SNAPSHOTS
    try:
        is_repository = os.path.basename(os.path.abspath(folder)).startswith(_PREFIX)  # noqa: PTH100, PTH119
        if not is_repository or not snapshots.is_dir():
            return folder
    except OSError as error:
        raise from_os_error(error, "access", snapshots) from error
    present = _folders(snapshots)
    commit = _main_commit(folder)
    if commit is not None:
        if commit not in present:
            message = f"{folder}: refs/main names the snapshot {commit}, which is missing"
            raise NotFoundError(message, path=str(snapshots / commit), hint=_hint(snapshots, present))
        return snapshots / commit
    if not present:
        raise NotFoundError(f"{folder} has no snapshot", path=str(folder), hint="Download the model again.")
    if len(present) > 1:
        message = f"{folder} has {len(present)} snapshots, and no refs/main says which one counts"
        raise UnsupportedSourceError(message, path=str(folder), hint=_hint(snapshots, present))
    return snapshots / present[0]


def _main_commit(folder: Path) -> str | None:
    """Return the commit in ``refs/main``; None if it is missing. Raises: NotFoundError if it does not name a snapshot."""
    refs = folder / "refs"
    try:
        raw = LocalFolder(refs).read(_MAIN, _LONGEST_REF)
    except NotFoundError:
        return None
    try:
        return file_name(raw.decode().strip())
    except (UnicodeDecodeError, BlobStoreError):
        message = f"{refs / _MAIN} should contain the name of a snapshot, not {raw!r}"
        raise NotFoundError(message, path=str(refs / _MAIN)) from None


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise from_os_error(error, "list", path) from error


def _hint(snapshots: Path, present: list[str]) -> str | None:
    if not present:
        return None
    more = f" (and {len(present) - _SHOWN} more)" if len(present) > _SHOWN else ""
    return f"Give one of them: {', '.join(str(snapshots / name) for name in present[:_SHOWN])}{more}"
