"""Inspection: the contents of a checkpoint or a stored model, from headers; as JSON, and as a tree.

The JSON has huggingface.js's shape and more. Headers and the index are those of the files, names
and metadata exactly. Source of the shape: huggingface/huggingface.js@028fe00b
packages/hub/src/lib/parse-safetensors-metadata.ts `SafetensorsParseFromRepo`.

The tree has the modules of tensors: the dots of their names are its branches. Modules with numbers
for names that are alike (the layers of a model, the experts of a layer) are one branch, ``0-31``,
with the sums of them all.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple

from blobstore.errors import BlobStoreError, quoted
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import DType, parameters_of
from blobstore.formats.gguf import GgufHeader
from blobstore.formats.safetensors.header import Header, TensorEntry, json_of
from blobstore.source.packings import Packing, UnclearPackingError, read_packing
from blobstore.source.producers import ASIDE, QUANT_STATE, REFUSED_METHODS, row_of
from blobstore.store.stored import StoredTensor, bits_per_weight, stored_tensors, weights_by_type


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


Config = Callable[[], SourceConfig | None]
"""Reads config.json when it is first asked for; None if the target has none."""

_PLAIN = frozenset({DType.BF16, DType.F16, DType.F32, DType.F64, DType.BOOL, DType.C64})
_INTEGERS = frozenset(
    {DType.U8, DType.I8, DType.U16, DType.I16, DType.U32, DType.I32, DType.F8_E8M0}
)
_LEAST_ELEMENTS = 1024


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
        return str(self.dtype if self.packing is None else self.packing)


def count_tensors(
    files: Sequence[InspectedFile], config: Config, notes: list[str]
) -> list[LogicalTensor]:
    """Return the logical tensors of files that share one space of names, in their order.

    ``notes`` gets a sentence for each kind of weight that is counted as it is stored.
    """
    ggufs = [(file.name, file.header) for file in files if isinstance(file.header, GgufHeader)]
    if ggufs:
        return [tensor for named in ggufs for tensor in _block_tensors(*named)]
    # Once: a header makes its entries as they are asked for.
    pairs = [(file, dict(file.header.tensors)) for file in files]
    entries = {name: entry for _, own in pairs for name, entry in own.items()}
    metadata = {key: value for file in files for key, value in file.header.metadata.items()}
    packed = _stored_weights(Header(entries, metadata, 0), notes)
    if packed is None:
        packed = _packed_weights(entries, config, notes)
    parts = {part for weight in packed.values() for part in weight.parts}
    tensors: list[LogicalTensor] = []
    for file, own in pairs:
        for name, entry in own.items():
            if name in packed:
                tensors.append(packed[name]._replace(file=file.name))
            elif name not in parts:
                count, nbytes = parameters_of(entry.shape), entry.end - entry.begin
                tensors.append(
                    LogicalTensor(name, entry.dtype, entry.shape, count, nbytes, file.name, (name,))
                )
    return tensors


def _block_tensors(file: str, header: GgufHeader) -> Iterator[LogicalTensor]:
    """Yield the tensors of a GGUF file."""
    for name, tensor in header.tensors.items():
        dtype, kind = tensor.dtype, tensor.type
        is_plain = dtype.value == kind.name
        packing = None if is_plain else Packing(kind.name, 8 * kind.block_nbytes / kind.block)
        yield LogicalTensor(
            name,
            dtype,
            tensor.dims,
            tensor.parameters,
            tensor.nbytes,
            file,
            (name,),
            packing,
            None if is_plain else "GGUF",
        )


def stored_tensor(weight: StoredTensor, file: str) -> LogicalTensor:
    """Return a tensor of one of the store's blobs."""
    packing = form = None
    if weight.quantization is not None:
        kind = weight.quantization.quant_type
        packing, form = Packing(kind.value, kind.bits, weight.quantization.group_size), "Ollama"
    parts = tuple(weight.name + suffix for suffix in weight.entries)
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


