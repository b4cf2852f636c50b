"""Inventory: the files and tensors of a checkpoint, from headers and JSON. No weight is read.

Which files belong to a checkpoint (docs/formats.md section 5): with a shard index exactly the files
and tensors that it names; without one ``model.safetensors`` or ``model-*.safetensors`` (both
together are an error); if there is no ``model``, the only other set of weights (files.py). A
single ``.safetensors`` file is a checkpoint without documents.
"""

from __future__ import annotations

import shlex
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    HeaderError,
    InvalidNameError,
    MissingFileError,
    NotFoundError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.checkpoint import CONFIG_NAME, FILE_TYPE, SourceConfig
from blobstore.formats.documents import MAX_DOCUMENT, Omission
from blobstore.formats.dtypes import DType, QuantType
from blobstore.formats.gguf import GgufHeader
from blobstore.formats.safetensors.header import Header
from blobstore.io.budget import Budget, Cancellation
from blobstore.io.workers import run_in_pool
from blobstore.names import file_name
from blobstore.source.adapters import (
    CONFIG as ADAPTER,
    MLX_FILE,
    PEFT_FILE,
    adapted_weights,
    adapter_among,
    adapter_error,
    are_adapters,
)
from blobstore.source.addresses import Source, folder_or_file, open_folder
from blobstore.source.assembly import source_weights
from blobstore.source.files import (
    KeptFile,
    ShardCheck,
    ShardIndex,
    WeightSet,
    check_complete,
    folder_with_weights,
    gguf_sets,
    headers,
    is_index,
    other_files,
    other_weights,
    parts_of,
    read_index,
    set_of,
    weight_sets,
    weights_among,
)
from blobstore.source.folders import (
    GGUF,
    SUFFIX,
    Folder,
    LocalFolder,
    SourceFile,
    SourceTensor,
)
from blobstore.source.gguf import gguf_weights, joined_header
from blobstore.source.gguf_documents import documents_of
from blobstore.source.producers import OWN, STATED
from blobstore.source.torch_files import TORCH_SUFFIXES
from blobstore.source.weights import CONNECTIONS, Form, SourceWeight

_OUTPUT = "lm_head.weight"
FLOAT = "float"
"""The kind of a checkpoint without quantized weights."""


