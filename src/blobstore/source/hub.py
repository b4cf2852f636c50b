"""The Hub: its addresses, and its cache on this machine.

The Hugging Face cache: ``models--ORG--NAME/snapshots/COMMIT`` is a folder of links, one for each
commit that was used.

``refs/REVISION`` holds the commit that a branch or tag stood for. No name on the Hub contains
``--``, so the folder's name is the repository's. Source: huggingface_hub file_download.py
`repo_folder_name`, `_cache_commit_hash_for_specific_revision`.

The Hub: its addresses; and what to do about a checkpoint that is given by an address, for imports
read local files.

``hf://`` addresses follow huggingface_hub's grammar (utils/_hf_uris.py at version 2.4.0):
``hf://[models/]ORG/NAME[@REVISION][/PATH]``, where a revision is one segment, its slashes as
``%2F``, or ``refs/pr/N`` or ``refs/convert/NAME``. Addresses of the Hub's pages
(``https://huggingface.co/ORG/NAME/tree/main``) are the repositories that they show.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blobstore.errors import (
    BlobStoreError,
    InvalidNameError,
    MissingFileError,
    NotFoundError,
    UnsupportedSourceError,
    UsageError,
    from_os_error,
    quoted,
)
from blobstore.names import file_name, relative_path
from blobstore.source.folders import LocalFolder

HUB = "https://huggingface.co"
HUB_SCHEME = "hf://"
MAIN = "main"

_REVISION = re.compile(r"@(refs/(?:convert/[A-Za-z0-9_.-]+|pr/[0-9]+)|[^/]*)(?:/|$)", re.ASCII)
_REPOSITORY = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}", re.ASCII
)
_HUB_HOST = re.compile(r"^(?:hf|huggingface)\.co/")
_ADDRESS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?P<rest>.*)", re.ASCII | re.DOTALL
)
"""With one slash where the text has been a `Path`."""
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")
_PAGES = ("tree", "blob", "resolve", "raw")
_FILE_ENDS = (".safetensors", ".json")


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A repository of the Hub at a revision, or a file or folder in it; ``path`` is empty for the repository itself."""

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{HUB_SCHEME}{self.repository}{revision}{'/' if self.path else ''}{self.path}"


def parse_hub(text: str) -> HubTarget:
    """Return what an ``hf://`` address names.

    Raises: UsageError for one that is not a model's, or breaks rule P1.
    """
    body = text.removeprefix(HUB_SCHEME)
    first, _, rest = body.partition("/")
    if first in _OTHER_KINDS:
        raise UsageError(f"{quoted(text)} is not a model of the Hub")
    if first == "models":
        body = rest
    before, at, _ = body.partition("@")
    if at and before.count("/") <= 1:
        match = _REVISION.match(body, len(before))
        if match is None or not match[1]:
            raise UsageError(
                f"{quoted(text)} has no revision after its @", hint="hf://ORG/NAME@REVISION/PATH"
            )
        revision, path = unquote(match[1]), body[match.end() :]
        return HubTarget(before, revision, _path(path, text))
    parts = body.split("/", 2)
    return HubTarget("/".join(parts[:2]), MAIN, _path("/".join(parts[2:]), text))


def parse_hub_page(url: str, endpoint: str = HUB) -> HubTarget | None:
    """Return what a page of the Hub shows; None for every other address, a repository's raw files included.

    Raises: UsageError for a path in it that breaks rule P1.
    """
    try:
        parts, hub = urlsplit(url), urlsplit(endpoint)
    except ValueError:  # no URL: brackets that are not closed
        return None
    base = hub.path.rstrip("/") + "/"
    if (parts.scheme, parts.netloc.lower()) != (
        hub.scheme,
        hub.netloc.lower(),
    ) or not parts.path.startswith(base):
        return None
    owner, *more = (unquote(part) for part in parts.path.removeprefix(base).rstrip("/").split("/"))
    if not owner or not more or owner in (*_OTHER_KINDS, "api"):
        return None
    repository = f"{owner}/{more[0]}"
    if len(more) == 1:
        return HubTarget(repository, MAIN, "")
    if more[1] not in _PAGES or len(more) < 3:  # noqa: PLR2004
        return None
    return HubTarget(repository, more[2], _path("/".join(more[3:]), url))


