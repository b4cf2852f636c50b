"""Files beside each other on a web server: a folder, and a repository of the Hugging Face Hub as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from blobstore.budget import Budget
from blobstore.errors import NotFoundError, UsageError, quoted
from blobstore.names import relative_path
from blobstore.transport import WebAddress

if TYPE_CHECKING:
    from blobstore.remote.remote import Remote

from blobstore.remote.reader import HttpReader

_T = TypeVar("_T")

HUB = "https://huggingface.co"
MAIN = "main"
# huggingface_hub@1.5 utils/_validators.py `validate_repo_id`: each part of at most 96 characters, none of which is a
# hyphen or a dot at an end or beside another; repositories without an owner are the Hub's oldest.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.-](?![.-]|/|$)){0,95}"
_REPOSITORY = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
# git-check-ref-format(1): what a branch or tag can't have in its name; a commit's hash passes as well.
_REVISION = re.compile(r"(?![/.-]|@$)(?!.*(?://|\.\.|@\{|/\.|\.lock(?:/|$)))[!-~]{1,255}(?<![/.])", re.ASCII)
_NOT_IN_REVISION = frozenset(" ~^:?*[\\")


class RemoteFolder:
    """Files beside each other on a web server. Nothing lists them: names have to be known."""

    def __init__(self, remote: Remote, base_url: str) -> None:
        """Raises: UsageError (rule R2) when ``base_url`` is not a web address, or has a query."""
        address = WebAddress.parse(base_url)
        if "?" in address.target:
            raise UsageError(f"a folder's address has no query: {address}", rule="R2")
        self.base_url = address.text.rstrip("/") + "/"
        self._remote = remote

    def url(self, name: str) -> str:
        """Return the address of a file. Raises: InvalidNameError (rule P1) for a name that leads elsewhere."""
        return self.base_url + "/".join(quote(part, safe="") for part in relative_path(name).split("/"))

    def open(self, name: str) -> HttpReader:
        """Return a reader of one file. Raises: as `Remote.open`."""
        return self._remote.open(self.url(name))

    def open_all(self, names: Iterable[str]) -> list[HttpReader]:
        """Return readers of several files, opened at once. Raises: as `Remote.open_all`."""
        return self._remote.open_all([self.url(name) for name in names])

    def reading(
        self, names: Sequence[str], read: Callable[[HttpReader], _T], budget: Budget | None = None
    ) -> AbstractContextManager[Iterator[_T]]:
        """Give what ``read`` makes of each file, in the order of ``names``. As `Remote.reading`."""
        return self._remote.reading([self.url(name) for name in names], read, budget)

    def read(self, name: str, limit: int, budget: Budget | None = None) -> bytes:
        """Return all of a small file. Raises: as `Remote.read_document`."""
        return self._remote.read_document(self.url(name), limit, budget)

    def find(self, name: str, limit: int) -> bytes | None:
        """Return all of a small file, None if it does not exist. Raises: as `Remote.read_document`."""
        try:
            return self.read(name, limit)
        except NotFoundError:
            return None


def hub_folder(remote: Remote, repository: str, revision: str = MAIN, endpoint: str = HUB) -> RemoteFolder:
    """Return the files of a repository at a revision (branch, tag or commit) of the Hugging Face Hub.

    A token of ``remote`` is for the endpoint, when this is the first address it is used with.

    Raises: UsageError (rule R2) for an invalid repository name, revision or web address.
    """
    if _REPOSITORY.fullmatch(repository) is None or repository.endswith(".git"):
        what = f"not a repository's name: {quoted(repository)} (rule R2)"
        raise UsageError(what, rule="R2", hint="It is ORGANISATION/NAME, such as bigscience/bloom.")
    if _REVISION.fullmatch(revision) is None or _NOT_IN_REVISION & set(revision):
        raise UsageError(f"not a branch, tag or commit: {quoted(revision)} (rule R2)", rule="R2")
    base = f"{endpoint.rstrip('/')}/{repository}/resolve/{quote(revision, safe='')}/"
    remote.client.start(base)
    return RemoteFolder(remote, base)
