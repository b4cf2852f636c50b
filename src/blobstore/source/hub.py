"""The Hugging Face Hub: the grammar of its addresses, a repository as a folder, and its cache here.

``hf://`` addresses follow huggingface_hub's grammar (utils/_hf_uris.py at version 2.4.0):
``hf://[models/]ORG/NAME[@REVISION][/PATH]``, where a revision is one segment, its slashes as
``%2F``, or ``refs/pr/N`` or ``refs/convert/NAME``. Addresses of the Hub's pages
(``https://huggingface.co/ORG/NAME/tree/main``) are the repositories that they show.

A repository is read at one commit: the one that its branch or tag stood for when it was first
listed. Its listing says the content's hash of each file. Source: huggingface_hub@2.4.0 hf_api.py
`HfApi.model_info`, `HfApi.list_repo_tree`, `RepoFile`; utils/_pagination.py.

The cache: ``models--ORG--NAME/snapshots/COMMIT`` is a folder of links, one for each commit that was
used. ``refs/REVISION`` holds the commit that a branch or tag stood for. No name on the Hub contains
``--``, so the folder's name is the repository's. Source: huggingface_hub file_download.py
`repo_folder_name`, `_cache_commit_hash_for_specific_revision`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from blobstore.errors import (
    BlobStoreError,
    InvalidNameError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    UnsupportedSourceError,
    UsageError,
    from_os_error,
    quoted,
)
from blobstore.formats import strictjson
from blobstore.names import Digest, file_name, relative_path
from blobstore.source.folders import Entry, Found, LocalFolder
from blobstore.source.web import WebEntry, WebFile, WebFolder, WebIdentity

if TYPE_CHECKING:
    from blobstore.io.http.reader import HttpReader, Remote

HUB = "https://huggingface.co"
HUB_SCHEME = "hf://"
MAIN = "main"

# huggingface_hub@1.5 utils/_validators.py `validate_repo_id`: each part of at most 96 characters,
# none of which is a hyphen or a dot at an end or beside another; repositories without an owner are
# the Hub's oldest.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.-](?![.-]|/|$)){0,95}"
_REPOSITORY = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
# git-check-ref-format(1): what a branch or tag can't have in its name; a commit's hash passes as
# well.
_REVISION = re.compile(
    r"(?![/.-]|@$)(?!.*(?://|\.\.|@\{|/\.|\.lock(?:/|$)))[!-~]{1,255}(?<![/.])", re.ASCII
)
_NOT_IN_REVISION = frozenset(" ~^:?*[\\")
_REVISION_IN_ADDRESS = re.compile(
    r"@(refs/(?:convert/[A-Za-z0-9_.-]+|pr/[0-9]+)|[^/]*)(?:/|$)", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)
_OTHER_KINDS = ("datasets", "spaces", "kernels", "buckets")
_PAGES = ("tree", "blob", "resolve", "raw")
_MAX_ANSWER = 16 * 2**20
_MAX_PAGES = 100
"""Pages of a listing, of 1,000 files each."""


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A repository of the Hub at a revision, or a file or folder in it; ``path`` is empty for the repository itself."""

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{HUB_SCHEME}{self.repository}{revision}{'/' if self.path else ''}{self.path}"

    def url(self, endpoint: str, revision: str | None = None) -> str:
        """Return the address of its files at ``revision`` (None: its own), with ``/`` at its end.

        Raises: UsageError (rule R2) for an invalid repository name or revision.
        """
        self._check()
        path = "".join(f"/{quote(part, safe='')}" for part in PurePosixPath(self.path).parts)
        at = quote(revision or self.revision, safe="")
        return f"{endpoint.rstrip('/')}/{self.repository}/resolve/{at}{path}/"

    def _check(self) -> None:
        if not is_repository(self.repository):
            what = f"not a repository's name: {quoted(self.repository)} (rule R2)"
            hint = "It is ORGANISATION/NAME, such as bigscience/bloom."
            raise UsageError(what, rule="R2", hint=hint)
        revision = self.revision
        if _REVISION.fullmatch(revision) is None or _NOT_IN_REVISION & set(revision):
            what = f"not a branch, tag or commit: {quoted(revision)} (rule R2)"
            raise UsageError(what, rule="R2")


def is_repository(name: str) -> bool:
    """Return True for a name that a repository of the Hub may have: ORG/NAME, or NAME."""
    return _REPOSITORY.fullmatch(name) is not None and not name.endswith(".git")


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
        match = _REVISION_IN_ADDRESS.match(body, len(before))
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


