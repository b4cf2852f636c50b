"""Files: the other files of a checkpoint's folder, and which of them an import keeps.

Beside its weights and JSON documents a checkpoint keeps its other files, subfolders included:
templates, tokenizers, processors, texts, code (which is never run), and the weights of subfolders,
as files. An import leaves out, each with its reason: hidden files, weights in other formats,
training state, caches, links that lead out of the folder, and files beyond the limits. A folder is
walked breadth first, in the order of names, so that the limits cut the same files everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from blobstore.errors import AccessError, InvalidNameError, quoted
from blobstore.formats.provenance import LeftOut
from blobstore.io.ranges import BytesReader, Identity, OpenReader
from blobstore.names import Digest, relative_path
from blobstore.source.folders import Entry, Folder, Found, not_declared

MAX_DEPTH = 8
"""The depth of nested folders."""
MAX_ENTRIES = 5_000
"""Files and folders beside the checkpoint's own: a manifest has room for 10,000 such layers."""
MAX_FILE = 256 * 2**20
"""Bytes of a file: the largest tokenizers have some tens of megabytes."""
MAX_BYTES = 4 * 2**30
"""Bytes of all kept files."""

OTHER_WEIGHTS = (
    "*.gguf",
    "*.ggml",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.npz",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.onnx.data",
    "*.ot",
    "*.pdparams",
    "*.tflite",
    "*.mlmodel",
    "*.mlpackage/",
    "*.mlmodelc/",
    "*.engine",
)
"""Files and folders with weights in formats that blobstore does not read."""
_TRAINING = (
    "optimizer.*",
    "scheduler.*",
    "rng_state*",
    "scaler.pt",
    "training_args.bin",
    "events.out.tfevents.*",
    "checkpoint-[0-9]*/",
    "global_step[0-9]*/",
)
_CACHES = ("__pycache__/", "*.pyc")

HIDDEN = "hidden, so not part of the checkpoint"
STORE = "a store of models, so not part of the checkpoint"
UNLISTED = "their server does not list them, so nothing is known of them"
NOT_ITS_OWN = frozenset({HIDDEN, STORE, UNLISTED})
"""The reasons for files that are not counted as the checkpoint's own."""
NOT_NAMED = "safetensors that are not part of the checkpoint"
_BEYOND = f"beyond the {MAX_ENTRIES:,} files and folders that are read"
_BY_PATTERN = (
    ("training state", _TRAINING),
    ("weights in a format that is not read", OTHER_WEIGHTS),
    ("a cache", _CACHES),
)
_STORE = {"blobs", "manifests"}
"""The folders of a store: a checkpoint may be imported into a store in its own folder."""
_SHOWN = ".gitattributes"
"""The hidden file that is part of a repository's content."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file that is kept byte for byte: its path in its folder, with ``/``, and its state."""

    name: str
    folder: Folder = field(repr=False, compare=False)
    found: Found

    @property
    def path(self) -> str:
        """Its path or address."""
        return self.folder.place(self.name)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.found.size

    @property
    def identity(self) -> Identity:
        """The file's state when it was listed."""
        return self.found.identity

    @property
    def holds_weights(self) -> bool:
        """True for weights that are kept unchanged, as a file."""
        return self.name.endswith(".safetensors")

    @contextmanager
    def open(self) -> Iterator[OpenReader]:
        """Give a reader of the file; `check` compares its declared digest.

        Raises: as `Folder.open`; CorruptDataError if it changed, at the end, too;
        DigestMismatchError for other bytes than those that git names.
        """
        with self.folder.open(self.name, self.identity) as reader:
            if self.found.git is None:
                yield reader
            else:  # repositories keep small files in git
                data = reader.read(0, reader.size)
                self.found.check(data, self.path)
                yield BytesReader(data, self.path)
            reader.check_unchanged()

    def check(self, digest: Digest) -> None:
        """Raise DigestMismatchError unless the bytes have the digest that their server declares."""
        if self.found.declared not in (None, digest):
            raise not_declared(self.path, self.found.declared)


class OtherFiles(NamedTuple):
    """The files beside a checkpoint's own, kept and left out, each sorted by name."""

    kept: tuple[KeptFile, ...]
    left_out: tuple[LeftOut, ...]