def _stored_weights(header: Header, notes: list[str]) -> dict[str, LogicalTensor] | None:
    """Return the tensors of a blob of a store, or of an exported model, by name.

    None for files that are neither. A weight and its scales may lie in two files: ``header`` has
    the tensors of all.
    """
    entries = header.tensors
    if not any(
        entry.dtype is DType.U32 and f"{name}.scale" in entries for name, entry in entries.items()
    ):
        return None
    try:
        return {weight.name: stored_tensor(weight, "") for weight in stored_tensors(header)}
    except BlobStoreError as error:
        notes.append(
            f"this looks like a blob of a store, but {error}: it is counted as it is stored"
        )
        return None


def _packed_weights(
    entries: Mapping[str, TensorEntry], config: Config, notes: list[str]
) -> dict[str, LogicalTensor]:
    """Return the packed weights by the names of their codes, without their file.

    ``notes`` gets a sentence for each kind that is uncertain.
    """
    weights: dict[str, LogicalTensor] = {}
    unclear: defaultdict[str, list[str]] = defaultdict(list)
    taken: set[str] = set()
    for name in _candidates(entries):
        row = row_of(name, entries) if name not in taken else None
        if row is None:
            continue
        try:
            logical, shape, packing, form = read_packing(row, name, entries, config)
        except UnclearPackingError as error:
            unclear[str(error)].append(name)
            continue
        base = name.removesuffix(row.weight)
        others = [base + suffix for suffix in row.companions]
        others += [base.removesuffix(".weight") + suffix for suffix in ASIDE]
        companions_of = (part for part in others if part in entries and part not in taken)
        parts = tuple(dict.fromkeys((name, *companions_of)))
        taken.update(parts)
        weights[name] = LogicalTensor(
            logical,
            entries[name].dtype,
            shape,
            parameters_of(shape),
            sum(entries[part].nbytes for part in parts),
            "",
            parts,
            packing,
            form,
        )
    unexplained = _unexplained(entries, taken.union(*unclear.values()), config)
    if unexplained:
        said = config()
        by = REFUSED_METHODS.get(said.quant_method or "") if said is not None else None
        form = f"by {by}" if by is not None else "or like scales, in an unknown form"
        unclear[f"they look packed, {form}"] = unexplained
    for reason, names in unclear.items():
        what = f"{quoted(names[0])} is"
        if len(names) > 1:
            what = f"{len(names):,} tensors (such as {quoted(names[0])}) are"
        notes.append(f"{what} counted as stored: {reason}")
    return weights


def _candidates(entries: Mapping[str, TensorEntry]) -> list[str]:
    odd = [name for name, entry in entries.items() if entry.dtype not in _PLAIN]
    # bitsandbytes may keep codes in floats.
    return list(entries) if any(QUANT_STATE in name for name in odd) else odd


def _unexplained(
    entries: Mapping[str, TensorEntry], explained: set[str], config: Config
) -> list[str]:
    rest = {
        name: entry
        for name, entry in entries.items()
        if entry.dtype in _INTEGERS
        and name not in explained
        and parameters_of(entry.shape) >= _LEAST_ELEMENTS
    }
    if not rest:
        return []
    from blobstore.source.assembly import look_packed

    names = dict.fromkeys(name for name, _ in look_packed(rest, entries, config()))
    names |= dict.fromkeys(name for name, entry in rest.items() if entry.dtype is DType.F8_E8M0)
    return list(names)


@dataclass(frozen=True, slots=True)
class FoundQuantization:
    """A type of quantization in a format, and how many tensors and weights have it."""

    type: str
    bits: float
    group_size: int | None
    format: str
    tensors: int
    parameters: int


MODELSPEC = "modelspec."
"""The prefix of metadata's keys that follow https://github.com/Stability-AI/ModelSpec."""


