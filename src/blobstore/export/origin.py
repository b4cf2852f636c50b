"""Origin: what ``blobstore.json`` says about the files that a model was imported from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blobstore.provenance import Provenance, RecordedFile
from blobstore.source.classify import FILE_TYPE, FILE_TYPES

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
            origin._places.update((name, (number, place)) for place, name in enumerate(file.tensors))
        return origin

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def place(self, name: str) -> tuple[int, int] | None:
        """Return the number of the file and the place in it of the tensor that became ``name``, or None."""
        others = (name.removesuffix(suffix) + other for suffix, other in _OTHER_NAMES if name.endswith(suffix))
        return next((self._places[one] for one in (name, *others) if one in self._places), None)

    def unpacked(self, name: str) -> str | None:
        """Return the name that a model's own code has for the values of ``name``, if the source had it in gpt-oss's blocks.

        None otherwise. The blocks of ``X`` are rows of outputs; its values are called ``X`` and are ``[..., in, out]``
        (huggingface/transformers@0189b1d0 integrations/mxfp4.py `convert_moe_packed_tensors`, modeling_gpt_oss.py
        `GptOssExperts`, and the checkpoints that are published in BF16).
        """
        base = name.removesuffix(".weight")
        return base if base != name and base + _BLOCKS in self._places and name not in self._places else None

    def metadata_of(self, names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """Return the metadata of the files that the tensors come from, and the keys on which these files differ.

        Such keys are left out. So is what describes tensors that were quantized in the source: the export says that itself.
        When no tensor is known, all files count.
        """
        numbers = sorted({place[0] for name in names if (place := self.place(name)) is not None})
        files = [self.files[number] for number in numbers] or self.files
        found: dict[str, str] = {}
        unequal: set[str] = set()
        for key, value in ((key, value) for file in files for key, value in file.metadata.items()):
            if found.setdefault(key, value) != value:
                unequal.add(key)
        return {key: found[key] for key in found if key not in unequal and not self._describes(key, found[key])}, unequal

    def _describes(self, key: str, value: str) -> bool:
        if key == FILE_TYPE:
            return value in FILE_TYPES
        owner, _, what = key.rpartition(".")
        return what in ("quant_type", "group_size", "transposed") and (not owner or owner in self)


def origins_of(provenance: Provenance) -> tuple[Origin, Origin]:
    """Return the origins of a model and of its draft model; nothing is known of a draft that there is not."""
    return _origin(provenance.sources), _origin(provenance.draft.sources if provenance.draft is not None else ())


def _origin(files: Iterable[RecordedFile]) -> Origin:
    return Origin.of(SourceFile(file.name, file.metadata, tuple(file.tensors)) for file in files)
