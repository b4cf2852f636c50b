"""Inventory: what a checkpoint consists of, from its headers and JSON documents. No weight is read.

Which files belong to a checkpoint (docs/formats.md section 5): with a shard index exactly the files and tensors that it
names; without one ``model.safetensors`` or ``model-*.safetensors``, both together being an error. A single ``.safetensors``
file is a checkpoint without documents.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from blobstore.checkpoint import CONFIG_NAME, SourceConfig
from blobstore.documents import MAX_DOCUMENT
from blobstore.dtypes import DType
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DocumentError,
    InvalidNameError,
    NotFoundError,
    StorageError,
    UnsupportedSourceError,
    quoted,
)
from blobstore.names import file_name
from blobstore.ranges import FileIdentity
from blobstore.safetensors import Header, read_header
from blobstore.source.adapters import adapter_among, adapter_error, are_adapters
from blobstore.source.folders import LocalFolder
from blobstore.source.shards import INDEX_NAME, INDEX_SUFFIX, SINGLE_NAME, check_index, read_index, shards_without_index

OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.npz", "*.h5", "*.msgpack")
"""Files that hold weights too, in formats that are not read."""


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
        return _read_folder(LocalFolder(path))
    if path.name.endswith(".index.json"):
        raise UnsupportedSourceError(f"{path} is a shard index", hint=f"Give its folder: {path.parent}")
    file, header = _read_file(LocalFolder(path.parent), path.name)
    if adapter_among([path.name]) or are_adapters(header.tensors):
        raise adapter_error(str(path))
    return Inventory(str(path), (file,), _tensors([(file, header)]), {}, None, ())


def _read_folder(folder: LocalFolder) -> Inventory:
    names = folder.names()
    index = read_index(folder) if INDEX_NAME in names else None
    chosen = index.files if index is not None else _choose(folder, names)
    read = [_read_file(folder, name) for name in chosen]
    left_out = tuple(name for name in names if name.endswith(".safetensors") and name not in chosen)
    if index is not None:
        check_index(index, [(file.path, file.name, file.tensor_names) for file, _ in read])
        _check_left_out(folder, index.weight_map, left_out)
    documents = {name: _read_document(folder, name) for name in names if _is_document(name)}
    config = SourceConfig.parse(documents[CONFIG_NAME], folder.place(CONFIG_NAME)) if CONFIG_NAME in documents else None
    return Inventory(folder.name, tuple(file for file, _ in read), _tensors(read), documents, config, left_out)


def _choose(folder: LocalFolder, names: list[str]) -> list[str]:
    single = [name for name in names if name == SINGLE_NAME]
    shards = shards_without_index(folder, names)
    if single and shards:
        raise UnsupportedSourceError(
            f"{folder.name} has both model.safetensors and model-*.safetensors, and no index says which one counts",
            path=folder.name,
            hint="Move one of them away, or import the file itself.",
        )
    if single or shards:
        return single or shards
    if adapter := adapter_among(names):
        raise adapter_error(folder.place(adapter))
    message = f"no weights in {folder.name}: no model.safetensors"
    raise NotFoundError(message, path=folder.name, hint=_weights_hint(names))


def _weights_hint(names: list[str]) -> str | None:
    if files := [name for name in names if name.endswith(".safetensors")]:
        return f"Import the file itself: {files[0]}"
    if others := [name for name in names if any(fnmatchcase(name, pattern) for pattern in OTHER_WEIGHTS)]:
        return f"{others[0]} is not safetensors: convert it first."
    return None


def _read_file(folder: LocalFolder, name: str) -> tuple[SourceFile, Header]:
    _check_storable(folder, name)
    with folder.open(name) as reader:
        header = read_header(reader)
        header.check_limits(reader.name)
        file = SourceFile(folder.place(name), name, reader.identity, reader.size, tuple(header.tensors), header.metadata)
    return file, header


def _check_left_out(folder: LocalFolder, held: Mapping[str, str], left_out: Iterable[str]) -> None:
    """Raise CorruptDataError when a file that is not in the index holds a tensor of it too."""
    for name in left_out:
        if twice := sorted(held.keys() & _tensor_names(folder, name)):
            message = f"{folder.place(name)} is not in the index, but holds the tensor {twice[0]!r} too"
            raise CorruptDataError(message, tensor=twice[0], rule="I1")


def _tensor_names(folder: LocalFolder, name: str) -> set[str]:
    try:
        return set(_read_file(folder, name)[0].tensor_names)
    except BlobStoreError:
        return set()  # a file that is left out may be anything


def _is_document(name: str) -> bool:
    return name.endswith(".json") and not name.endswith(INDEX_SUFFIX)


def _check_storable(folder: LocalFolder, name: str) -> None:
    """Raise unless the file's name can be a name in a manifest, and a file again later."""
    try:
        file_name(name)
    except InvalidNameError as error:
        path = folder.place(name)
        raise UnsupportedSourceError(f"{quoted(path)} can't be stored: {error}", path=path) from None


def _read_document(folder: LocalFolder, name: str) -> bytes:
    _check_storable(folder, name)
    return folder.read(name, MAX_DOCUMENT)


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
