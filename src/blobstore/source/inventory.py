"""Inventory: what a checkpoint consists of, from its headers and JSON documents. No weight is read.

Which files belong to a checkpoint (docs/formats.md section 5): with a shard index exactly the files
and tensors that it names; without one ``model.safetensors`` or ``model-*.safetensors``, both
together being an error; where there is no ``model``, the only other set of weights (shards.py). A
single ``.safetensors`` file is a checkpoint without documents.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    HeaderError,
    InvalidNameError,
    MissingFileError,
    NotFoundError,
    UnsupportedSourceError,
    quoted,
)
from blobstore.formats.checkpoint import CONFIG_NAME, SourceConfig
from blobstore.formats.coverage import LeftOut
from blobstore.formats.documents import MAX_DOCUMENT
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.codec import header_of
from blobstore.formats.safetensors.header import Header
from blobstore.io.ranges import Identity
from blobstore.names import file_name
from blobstore.source.addresses import Source, open_folder
from blobstore.source.files import OTHER_WEIGHTS, KeptFile, OtherFiles, other_files
from blobstore.source.folders import Folder, LocalFolder, SourceReader
from blobstore.source.shards import (
    SUFFIX,
    ShardCheck,
    ShardIndex,
    WeightSet,
    adapter_among,
    adapter_error,
    are_adapters,
    check_complete,
    folder_with_weights,
    is_index,
    read_index,
    set_of,
    weight_sets,
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One .safetensors file of a folder, as it was when its header was read; ``path``: or its address."""

    folder: Folder = field(repr=False, compare=False)
    name: str
    path: str
    identity: Identity
    size: int
    tensor_names: tuple[str, ...]
    metadata: Mapping[str, str]

    def open(self) -> SourceReader:
        """Return a reader of the file. Raises: as `Folder.open`; CorruptDataError if it changed."""
        return self.folder.open(self.name, self.identity)


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
    """A checkpoint: its tensors by name, sorted; its JSON documents by file name, sorted.

    ``path``: the path or address of the folder or file. ``other_files``: its other files, and what
    was left out.
    """

    path: str
    folder: Folder = field(repr=False, compare=False)
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, SourceTensor]
    documents: Mapping[str, bytes]
    config: SourceConfig | None
    other_files: OtherFiles = field(default_factory=OtherFiles)

    @property
    def kept(self) -> tuple[KeptFile, ...]:
        """The files beside weights and documents that are kept byte for byte, sorted by name."""
        return self.other_files.kept

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The files and folders that are not read, sorted by name."""
        return self.other_files.left_out

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_inventory(source: Source, *, without: Path | None = None) -> Inventory:
    """Return the inventory of a .safetensors file or of a checkpoint folder, but what is at ``without``: a draft model.

    Raises: as `open_folder`; NotFoundError (no weights, a shard that is missing, a link to a missing
    file), HeaderError, DocumentError (config.json, index), CorruptDataError (index and shards
    disagree), UnsupportedSourceError (an adapter, several sets of weights, both single file and
    shards, a server that does not send parts of files), LimitExceededError, StorageError,
    RemoteError.
    """
    folder = open_folder(source)
    if folder.file is None:
        return _read_whole(folder, without)
    if is_index(folder.file):
        return _read_folder(folder, without, WeightSet(folder.file, index=folder.file))
    return _read_single(folder, folder.file)


def _read_whole(folder: Folder, without: Path | None) -> Inventory:
    try:
        return _read_folder(folder, without)
    except MissingFileError as error:
        other = folder.as_file()
        if error.rule is not None or other is None or other.file is None:
            raise
        try:
            return _read_single(other, other.file)
        except BlobStoreError:
            raise error from None


def _read_single(folder: Folder, name: str) -> Inventory:
    try:
        ((file, header),) = _read_files(folder, [name])
    except HeaderError as error:
        if not name.endswith(SUFFIX):
            error.hint = f"A checkpoint is a {SUFFIX} file, or a folder with such files in it."
        raise
    if adapter_among([name]) or are_adapters(header.tensors):
        raise adapter_error(folder.place(name))
    return Inventory(folder.place(name), folder, (file,), _tensors([(file, header)]), {}, None)


def _read_folder(folder: Folder, without: Path | None, asked: WeightSet | None = None) -> Inventory:
    names = folder.names()
    if names is None:
        names = [entry.name for entry in folder.scan()]
    weights = asked or _choose(folder, names)
    index = read_index(folder, weights.index) if weights.index is not None else None
    chosen = index.files if index is not None else _files_without_index(folder, weights)
    read = _read_shards(folder, chosen, index)
    if index is not None:
        others = [name for name in names if name.endswith(SUFFIX) and name not in chosen]
        own = {set_of(name) for name in chosen}
        _check_left_out(
            folder, index.weight_map, [name for name in others if set_of(name) in (None, *own)]
        )
    documents = {name: _read_document(folder, name) for name in names if _is_document(name)}
    config = (
        SourceConfig.parse(documents[CONFIG_NAME], folder.place(CONFIG_NAME))
        if CONFIG_NAME in documents
        else None
    )
    others_found = other_files(folder, {*chosen, *documents}, without)
    files = tuple(file for file, _ in read)
    return Inventory(folder.name, folder, files, _tensors(read), documents, config, others_found)


def _choose(folder: Folder, names: list[str]) -> WeightSet:
    """Return the set of weights that the folder is about."""
    sets = weight_sets(names)
    if not sets:
        if adapter := adapter_among(names):
            raise adapter_error(folder.place(adapter))
        message = f"no weights in {folder.name}: no model.safetensors"
        raise MissingFileError(message, path=folder.name, hint=_weights_hint(folder, names))
    if len(sets) > 1:
        raise UnsupportedSourceError(
            f"{folder.name} has several sets of weights: {', '.join(found.name for found in sets)}",
            path=folder.name,
            hint=_sets_hint(folder, sets),
        )
    return sets[0]


def _files_without_index(folder: Folder, weights: WeightSet) -> list[str]:
    check_complete(folder, weights.shards)
    if weights.single and weights.shards:
        raise UnsupportedSourceError(
            f"{folder.name} has both {weights.single} and {weights.name}-*.safetensors, and no index says which one counts",
            path=folder.name,
            hint=f"Move one of them away, or import the file itself: {folder.place(weights.single)}",
        )
    return [weights.single] if weights.single else weights.shards


def _sets_hint(folder: Folder, sets: list[WeightSet]) -> str:
    if files := [folder.place(found.target) for found in sets if found.target is not None]:
        return f"Import one of them: {' or '.join(files)}"
    return "Move away those that are not meant."


def _weights_hint(folder: Folder, names: list[str]) -> str | None:
    if files := [name for name in names if name.endswith(SUFFIX)]:
        return f"Import the file itself: {folder.place(files[0])}"
    if others := [
        name for name in names if any(fnmatchcase(name, pattern) for pattern in OTHER_WEIGHTS)
    ]:
        return f"{others[0]} is not safetensors: convert it first."
    inner = folder_with_weights(folder.path) if isinstance(folder, LocalFolder) else None
    if inner is not None:
        return f"A folder in it has some: {shlex.join(('blobstore', 'import', str(inner)))}"
    return None


def _read_shards(
    folder: Folder, names: Sequence[str], index: ShardIndex | None
) -> list[tuple[SourceFile, Header]]:
    """Return the files with their headers; equal metadata are kept once."""
    check, read = ShardCheck(index), []
    known: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}
    for file, header in _read_files(folder, names):
        check.add(file.path, file.name, header.tensors.keys())
        metadata = known.setdefault(tuple(file.metadata.items()), file.metadata)
        read.append((replace(file, metadata=metadata), replace(header, metadata=metadata)))
    check.finish()
    return read


def _read_files(folder: Folder, names: Sequence[str]) -> Iterator[tuple[SourceFile, Header]]:
    for name in names:
        _check_storable(folder, name)

    def read(reader: SourceReader) -> tuple[Identity, int, Header]:
        header = header_of(reader, folder.budget)
        header.check_limits(reader.name)
        return reader.identity, reader.size, header

    with folder.sources(names, read) as found:
        for name, (identity, size, header) in zip(names, found, strict=True):
            tensors = tuple(header.tensors)
            yield (
                SourceFile(
                    folder, name, folder.place(name), identity, size, tensors, header.metadata
                ),
                header,
            )


def _check_left_out(folder: Folder, held: Mapping[str, str], left_out: Iterable[str]) -> None:
    """Raise CorruptDataError when a file that is not in the index holds a tensor of it too."""
    for name in left_out:
        if twice := sorted(held.keys() & _tensor_names(folder, name)):
            message = (
                f"{folder.place(name)} is not in the index, but holds the tensor {twice[0]!r} too"
            )
            raise CorruptDataError(message, tensor=twice[0], rule="I1")


def _tensor_names(folder: Folder, name: str) -> set[str]:
    try:
        ((file, _),) = _read_files(folder, [name])
    except BlobStoreError:
        return set()  # a file that is left out may be anything
    return set(file.tensor_names)


def _is_document(name: str) -> bool:
    return name.endswith(".json") and not is_index(name)


def _check_storable(folder: Folder, name: str) -> None:
    """Raise unless the file's name can be a name in a manifest, and a file again later."""
    try:
        file_name(name)
    except InvalidNameError as error:
        path = folder.place(name)
        raise UnsupportedSourceError(
            f"{quoted(path)} can't be stored: {error}", path=path
        ) from None


def _read_document(folder: Folder, name: str) -> bytes:
    _check_storable(folder, name)
    return folder.read(name, MAX_DOCUMENT)


def _tensors(read: list[tuple[SourceFile, Header]]) -> dict[str, SourceTensor]:
    tensors: dict[str, SourceTensor] = {}
    for file, header in read:
        for name, entry in header.tensors.items():
            offset = header.data_start + entry.begin
            tensors[name] = SourceTensor(name, file, entry.dtype, entry.shape, offset, entry.nbytes)
    if not tensors:
        raise NotFoundError(f"no tensors in {', '.join(file.path for file, _ in read)}")
    return dict(sorted(tensors.items()))
