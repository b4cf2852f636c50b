"""The files of a checkpoint's folder: those that hold its tensors, and the others that are kept.

Loaders know weights by name: ``model`` (transformers, mlx-lm), ``diffusion_pytorch_model``
(diffusers) and ``consolidated`` (Mistral), each as one file or as shards with an index. A variant
is part of the name: ``model.fp16.safetensors``, ``model.fp16-00001-of-00002.safetensors``, formerly
``model-00001-of-00002.fp16.safetensors``; ``model.safetensors.index.fp16.json``. Source:
huggingface/diffusers@0043aa1d pipelines/pipeline_loading_utils.py `variant_compatible_siblings`.

Rule I1: a shard index maps tensor names to plain ``*.safetensors`` file names; every file that it
names exists, and holds exactly the tensors that the index assigns to it. Nothing is opened before
the index is checked. Unknown keys are ignored.


Apart from its weights and JSON documents a checkpoint keeps its other files, subfolders included:
templates, tokenizers, processors, texts, code (which is never run), and the weights of subfolders,
as files. An import leaves out, each with its reason: hidden files, weights in other formats,
training state, caches, links that lead out of the folder, and files beyond the limits. A folder is
walked breadth first, in the order of names, so that the limits cut the same files everywhere.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from blobstore.errors import (
    AccessError,
    BlobStoreError,
    CorruptDataError,
    DocumentError,
    InvalidNameError,
    MissingFileError,
    NotFoundError,
    quoted,
)
from blobstore.formats.documents import Omission
from blobstore.formats.gguf import MAGIC, gguf_header
from blobstore.formats.safetensors.header import Header, header_of
from blobstore.formats.strictjson import check_limit, parse_object
from blobstore.io.budget import MAX_TEXT
from blobstore.io.ranges import BytesReader, Identity, OpenReader, SourceReader
from blobstore.names import file_name, relative_path
from blobstore.source.folders import FIRST_READ, GGUF, SUFFIX, Entry, Folder, Found, LocalFolder
from blobstore.source.torch_files import TORCH_SUFFIXES, torch_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIXES = (SUFFIX, GGUF, *TORCH_SUFFIXES)
MAX_INDEX = MAX_TEXT
MAX_INDEX_VALUES = 2_000_000
"""Values of an index: a checkpoint of 1,000,000 tensors needs one for each, and some more."""
# Files of an index: the largest checkpoints have some hundreds; on a server each is a request.
_MAX_SHARDS = 10_000

_TORCH_STEM, _TORCH_SUFFIX = "pytorch_model", ".bin"
_STEM = rf"(?P<stem>model|diffusion_pytorch_model|consolidated|{_TORCH_STEM})"
_FORMAT = r"(?P<format>\.safetensors|\.bin)"
_VARIANT = r"\.(?P<variant>[A-Za-z0-9_]+)"
_NUMBERS = r"(?P<number>[0-9]{1,6})-of-(?P<total>[0-9]{1,6})"
_INDEX_FILE = re.compile(rf"{_STEM}{_FORMAT}\.index(?:{_VARIANT})?\.json", re.ASCII)
_WEIGHT_FILES = (
    re.compile(rf"{_STEM}-{_NUMBERS}{_VARIANT}{_FORMAT}", re.ASCII),  # an older diffusers
    re.compile(rf"{_STEM}(?:{_VARIANT})?(?:-.+)?{_FORMAT}", re.ASCII | re.DOTALL),
)
SHARD_FILE = re.compile(rf"(?P<before>.+-){_NUMBERS}(?P<after>\..+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A shard index: tensor name → shard file name; ``document`` is its whole JSON object."""

    weight_map: Mapping[str, str]
    document: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: bytes, what: str = "shard index", suffix: str = SUFFIX) -> ShardIndex:
        """Return the index in ``raw``.

        Raises: DocumentError (rule I1) when weight_map is missing or empty, or names a file that is
        not a plain one with the suffix; LimitExceededError for more than 200 MB or 10,000 files.
        """
        document = parse_object(raw, what, rule="I1", limit=MAX_INDEX, values=MAX_INDEX_VALUES)
        weight_map = document.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DocumentError(
                f"{what}: weight_map does not map tensors to files (rule I1)", rule="I1"
            )
        checked: set[str] = set()
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or name not in checked:
                place = f"{what}: weight_map of {quoted(tensor)}"
                try:
                    checked.add(file_name(name))
                except BlobStoreError as error:
                    raise DocumentError(f"{place}: {error.message} (rule I1)", rule="I1") from None
                if not name.endswith(suffix):
                    raise DocumentError(
                        f"{place}: {name!r} is not a {suffix} file (rule I1)", rule="I1"
                    )
        check_limit(what, len(checked), "files", _MAX_SHARDS, "I1")
        return cls(weight_map, document)

    @property
    def files(self) -> list[str]:
        return sorted(set(self.weight_map.values()))