class TargetKind(enum.Enum):
    """The kind of an inspection's target."""

    FILE = "file"
    FOLDER = "folder"
    INDEX = "index"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a checkpoint or a stored model holds; huggingface.js's keys come first.

    No weight is read. In JSON headers are those of the files: ``__metadata__``, and tensors with
    ``dtype``, ``shape`` and ``data_offsets``.

    ``name`` is the path, address or model's name; ``files`` are in the order of their names, a
    stored model's blobs in the order of its manifest. ``index`` is the shard index's JSON object,
    None without one. ``tensors`` are the logical ones: packed weights have their shape before
    packing. ``metadata`` are the files' ``__metadata__`` where they agree; a stored model's are
    those of the files that it was imported from. ``notes`` are sentences for the user.
    """

    KEYS = (
        "sharded",
        "header?=single_header",
        "index?=full_index",
        "headers?=all_headers",
        "parameter_count",
        "parameters",
        "name",
        "kind",
        "files",
        "tensors=len(tensors)",
        "bytes=nbytes",
        "bits_per_weight",
        "quantization=quantizations",
        "notes",
    )

    name: str
    kind: TargetKind
    files: tuple[InspectedFile, ...]
    index: Mapping[str, Any] | None = field(repr=False)
    tensors: tuple[LogicalTensor, ...] = field(repr=False)
    metadata: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...]

    @property
    def sharded(self) -> bool:
        """Whether the tensors lie in several files, or in one that an index names.

        A stored model's always do.
        """
        return self.index is not None or len(self.files) != 1 or self.kind is TargetKind.MODEL

    @property
    def headers(self) -> dict[str, Header]:
        """The files' headers by file name, as they lie in the files."""
        return {file.name: file.header for file in self.files}

    @property
    def single_header(self) -> Mapping[str, Any] | None:
        """The header as JSON when it is one file, else None."""
        return None if self.sharded else json_of(self.files[0].header)

    @property
    def full_index(self) -> Mapping[str, Any] | None:
        """The index when it is sharded, or one made of the files; else None."""
        if self.index is not None or not self.sharded:
            return self.index
        return {
            "metadata": {"total_size": self.nbytes},
            "weight_map": {name: file.name for file in self.files for name in file.header.tensors},
        }

    @property
    def all_headers(self) -> Mapping[str, Any] | None:
        """The headers as JSON by file name when it is sharded, else None."""
        if not self.sharded:
            return None
        return {name: json_of(header) for name, header in self.headers.items()}

    @property
    def parameter_count(self) -> Mapping[str, int]:
        """The number of weights by the dtype that they are stored in.

        As huggingface.js' ``parameterCount`` (packages/hub/src/lib/parse-safetensors-metadata.ts,
        August 2026): packed weights count as before packing, under the dtype of the packed tensor;
        scales, zero points and tensors of rank 0 do not count. Three differences: MLX's words (U32)
        and Ollama's blobs count as before packing; a quantization's tensors are found by the
        companions and not by their names alone, so config.json is only needed where shapes
        are ambiguous; and an unknown width is not taken for 4 bits.
        """
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.dtype.value] += tensor.parameters
        return {dtype: count for dtype, count in sorted(counts.items()) if count}

    @property
    def parameters(self) -> int:
        """The number of weights, before packing."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without headers."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per weight, with scales and biases; None without weights."""
        return bits_per_weight(self.nbytes, self.parameters)

    @property
    def quantizations(self) -> tuple[FoundQuantization, ...]:
        """The ways in which weights are quantized, the one of most weights first."""
        groups: defaultdict[tuple[Packing, str], list[int]] = defaultdict(list)
        for tensor in self.tensors:
            if tensor.packing is not None and tensor.format is not None:
                groups[tensor.packing, tensor.format].append(tensor.parameters)
        rows = [
            FoundQuantization(kind.kind, kind.bits, kind.group_size, form, len(each), sum(each))
            for (kind, form), each in groups.items()
        ]
        return tuple(sorted(rows, key=lambda one: (-one.parameters, one.type, one.format)))

    @property
    def modelspec(self) -> dict[str, str]:
        """The metadata's fields of ModelSpec by name, without ``modelspec.``, sorted."""
        return {
            key.removeprefix(MODELSPEC): value
            for key, value in sorted(self.metadata.items())
            if key.startswith(MODELSPEC)
        }

    def only(self, globs: Sequence[str]) -> Inspection:
        """Return the same with only those tensors whose name, or a stored part's, a glob matches.

        ``*``, ``?``, ``[abc]`` and ``[!abc]`` as in a shell; ``*`` matches dots, the case of
        letters counts. Headers and the index keep the entries of these tensors.
        """
        chosen = [
            tensor
            for tensor in self.tensors
            if any(
                fnmatchcase(name, glob) for glob in globs for name in (tensor.name, *tensor.parts)
            )
        ]
        names = {part for tensor in chosen for part in tensor.parts}
        files = []
        for file in self.files:
            entries = {key: entry for key, entry in file.header.tensors.items() if key in names}
            files.append(replace(file, header=replace(file.header, tensors=entries)))
        index = self.index
        if index is not None:
            index = {
                **index,
                "weight_map": {
                    key: file for key, file in index["weight_map"].items() if key in names
                },
            }
        return replace(self, tensors=tuple(chosen), files=tuple(files), index=index)


