"""Summaries: what a model is in short, remembered by the sha256 of its manifest's bytes.

A manifest names its blobs by their digests, so what follows from them never changes: a line that is there is right for ever,
whatever becomes of the model's name. ``.blobstore/cache/summaries`` is the only thing that reading a store writes: to read
the headers of 600,000 blobs takes a minute, and this file a fraction of a second. It is written only where the store belongs
to the user who reads it: a ``sudo blobstore list`` must not leave folders that the owner can't write to. A line with a wrong
checksum, torn or foreign, is ignored; so are failures to write the file.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.store.files import append_file, make_folder, os_errors, read_own, replace_file

_log = logging.getLogger("blobstore.store")

_VERSION = b"1"
"""Goes up when the same blobs are summarized otherwise."""
_LARGEST = 64 * 2**20
"""Bytes of a file that is read: 400,000 models. A larger one is not ours, and the next list starts it anew."""
_LINE = re.compile(
    rb"^(?P<text>(?P<key>[0-9a-f]{64}) (?P<size>[0-9]{1,18}) (?P<parameters>[0-9]{1,24}) (?P<plain>[01])"
    rb" (?P<kind>[0-9A-Za-z_]{0,32}) %b) (?P<sum>[0-9a-f]{8})$" % _VERSION,
    re.ASCII | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """A model in short: bytes of its blobs, each counted once, parameters, type; whether its manifest is a plain one."""

    size: int
    parameters: int
    quant_type: str
    is_plain: bool

    def encode(self, key: str) -> bytes:
        """Return the line for a manifest whose sha256 is ``key``."""
        numbers = b"%d %d %d" % (self.size, self.parameters, self.is_plain)
        text = b"%b %b %b %b" % (key.encode(), numbers, self.quant_type.encode(), _VERSION)
        return b"%b %08x\n" % (text, zlib.crc32(text))


class SummaryCache:
    """The summaries of a store. ``owner``: the folder whose owner may write them."""

    def __init__(self, path: Path, owner: Path) -> None:
        self._path = path
        self._owner = owner

    def read(self) -> dict[str, Summary]:
        """Return the summaries by the sha256 of their manifests, in hex digits; none when the file can't be read."""
        try:
            text = read_own(self._path, _LARGEST)
        except NotFoundError:
            return {}
        except BlobStoreError as error:
            _log.info("the summaries of models can't be read: %s", error)
            return {}
        found = {}
        for match in _LINE.finditer(text):
            if zlib.crc32(match["text"]) == int(match["sum"], 16):
                size, parameters, is_plain = (int(match[name]) for name in ("size", "parameters", "plain"))
                found[match["key"].decode()] = Summary(size, parameters, match["kind"].decode(), bool(is_plain))
        return found

    def add(self, summaries: Mapping[str, Summary]) -> None:
        """Remember summaries, where that is ours to do. Nothing is raised: the next reader has more to do, that is all."""
        fit = {key: summary for key, summary in summaries.items() if _LINE.fullmatch(summary.encode(key)[:-1])}
        if not fit or not self._is_ours():
            return
        try:
            with os_errors("write", self._path):
                make_folder(self._path.parent, durable=False)
                write = replace_file if self._is_too_large() else append_file
                write(self._path, b"\n" + b"".join(summary.encode(key) for key, summary in fit.items()))
        except BlobStoreError as error:
            _log.info("the summaries of models are not remembered: %s", error)

    def keep(self, keys: Collection[str]) -> None:
        """Forget all but those of ``keys``. Only for a holder of the store's exclusive lock. Raises: StorageError."""
        known = self.read()
        if known.keys() - set(keys) or self._is_too_large():
            with os_errors("write", self._path):
                lines = (summary.encode(key) for key, summary in sorted(known.items()) if key in keys)
                replace_file(self._path, b"".join(lines))

    def _is_too_large(self) -> bool:
        try:
            return self._path.lstat().st_size > _LARGEST
        except OSError:
            return False

    def _is_ours(self) -> bool:
        try:
            if any(folder.is_symlink() for folder in (self._path.parent, self._path.parent.parent)):
                return False  # it would be written where another program put something
            return self._owner.stat().st_uid == os.geteuid()
        except OSError:
            return False