def headers(
    folder: Folder, names: Sequence[str]
) -> AbstractContextManager[Iterator[tuple[SourceReader, Header]]]:
    """Give a reader of each file, which is closed in its turn, and the file's header.

    Files of one call are of one format. Raises: as `Folder.reading`; `header_of`, `gguf_header` or
    `torch_header`.
    """
    are_torch = bool(names) and names[0].endswith(TORCH_SUFFIXES)

    def read(reader: SourceReader) -> tuple[SourceReader, Header]:
        if are_torch:
            return reader, torch_header(reader, folder.budget)
        if reader.name.endswith(GGUF) or (
            reader.size >= len(MAGIC) and reader.read(0, len(MAGIC)) == MAGIC
        ):
            return reader, gguf_header(reader, folder.budget)
        return reader, header_of(reader, folder.budget, first_nbytes=FIRST_READ)

    return folder.read_each(names, read)


def read_index(folder: Folder, name: str = INDEX_NAME) -> ShardIndex:
    """Return a folder's shard index; if the folder lists its files, all shards exist.

    Raises: NotFoundError (no index, a shard that is missing), DocumentError, LimitExceededError,
    StorageError.
    """
    suffix = _TORCH_SUFFIX if name.startswith(_TORCH_STEM) else SUFFIX
    index = ShardIndex.parse(folder.read(name, MAX_INDEX), folder.place(name), suffix)
    present = folder.names()
    if present is not None and (missing := sorted(set(index.files).difference(present))):
        raise missing_shard(folder, name, missing[0])
    return index


def missing_shard(folder: Folder, index: str, shard: str) -> NotFoundError:
    """Return the error for a missing shard that an index names."""
    return MissingFileError(
        f"{folder.place(index)} names the shard {shard}, which is missing",
        path=folder.place(shard),
        rule="I1",
    )


class ShardCheck:
    """Checks a checkpoint's shards against its index and one another, one by one as they are read.

    With an index each tensor is in exactly the shard that it names, and the shards hold nothing
    else; without one no two shards hold a tensor of one name.
    """

    def __init__(self, index: ShardIndex | None) -> None:
        self._named = index.weight_map if index is not None else None
        self._places: dict[str, str] = {}

    def add(self, place: str, file: str, tensors: Collection[str]) -> None:
        """Add a shard: its path or address, its file name, the names of its tensors.

        Raises: CorruptDataError (rule I1) when it and the index disagree, DocumentError (rule I1)
        when another shard has one of its tensors.
        """
        for name in tensors:
            where = file if self._named is None else self._named.get(name)
            if where != file:
                says = f"says it is in {where}" if where else "does not name it"
                raise CorruptDataError(
                    f"{place} holds the tensor {quoted(name)}, but the index {says}",
                    tensor=name,
                    rule="I1",
                    path=place,
                )
        if twice := self._places.keys() & tensors:
            name = min(twice)
            raise DocumentError(
                f"{self._places[name]} and {place} both hold the tensor {quoted(name)}",
                tensor=name,
                rule="I1",
                path=place,
            )
        self._places.update(dict.fromkeys(tensors, place))

    def finish(self) -> None:
        """Raise CorruptDataError (rule I1) when the index names a tensor that no shard holds."""
        named = self._named or {}
        if missing := named.keys() - self._places.keys():
            name = min(missing)
            raise CorruptDataError(
                f"the index says that {named[name]} holds the tensor {quoted(name)},"
                " but it does not",
                tensor=name,
                rule="I1",
            )


@dataclass(slots=True)
class WeightSet:
    """The files of a folder that are one set of weights by their names.

    ``name`` is ``model``, ``model.fp16``, ….

    A set may have an index, a single file and shards at once; the reader decides which of them to
    use.
    """

    name: str
    index: str | None = None
    single: str | None = None
    shards: list[str] = field(default_factory=list)


def weight_sets(names: Iterable[str]) -> list[WeightSet]:
    """Return the sets of weights among a folder's files, except those that a loader ignores.

    With ``model`` all others are ignored; with a set all its variants. PyTorch's files are ignored
    if the folder has weights in another format.
    """
    sets: dict[str, WeightSet] = {}
    for name in sorted(names):
        if (stem := set_of(name)) is None:
            continue
        found = sets.setdefault(stem, WeightSet(stem))
        if name.endswith(".json"):
            found.index = name
        elif name.rpartition(".")[0] == stem:
            found.single = name
        else:
            found.shards.append(name)
    sets = {name: one for name, one in sets.items() if not name.startswith(_TORCH_STEM)} or sets
    if "model" in sets:
        return [sets["model"]]
    return [
        found for name, found in sets.items() if name.partition(".")[0] not in sets.keys() - {name}
    ]


