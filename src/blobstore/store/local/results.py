"""Results: what `quality` measured of a model, the last `verify` of a store.

``.blobstore/results/verify.json``, and by the sha256 of a manifest ``results/quality/<hex>.json``
are documents, made and read by views/*_records.py. ``results/tensors/<hex>.json``, which versions
before kept for pages, are only removed. Each replaces the one before it. They are written only if
the store belongs to the user. A manifest names its blobs by digest, so a result stays right
whatever happens to the model's name; it is removed with the last model of its manifest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Literal

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.io.durable import listed, make_folder, os_errors, read_own, replace_file
from blobstore.names import Digest
from blobstore.store.local.journal import is_ours

_log = logging.getLogger("blobstore.store.local.store")

MOST_BYTES = 64 * 2**20
"""Of a document. One of the largest models has 40 MB."""
Kind = Literal["quality", "tensors"]
_KINDS: tuple[Kind, ...] = ("quality", "tensors")
_SUFFIX = ".json"
_OURS = re.compile(r"(?P<hex>[0-9a-f]{64})\.json(?P<unfinished>\.[0-9a-f]{16})?", re.ASCII)


class ResultFolder:
    """The results of a store, in ``folder``. ``owner``: a path whose owner may write them."""

    def __init__(self, folder: Path, owner: Path) -> None:
        self._folder = folder
        self._owner = owner

    def read(self, kind: Kind, manifest: Digest) -> tuple[str, bytes] | None:
        """Return path and bytes of a manifest's document of that kind; None without one.

        Raises: LimitExceededError for a file that is too large; StorageError.
        """
        return _read(self._path(kind, manifest.hex))

    def read_verify(self) -> tuple[str, bytes] | None:
        """Return path and bytes of the last result of `verify`. As `read`."""
        return _read(self._folder / f"verify{_SUFFIX}")

    def keep(self, kind: Kind, manifest: Digest, document: bytes) -> None:
        """Keep a manifest's document. Failures are ignored."""
        self._write(self._path(kind, manifest.hex), document)

    def keep_verify(self, document: bytes) -> None:
        """Keep a result of `verify`. Failures are ignored."""
        self._write(self._folder / f"verify{_SUFFIX}", document)

    def remove_all(self, manifests: Iterable[str]) -> None:
        """Remove the results of manifests, given by hex digits. Failures are ignored."""
        for digits in manifests:
            for kind in _KINDS:
                with suppress(OSError):
                    self._path(kind, digits).unlink()

    def keep_only(self, manifests: AbstractSet[str]) -> None:
        """Remove the results of all other manifests, and files left unfinished.

        Only for a holder of the store's exclusive lock. Failures are ignored.
        """
        for kind in _KINDS:
            folder = self._folder / kind
            if any(path.is_symlink() for path in (self._folder, folder)):
                continue  # the link of another program
            with suppress(BlobStoreError), os_errors("list", folder):
                for entry in listed(folder):
                    match = _OURS.fullmatch(entry.name)
                    if match and (match["unfinished"] or match["hex"] not in manifests):
                        Path(entry.path).unlink(missing_ok=True)

    def _path(self, kind: Kind, digits: str) -> Path:
        return self._folder / kind / f"{digits}{_SUFFIX}"

    def _write(self, path: Path, document: bytes) -> None:
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