def other_files(folder: Folder, own: Collection[str], without: Folder | None = None) -> OtherFiles:
    """Return the files of ``folder`` except the names ``own`` and the folder ``without``.

    ``without`` is a draft model.

    Raises: StorageError, RemoteError when the folder can't be listed; NotFoundError for a link to a
    missing file.
    """
    walk = _Walk(folder, frozenset(own), without.key.rstrip("/") if without is not None else None)
    walk.run()
    if folder.names() is None:
        walk.left_out.append(LeftOut("files of other names", UNLISTED))
    return OtherFiles(
        tuple(sorted(walk.kept, key=lambda file: file.name)),
        tuple(sorted(walk.left_out, key=lambda one: one.name)),
    )


@dataclass(slots=True)
class _Walk:
    """A walk through a checkpoint's folder, except the path or address ``without``."""

    folder: Folder
    own: frozenset[str]
    without: str | None
    kept: list[KeptFile] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    entries: int = 0
    nbytes: int = 0

    def run(self) -> None:
        """Walk. Raises: StorageError; NotFoundError for a link to a missing file."""
        others = [entry for entry in self.folder.scan() if entry.name not in self.own]
        waiting = deque(self._enter("", others))
        while waiting:
            prefix = waiting.popleft()
            try:  # no more than the limit and one
                entries = self.folder.scan(prefix, MAX_ENTRIES + 1)
            except AccessError as error:
                self._leave(prefix, f"can't be listed ({error.message.rpartition(': ')[2]})")
                continue
            if self.entries + len(entries) > MAX_ENTRIES:
                self._leave(prefix, _BEYOND)
            else:
                waiting += self._enter(prefix, entries)

    def _enter(self, prefix: str, entries: Sequence[Entry]) -> list[str]:
        """Add the entries of a folder; return its subfolders that are to be walked."""
        self.entries += len(entries)
        if len(entries) > MAX_ENTRIES:
            first = _said(entries[MAX_ENTRIES].name)
            self.left_out.append(
                LeftOut(f"{first} and what follows", _BEYOND, len(entries) - MAX_ENTRIES)
            )
        store = _STORE if {entry.name for entry in entries} >= _STORE else ()
        folders = []
        for entry in entries[:MAX_ENTRIES]:
            if entry.name in store:
                self._leave(f"{prefix}{entry.name}/", STORE)
            elif self._take(entry, prefix + entry.name):
                folders.append(f"{prefix}{entry.name}/")
        return folders

    def _take(self, entry: Entry, name: str) -> bool:
        """Add an entry; return True for a folder that is to be walked."""
        if self.without is not None and entry.place == self.without:
            return False
        shown = f"{name}/" if entry.is_folder else name
        if entry.name.startswith(".") and entry.name != _SHOWN:
            return self._leave(shown, HIDDEN)
        if (reason := _unfit_name(name) or _unwanted(shown) or entry.fault) is not None:
            return self._leave(shown, reason)
        if entry.is_folder:
            is_deep = name.count("/") + 1 > MAX_DEPTH
            return not is_deep or self._leave(shown, f"more than {MAX_DEPTH} folders deep")
        if entry.error is not None:
            raise entry.error
        return self._keep(entry.found, name)

    def _keep(self, found: Found | None, name: str) -> bool:
        if found is None:
            return self._leave(name, "not a regular file")
        if found.size > MAX_FILE:
            return self._leave(name, f"larger than {MAX_FILE // 2**20} MiB")
        if self.nbytes + found.size > MAX_BYTES:
            return self._leave(
                name, f"beyond the {MAX_BYTES // 2**30} GiB that are kept of such files"
            )
        self.nbytes += found.size
        self.kept.append(KeptFile(name, self.folder, found))
        return False

    def _leave(self, name: str, reason: str) -> bool:
        self.left_out.append(LeftOut(_said(name), reason))
        return False


def _unfit_name(name: str) -> str | None:
    try:
        relative_path(name)
    except InvalidNameError as error:
        return f"its name can't be stored ({error.message.partition(': ')[2]})"
    return None


def _unwanted(name: str) -> str | None:
    """Return the reason to leave out a file or a folder (``name/``) by name; None to keep it."""
    last = name.rsplit("/", 2)[-2] + "/" if name.endswith("/") else name.rpartition("/")[2]
    if name.endswith(".safetensors") and "/" not in name:
        return NOT_NAMED
    for reason, patterns in _BY_PATTERN:
        if _is_any(last, patterns):
            return reason
    return None


def other_weights(names: Iterable[str]) -> str | None:
    """Return the first name of a weights file in a format that blobstore does not read, or None."""
    return next((name for name in names if _is_any(name, OTHER_WEIGHTS)), None)


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _said(name: str) -> str:
    """Return a printable name: bytes that are not UTF-8 are escaped."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return quoted(name)
    return name