def set_of(name: str) -> str | None:
    """Return the name of the set of weights that a file belongs to by its name, or None."""
    patterns = (_INDEX_FILE,) if name.endswith(".json") else _WEIGHT_FILES
    match = next((match for pattern in patterns if (match := pattern.fullmatch(name))), None)
    if match is None or (match["stem"] == _TORCH_STEM) != (match["format"] == _TORCH_SUFFIX):
        return None
    return f"{match['stem']}.{match['variant']}" if match["variant"] else match["stem"]


def gguf_sets(names: Iterable[str]) -> list[list[str]]:
    """Return the sets of GGUF files among names: each is one file, or all parts of one."""
    sets = [parts_of(name) for name in sorted(names) if name.endswith(GGUF)]
    return list({parts[0]: parts for parts in sets}.values())


def parts_of(name: str, suffix: str = GGUF) -> list[str]:
    """Return the names of all files of the set of shards that ``name`` says it is one of.

    Only the name itself without that suffix. Raises: LimitExceededError for more than 10,000.
    """
    if not name.endswith(suffix) or (match := SHARD_FILE.fullmatch(name)) is None:
        return [name]
    total, before, after = int(match["total"]), *match.group("before", "after")
    check_limit(name, total, "parts", _MAX_SHARDS)
    width = len(match["number"])
    return [f"{before}{one:0{width}}-of-{match['total']}{after}" for one in range(1, total + 1)]


def folder_with_weights(folder: Folder) -> Path | None:
    """Return the first subfolder of a local folder that has weights, as in diffusers pipelines."""
    try:
        paths = sorted(folder.path.glob(f"*/*{SUFFIX}")) if isinstance(folder, LocalFolder) else []
        return paths[0].parent if paths else None
    except OSError:
        return None


def is_index(name: str) -> bool:
    """Return True for a shard index's file name.

    Some names include a variant: ``model.safetensors.index.fp16.json``.
    """
    return name.endswith(".json") and (".safetensors.index." in name or ".bin.index." in name)


def split_file(path: str) -> tuple[str, str | None]:
    """Return a path as folder and file; None if its last part is not the name of a file."""
    above, _, last = path.rpartition("/")
    return (above, last) if last.endswith(WEIGHT_SUFFIXES) or is_index(last) else (path, None)


def check_complete(folder: Folder, shards: Iterable[str]) -> None:
    """Raise NotFoundError when the names ``…-00001-of-00003…`` show that a shard is missing."""
    present, whole = set(shards), set[str]()
    for name in sorted(present):
        parts = [] if name in whole else parts_of(name, SUFFIX)
        if missing := next((part for part in parts if part not in present), None):
            raise MissingFileError(
                f"{folder.name} has {name}, but {missing} is missing", path=folder.place(missing)
            )
        whole.update(parts)


MAX_DEPTH = 8
"""The depth of nested folders."""
MAX_ENTRIES = 5_000
"""Files and folders that are not the checkpoint's own: a manifest has room for 10,000 such
layers."""
MAX_FILE = 256 * 2**20
"""Bytes of a file: the largest tokenizers have some tens of megabytes."""
MAX_BYTES = 4 * 2**30
"""Bytes of all kept files."""

