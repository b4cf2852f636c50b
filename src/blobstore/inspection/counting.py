"""Counting: the logical tensors of files, from their headers, with packed weights unpacked. Pure.

Every stored tensor belongs to exactly one logical tensor. Scales, biases and zero points of a
quantization are part of their weight and count nothing; so do the scales of activations beside one.
Whatever else there is counts as it is stored, buffers and masks too. What looks packed and can't be
understood counts as it is stored, and a note says so.

InspectedFile: one file of what is inspected, and its header.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.errors import BlobStoreError, DocumentError, quoted
from blobstore.formats.dtypes import DType, parameters_of
from blobstore.formats.safetensors.header import Header, TensorEntry
from blobstore.source.packings import PackedWeight, Packing, UnclearPackingError, read_packing
from blobstore.source.producers import ASIDE, QUANT_STATE, Producer, counting_row
from blobstore.store.stored import StoredTensor, stored_tensors

if TYPE_CHECKING:
    from blobstore.formats.checkpoint import SourceConfig


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """One .safetensors file, or one blob of a stored model.

    ``name`` is its file name, a blob's that of its layer; ``place`` its path or address; ``nbytes``
    the bytes of the whole file, None where a server does not say.
    """

    KEYS = ("name", "bytes=nbytes")

    name: str
    place: str
    nbytes: int | None
    header: Header


Config = Callable[[], "SourceConfig | None"]
"""Reads config.json when it is first asked for; None if the target has none."""

_PLAIN = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64, DType.BOOL, DType.C64})
_INTEGERS = frozenset(
    {DType.U8, DType.I8, DType.U16, DType.I16, DType.U32, DType.I32, DType.F8_E8M0}
)
_LEAST_ELEMENTS = 1024
STORED_FORMAT = "Ollama"


class LogicalTensor(NamedTuple):
    """One tensor of the model, however many stored ones it is.

    A named tuple: 40,000 are made in 20 ms instead of 75.

    ``dtype`` is the stored dtype of the weight (U32 for words of codes), ``shape`` that before
    packing, ``nbytes`` the stored bytes, companions included. ``parts`` are the names of its stored
    tensors, the weight's first. ``packing`` and ``format`` say how a quantized one is kept, and by
    whose convention.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parameters: int
    nbytes: int
    file: str
    parts: tuple[str, ...]
    packing: Packing | None = None
    format: str | None = None

    @property
    def type_name(self) -> str:
        """What a person calls its type: ``int4/64``, or the dtype."""
        return str(self.dtype if self.packing is None else self.packing)


def count_tensors(
    files: Sequence[InspectedFile], config: Config, notes: list[str]
) -> list[LogicalTensor]:
    """Return the logical tensors of files that share one space of names, in their order.

    ``notes`` gets a sentence for each kind of weight that is counted as it is stored.

    Raises: DocumentError when two of the files hold a tensor of one name.
    """
    pairs = [
        (file, dict(file.header.tensors)) for file in files
    ]  # once: a header makes its entries as they are asked for
    merged = _merged(pairs)
    exported = _exported_weights(pairs, merged, notes)
    if exported is not None:
        return exported
    others: list[tuple[InspectedFile, dict[str, TensorEntry]]] = []
    tensors: list[LogicalTensor] = []
    for file, entries in pairs:
        weights = _stored_weights(file, entries, notes)
        if weights is None:
            others.append((file, entries))
        else:
            tensors += (stored_tensor(weight, file.name) for weight in weights)
    space = _Space(merged if len(others) == len(pairs) else _merged(others), config)
    found = space.packed(notes)
    for file, entries in others:
        tensors += space.tensors(file.name, entries, found)
    return tensors


