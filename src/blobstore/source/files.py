"""Files: what lies in a checkpoint's folder beside its weights and JSON documents, and which of it an import keeps.

Everything that belongs to the checkpoint is kept, subfolders included: templates, tokenizers,
processors, texts, code (which is never run), and the weights of subfolders, as files. Left out,
each with its reason: hidden files, weights in other formats, training state, caches, links that
lead out of the folder, and what is beyond the limits. A folder is walked breadth first, in the
order of names, so that the limits cut the same files everywhere.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from blobstore.errors import InvalidNameError, from_os_error, quoted
from blobstore.formats.coverage import LeftOut
from blobstore.io.ranges import FileIdentity, real_path
from blobstore.names import relative_path
from blobstore.source.folders import broken_link

MAX_DEPTH = 8
"""Folders below one another."""
MAX_ENTRIES = 5_000
"""Files and folders beside the checkpoint's own: a manifest has room for 10,000 layers beside 100,000 tensors."""
MAX_FILE = 256 * 2**20
"""Bytes of a file: the largest tokenizers have some tens of megabytes."""
MAX_BYTES = 4 * 2**30
"""Bytes of all kept files."""

OTHER_WEIGHTS = (
    *(
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
    ),
    *(
        "*.onnx.data",
        "*.ot",
        "*.pdparams",
        "*.tflite",
        "*.mlmodel",
        "*.mlpackage/",
        "*.mlmodelc/",
        "*.engine",
    ),
)
"""Files and folders that hold weights too, in formats that are not read."""
_TRAINING = (
    *(
        "optimizer.*",
        "scheduler.*",
        "rng_state*",
        "scaler.pt",
        "training_args.bin",
        "events.out.tfevents.*",
    ),
    *("checkpoint-[0-9]*/", "global_step[0-9]*/"),
)
_CACHES = ("__pycache__/", "*.pyc")

HIDDEN = "hidden, so not part of the checkpoint"
STORE = "a store of models, so not part of the checkpoint"
NOT_ITS_OWN = frozenset({HIDDEN, STORE})
"""The reasons of what is not counted as the checkpoint's: it differs from one copy of the same checkpoint to another."""
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
    """A file that is kept byte for byte: its path in the folder, with ``/``, and the file as it was when it was found."""

    name: str
    path: str
    identity: FileIdentity
    size: int

    @property
    def holds_weights(self) -> bool:
        """True for weights that are kept as they are, as a file."""
        return self.name.endswith(".safetensors")


