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

import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.io.durable import (
    append_file,
    list_folder,
    make_folder,
    os_errors,
    read_own,
    replace_file,
)
from blobstore.names import Digest

_log = logging.getLogger("blobstore.store.local.store")

_LINE = re.compile(rb"^(([0-9a-f]{64}) ([ -~]{0,999})) ([0-9a-f]{8})$", re.ASCII | re.MULTILINE)
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
# Bytes of a file that is read. From a half on it is written anew, without what was replaced.
_LARGEST = 128 * 2**20


@dataclass(eq=False)
class HintFile:
    """Hints in one file. It is written to by the owner of ``owner`` only (None: by all)."""

    _path: Path
    _owner: Path | None = None

    def read(self) -> dict[str, str]:
        """Return the newest text of each key; none if the file can't be read."""
        try:
            text = read_own(self._path, _LARGEST)
        except BlobStoreError as error:
            if not isinstance(error, NotFoundError):
                _log.warning("hints can't be read: %s", error)
            return {}
        return {
            key.decode(): value.decode()
            for line, key, value, checksum in map(re.Match.groups, _LINE.finditer(text))
            if zlib.crc32(line) == int(checksum, 16)
        }

    def add(self, hints: Iterable[tuple[str, str]]) -> None:
        """Add hints, which replace those of their keys. Failures are ignored."""
        text = _encode(hints)
        if not text or (self._owner is not None and not _is_ours(self._path, self._owner)):
            return
        with _writing(self._path):
            make_folder(self._path.parent, durable=False)
            if self._size() > _LARGEST // 2:
                newest = _encode(self.read().items())
                # Else it would be written anew each time.
                replace_file(self._path, newest if len(newest) < _LARGEST // 4 else b"")
            append_file(self._path, b"\n" + text)  # the last line may be torn

    def keep(self, is_needed: Callable[[str, str], bool]) -> None:
        """Remove the other hints. Failures are ignored.

        Only for a holder of the store's exclusive lock.
        """
        text = _encode((key, value) for key, value in self.read().items() if is_needed(key, value))
        if len(text) < self._size():
            with _writing(self._path):
                replace_file(self._path, text)

    def _size(self) -> int:
        try:
            return self._path.lstat().st_size
        except OSError:
            return 0


def _encode(hints: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"{key} {value}".encode() for key, value in hints]
    return b"".join([b"%b %08x\n" % (line, zlib.crc32(line)) for line in lines])


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        with os_errors("write", path):
            yield
    except BlobStoreError as error:
        _log.info("hints could not be written: %s", error)


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


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list shows of a model.

    ``is_plain``: its manifest is formatted as Ollama formats them (references.py).
    """

    size: int
    parameters: int
    tensor_bytes: int
    quant_type: str
    is_plain: bool


# Increases when the same blobs get another summary.
_VERSION = 3
_SUMMARY = re.compile(
    rf"([0-9]{{1,18}}) ([0-9]{{1,24}}) ([0-9]{{1,24}}) ([01]) ([0-9A-Za-z_ ]{{0,32}}) {_VERSION}",
    re.ASCII,
)


@dataclass(eq=False)
class SummaryHints:
    """Summaries of models by the sha256 of their manifests: a list need not read headers again."""

    _file: HintFile

    def read(self) -> dict[str, Summary]:
        summaries = {}
        for key, text in self._file.read().items():
            if match := _SUMMARY.fullmatch(text):
                size, parameters, nbytes, plain, kind = match.groups()
                numbers = int(size), int(parameters), int(nbytes)
                summaries[key] = Summary(*numbers, kind, plain == "1")
        return summaries

    def add(self, summaries: Mapping[str, Summary]) -> None:
        texts = {
            key: f"{one.size} {one.parameters} {one.tensor_bytes} {one.is_plain:d} {one.quant_type}"
            f" {_VERSION}"
            for key, one in summaries.items()
        }
        self._file.add(item for item in texts.items() if _SUMMARY.fullmatch(item[1]))

    def keep(self, keys: AbstractSet[str]) -> None:
        self._file.keep(lambda key, _text: key in keys)


@dataclass(frozen=True, slots=True)
class Share:
    """A repository of the registry at ``host`` that has the model of the manifest.

    For the address of a source, ``host`` is its scheme with a colon.
    """

    host: str
    repository: str
    manifest: Digest

    @classmethod
    def of_source(cls, address: str, manifest: Digest) -> "Share":
        scheme, place = address.rstrip("/").split("//", 1)
        return cls(scheme, place, manifest)


_SHARE = re.compile(
    r"([A-Za-z0-9_.:-]{1,350}) ([A-Za-z0-9]+(?:[@._/-]+[A-Za-z0-9]+)*) ([0-9a-f]{64})", re.ASCII
)


@dataclass(eq=False)
class ShareHints:
    """The registries that have models, as far as noted: a registry knows its blobs itself."""

    _file: HintFile

    def read(self) -> set[Share]:
        matches = filter(None, map(_SHARE.fullmatch, self._file.read().values()))
        return {Share(match[1], match[2], Digest(match[3])) for match in matches}

    def add(self, share: Share) -> None:
        if share not in self.read():
            text = f"{share.host} {share.repository} {share.manifest.hex}"
            self._file.add([(hashlib.sha256(text.encode()).hexdigest(), text)])


MOST_BYTES = 64 * 2**20
"""Of a document. One of the largest models has 40 MB."""


@dataclass(eq=False)
class ResultFolder:
    """The results of a store, in ``folder``: ``verify``, and ``quality/`` with a manifest's sha256.

    ``owner``: a path whose owner may write them.
    """

    _folder: Path
    _owner: Path

    def read(self, name: str) -> tuple[str, bytes] | None:
        """Return where a result is kept, and the document; None without one.

        Raises: LimitExceededError for a large file; StorageError.
        """
        path = self._path(name)
        try:
            return str(path), read_own(path, MOST_BYTES)
        except NotFoundError:
            return None

    def keep(self, name: str, document: bytes) -> None:
        """Keep a result. Failures are ignored."""
        path = self._path(name)
        if len(document) <= MOST_BYTES and _is_ours(path, self._owner):
            with _writing(path):
                make_folder(path.parent, durable=False)
                replace_file(path, document)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def keep_only(self, manifests: AbstractSet[str]) -> None:
        """Remove the results of all other manifests than these (hex digits). Failures are ignored.

        Only for a holder of the store's exclusive lock.
        """
        folder = self._folder / "quality"
        if not (self._folder.is_symlink() or folder.is_symlink()):  # else another program's
            with suppress(OSError):
                for entry in list_folder(folder):
                    is_needed = entry.name.removesuffix(".json") in manifests
                    if _KEY.match(entry.name) and not is_needed:
                        Path(entry.path).unlink()