def _exported_weights(
    files: Sequence[tuple[InspectedFile, dict[str, TensorEntry]]],
    merged: dict[str, TensorEntry],
    notes: list[str],
) -> list[LogicalTensor] | None:
    """Return the tensors of an exported model in several files; None if metadata say it is not one.

    A weight and its scales may lie in two of the files: ``merged`` are the tensors of all.
    """
    metadata = {key: value for file, _ in files for key, value in file.header.metadata.items()}
    if len(files) == 1 or not any(key.endswith(".quant_type") for key in metadata):
        return None
    try:
        weights = {weight.name: weight for weight in stored_tensors(Header(merged, metadata, 0))}
    except BlobStoreError as error:
        notes.append(
            f"the files look like an exported model, but {error}: they are counted one by one"
        )
        return None
    return [
        stored_tensor(weights[name], file.name)
        for file, names in files
        for name in names
        if name in weights
    ]


def _merged(
    files: Sequence[tuple[InspectedFile, dict[str, TensorEntry]]],
) -> dict[str, TensorEntry]:
    """Return the tensors of several files.

    Raises: DocumentError when two of them have one of the same name.
    """
    if len(files) == 1:
        return files[0][1]
    merged: dict[str, TensorEntry] = {}
    for position, (file, entries) in enumerate(files):
        count = len(merged)
        merged |= entries
        if len(merged) < count + len(entries):
            other, name = next(
                (one.name, name)
                for one, held in files[:position]
                for name in held
                if name in entries
            )
            message = f"{other} and {file.name} both hold the tensor {quoted(name)}"
            raise DocumentError(message, tensor=name, rule="I1", path=file.place)
    return merged


def stored_tensor(weight: StoredTensor, file: str) -> LogicalTensor:
    """Return a tensor of one of the store's blobs."""
    packing = None
    if weight.quantization is not None:
        kind = weight.quantization.quant_type
        packing = Packing(kind.value, kind.bits, weight.quantization.group_size)
    parts = tuple(weight.name + suffix for suffix in weight.entries)
    form = STORED_FORMAT if packing is not None else None
    return LogicalTensor(
        weight.name,
        weight.dtype,
        weight.shape,
        weight.parameters,
        weight.nbytes,
        file,
        parts,
        packing,
        form,
    )


def _stored_weights(
    file: InspectedFile, entries: Mapping[str, TensorEntry], notes: list[str]
) -> list[StoredTensor] | None:
    """Return the tensors of a file that is a blob of a store; None for another file."""
    if not any(
        entry.dtype is DType.U32 and f"{name}.scale" in entries for name, entry in entries.items()
    ):
        return None
    try:
        return list(stored_tensors(file.header))
    except BlobStoreError as error:
        notes.append(
            f"{quoted(file.name)} looks like a blob of a store, but {error}: "
            "it is counted as it is stored"
        )
        return None