# The dots of a name that branch: a name may have a hundred thousand.
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of a tree: modules that are alike, with all tensors below them, or one tensor."""

    KEYS = ("depth", "name", "alike", "types", "shape", "parameters", "size=nbytes")

    depth: int
    name: str
    alike: Annotated[int, "how many modules in each of the parents"]
    tensors: list[Any]
    shape: Annotated[tuple[int, ...] | None, "of a tensor"]

    @property
    def types(self) -> Annotated[list[str], "of most weights first"]:
        return [kind for kind, _ in weights_by_type(self.tensors).most_common()]

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def nbytes(self) -> Annotated[int, "with scales and biases"]:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(slots=True, eq=False)
class _Node:
    """A module, a tensor, or both. ``form`` is equal for nodes that are alike."""

    children: dict[str, _Node] = field(default_factory=dict)
    own: list[Any] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    form: int = 0


def tree_of(tensors: Iterable[Any], depth: int | None = None) -> Iterator[Branch]:
    """Yield the branches of a tree, each after its parent, in the order of the tensors.

    A tensor is an object with ``name``, ``type_name`` and ``shape``. ``depth``: how many levels;
    None for all.
    A module with only one child is shown with it on one line: ``model.layers``.
    """
    root = _Node()
    for tensor in tensors:
        node = root
        for part in tensor.name.split(".", _MAX_DEPTH - 1):
            node = node.children.setdefault(part, _Node())
            node.tensors.append(tensor)
        node.own.append(tensor)
    _number_forms(root, {})
    yield from _branches([root], 0, _MAX_DEPTH if depth is None else depth)


def _number_forms(node: _Node, forms: dict[tuple[object, ...], int]) -> None:
    for child in node.children.values():
        _number_forms(child, forms)
    own = tuple((tensor.type_name, tensor.shape) for tensor in node.own)
    form = (own, *((name, node.children[name].form) for name in sorted(node.children)))
    node.form = forms.setdefault(form, len(forms))


def _branches(alike: list[_Node], depth: int, levels: int) -> Iterator[Branch]:
    """Yield the branches below nodes that are alike, each child together with its like."""
    if depth >= levels:
        return
    for name, nodes in _group(alike):
        label, inner = name, nodes
        while len(inner[0].children) == 1 and not inner[0].own:
            (child,) = inner[0].children
            if _is_number(child):
                break
            label, inner = f"{label}.{child}", [node.children[child] for node in inner]
        first = inner[0]
        shape = first.own[0].shape if len(first.own) == 1 and not first.children else None
        tensors = [tensor for node in inner for tensor in node.tensors]
        yield Branch(depth, label, len(nodes) // len(alike), tensors, shape)
        yield from _branches(inner, depth + 1, levels)


def _group(alike: list[_Node]) -> Iterator[tuple[str, list[_Node]]]:
    """Yield the children of nodes that are alike by name; numbered ones that are alike together."""
    groups: dict[object, list[str]] = {}
    for name, child in alike[0].children.items():
        groups.setdefault(child.form if _is_number(name) else name, []).append(name)
    for names in groups.values():
        label = names[0] if len(names) == 1 else _ranges(sorted(map(int, names)))
        yield label, [node.children[name] for node in alike for name in names]


def _is_number(name: str) -> bool:
    is_short = len(name) <= 9  # noqa: PLR2004  # longer ones are hashes
    return is_short and name.isascii() and name.isdigit()


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as a person writes them: ``0-3,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