class HubFolder(WebFolder):
    """A repository of the Hub, or a folder in it, at one commit.

    Where the server does not answer the Hub's API (a plain mirror of its files), it is a `WebFolder`
    at the revision that was asked for.
    """

    def __init__(
        self, remote: Remote, target: HubTarget, endpoint: str, file: str | None = None
    ) -> None:
        """``target.path`` is the folder, ``file`` a file in it.

        Raises: UsageError (rule R2) for an invalid repository name, revision or web address.
        """
        url = target.url(endpoint)
        self._target = target
        self._endpoint = endpoint.rstrip("/")
        self._api = f"{self._endpoint}/api/models/{target.repository}"
        remote.start(f"{self._endpoint}/")  # a token is the endpoint's
        super().__init__(remote, url, file=file)
        self.name = str(target)

    @property
    def base_url(self) -> str:
        """The address of its files, at the commit where that is known."""
        return self._target.url(self._endpoint, self._commit)

    @property
    def key(self) -> str:
        """The ``hf://`` address at the commit."""
        path = "/".join(filter(None, (self._target.path, self.file)))
        return str(replace(self._target, revision=self._commit or self._target.revision, path=path))

    @property
    def stem(self) -> str:
        """The file's name without its suffix, else the folder's, else the repository's."""
        last = self._target.path or self._target.repository
        return (self.file or last.rpartition("/")[2]).removesuffix(".safetensors")

    @property
    def address(self) -> str:
        """The ``hf://`` address at the commit."""
        return self.key

    def as_file(self) -> None:
        """Return None: the listing says what is a file."""

    def names(self) -> list[str] | None:
        """Return the names of its files, sorted; None for a server that does not list them."""
        if self._listing is None:
            return None
        return sorted(entry.name for entry in self._listing.get("", ()) if not entry.is_folder)

    def scan(self, prefix: str = "", most: int | None = None) -> list[Entry]:
        """Return what the repository has there."""
        if self._listing is None:
            return super().scan(prefix, most)
        entries: list[Entry] = [*self._listing.get(prefix, ())]
        return sorted(entries, key=lambda entry: entry.name)[:most]

    @cached_property
    def _commit(self) -> str | None:
        """The commit that the revision stands for; None where the server does not answer the Hub's API."""
        url = f"{self._api}/revision/{quote(self._target.revision, safe='')}"
        try:
            raw = self._remote.read_document(f"{url}?expand=sha", _MAX_ANSWER, self.budget)
        except NotFoundError:
            return None
        commit = strictjson.parse_object(raw, url, rule="R1").get("sha")
        if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
            raise RemoteError(f"{url}: its answer names no commit (rule R1)", rule="R1", path=url)
        return commit

    @cached_property
    def _listing(self) -> dict[str, list[WebEntry]] | None:
        """What lies in each folder, by its path with ``/`` at its end; None without the Hub's API."""
        return None if self._commit is None else self._sorted(self._listed(self._commit))

    def _listed(self, commit: str) -> list[HubFile]:
        """Return all files of a commit. Raises: LimitExceededError for more than 100 pages."""
        files: list[HubFile] = []
        url, query = f"{self._api}/tree/{commit}", "recursive=true"
        for _ in range(_MAX_PAGES):
            raw, following = self._remote.read_page(f"{url}?{query}", _MAX_ANSWER, self.budget)
            files += _files_of(raw, url)
            if following is None:
                return files
            query = urlsplit(following).query  # and nothing else: the server does not say where
        raise LimitExceededError(
            f"limit exceeded: {self.name} lists more than {_MAX_PAGES} pages of files",
            path=self.name,
        )

    def _sorted(self, files: list[HubFile]) -> dict[str, list[WebEntry]]:
        listing: dict[str, dict[str, WebEntry]] = {}
        above = f"{self._target.path}/" if self._target.path else ""
        for file in files:
            if not file.path.startswith(above):
                continue
            *folders, name = file.path.removeprefix(above).split("/")
            prefix = ""
            for folder in folders:
                place = self.url(prefix + folder)
                listing.setdefault(prefix, {}).setdefault(folder, WebEntry(folder, place, None))
                prefix += f"{folder}/"
            identity = WebIdentity(f"{file.identity} {file.size}")
            found = Found(file.size, identity, file.digest)
            listing.setdefault(prefix, {})[name] = WebEntry(name, self.url(prefix + name), found)
        return {prefix: list(entries.values()) for prefix, entries in listing.items()}

    def _source(self, reader: HttpReader) -> WebFile:
        """Return a reader with the identity that the listing gives: the content's hash."""
        found = self._states.get(reader.name)
        if found is None:
            return super()._source(reader)
        if reader.size != found.size:
            message = f"{reader.name} has {reader.size} bytes, and {found.size:,} in the repository's listing"
            raise RemoteError(f"{message} (rule R1)", rule="R1", path=reader.name)
        return WebFile(reader, found.identity)

    @cached_property
    def _states(self) -> dict[str, Found]:
        entries = (entry for entries in (self._listing or {}).values() for entry in entries)
        return {entry.place: entry.state for entry in entries if entry.state is not None}


class HubFile(NamedTuple):
    """A file of a repository: ``identity`` is its content's hash, ``digest`` that as SHA-256 for large files."""

    path: str
    size: int
    identity: str
    digest: Digest | None


def _files_of(raw: bytes, place: str) -> list[HubFile]:
    """Return the files of one page of a listing. Raises: RemoteError (rule R1) for another answer."""
    try:
        rows = strictjson.parse(raw)
        return [_file_of(row) for row in rows if row["type"] == "file"]
    except (BlobStoreError, strictjson.StrictJsonError, KeyError, TypeError, ValueError) as error:
        raise RemoteError(
            f"{place}: its answer is not a listing of files (rule R1)", rule="R1", path=place
        ) from error


def _file_of(row: dict[str, Any]) -> HubFile:
    path, size, identity, large = row["path"], row["size"], row["oid"], row.get("lfs")
    if type(size) is not int or size < 0 or not isinstance(identity, str):
        raise ValueError("a file without a size or a hash")
    digest = Digest(large["oid"]) if large is not None else None
    return HubFile(relative_path(path), size, identity if digest is None else digest.hex, digest)


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
