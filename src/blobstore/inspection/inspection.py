"""Inspection: what a checkpoint or a stored model holds, from its headers. A value."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from blobstore.inspection.counting import FoundQuantization, LogicalTensor, parameters_by_dtype, quantizations_of
from blobstore.inspection.files import InspectedFile
from blobstore.safetensors import Header

MODELSPEC = "modelspec."
"""What the keys of metadata begin with that follow https://github.com/Stability-AI/ModelSpec."""


class TargetKind(enum.Enum):
    """What was inspected."""

    FILE = "file"
    FOLDER = "folder"
    INDEX = "index"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a target holds. Nothing of it is a weight's value: only headers were read.

    ``name`` is the path, address or model's name; ``files`` are in the order of their names, a stored model's blobs in that
    of its manifest. ``index`` is the shard index's JSON object, None without one. ``tensors`` are the logical ones:
    packed weights with the shape that they stand for. ``metadata`` are the files' ``__metadata__`` where they do not
    contradict each other, a stored model's those of the files that it was imported from. ``notes`` are sentences: what to
    know about it.
    """

    name: str
    kind: TargetKind
    files: tuple[InspectedFile, ...]
    index: Mapping[str, Any] | None
    tensors: tuple[LogicalTensor, ...]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def sharded(self) -> bool:
        """Whether the tensors lie in several files, or in one that an index names; a stored model's always do."""
        return self.index is not None or len(self.files) != 1 or self.kind is TargetKind.MODEL

    @property
    def headers(self) -> dict[str, Header]:
        """The files' headers by file name, as they lie in the files."""
        return {file.name: file.header for file in self.files}

    @property
    def parameter_count(self) -> Mapping[str, int]:
        """The number of weights by the dtype that they are stored in.

        As huggingface.js' ``parameterCount`` (packages/hub/src/lib/parse-safetensors-metadata.ts, August 2026): packed
        weights count as what they stand for, under the dtype of the packed tensor; scales and zero points count nothing,
        nor do tensors of rank 0. It differs where huggingface.js does not look: MLX's words (U32) and Ollama's blobs count
        as what they stand for; what belongs to a quantization is told by what lies beside it and not by its name alone, so
        that it needs no config.json where shapes tell; and a width that nothing says is not taken for 4 bits.
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
        """The fields of ModelSpec in the metadata, by their names without ``modelspec.``, sorted."""
        return {
            key.removeprefix(MODELSPEC): self.metadata[key] for key in sorted(self.metadata) if key.startswith(MODELSPEC)
        }

    def only(self, globs: Sequence[str]) -> Inspection:
        """Return the same with only those tensors of which one of ``globs`` matches the name, or a stored one's.

        ``*``, ``?``, ``[abc]`` and ``[!abc]`` as in a shell; ``*`` matches dots, the case of letters counts. Headers and the
        index keep the entries of these tensors.
        """
        chosen = [tensor for tensor in self.tensors if _matches(tensor, globs)]
        names = {part for tensor in chosen for part in tensor.parts}
        files = tuple(_narrowed(file, names) for file in self.files)
        index = self.index
        if index is not None:
            index = {**index, "weight_map": {key: file for key, file in index["weight_map"].items() if key in names}}
        return replace(self, tensors=tuple(chosen), files=files, index=index)


def _matches(tensor: LogicalTensor, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in {tensor.name, *tensor.parts})


def _narrowed(file: InspectedFile, names: set[str]) -> InspectedFile:
    entries = {name: entry for name, entry in file.header.tensors.items() if name in names}
    return replace(file, header=replace(file.header, tensors=entries))
