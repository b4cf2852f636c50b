"""Results: what `quality` measured of a model, and what the last `verify` of a store found.

``.blobstore/results/quality/<sha256 of a manifest>.json`` and ``.blobstore/results/verify.json``
are JSON documents, made and read by views/records.py. Each replaces the one before it. They are
written only if the store belongs to the user. A manifest names its blobs by digest, so a result
stays right whatever happens to the model's name; it is removed with the last model of its manifest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.io.durable import listed, make_folder, os_errors, read_own
from blobstore.io.small_files import replace_file
from blobstore.names import Digest
from blobstore.store.local.journal import is_ours

_log = logging.getLogger("blobstore.store.local.store")

MOST_BYTES = 64 * 2**20
"""Of a document. One of the largest models has 40 MB."""
_QUALITY = "quality"
_SUFFIX = ".json"
_OURS = re.compile(r"(?P<hex>[0-9a-f]{64})\.json(?P<unfinished>\.[0-9a-f]{16})?", re.ASCII)


class ResultFolder:
    """The results of a store, in ``folder``. ``owner``: a path whose owner may write them."""

    def __init__(self, folder: Path, owner: Path) -> None:
        self._folder = folder
        self._owner = owner

    def quality(self, manifest: Digest) -> tuple[str, bytes] | None:
        """Return path and bytes of the result of `quality` for a manifest; None without one.

        Raises: LimitExceededError for a file that is too large; StorageError.
        """
        return _read(self._of_quality(manifest))

    def verify(self) -> tuple[str, bytes] | None:
        """Return path and bytes of the last result of `verify`. As `quality`."""
        return _read(self._folder / f"verify{_SUFFIX}")

    def keep_quality(self, manifest: Digest, document: bytes) -> None:
        """Keep a result of `quality`. Failures are ignored."""
        self._keep(self._of_quality(manifest), document)

    def keep_verify(self, document: bytes) -> None:
        """Keep a result of `verify`. Failures are ignored."""
        self._keep(self._folder / f"verify{_SUFFIX}", document)

    def remove_all(self, manifests: Iterable[str]) -> None:
        """Remove the results of manifests, given by hex digits. Failures are ignored."""
        for digits in manifests:
            with suppress(OSError):
                self._of_quality(Digest(digits)).unlink()

    def keep_only(self, manifests: AbstractSet[str]) -> None:
        """Remove the results of all other manifests, and files left unfinished.

        Only for a holder of the store's exclusive lock. Failures are ignored.
        """
        folder = self._folder / _QUALITY
        if any(path.is_symlink() for path in (self._folder, folder)):
            return  # the link of another program
        with suppress(BlobStoreError), os_errors("list", folder):
            for entry in listed(folder):
                match = _OURS.fullmatch(entry.name)
                if match and (match["unfinished"] or match["hex"] not in manifests):
                    with suppress(OSError):
                        Path(entry.path).unlink()

    def _of_quality(self, manifest: Digest) -> Path:
        return self._folder / _QUALITY / f"{manifest.hex}{_SUFFIX}"

    def _keep(self, path: Path, document: bytes) -> None:
        if len(document) > MOST_BYTES or not is_ours(path, self._owner):
            return
        try:
            with os_errors("write", path):
                make_folder(path.parent, durable=False)
                replace_file(path, document)
        except BlobStoreError as error:
            _log.info("a result is not kept: %s", error)


def _read(path: Path) -> tuple[str, bytes] | None:
    try:
        return str(path), read_own(path, MOST_BYTES)
    except NotFoundError:
        return None
