"""Origin: what ``blobstore.json`` says about the files that a model was imported from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from blobstore.documents import MAX_DOCUMENT, Document, validated
from blobstore.strictjson import parse_object

OWN_DOCUMENT = "blobstore.json"
_RULE = "B1"
# How other programs call the codes of X.weight: compressed-tensors, gpt-oss (source/producers.py).
_OTHER_NAMES = (("", "_packed"), (".weight", "_blocks"))


class _File(Document):
    name: str
    metadata: dict[str, str]
    tensors: list[str]


class _Draft(Document):
    sources: list[_File]


class _OwnDocument(Document):
    version: Literal[1]
    sources: list[_File]
    draft: _Draft | None = None


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
        return {key: found[key] for key in found if key not in unequal and not self._describes(key)}, unequal

    def _describes(self, key: str) -> bool:
        owner, _, what = key.rpartition(".")
        return what in ("quant_type", "group_size", "transposed") and (not owner or owner in self)


def read_origins(raw: bytes | None) -> tuple[Origin, Origin]:
    """Return the origins of a model and of its draft model, from the bytes of blobstore.json or None.

    Raises: DocumentError (rule B1) when it is none; LimitExceededError.
    """
    if raw is None:
        return Origin(), Origin()
    fields = parse_object(raw, OWN_DOCUMENT, rule=_RULE, limit=MAX_DOCUMENT)
    document = validated(_OwnDocument, fields, OWN_DOCUMENT, _RULE)
    return _origin(document.sources), _origin(document.draft.sources if document.draft is not None else ())


def source_names(raw: bytes | None) -> frozenset[str] | None:
    """Return the names of a source's tensors, from the bytes of blobstore.json; None where they are not known.

    Raises: as `read_origins`.
    """
    origin, _ = read_origins(raw)
    return frozenset(name for file in origin.files for name in file.tensors) or None


def _origin(files: Iterable[_File]) -> Origin:
    return Origin.of(SourceFile(file.name, file.metadata, tuple(file.tensors)) for file in files)
