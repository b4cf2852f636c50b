"""Inventory: what a checkpoint consists of, from its headers and JSON documents. No weight is read.

Which files belong to a checkpoint (docs/formats.md section 5): with a shard index exactly the files and tensors that it
names; without one ``model.safetensors`` or ``model-*.safetensors``, both together being an error. A single ``.safetensors``
file is a checkpoint without documents.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blobstore.checkpoint import CONFIG_NAME, MAX_INDEX, ShardIndex, SourceConfig
from blobstore.documents import MAX_DOCUMENT
from blobstore.dtypes import DType
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DocumentError,
    InvalidNameError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    UnsupportedSourceError,
    from_os_error,
    quoted,
)
from blobstore.names import file_name
from blobstore.ranges import FileIdentity, FileReader
from blobstore.safetensors import Header, read_header

INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"model-(?P<number>[0-9]{1,6})-of-(?P<total>[0-9]{1,6})\.safetensors", re.ASCII)
_OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.npz", "*.h5", "*.msgpack")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One .safetensors file, as it was when its header was read."""

    path: str
    name: str
    identity: FileIdentity
    size: int
    tensor_names: tuple[str, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the checkpoint. ``offset`` counts bytes from the start of its file."""

    name: str
    file: SourceFile
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint: its tensors by name, sorted; its JSON documents by file name, sorted; what was left out."""

    path: str
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, SourceTensor]
    documents: Mapping[str, bytes]
    config: SourceConfig | None
    left_out: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_inventory(source: str | os.PathLike[str]) -> Inventory:
    """Return the inventory of a .safetensors file or of a checkpoint folder.

    Raises: NotFoundError (no such path, no weights, a shard that is missing), HeaderError, DocumentError (config.json,
    index), CorruptDataError (index and shards disagree), UnsupportedSourceError (both single file and shards),
    LimitExceededError, StorageError.
    """
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise NotFoundError(f"no file or folder at {path}", path=str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StorageError(f"can't look at {path}: {error}", path=str(path)) from error
    if stat.S_ISDIR(mode):
        return _read_folder(path)
    if path.name.endswith(".index.json"):
        raise UnsupportedSourceError(f"{path} is a shard index", hint=f"Give its folder: {path.parent}")
    file, header = _read_file(path)
    return Inventory(str(path), (file,), _tensors([(file, header)]), {}, None, ())


def _read_folder(folder: Path) -> Inventory:
    names = _list(folder)
    index = _read_index(folder) if INDEX_NAME in names else None
    chosen = sorted(set(index.weight_map.values())) if index is not None else _choose(folder, names)
    read = [_read_file(folder / name) for name in chosen]
    left_out = tuple(name for name in names if name.endswith(".safetensors") and name not in chosen)
    if index is not None:
        _check_index(index, read, [folder / name for name in left_out])
    documents = {name: _read_document(folder / name) for name in names if _is_document(name)}
    config = SourceConfig.parse(documents[CONFIG_NAME], str(folder / CONFIG_NAME)) if CONFIG_NAME in documents else None
    return Inventory(str(folder), tuple(file for file, _ in read), _tensors(read), documents, config, left_out)


def _list(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            # Whatever is no folder: a dangling link or a FIFO is refused when it is opened, and does not vanish here.
            return sorted(entry.name for entry in entries if not entry.is_dir())
    except OSError as error:
        raise from_os_error(error, "list", folder) from error


def _choose(folder: Path, names: list[str]) -> list[str]:
    single = [name for name in names if name == "model.safetensors"]
    shards = [name for name in names if fnmatchcase(name, "model-*.safetensors")]
    _check_complete(folder, shards)
    if single and shards:
        raise UnsupportedSourceError(
            f"{folder} has both model.safetensors and model-*.safetensors, and no index says which one counts",
            path=str(folder),
            hint="Move one of them away, or import the file itself.",
        )
    if single or shards:
        return single or shards
    raise NotFoundError(f"no weights in {folder}: no model.safetensors", path=str(folder), hint=_weights_hint(names))


def _check_complete(folder: Path, shards: list[str]) -> None:
    """Raise when the shards' own names, ``model-00001-of-00003.safetensors``, say that one is missing."""
    present = set(shards)
    claims = {match["total"]: match for name in shards if (match := _SHARD_NAME.fullmatch(name))}
    for total, match in claims.items():
        width = len(match["number"])
        names = (f"model-{number:0{width}}-of-{total}.safetensors" for number in range(1, int(total) + 1))
        if missing := next((name for name in names if name not in present), None):
            raise NotFoundError(f"{folder} has {match[0]}, but {missing} is missing", path=str(folder / missing))


def _weights_hint(names: list[str]) -> str | None:
    if files := [name for name in names if name.endswith(".safetensors")]:
        return f"Import the file itself: {files[0]}"
    if others := [name for name in names if any(fnmatchcase(name, pattern) for pattern in _OTHER_WEIGHTS)]:
        return f"{others[0]} is not safetensors: convert it first."
    return None


def _read_file(path: Path) -> tuple[SourceFile, Header]:
    _check_storable(path)
    with FileReader(path) as reader:
        header = read_header(reader)
        header.check_limits(reader.name)
        file = SourceFile(str(path), path.name, reader.identity, reader.size, tuple(header.tensors), header.metadata)
    return file, header


def _read_index(folder: Path) -> ShardIndex:
    path = folder / INDEX_NAME
    with FileReader(path) as reader:
        if reader.size > MAX_INDEX:
            raise LimitExceededError(f"limit exceeded: {path} has {reader.size:,} bytes, at most {MAX_INDEX:,}")
        index = ShardIndex.parse(reader.read(0, reader.size), str(path))
    for name in sorted(set(index.weight_map.values())):
        if not (folder / name).exists():
            raise NotFoundError(f"{path} names the shard {name}, which is missing", path=str(folder / name), rule="I1")
    return index


def _check_index(index: ShardIndex, read: list[tuple[SourceFile, Header]], left_out: Iterable[Path]) -> None:
    """Raise unless each tensor is in exactly the shard that the index names, and the shards hold nothing else."""
    for file, header in read:
        for name in header.tensors:
            if index.weight_map.get(name) != file.name:
                where = index.weight_map.get(name)
                says = f"says it is in {where}" if where else "does not name it"
                raise CorruptDataError(
                    f"{file.path} holds the tensor {name!r}, but the index {says}", tensor=name, rule="I1"
                )
    held = {name for file, _ in read for name in file.tensor_names}
    if missing := sorted(index.weight_map.keys() - held):
        raise CorruptDataError(
            f"the index says that {index.weight_map[missing[0]]} holds the tensor {missing[0]!r}, but it does not",
            tensor=missing[0],
            rule="I1",
        )
    for path in left_out:
        if twice := sorted(held.intersection(_tensor_names(path))):
            raise CorruptDataError(
                f"{path} is not in the index, but holds the tensor {twice[0]!r} too", tensor=twice[0], rule="I1"
            )


def _tensor_names(path: Path) -> Iterable[str]:
    try:
        return _read_file(path)[0].tensor_names
    except BlobStoreError:
        return ()  # a file that is left out may be anything


def _is_document(name: str) -> bool:
    return name.endswith(".json") and not name.endswith(".safetensors.index.json")


def _check_storable(path: Path) -> None:
    """Raise unless the file's name can be a name in a manifest, and a file again later."""
    try:
        file_name(path.name)
    except InvalidNameError as error:
        raise UnsupportedSourceError(f"{quoted(str(path))} can't be stored: {error}", path=str(path)) from None


def _read_document(path: Path) -> bytes:
    _check_storable(path)
    with FileReader(path) as reader:
        if reader.size > MAX_DOCUMENT:
            raise LimitExceededError(f"limit exceeded: {path} has {reader.size:,} bytes, at most {MAX_DOCUMENT:,}")
        return reader.read(0, reader.size)


def _tensors(read: list[tuple[SourceFile, Header]]) -> dict[str, SourceTensor]:
    tensors: dict[str, SourceTensor] = {}
    for file, header in read:
        for name, entry in header.tensors.items():
            if name in tensors:
                raise DocumentError(
                    f"{tensors[name].file.path} and {file.path} both hold the tensor {name!r}", tensor=name, rule="I1"
                )
            offset = header.data_start + entry.begin
            tensors[name] = SourceTensor(name, file, entry.dtype, entry.shape, offset, entry.nbytes)
    if not tensors:
        raise NotFoundError(f"no tensors in {', '.join(file.path for file, _ in read)}")
    return dict(sorted(tensors.items()))