# Files and folders with weights in formats that blobstore does not read.
_OTHER_WEIGHTS = (
    *("*.gguf", "*.ggml", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.npz", "*.h5", "*.msgpack"),
    *("*.onnx", "*.onnx_data", "*.onnx.data", "*.ot", "*.pdparams", "*.tflite", "*.mlmodel"),
    *("*.mlpackage/", "*.mlmodelc/", "*.engine"),
)
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

HIDDEN = "hidden, so not part of the checkpoint"
STORE = "a store of models, so not part of the checkpoint"
UNLISTED = "their server does not list them, so nothing is known of them"
NOT_ITS_OWN = frozenset({HIDDEN, STORE, UNLISTED})
"""The reasons for files that are not counted as the checkpoint's own."""
NOT_NAMED = "safetensors that are not part of the checkpoint"
_BEYOND = f"beyond the {MAX_ENTRIES:,} files and folders that are read"
_BY_PATTERN = (
    ("training state", _TRAINING),
    ("weights in another format", _OTHER_WEIGHTS),
    ("a cache", ("__pycache__/", "*.pyc")),
)
# The folders of a store: a checkpoint may be imported into a store in its own folder.
_STORE = {"blobs", "manifests"}


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file that is kept byte for byte: its path in its folder, with ``/``, and its state."""

    name: str
    folder: Folder = field(repr=False, compare=False)
    found: Found

    @property
    def path(self) -> str:
        return self.folder.place(self.name)

    @property
    def size(self) -> int:
        return self.found.size

    @property
    def identity(self) -> Identity:
        return self.found.identity

    @contextmanager
    def open(self) -> Iterator[OpenReader]:
        """Give a reader of the file; `check` compares its declared digest.

        Raises: as `Folder.open`; CorruptDataError if it changed, at the end, too;
        DigestMismatchError for other bytes than those that git names.
        """
        with self.folder.open(self.name, self.identity) as reader:
            if self.found.git is None:
                yield reader
            else:
                data = reader.read(0, reader.size)
                self.found.check_bytes(data, self.path)
                yield BytesReader(data, self.path)
            reader.check_unchanged()


def other_files(
    folder: Folder, own: Collection[str], without: Folder | None = None
) -> tuple[tuple[KeptFile, ...], tuple[Omission, ...]]:
    """Return the kept and the left out files of ``folder``, each sorted by name.

    They are all except the names ``own`` and the folder ``without``, a draft model.

    Raises: StorageError, RemoteError when the folder can't be listed; NotFoundError for a link to a
    missing file.
    """
    walk = _Walk(folder, frozenset(own), without.key.rstrip("/") if without is not None else None)
    walk.run()
    if folder.names() is None:
        walk.left_out.append(Omission("files of other names", UNLISTED))
    kept = sorted(walk.kept, key=lambda file: file.name)
    return tuple(kept), tuple(sorted(walk.left_out, key=lambda file: file.name))


@dataclass(slots=True)
class _Walk:
    """A walk through a checkpoint's folder, except the path or address ``without``."""

    folder: Folder
    own: frozenset[str]
    without: str | None
    kept: list[KeptFile] = field(default_factory=list)
    left_out: list[Omission] = field(default_factory=list)
    entries: int = 0
    nbytes: int = 0

    def run(self) -> None:
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
        """Add the entries of a folder; return its subfolders to walk."""
        self.entries += len(entries)
        if len(entries) > MAX_ENTRIES:
            first = f"{_printable(entries[MAX_ENTRIES].name)} and what follows"
            self._leave(first, _BEYOND, len(entries) - MAX_ENTRIES)
        store = _STORE if {entry.name for entry in entries} >= _STORE else ()
        folders = []
        for entry in entries[:MAX_ENTRIES]:
            name = f"{prefix}{entry.name}"
            shown = f"{name}/" if entry.is_folder else name
            if entry.place == self.without:
                continue
            if (reason := STORE if entry.name in store else self._reason(entry, name)) is not None:
                self._leave(shown, reason)
            elif entry.found is None:
                folders.append(shown)
            else:
                self.nbytes += entry.found.size
                self.kept.append(KeptFile(name, self.folder, entry.found))
        return folders

    def _reason(self, entry: Entry, name: str) -> str | None:
        """Return the reason to leave out a file or a folder; None to keep or to walk it."""
        if entry.name.startswith(".") and entry.name != ".gitattributes":
            return HIDDEN
        try:
            relative_path(name)
        except InvalidNameError as error:
            return f"its name can't be stored ({error.message.partition(': ')[2]})"
        if name == entry.name and name.endswith(".safetensors") and not entry.is_folder:
            return NOT_NAMED
        last = f"{entry.name}/" if entry.is_folder else entry.name
        for reason, patterns in _BY_PATTERN:
            if _is_any(last, patterns):
                return reason
        if entry.fault is None and entry.error is not None:
            raise entry.error
        size = entry.found.size if entry.found is not None else 0
        faults = {
            entry.fault: entry.fault is not None,
            "not a regular file": entry.found is None and not entry.is_folder,
            f"more than {MAX_DEPTH} folders deep": entry.is_folder and name.count("/") >= MAX_DEPTH,
            f"larger than {MAX_FILE // 2**20} MiB": size > MAX_FILE,
            f"beyond the {MAX_BYTES // 2**30} GiB that are kept of such files": (
                self.nbytes + size > MAX_BYTES
            ),
        }
        return next((reason for reason, is_so in faults.items() if is_so), None)

    def _leave(self, name: str, reason: str, count: int = 1) -> None:
        self.left_out.append(Omission(_printable(name), reason, count))


def weights_among(names: Iterable[str]) -> str | None:
    """Return the first name of a file that may hold weights, or None."""
    named = [name for name in names if not _is_any(name, _TRAINING)]
    return next((one for end in WEIGHT_SUFFIXES for one in named if one.endswith(end)), None)


def other_weights(names: Iterable[str]) -> str | None:
    """Return the first name of a weights file in a format that blobstore does not read, or None."""
    return next((name for name in names if _is_any(name, _OTHER_WEIGHTS)), None)


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _printable(name: str) -> str:
    """Return a printable name: bytes that are not UTF-8 are escaped."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return quoted(name)
    return name