@dataclass(frozen=True, slots=True)
class _Packed:
    """The packed weights of a space and their stored tensors, by the name of the weight's own."""

    weights: dict[str, PackedWeight]
    parts: dict[str, tuple[str, ...]]
    companions: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Space:
    """The tensors of files that share their names: what may belong together."""

    entries: Mapping[str, TensorEntry]
    config: Config

    def tensors(
        self, file: str, entries: Mapping[str, TensorEntry], found: _Packed
    ) -> Iterator[LogicalTensor]:
        """Yield the logical tensors whose weights are in one of the files."""
        for name, entry in entries.items():
            if name in found.companions:
                continue
            weight = found.weights.get(name)
            if weight is None:
                count, nbytes = parameters_of(entry.shape), entry.end - entry.begin
                yield LogicalTensor(name, entry.dtype, entry.shape, count, nbytes, file, (name,))
            else:
                parts = found.parts[name]
                count, nbytes = (
                    parameters_of(weight.shape),
                    sum(self.entries[part].nbytes for part in parts),
                )
                named = (weight.name, entry.dtype, weight.shape, count, nbytes)
                yield LogicalTensor(*named, file, parts, weight.packing, weight.format)

    def packed(self, notes: list[str]) -> _Packed:
        """Return the packed weights; ``notes`` gets a sentence for each kind that can't be told."""
        weights: dict[str, PackedWeight] = {}
        parts: dict[str, tuple[str, ...]] = {}
        unclear: defaultdict[str, list[str]] = defaultdict(list)
        taken: set[str] = set()
        for name in self._candidates():
            row = counting_row(name, self.entries) if name not in taken else None
            if row is None:
                continue
            try:
                weights[name] = read_packing(row, name, self.entries, self.config)
            except UnclearPackingError as error:
                unclear[str(error)].append(name)
            else:
                parts[name] = (
                    name,
                    *(part for part in self._companions(row, name) if part not in taken),
                )
                taken.update(parts[name])
        unclear |= self._unexplained(taken.union(*unclear.values()))
        notes += (_note(names, reason) for reason, names in unclear.items())
        return _Packed(weights, parts, frozenset(taken - weights.keys()))

    def _candidates(self) -> list[str]:
        """Return the names of tensors that may be packed weights: mostly none, which saves time."""
        odd = [name for name, entry in self.entries.items() if entry.dtype not in _PLAIN]
        any_dtype = any(
            QUANT_STATE in name for name in odd
        )  # bitsandbytes may keep codes in floats
        return list(self.entries) if any_dtype else odd

    def _companions(self, row: Producer, name: str) -> Iterator[str]:
        base = name.removesuffix(row.weight)
        module = base.removesuffix(".weight")
        names = [
            *(base + suffix for suffix in row.companions),
            *(module + suffix for suffix in ASIDE),
        ]
        return (part for part in dict.fromkeys(names) if part in self.entries and part != name)

    def _unexplained(self, explained: set[str]) -> dict[str, list[str]]:
        rest = {
            name: entry
            for name, entry in self.entries.items()
            if entry.dtype in _INTEGERS
            and name not in explained
            and parameters_of(entry.shape) >= _LEAST_ELEMENTS
        }
        if not rest:
            return {}
        from blobstore.source.assembly import look_packed

        names = dict.fromkeys(name for name, _ in look_packed(rest, self.entries, self.config()))
        names |= dict.fromkeys(name for name, entry in rest.items() if entry.dtype is DType.F8_E8M0)
        return (
            {"they look packed, or like scales, in no form that is known": list(names)}
            if names
            else {}
        )


def _note(names: Sequence[str], reason: str) -> str:
    what = (
        f"{quoted(names[0])} is"
        if len(names) == 1
        else f"{len(names):,} tensors (such as {quoted(names[0])}) are"
    )
    return f"{what} counted as stored: {reason}"


@dataclass(frozen=True, slots=True)
class FoundQuantization:
    """A type of quantization in a format, and how many tensors and weights have it."""

    type: str
    bits: float
    group_size: int | None
    format: str
    tensors: int
    parameters: int


def quantizations_of(tensors: Iterable[LogicalTensor]) -> tuple[FoundQuantization, ...]:
    """Return the ways in which ``tensors`` are quantized, the one of most weights first."""
    counts: defaultdict[tuple[Packing, str], list[int]] = defaultdict(lambda: [0, 0])
    for tensor in tensors:
        if tensor.packing is not None and tensor.format is not None:
            count = counts[tensor.packing, tensor.format]
            count[0] += 1
            count[1] += tensor.parameters
    found = [
        FoundQuantization(packing.kind, packing.bits, packing.group_size, form, *count)
        for (packing, form), count in counts.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.parameters, one.type, one.format)))


def parameters_by_dtype(tensors: Iterable[LogicalTensor]) -> Mapping[str, int]:
    """Return the number of weights by the dtype that they are stored in, sorted by dtype.

    Dtypes with none are left out.
    """
    counts: defaultdict[DType, int] = defaultdict(int)
    for tensor in tensors:
        counts[tensor.dtype] += tensor.parameters
    return {
        dtype.value: count
        for dtype, count in sorted(counts.items(), key=lambda item: item[0].value)
        if count
    }