@dataclass(frozen=True)
class Inventory:
    """A checkpoint: its tensors by name, sorted; its JSON documents by file name, sorted.

    ``path``: the path or address of the folder or file. ``kept``: the files apart from weights and
    documents that are kept byte for byte; ``left_out``: the others. Both are sorted by name.
    ``config_folder``: where documents and kept files are, if they are in another folder.
    ``states``: the bytes of the tensors that say how a weight is stored, by their names.
    ``adapter``: what is merged into the weights.
    ``header``: of a GGUF model.
    """

    path: str
    folder: Folder = field(repr=False, compare=False)
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, SourceTensor]
    documents: Mapping[str, bytes]
    config: SourceConfig | None
    kept: tuple[KeptFile, ...] = ()
    left_out: tuple[Omission, ...] = ()
    states: Mapping[str, bytes] = field(default_factory=dict)
    config_folder: Folder | None = field(default=None, repr=False, compare=False)
    adapter: Inventory | None = None
    header: GgufHeader | None = None

    @cached_property
    def weights(self) -> tuple[SourceWeight, ...]:
        """The weights, sorted by name.

        Raises: as `source_weights`, `gguf_weights` and `adapted_weights`.
        """
        if self.header is not None:
            weights = gguf_weights(self.tensors, self.header)
        else:
            # Biases of zeros, which GPTQ's programs add to modules without one, are left out.
            zeros = {
                one for one, raw in self.states.items() if one.endswith(_BIAS) and not any(raw)
            }
            used = {name: one for name, one in self.tensors.items() if name not in zeros}
            weights = source_weights(used, self.config, self.states)
        if (adapter := self.adapter) is None:
            return weights
        ties = self.config is not None and self.config.others.get("tie_word_embeddings") is True
        document, place = adapter.documents[ADAPTER], adapter.folder.place(ADAPTER)
        return adapted_weights(weights, adapter.tensors, document, place, ties_head=ties)

    @property
    def adapter_files(self) -> tuple[SourceFile, ...]:
        return () if self.adapter is None else self.adapter.files

    @property
    def folders(self) -> list[Folder]:
        adapter = self.adapter.folder if self.adapter is not None else None
        return [one for one in (self.folder, self.config_folder, adapter) if one is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_inventory(source: Source, *, without: Folder | None = None) -> Inventory:
    """Return the inventory of a .safetensors file or a checkpoint folder.

    The folder ``without``, a draft model, is left out.

    Raises: as `open_folder`; NotFoundError (no weights, a missing shard, a link to a missing file),
    HeaderError, DocumentError (config.json, index), CorruptDataError (index and shards
    disagree), UnsupportedSourceError (an adapter, several sets of weights, both single file and
    shards, a server that does not send parts of files), LimitExceededError, StorageError,
    RemoteError.
    """
    folder = open_folder(source)
    folder.budget = Budget(folder.name)  # a folder may be read more than once
    if folder.file is None:
        return folder_or_file(folder, lambda own: _read_folder(own, without), _read_single)
    if is_index(folder.file):
        return _read_folder(folder, without, WeightSet(folder.file, index=folder.file))
    return _read_single(folder, folder.file)


def read_model(
    source: Source,
    *,
    without: Folder | None = None,
    config: Source | None = None,
    adapter: Source | None = None,
) -> Inventory:
    """Return the inventory of a model that is to be imported: with the documents of ``config``.

    Without ``config`` a GGUF model has its folder's, or else those that its metadata make.
    ``adapter`` is merged into its weights.

    Raises: as `read_inventory` and `documents_of`; MissingFileError if ``config`` has no
    config.json.
    """
    inventory = read_inventory(source, without=without)
    if adapter is not None:
        inventory = replace(inventory, adapter=read_adapter(adapter))
    if config is not None:
        return _with_documents(inventory, open_folder(config))
    if inventory.header is None or CONFIG_NAME in inventory.documents:
        return inventory
    made = documents_of(inventory.header, inventory.path, partial(_floats, inventory))
    parsed = SourceConfig.parse(made[CONFIG_NAME], f"the config.json made of {inventory.path}")
    documents = dict(sorted({**made, **inventory.documents}.items()))
    return replace(inventory, documents=documents, config=parsed)


def _floats(inventory: Inventory, name: str) -> list[float]:
    """Return the values of a small F32 tensor of a GGUF model."""
    tensor = inventory.tensors[name]
    if tensor.dtype is not DType.F32 or tensor.nbytes > 2**20:
        raise UnsupportedSourceError(
            f"{quoted(name)} is {tensor.dtype} {list(tensor.shape)}, expected a small F32",
            tensor=name,
            path=tensor.file.path,
        )
    raw = _read_small(inventory.folder, [tensor])[name]
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _with_documents(inventory: Inventory, folder: Folder) -> Inventory:
    folder.budget = Budget(folder.name)
    documents, config = _documents(folder, names := _names(folder))
    if config is None:
        raise MissingFileError(
            f"{folder.name} has no {CONFIG_NAME}", path=folder.place(CONFIG_NAME)
        )
    kept, _ = other_files(folder, [*documents, *(name for name in names if is_index(name))])
    indexes = [file for file in inventory.kept if is_index(file.name)]  # they are the weights'
    kept_names = {file.name for file in inventory.kept if not is_index(file.name)}
    return replace(
        inventory,
        documents=documents,
        config=config,
        kept=tuple(sorted([*kept, *indexes], key=lambda file: file.name)),
        left_out=(
            *inventory.left_out,
            *(
                Omission(name, "replaced by those of config")
                for name in sorted({*inventory.documents, *kept_names})
            ),
        ),
        config_folder=folder,
    )


def _documents(
    folder: Folder, names: Iterable[str]
) -> tuple[dict[str, bytes], SourceConfig | None]:
    described = [name for name in names if name.endswith(".json") and not is_index(name)]
    for name in described:
        _check_storable(folder, name)
    documents, config = folder.read_all(described, MAX_DOCUMENT), None
    if CONFIG_NAME in documents:
        config = SourceConfig.parse(documents[CONFIG_NAME], folder.place(CONFIG_NAME))
    return documents, config


def _names(folder: Folder) -> list[str]:
    listed = folder.names()
    return listed if listed is not None else [entry.name for entry in folder.scan()]


def read_adapter(source: Source) -> Inventory:
    """Return the inventory of an adapter of PEFT or mlx-lm. Raises: as `read_inventory`."""
    folder = open_folder(source)
    folder.budget = Budget(folder.name)
    try:
        raw = folder.read(ADAPTER, MAX_DOCUMENT)
        name = folder.file or (PEFT_FILE if b'"peft_type"' in raw else MLX_FILE)
        read = _read_shards(folder, [name])
    except NotFoundError as error:
        error.hint = f"An adapter is a folder with {ADAPTER} and {PEFT_FILE} or {MLX_FILE}."
        raise
    files = tuple(file for file, _ in read)
    return Inventory(folder.name, folder, files, _tensors(read), {ADAPTER: raw}, None)


def _read_single(folder: Folder, name: str) -> Inventory:
    try:
        read = _read_shards(folder, parts_of(name))
    except HeaderError as error:
        if not name.endswith((SUFFIX, GGUF)):
            error.hint = f"A checkpoint is a {SUFFIX} or {GGUF} file, or a folder with such files."
        raise
    if adapter_among([name]) or are_adapters(read[0][1].tensors):
        raise adapter_error(folder.place(name))
    return _inventory_of(folder, folder.place(name), read, {}, None)


def _read_folder(
    folder: Folder, without: Folder | None, asked: WeightSet | None = None
) -> Inventory:
    names = _names(folder)
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
    documents, config = _documents(folder, names)
    read_names = {*chosen, *documents}
    if chosen[0].endswith(TORCH_SUFFIXES):  # an export has no files of the names in its index
        read_names |= {name for name in names if is_index(name)}
    kept, left_out = other_files(folder, read_names, without)
    whole = _inventory_of(folder, folder.name, read, documents, config)
    return replace(whole, kept=kept, left_out=left_out)


def _inventory_of(
    folder: Folder,
    path: str,
    read: list[tuple[SourceFile, Header]],
    documents: Mapping[str, bytes],
    config: SourceConfig | None,
) -> Inventory:
    files, header, tensors = tuple(file for file, _ in read), joined_header(read), _tensors(read)
    if config is not None:
        tensors = _without_tied(tensors, config)
    states = _read_states(folder, tensors)
    return Inventory(path, folder, files, tensors, documents, config, states=states, header=header)


def _choose(folder: Folder, names: list[str]) -> WeightSet:
    sets = weight_sets(names) or [
        WeightSet(parts[0], single=parts[0])
        if len(parts) == 1
        else WeightSet(parts[0], shards=parts)
        for parts in ([] if any(name.endswith(SUFFIX) for name in names) else gguf_sets(names))
    ]
    if not sets:
        if adapter := adapter_among(names):
            raise adapter_error(folder.place(adapter))
        raise MissingFileError(
            f"no weights in {folder.name}: no model.safetensors",
            path=folder.name,
            hint=_weights_hint(folder, names),
        )
    if len(sets) > 1:
        # The index or the single file; shards without an index are several files.
        files = [folder.place(file) for one in sets if (file := one.index or one.single)]
        raise UnsupportedSourceError(
            f"{folder.name} has several sets of weights: {', '.join(found.name for found in sets)}",
            path=folder.name,
            hint=f"Import one of them: {' or '.join(files)}" if files else "Move the others away.",
        )
    return sets[0]


def _files_without_index(folder: Folder, weights: WeightSet) -> list[str]:
    check_complete(folder, weights.shards)
    if weights.single and weights.shards:
        raise UnsupportedSourceError(
            f"{folder.name} has both {weights.single} and {weights.shards[0]}, and no index says"
            " which one counts",
            path=folder.name,
            hint="Move one of them away, or import the file itself:"
            f" {folder.place(weights.single)}",
        )
    return [weights.single] if weights.single else weights.shards


def _weights_hint(folder: Folder, names: list[str]) -> str | None:
    if own := weights_among(names):
        return f"Import the file itself: {folder.place(own)}"
    if other := other_weights(names):
        return f"{other} is neither safetensors nor GGUF: convert it first."
    if (inner := folder_with_weights(folder)) is not None:
        return f"A folder in it has some: {shlex.join(('blobstore', 'import', str(inner)))}"
    if not names and not isinstance(folder, LocalFolder):
        return "Check the address; a private repository needs a token."
    return None


def _read_shards(
    folder: Folder, names: Sequence[str], index: ShardIndex | None = None
) -> list[tuple[SourceFile, Header]]:
    check, read = ShardCheck(index), []
    for name in names:
        _check_storable(folder, name)
    for file, header in read_files(folder, names):
        check.add(file.path, file.name, header.tensors.keys())
        read.append((file, header))
    check.finish()
    return read


def read_files(folder: Folder, names: Sequence[str]) -> Iterator[tuple[SourceFile, Header]]:
    """Yield files of a folder with their headers. Raises: as `headers` and `Folder.open`."""
    with headers(folder, names) as read:
        for name, (reader, header) in zip(names, read, strict=True):
            header.check_limits(reader.name)
            file = SourceFile(
                folder,
                name,
                folder.place(name),
                reader.identity,
                reader.size,
                tuple(header.tensors),
                header.metadata,
                reader.declared,
            )
            yield file, header


def _check_left_out(folder: Folder, held: Mapping[str, str], left_out: Iterable[str]) -> None:
    """Raise CorruptDataError if a file outside the index holds a tensor of the index."""
    for name in left_out:
        try:
            ((file, _),) = read_files(folder, [name])
        except BlobStoreError:
            continue  # a file that is left out may be anything
        if twice := sorted(held.keys() & file.tensor_names):
            raise CorruptDataError(
                f"{folder.place(name)} is not in the index, but holds the tensor {twice[0]!r} too",
                tensor=twice[0],
                rule="I1",
            )


def _check_storable(folder: Folder, name: str) -> None:
    """Raise if the name can't be a layer name in a manifest, or a file name in an export."""
    try:
        file_name(name)
    except InvalidNameError as error:
        path = folder.place(name)
        raise UnsupportedSourceError(
            f"{quoted(path)} can't be stored: {error}", path=path
        ) from None


def _tensors(read: list[tuple[SourceFile, Header]]) -> dict[str, SourceTensor]:
    tensors = {
        name: SourceTensor(
            name, file, entry.dtype, entry.shape, header.data_start + entry.begin, entry.nbytes
        )
        for file, header in read
        for name, entry in header.tensors.items()
    }
    if not tensors:
        raise NotFoundError(f"no tensors in {', '.join(file.path for file, _ in read)}")
    return dict(sorted(tensors.items()))


def _without_tied(
    tensors: dict[str, SourceTensor], config: SourceConfig
) -> dict[str, SourceTensor]:
    """Return the tensors without an output layer that has the very bytes of another tensor.

    transformers leaves it out of safetensors too, unless config.json says that the embeddings are
    not tied (modeling_utils.py `save_pretrained` at version 5.24.0).
    """
    output, said = tensors.get(_OUTPUT), {**config.others, **(config.text_config or {})}
    if output is None or said.get("tie_word_embeddings") is False or not output.nbytes:
        return tensors
    places = [(tensor.file.name, tensor.offset) for tensor in tensors.values()]
    is_tied = places.count((output.file.name, output.offset)) > 1
    return {name: one for name, one in tensors.items() if name != _OUTPUT or not is_tied}


_MAX_STATE, _MAX_BIAS = 4096, 2**18
_BIAS, _CODES = ".bias", ".qweight"


def _read_states(folder: Folder, tensors: Mapping[str, SourceTensor]) -> dict[str, bytes]:
    """Return the bytes of small `STATED` tensors, and of biases of GPTQ's, by their names."""
    biases = {f"{name.removesuffix(_CODES)}{_BIAS}" for name in tensors if name.endswith(_CODES)}
    small = [
        tensor
        for name, tensor in tensors.items()
        if (name.endswith(STATED) and 0 < tensor.nbytes <= _MAX_STATE)
        or (name in biases and 0 < tensor.nbytes <= _MAX_BIAS)
    ]
    return _read_small(folder, small) if small else {}


def _read_small(folder: Folder, tensors: list[SourceTensor]) -> dict[str, bytes]:
    def read(tensor: SourceTensor, cancellation: Cancellation) -> bytes:
        budget, file, data = folder.budget, tensor.file, bytearray(tensor.nbytes)
        budget.take_text(tensor.nbytes, tensor.name)
        if folder.is_remote:
            budget.receive(2**10)  # about the head of a reply; counting it gives slow servers time
            budget.seconds_left()
        folder.fill(file.name, file.identity, tensor.offset, memoryview(data), cancellation)
        return bytes(data)

    with run_in_pool(tensors, read, 2 * CONNECTIONS) as texts:
        return {tensor.name: text for tensor, text in zip(tensors, texts, strict=True)}


def kind_of(weights: Iterable[SourceWeight]) -> str:
    """Return Ollama's name for a kind of checkpoint (x/create/classify.go, ollama@fb307609)."""
    forms = {one.form for one in weights if one.coding is None or one.coding.is_quantized}
    if not forms.isdisjoint({Form.CODES, Form.CODED}):
        return "prequantized"
    return "block-fp8" if Form.FP8 in forms else FLOAT


def quant_type_of(weights: Sequence[SourceWeight], config: SourceConfig | None) -> QuantType | None:
    """Return the type of all quantized weights of a source; FP8 counts as mxfp8.

    If there are several types, it is the requested type that the source names: in MLX's general
    settings in ``config``, as for Ollama (fixtures/ollama-records, d_mlx_mixed_4_8), or as
    `FILE_TYPE` in the metadata of an export of ours. None without a type, or if the source
    names none.
    """
    types = {
        QuantType.MXFP8 if weight.quantization is None else weight.quantization.quant_type
        for weight in weights
        if weight.form is Form.FP8 or weight.quantization is not None
    }
    if len(types) == 1:
        return types.pop()
    said = {
        weight.file.metadata.get(FILE_TYPE) for weight in weights if weight.producer == OWN.name
    }
    settings = config.mlx_quantization if config is not None else None
    with suppress(UsageError):  # a type that is not one of ours
        said |= {settings.quantization.quant_type.value} if settings is not None else set()
    asked = [kind for kind in types if kind.value in said]
    return asked[0] if len(asked) == 1 else None
