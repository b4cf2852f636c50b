"""A `Remote` for tests: it takes the headers of .safetensors files with their first bytes."""

from __future__ import annotations

from collections.abc import Sequence

from blobstore.formats.safetensors.header import header_end
from blobstore.io.budget import Budget, RequestLimits
from blobstore.io.http.client import HttpClient
from blobstore.io.http.remote_files import HttpReader, Remote as PlainRemote, Wanted
from blobstore.source.folders import HUB
from blobstore.source.hub import HubFolder, HubTarget
from blobstore.source.web import WebFolder


class Remote(PlainRemote):
    """A `Remote` whose readers have their headers."""

    def open(
        self,
        url: str,
        budget: Budget | None = None,
        *,
        first_read: int | None = None,
        wanted: Wanted | None = header_end,
        limits: RequestLimits | None = None,
    ) -> HttpReader:
        """Return a reader of the file at ``url``, with its header read."""
        return super().open(url, budget, first_read=first_read, wanted=wanted, limits=limits)

    def open_all(self, urls: Sequence[str]) -> list[HttpReader]:
        """Return readers of all ``urls``, opened at once."""
        with self.at_once(urls, lambda url, limits: self.open(url, limits=limits)) as readers:
            return list(readers)


def header_reader(
    client: HttpClient, url: str, *, limits: RequestLimits | None = None
) -> HttpReader:
    """Return a reader of the file at ``url``, with its header read."""
    return HttpReader(client, url, wanted=header_end, limits=limits)


def open_all(folder: WebFolder, names: Sequence[str]) -> list[HttpReader]:
    """Return readers of several files of a folder, opened at once."""
    with folder.reading(names, lambda reader: reader) as readers:
        return list(readers)


def hub_folder(
    remote: PlainRemote, repository: str, revision: str = "main", endpoint: str = HUB
) -> HubFolder:
    """Return a repository of the Hub."""
    return HubFolder(remote, HubTarget(repository, revision, ""), endpoint)
