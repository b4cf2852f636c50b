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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from blobstore.formats.safetensors.header import Header
from blobstore.inspection.counting import (
    FoundQuantization,
    InspectedFile,
    LogicalTensor,
    parameters_by_dtype,
    quantizations_of,
)


def _header(header: Header) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
    for name, entry in header.tensors.items():
        entries[name] = {
            "dtype": entry.dtype.value,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    return entries


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
    index: Mapping[str, Any] | None
    tensors: tuple[LogicalTensor, ...]
    metadata: Mapping[str, str]
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
        return None if self.sharded else _header(self.files[0].header)

    @property
    def full_index(self) -> Mapping[str, Any] | None:
        """The index when it is sharded, or one made of the files; else None."""
        if self.index is not None or not self.sharded:
            return self.index
        places = {name: file.name for file in self.files for name in file.header.tensors}
        return {"metadata": {"total_size": self.nbytes}, "weight_map": places}

    @property
    def all_headers(self) -> Mapping[str, Any] | None:
        """The headers as JSON by file name when it is sharded, else None."""
        if not self.sharded:
            return None
        return {name: _header(header) for name, header in self.headers.items()}

    @property
    def parameter_count(self) -> Mapping[str, int]:
        """The number of weights by the dtype that they are stored in.

        As huggingface.js' ``parameterCount`` (packages/hub/src/lib/parse-safetensors-metadata.ts,
        August 2026): packed weights count as before packing, under the dtype of the packed tensor;
        scales, zero points and tensors of rank 0 do not count. Three differences: MLX's words (U32)
        and Ollama's blobs count as before packing; a quantization's tensors are found by the
        tensors beside them and not by their names alone, so config.json is only needed where shapes
        are ambiguous; and an unknown width is not taken for 4 bits.
        """
        return parameters_by_dtype(self.tensors)

    @property
    def parameters(self) -> int:
        """The number of weights, before packing."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, headers not included."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits a weight, scales and biases included; None without weights."""
        parameters = self.parameters
        return 8 * self.nbytes / parameters if parameters else None

    @property
    def quantizations(self) -> tuple[FoundQuantization, ...]:
        """The ways in which weights are quantized, the one of most weights first."""
        return quantizations_of(self.tensors)

    @property
    def modelspec(self) -> dict[str, str]:
        """The metadata's fields of ModelSpec by name, without ``modelspec.``, sorted."""
        return {
            key.removeprefix(MODELSPEC): self.metadata[key]
            for key in sorted(self.metadata)
            if key.startswith(MODELSPEC)
        }

    def only(self, globs: Sequence[str]) -> Inspection:
        """Return the same with only those tensors whose name, or a stored part's, a glob matches.

        ``*``, ``?``, ``[abc]`` and ``[!abc]`` as in a shell; ``*`` matches dots, the case of
        letters counts. Headers and the index keep the entries of these tensors.
        """
        chosen = [tensor for tensor in self.tensors if _matches(tensor, globs)]
        names = {part for tensor in chosen for part in tensor.parts}
        files = tuple(_narrowed(file, names) for file in self.files)
        index = self.index
        if index is not None:
            index = {
                **index,
                "weight_map": {
                    key: file for key, file in index["weight_map"].items() if key in names
                },
            }
        return replace(self, tensors=tuple(chosen), files=files, index=index)


def _matches(tensor: LogicalTensor, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in {tensor.name, *tensor.parts})


def _narrowed(file: InspectedFile, names: set[str]) -> InspectedFile:
    entries = {name: entry for name, entry in file.header.tensors.items() if name in names}
    return replace(file, header=replace(file.header, tensors=entries))


_MAX_DEPTH = 32
"""The dots of a name that branch: a name may have a hundred thousand."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of a tree.

    ``alike`` is how many modules it stands for; ``types`` are the weights of each type.
    """

    depth: int
    name: str
    alike: int
    tensors: int
    parameters: int
    nbytes: int
    types: tuple[tuple[str, int], ...]
    shape: tuple[int, ...] | None


@dataclass(slots=True)
class _Node:
    """A module, or a tensor: then it has a shape."""

    children: dict[str, _Node] = field(default_factory=dict)
    own: list[LogicalTensor] = field(default_factory=list)
    form: int = 0
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    types: Counter[str] = field(default_factory=Counter)


def tree_of(tensors: Iterable[LogicalTensor], depth: int | None = None) -> Iterator[Branch]:
    """Yield the branches of a tree, each after its parent, in the order of the tensors.

    ``depth``: how many levels; None for all.
    A module with only one child is shown with it on one line: ``model.layers``.
    """
    root = _Node()
    for tensor in tensors:
        _plant(root, tensor)
    _measure(root, {})
    yield from _branches([root], 0, _MAX_DEPTH if depth is None else depth)


def _plant(root: _Node, tensor: LogicalTensor) -> None:
    node = root
    for part in tensor.name.split(".", _MAX_DEPTH - 1):
        node = node.children.setdefault(part, _Node())
    node.own.append(tensor)


def _measure(node: _Node, forms: dict[tuple[object, ...], int]) -> None:
    """Fill in the sums of a node, and its form: a number that is equal for nodes that are alike."""
    for child in node.children.values():
        _measure(child, forms)
        node.tensors += child.tensors
        node.parameters += child.parameters
        node.nbytes += child.nbytes
        node.types.update(child.types)
    for tensor in node.own:
        node.tensors += 1
        node.parameters += tensor.parameters
        node.nbytes += tensor.nbytes
        node.types[tensor.type_name] += tensor.parameters
    own = tuple((tensor.type_name, tensor.shape, tensor.nbytes) for tensor in node.own)
    form = (own, *((name, node.children[name].form) for name in sorted(node.children)))
    node.form = forms.setdefault(form, len(forms))


def _branches(alike: list[_Node], depth: int, levels: int) -> Iterator[Branch]:
    """Yield the branches below nodes that are alike, each child together with its like."""
    if depth >= levels:
        return
    for name, nodes in _grouped(alike):
        label, inner = name, nodes
        while len(inner[0].children) == 1 and not inner[0].own:
            (child,) = inner[0].children
            if _is_number(child):
                break
            label, inner = f"{label}.{child}", [node.children[child] for node in inner]
        yield _branch(depth, label, len(nodes) // len(alike), inner)
        yield from _branches(inner, depth + 1, levels)


def _grouped(alike: list[_Node]) -> Iterator[tuple[str, list[_Node]]]:
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


def _branch(depth: int, name: str, alike: int, nodes: list[_Node]) -> Branch:
    types: Counter[str] = Counter()
    for node in nodes:
        types.update(node.types)
    first = nodes[0]
    leaf = first.own[0].shape if len(first.own) == 1 and not first.children else None
    return Branch(
        depth=depth,
        name=name,
        alike=alike,
        tensors=sum(node.tensors for node in nodes),
        parameters=sum(node.parameters for node in nodes),
        nbytes=sum(node.nbytes for node in nodes),
        types=tuple(sorted(types.items(), key=lambda item: -item[1])),
        shape=leaf,
    )
