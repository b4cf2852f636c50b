"""A `Remote` for tests, which opens several files at once."""

from __future__ import annotations

from collections.abc import Sequence

from blobstore.io.http.remote_files import Remote as PlainRemote, RemoteFile
from blobstore.source.folders import HUB
from blobstore.source.web import HubFolder, HubTarget, WebFolder


class Remote(PlainRemote):
    """A `Remote` that opens several files at once."""

    def open_all(self, urls: Sequence[str]) -> list[RemoteFile]:
        """Return readers of all ``urls``, opened at once."""
        with self.at_once(urls, self.open) as readers:
            return list(readers)


def open_all(folder: WebFolder, names: Sequence[str]) -> list[RemoteFile]:
    """Return readers of several files of a folder, opened at once."""
    with folder.reading(names, lambda reader: reader) as readers:
        return list(readers)


def hub_folder(
    remote: PlainRemote, repository: str, revision: str = "main", endpoint: str = HUB
) -> HubFolder:
    """Return a repository of the Hub."""
    return HubFolder(remote, HubTarget(repository, revision, ""), endpoint)
