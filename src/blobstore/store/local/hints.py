"""Hints: notes that save work, and that may be deleted at any time.

``.blobstore/hints/`` has files of one form. ``journal``: which blob was made for which key, so that
none is made twice. ``summaries``: what a list shows of a model, by the sha256 of its manifest.
``shares``: which registries have which models, so that their blobs can be mounted there. A line is
a key of 64 hex digits, a text, and the CRC-32 of both; the newest line of a key counts. Torn and
foreign lines are ignored. A hint is never trusted over bytes.

``.blobstore/results/`` has documents, made and read by views/*_records.py: what the last `verify`
of the store found (``verify.json``), and what `quality` measured of a model, by the sha256 of its
manifest (``quality/<hex>.json``). Each replaces the one before it.

A manifest names its blobs by digest, so summaries and results stay right whatever happens to the
model's name. Commands that only read write both, and only if the store belongs to their user: a
``sudo blobstore list`` must not leave files that the owner can't write to.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.io.durable import (
    append_file,
    listed,
    make_folder,
    os_errors,
    read_own,
    replace_file,
)
from blobstore.names import Digest
from blobstore.store.ports import Share, Summary

_log = logging.getLogger("blobstore.store.local.store")

_LINE = re.compile(
    rb"^(?P<text>(?P<key>[0-9a-f]{64}) (?P<value>[ -~]{0,999})) (?P<sum>[0-9a-f]{8})$",
    re.ASCII | re.MULTILINE,
)
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LARGEST = 128 * 2**20
"""Bytes of a file that is read. From a half on it is written anew, without what was replaced."""


class HintFile:
    """Hints in one file. It is written to by the owner of ``owner`` only (None: by all)."""

    def __init__(self, path: Path, owner: Path | None = None) -> None:
        self._path = path
        self._owner = owner

    def read(self) -> dict[str, str]:
        """Return the newest text of each key; none if the file can't be read."""
        try:
            text = read_own(self._path, _LARGEST)
        except BlobStoreError as error:
            if not isinstance(error, NotFoundError):
                _log.warning("what is known of earlier work can't be read: %s", error)
            return {}
        return {
            match["key"].decode(): match["value"].decode()
            for match in _LINE.finditer(text)
            if zlib.crc32(match["text"]) == int(match["sum"], 16)
        }

    def add(self, hints: Iterable[tuple[str, str]]) -> None:
        """Add hints, which replace those of their keys. Failures are ignored."""
        text = _encoded(hints)
        if not text or (self._owner is not None and not _is_ours(self._path, self._owner)):
            return
        try:
            with os_errors("write", self._path):
                make_folder(self._path.parent, durable=False)
                if self._size() > _LARGEST // 2:
                    newest = _encoded(self.read().items())
                    # Else it would be written anew each time.
                    replace_file(self._path, newest if len(newest) < _LARGEST // 4 else b"")
                append_file(self._path, b"\n" + text)  # the last line may be torn
        except BlobStoreError as error:
            _log.info("what is known now is not noted: %s", error)

    def keep(self, is_needed: Callable[[str, str], bool]) -> None:
        """Remove the other hints. Only for a holder of the store's exclusive lock.

        Raises: StorageError.
        """
        text = _encoded((key, value) for key, value in self.read().items() if is_needed(key, value))
        if len(text) < self._size():
            with os_errors("write", self._path):
                replace_file(self._path, text)

    def _size(self) -> int:
        try:
            return self._path.lstat().st_size
        except OSError:
            return 0


def _encoded(hints: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"{key} {value}".encode() for key, value in hints]
    return b"".join([b"%b %08x\n" % (line, zlib.crc32(line)) for line in lines])


def _is_ours(path: Path, owner: Path) -> bool:
    """Return True if ``owner`` belongs to this user, and no folder from it to ``path`` is a link.

    A link is another program's.
    """
    try:
        between = (folder for folder in path.parents if folder.is_relative_to(owner))
        if any(folder.is_symlink() for folder in between if folder != owner):
            return False
        return owner.stat().st_uid == os.geteuid()
    except OSError:
        return False


_VERSION = 1
"""Increases when the same blobs get another summary."""
_SUMMARY = re.compile(
    rf"(?P<size>[0-9]{{1,18}}) (?P<parameters>[0-9]{{1,24}}) (?P<plain>[01])"
    rf" (?P<kind>[0-9A-Za-z_]{{0,32}}) {_VERSION}",
    re.ASCII,
)


class SummaryHints:
    """The summaries of a store. See `Summaries`."""

    def __init__(self, file: HintFile) -> None:
        self._file = file

    def read(self) -> dict[str, Summary]:
        """Return the summaries by the sha256 of their manifests, in hex digits."""
        found = ((key, _SUMMARY.fullmatch(text)) for key, text in self._file.read().items())
        return {
            key: Summary(
                size=int(match["size"]),
                parameters=int(match["parameters"]),
                quant_type=match["kind"],
                is_plain=match["plain"] == "1",
            )
            for key, match in found
            if match is not None
        }

    def add(self, summaries: Mapping[str, Summary]) -> None:
        texts = (
            (key, f"{one.size} {one.parameters} {one.is_plain:d} {one.quant_type} {_VERSION}")
            for key, one in summaries.items()
        )
        self._file.add(pair for pair in texts if _SUMMARY.fullmatch(pair[1]))

    def keep(self, keys: AbstractSet[str]) -> None:
        self._file.keep(lambda key, _text: key in keys)


_SHARE = re.compile(
    r"(?P<host>[A-Za-z0-9_.:-]{1,350}) (?P<repository>[A-Za-z0-9]+(?:[._/-]+[A-Za-z0-9]+)*)"
    r" (?P<hex>[0-9a-f]{64})",
    re.ASCII,
)


class ShareHints:
    """The registries that have models. See `Shares`. A registry says itself which blobs it has."""

    def __init__(self, file: HintFile) -> None:
        self._file = file

    def read(self) -> set[Share]:
        found = filter(None, map(_SHARE.fullmatch, self._file.read().values()))
        return {Share(one["host"], one["repository"], Digest(one["hex"])) for one in found}

    def add(self, share: Share) -> None:
        if share not in self.read():
            text = f"{share.host} {share.repository} {share.manifest.hex}"
            self._file.add([(hashlib.sha256(text.encode()).hexdigest(), text)])


MOST_BYTES: Final = 64 * 2**20
"""Of a document. One of the largest models has 40 MB."""
Kind = Literal["quality"]


class ResultFolder:
    """The results of a store, in ``folder``. ``owner``: a path whose owner may write them."""

    def __init__(self, folder: Path, owner: Path) -> None:
        self._folder = folder
        self._owner = owner

    def read(self, kind: Kind, manifest: Digest) -> tuple[str, bytes] | None:
        """See `Results`. Raises: LimitExceededError for a large file; StorageError."""
        return self._read(f"{kind}/{manifest.hex}.json")

    def read_verify(self) -> tuple[str, bytes] | None:
        return self._read("verify.json")

    def keep(self, kind: Kind, manifest: Digest, document: bytes) -> None:
        self._write(f"{kind}/{manifest.hex}.json", document)

    def keep_verify(self, document: bytes) -> None:
        self._write("verify.json", document)

    def keep_only(self, manifests: AbstractSet[str]) -> None:
        """Remove the results of all other manifests than these (hex digits). Failures are ignored.

        Only for a holder of the store's exclusive lock.
        """
        folder = self._folder / "quality"
        if not (self._folder.is_symlink() or folder.is_symlink()):  # else another program's
            with suppress(OSError):
                for entry in listed(folder):
                    is_needed = entry.name.removesuffix(".json") in manifests
                    if _KEY.match(entry.name) and not is_needed:
                        Path(entry.path).unlink()

    def _read(self, name: str) -> tuple[str, bytes] | None:
        path = self._folder / name
        try:
            return str(path), read_own(path, MOST_BYTES)
        except NotFoundError:
            return None

    def _write(self, name: str, document: bytes) -> None:
        path = self._folder / name
        if len(document) > MOST_BYTES or not _is_ours(path, self._owner):
            return
        try:
            with os_errors("write", path):
                make_folder(path.parent, durable=False)
                replace_file(path, document)
        except BlobStoreError as error:
            _log.info("a result is not kept: %s", error)
