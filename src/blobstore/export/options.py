"""What a user asks of an export, and what the import recorded of its source. Pure.

Origin: what ``blobstore.json`` says about the files that a model was imported from. Pure.

What a user asks of an export, checked. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blobstore.errors import UsageError
from blobstore.formats.dtypes import DType
from blobstore.formats.provenance import Provenance, RecordedFile
from blobstore.source.weights import FILE_TYPE, FILE_TYPES

DEFAULT_SHARD = 5_000_000_000
"""huggingface_hub's 5GB (2.4.0 serialization/_base.py ``MAX_SHARD_SIZE``)."""
AS_SOURCE = "source"


class Form(enum.Enum):
    """Whose folder is written: names of quantized tensors as stored, or mlx-lm's."""

    SAFETENSORS = "safetensors"
    MLX = "mlx"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """``dequantize``: the dtype of all floats, or None.

    ``max_shard_size``: bytes; None keeps the source's files.
    """

    form: Form
    dequantize: DType | None
    max_shard_size: int | None

    @classmethod
    def parse(
        cls, form: str, dequantize: str | DType | None, max_shard_size: int | str
    ) -> ExportOptions:
        """Return the options that these words are.

        Raises: UsageError for an unknown word or an invalid size.
        """
        try:
            chosen = Form(form)
        except ValueError:
            raise UsageError(
                f"unknown format {form!r}", hint="Use one of: safetensors, mlx."
            ) from None
        dtype = DType.parse_float(dequantize) if isinstance(dequantize, str) else dequantize
        if dtype is not None and not dtype.is_float:
            raise UsageError(
                f"weights are dequantized to bfloat16, float16 or float32, not {dtype}"
            )
        if max_shard_size == AS_SOURCE:
            if chosen is Form.MLX:
                raise UsageError(
                    "the source's files hold other tensors than mlx-lm's",
                    hint="Give a size, such as 5GB.",
                )
            return cls(chosen, dtype, None)
        if type(max_shard_size) is not int or max_shard_size < 1:
            raise UsageError(
                f"invalid shard size: {max_shard_size!r}",
                hint=f"Give bytes, or {AS_SOURCE!r} for its files.",
            )
        return cls(chosen, dtype, max_shard_size)


_BLOCKS = "_blocks"
# How other programs call the codes of X.weight: compressed-tensors, gpt-oss (source/producers.py).
_OTHER_NAMES = (("", "_packed"), (".weight", _BLOCKS))


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its name, its metadata, the names of its tensors in order."""

    name: str
    metadata: Mapping[str, str]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The files of a source in order; none when nothing is known about it."""

    files: tuple[SourceFile, ...] = ()
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Iterable[SourceFile]) -> Origin:
        """Return the origin with these files."""
        origin = cls(tuple(files))
        for number, file in enumerate(origin.files):
            origin._places.update(
                (name, (number, place)) for place, name in enumerate(file.tensors)
            )
        return origin

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def place(self, name: str) -> tuple[int, int] | None:
        """Return the number of the file and the place in it of the tensor that became ``name``, or None."""
        others = (
            name.removesuffix(suffix) + other
            for suffix, other in _OTHER_NAMES
            if name.endswith(suffix)
        )
        return next((self._places[one] for one in (name, *others) if one in self._places), None)

    def unpacked(self, name: str) -> str | None:
        """Return the name that a model's own code has for the values of ``name``, if the source had it in gpt-oss's blocks.

        None otherwise. The blocks of ``X`` are rows of outputs; its values are called ``X`` and are
        ``[..., in, out]`` (huggingface/transformers@0189b1d0 integrations/mxfp4.py
        `convert_moe_packed_tensors`, modeling_gpt_oss.py `GptOssExperts`, and the checkpoints that
        are published in BF16).
        """
        base = name.removesuffix(".weight")
        return (
            base
            if base != name and base + _BLOCKS in self._places and name not in self._places
            else None
        )

    def metadata_of(self, names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """Return the metadata of the files that the tensors come from, and the keys on which these files differ.

        Such keys are left out. So is what describes tensors that were quantized in the source: the
        export says that itself. When no tensor is known, all files count.
        """
        numbers = sorted({place[0] for name in names if (place := self.place(name)) is not None})
        files = [self.files[number] for number in numbers] or self.files
        found: dict[str, str] = {}
        unequal: set[str] = set()
        for key, value in ((key, value) for file in files for key, value in file.metadata.items()):
            if found.setdefault(key, value) != value:
                unequal.add(key)
        return {
            key: found[key]
            for key in found
            if key not in unequal and not self._describes(key, found[key])
        }, unequal

    def _describes(self, key: str, value: str) -> bool:
        if key == FILE_TYPE:
            return value in FILE_TYPES
        owner, _, what = key.rpartition(".")
        return what in ("quant_type", "group_size", "transposed") and (not owner or owner in self)


def origins_of(provenance: Provenance) -> tuple[Origin, Origin]:
    """Return the origins of a model and of its draft model.

    Nothing is known of a draft that there is not.
    """
    return _origin(provenance.sources), _origin(
        provenance.draft.sources if provenance.draft is not None else ()
    )


def _origin(files: Iterable[RecordedFile]) -> Origin:
    return Origin.of(SourceFile(file.name, file.metadata, tuple(file.tensors)) for file in files)