def _path(path: str, text: str) -> str:
    path = path.rstrip("/")
    try:
        return relative_path(path) if path else ""
    except InvalidNameError as error:
        raise UsageError(f"{quoted(text)}: {error.message}", rule=error.rule) from None


def refuse_remote(source: str) -> None:
    """Raise UsageError for an address, with the commands that download and import it: only local files are imported."""
    match = _ADDRESS.fullmatch(source)
    if match is None or os.path.lexists(source):
        return
    address = f"{match['scheme'].lower()}://{match['rest']}"
    message = f"can't read {quoted(address)}: only local files and folders are imported so far"
    raise UsageError(
        message, hint=_how_to_get(address, match["scheme"].lower(), match["rest"]), path=address
    )


def absent(source: str) -> NotFoundError:
    """Return the error for a path that does not exist.

    What may be a repository of the Hub gets the commands for that.
    """
    hint, repository = None, _HUB_HOST.sub("", source)
    is_near = os.path.isdir(os.path.dirname(source))  # noqa: PTH112, PTH120  # then it is a misspelt path
    if _REPOSITORY.fullmatch(repository) and not is_near and not source.endswith(_FILE_ENDS):
        hint = f"If that is a model on Hugging Face: {_download(HubTarget(repository, MAIN, ''))}"
    return MissingFileError(f"no file or folder at {source}", path=source, hint=hint)


def _how_to_get(source: str, scheme: str, rest: str) -> str:
    if scheme == "file":
        return f"Give the path: {rest}"
    target = _hub_target(source, scheme)
    if target is not None and _REPOSITORY.fullmatch(target.repository):
        return f"Download it first: {_download(target)}"
    name = rest.partition("?")[0].partition("#")[0].rstrip("/").rpartition("/")[2]
    is_file = name.endswith(_FILE_ENDS)
    if scheme == "s3" and name:
        copy = ("aws", "s3", "cp", *(() if is_file else ("--recursive",)), source, name)
        return f"Download it first: {_then(copy, name)}"
    if scheme in ("http", "https") and is_file:
        return f"Download it first: {_then(('curl', '-L', '-o', name, source), name)}"
    return "Download it to a folder first, then: blobstore import FOLDER"


def _hub_target(source: str, scheme: str) -> HubTarget | None:
    try:
        return parse_hub(source) if scheme == "hf" else parse_hub_page(source)
    except UsageError:
        return None


def _download(target: HubTarget) -> str:
    """Return the commands that get a repository, or what is named of it, and import it."""
    folder = target.repository.rpartition("/")[2]
    revision = () if target.revision == MAIN else ("--revision", target.revision)
    is_file = target.path.endswith(_FILE_ENDS)
    part = (target.path,) if is_file else ("--include", f"{target.path}/*") if target.path else ()
    command = ("hf", "download", target.repository, *part, *revision, "--local-dir", folder)
    return _then(command, f"{folder}/{target.path}" if target.path else folder)


def _then(command: tuple[str, ...], path: str) -> str:
    return f"{shlex.join(command)} && {shlex.join(('blobstore', 'import', path))}"


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
    """Return the snapshot that a repository's folder in the cache stands for.

    Every other folder as it is.

    That is the one that ``refs/main`` names, else the only one. Raises: NotFoundError when that is
    missing; UnsupportedSourceError when there are several and no ``refs/main``; StorageError.
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
            raise NotFoundError(
                message, path=str(snapshots / commit), hint=_hint(snapshots, present)
            )
        return snapshots / commit
    if not present:
        raise NotFoundError(
            f"{folder} has no snapshot", path=str(folder), hint="Download the model again."
        )
    if len(present) > 1:
        message = f"{folder} has {len(present)} snapshots, and no refs/main says which one counts"
        raise UnsupportedSourceError(message, path=str(folder), hint=_hint(snapshots, present))
    return snapshots / present[0]


def _main_commit(folder: Path) -> str | None:
    """Return the commit in ``refs/main``; None if it is missing.

    Raises: NotFoundError if it does not name a snapshot.
    """
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
    return (
        f"Give one of them: {', '.join(str(snapshots / name) for name in present[:_SHOWN])}{more}"
    )
