"""Shares: which registries have which models, so that their blobs can be mounted there.

``.blobstore/cache/shares`` is appended to by every push and pull. A line is a hint: a registry says
itself whether it has a blob. A torn or foreign line is ignored, and so are failures.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.io.durable import append_file, make_folder, os_errors, read_own, replace_file
from blobstore.names import Digest
from blobstore.store.ports import Share

_log = logging.getLogger("blobstore.store.local.store")

_LINE = re.compile(
    r"^(?P<host>[A-Za-z0-9_.:-]{1,350}) (?P<repository>[A-Za-z0-9]+(?:[._/-]+[A-Za-z0-9]+)*)"
    r" (?P<hex>[0-9a-f]{64})$",
    re.ASCII | re.MULTILINE,
)
_LARGEST = 2**20


class ShareNotes:
    """The shares of a store, in a file. See `Shares`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> set[Share]:
        """Return all that are noted; none if the file can't be read."""
        try:
            text = read_own(self._path, _LARGEST).decode(errors="replace")
        except BlobStoreError as error:
            if not isinstance(error, NotFoundError):
                _log.info("the registries that have models are unknown: %s", error)
            return set()
        found = _LINE.finditer(text)
        return {Share(one["host"], one["repository"], Digest(one["hex"])) for one in found}

    def add(self, share: Share) -> None:
        """Note one. Failures are ignored."""
        if share in (known := self.read()):
            return
        line = f"\n{share.host} {share.repository} {share.manifest.hex}\n".encode()
        try:
            with os_errors("write", self._path):
                make_folder(self._path.parent, durable=False)
                # A file that can't be read is begun anew: it is too large, or not ours.
                write = append_file if known else replace_file
                write(self._path, line)
        except BlobStoreError as error:
            _log.info("it is not noted that a registry has a model: %s", error)