@dataclass(frozen=True, slots=True)
class OtherFiles:
    """What lies beside a checkpoint's own files: what is kept and what is left out, each sorted by name."""

    kept: tuple[KeptFile, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def other_files(folder: Path, own: Collection[str], without: Path | None = None) -> OtherFiles:
    """Return the files of ``folder`` but its ``own``, which are names in it, and what is at ``without`` (a draft model).

    Raises: StorageError when the folder can't be listed; NotFoundError for a link to nothing.
    """
    walk = _Walk(folder, frozenset(own), real_path(without) if without is not None else None)
    walk.run()
    return OtherFiles(
        tuple(sorted(walk.kept, key=lambda file: file.name)),
        tuple(sorted(walk.left_out, key=lambda one: one.name)),
    )


@dataclass(slots=True)
class _Walk:
    """A walk through a checkpoint's folder."""

    folder: Path
    own: frozenset[str]
    without: str | None
    kept: list[KeptFile] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    entries: int = 0
    nbytes: int = 0
    homes: tuple[str, ...] = ()

    def run(self) -> None:
        """Walk.

        Raises: StorageError when the folder can't be listed; NotFoundError for a link to nothing.
        """
        self.homes = tuple(_homes(self.folder))
        try:
            waiting = deque(self._enter("", self._listed("")))
        except OSError as error:
            raise from_os_error(error, "list", self.folder) from error
        while waiting:
            prefix = waiting.popleft()
            try:
                entries = self._listed(prefix)
            except PermissionError as error:
                self._leave(prefix, f"can't be listed ({(error.strerror or '').lower()})")
                continue
            except OSError as error:
                raise from_os_error(error, "list", self.folder / prefix) from error
            if self.entries + len(entries) > MAX_ENTRIES:
                self._leave(prefix, _BEYOND)
            else:
                waiting += self._enter(prefix, entries)

    def _enter(self, prefix: str, entries: list[os.DirEntry[str]]) -> list[str]:
        """Take in the entries of a folder; return the folders of it that are to be walked."""
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
            elif self._look(entry, prefix):
                folders.append(f"{prefix}{entry.name}/")
        return folders

    def _listed(self, prefix: str) -> list[os.DirEntry[str]]:
        """Return a folder's entries by name; of a subfolder no more than the limit and one.

        Raises: OSError.
        """
        with os.scandir(self.folder / prefix) as entries:
            if prefix:
                return sorted(islice(entries, MAX_ENTRIES + 1), key=lambda entry: entry.name)
            return sorted(
                (entry for entry in entries if entry.name not in self.own),
                key=lambda entry: entry.name,
            )

    def _look(self, entry: os.DirEntry[str], prefix: str) -> bool:
        """Take in an entry; return True for a folder that is to be walked."""
        name = prefix + entry.name
        if self.without is not None and real_path(entry.path) == self.without:
            return False
        is_folder = entry.is_dir(follow_symlinks=False)
        shown = f"{name}/" if is_folder else name
        if entry.name.startswith(".") and entry.name != _SHOWN:
            return self._leave(shown, HIDDEN)
        if (reason := _unfit_name(name) or _unwanted(shown) or self._bad_link(entry)) is not None:
            return self._leave(shown, reason)
        if is_folder:
            is_deep = name.count("/") + 1 > MAX_DEPTH
            return not is_deep or self._leave(shown, f"more than {MAX_DEPTH} folders deep")
        self._take(name, entry)
        return False

    def _take(self, name: str, entry: os.DirEntry[str]) -> None:
        try:
            status = entry.stat()
        except (
            OSError
        ) as error:  # a link to nothing: in the Hugging Face cache a download that was cut off
            broken = (
                broken_link(self.folder / name) if isinstance(error, FileNotFoundError) else None
            )
            raise broken or from_os_error(error, "stat", entry.path) from error
        if not stat.S_ISREG(status.st_mode):
            self._leave(name, "not a regular file")
        elif status.st_size > MAX_FILE:
            self._leave(name, f"larger than {MAX_FILE // 2**20} MiB")
        elif self.nbytes + status.st_size > MAX_BYTES:
            self._leave(name, f"beyond the {MAX_BYTES // 2**30} GiB that are kept of such files")
        else:
            self.nbytes += status.st_size
            self.kept.append(
                KeptFile(name, str(self.folder / name), FileIdentity(status), status.st_size)
            )

    def _bad_link(self, entry: os.DirEntry[str]) -> str | None:
        """Return why a link is not followed: it is a folder's (which may lead back), or it leads out of the checkpoint."""
        if not entry.is_symlink():
            return None
        if os.path.isdir(entry.path):  # noqa: PTH112  # which takes a loop of links for none
            return "a link to a folder"
        target = real_path(entry.path)
        is_inside = any(target.startswith(f"{home}{os.sep}") for home in self.homes)
        return None if is_inside else "a link to a place outside of the checkpoint's folder"

    def _leave(self, name: str, reason: str) -> bool:
        self.left_out.append(LeftOut(_said(name), reason))
        return False


def _homes(folder: Path) -> Iterator[str]:
    """Yield the folders that links may lead into: the checkpoint's, and of a Hugging Face snapshot its repository's.

    A snapshot is ``models--ORG--NAME/snapshots/REVISION``; its files are links into
    ``models--ORG--NAME/blobs``.
    """
    real = Path(real_path(folder))
    yield str(real)
    if real.parent.name == "snapshots":
        yield str(real.parent.parent)


def _unfit_name(name: str) -> str | None:
    try:
        relative_path(name)
    except InvalidNameError as error:
        return f"its name can't be stored ({error.message.partition(': ')[2]})"
    return None


def _unwanted(name: str) -> str | None:
    """Return why a file or folder (``/`` at its end) of that path is left out, by its name; None when it is not."""
    last = name.rsplit("/", 2)[-2] + "/" if name.endswith("/") else name.rpartition("/")[2]
    if name.endswith(".safetensors") and "/" not in name:
        return NOT_NAMED
    for reason, patterns in _BY_PATTERN:
        if any(fnmatchcase(last, pattern) for pattern in patterns):
            return reason
    return None


def _said(name: str) -> str:
    """Return a name that can be written: what is not UTF-8 in it is escaped."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return quoted(name)
    return name
