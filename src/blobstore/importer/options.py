"""Options: what a user asks of an import, checked once.

Profiles: presets of what an import writes, ours and Ollama's (docs/formats.md). Values.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from blobstore.errors import UsageError
from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.formats.modelfile import (
    MAX_MODELFILE,
    Modelfile,
    parse_parameters,
    resolve_path,
)
from blobstore.importer.arguments import ImportArguments, PolicyFunction, SizeTarget
from blobstore.importer.rules import (
    Importance,
    PolicyFile,
    Rule,
    check_count,
    parse_groups,
)
from blobstore.io.durable import read_own
from blobstore.kernels.scales import check_method

_T = TypeVar("_T")


class Experts(enum.Enum):
    """The form of experts: one blob of a group's tensors, or one tensor a projection."""

    PACKED = "packed"
    STACKED = "stacked"


@dataclass(frozen=True, slots=True)
class Profile:
    """A preset of independent options (docs/design.md, "Glossary").

    ``group_sizes`` are those of int4 and int8. ``aligned_to``: what must divide a row besides its
    groups. ``is_ollama``: Ollama's tests of names alone say what tensors are, and not their
    architecture, too; data are not aligned to pages; no document of our own is written.
    """

    name: str
    group_sizes: dict[QuantType, int]
    aligned_to: dict[QuantType, int]
    experts: Experts
    is_ollama: bool


_OLLAMA_GROUPS = {QuantType.INT4: 64, QuantType.INT8: 64}
PROFILES = {
    "default": Profile(
        "default", {QuantType.INT4: 32, QuantType.INT8: 64}, {}, Experts.PACKED, is_ollama=False
    ),
    # Ollama quantizes int4 and int8 only when 64 divides the rows, whatever the group.
    "ollama": Profile("ollama", _OLLAMA_GROUPS, _OLLAMA_GROUPS, Experts.STACKED, is_ollama=True),
}

PAGE = 16_384
"""Bytes of a page on Apple's processors, a multiple of other processors' pages."""
_PAGE_ALIGNED_FROM = 2**20
_DEFAULT_ALIGNMENT = 8
_MAX_ALIGNMENT = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """The options of an import, all valid.

    ``group_size`` is the asked type's, ``groups`` are those of any type.

    ``experts`` None is what the architecture needs, else the profile's; ``alignment`` None is the
    profile's. ``source``: the checkpoint that the Modelfile names; ``adapter``: what is merged
    into it; ``draft``: the draft's; ``config``: the folder with the model's documents.
    """

    quant_type: QuantType | None = None
    group_size: int | None = None
    groups: Mapping[QuantType, int] = field(default_factory=dict)
    method: str = "minmax"
    importance: Importance | None = None
    global_scale: bool = False
    rules: tuple[Rule, ...] = ()
    decide: PolicyFunction | None = None
    target: SizeTarget | None = None
    pure: bool = False
    requantize: bool = False
    dtype: DType | None = None
    profile: Profile = PROFILES["default"]
    experts: Experts | None = None
    alignment: int | None = None
    modelfile: Modelfile = field(default_factory=Modelfile)
    source: str | None = None
    adapter: str | None = None
    draft: str | None = None
    draft_type: QuantType | None = None
    config: str | None = None

    @classmethod
    def parse(cls, **given: Unpack[ImportArguments]) -> ImportOptions:
        """Return options from a user's words.

        What is given wins over the policy file; its rules come before those that are given.

        Raises: UsageError for an unknown word, a group size that the type does not have, an option
        that says nothing without another; LimitExceededError for over 1,000 rules with patterns; as
        `PolicyFile.read`, `Importance.parse` and `Modelfile.parse`.
        """
        _check_arguments(given)
        policy = given.get("policy")
        decide = policy if callable(policy) else None
        file = PolicyFile() if policy is None or callable(policy) else PolicyFile.read(policy)
        words: dict[str, Any] = dict.fromkeys(ImportArguments.__annotations__)
        words.update(quant=file.quant, method=file.method)
        words.update((name, value) for name, value in given.items() if value is not None)
        modelfile, folder = _modelfile(given)
        draft, config = given.get("draft") or _resolve(modelfile.draft, folder), given.get("config")
        adapter = given.get("adapter") or _resolve(modelfile.adapter, folder)
        options = replace(
            cls._of(words),
            groups=file.groups,
            importance=_optional(Importance.parse, given.get("importance")),
            rules=(*file.rules, *map(Rule.parse, given.get("rules") or ())),
            decide=decide,
            target=SizeTarget.parse(given.get("target_size"), given.get("target_bpw")),
            modelfile=modelfile,
            source=_resolve(modelfile.source, folder),
            adapter=os.fspath(adapter) if adapter else None,
            draft=os.fspath(draft) if draft else None,
            draft_type=_type(given.get("draft_quant")),
            config=os.fspath(config) if config else None,
        )
        _check(options)
        return options

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ImportOptions:
        """Return the options of an import from what ``blobstore.json`` keeps of them.

        The values of importance are not among them: their digest is ``record["importance"]``.

        Raises: KeyError, TypeError, ValueError, AttributeError, BlobStoreError for invalid ones.
        """
        options = replace(
            cls._of(record),
            groups=parse_groups(record["groups"]),
            rules=tuple(map(Rule.parse, record["rules"])),
            experts=_experts(record["experts"]),
        )
        for key, value in options.record.items():
            if record[key] != value and key != "importance":
                raise ValueError(f"{key} is not what an import records")
        return options

    @property
    def record(self) -> dict[str, Any]:
        kind = _optional(self.quantization, self.quant_type)
        groups = sorted((kind.value, size) for kind, size in self.groups.items())
        return {
            "quant": kind and kind.quant_type.value,
            "group_size": kind and kind.group_size,
            "groups": dict(groups),
            "method": self.method,
            "importance": self.importance and str(self.importance.digest),
            "global_scale": self.global_scale,
            "rules": [str(rule) for rule in self.rules],
            **({"pure": True} if self.pure else {}),
            "requantize": self.requantize,
            "dtype": self.dtype and self.dtype.value,
            "profile": self.profile.name,
            "experts": self.experts and self.experts.value,
            "alignment": self.alignment,
        }

    @classmethod
    def _of(cls, words: Mapping[str, Any]) -> ImportOptions:
        return cls(
            quant_type=_type(words["quant"]),
            group_size=words["group_size"],
            method=check_method(words["method"] or "minmax"),
            global_scale=bool(words["global_scale"]),
            pure=bool(words.get("pure")),
            requantize=bool(words["requantize"]),
            dtype=_optional(DType.parse_float, words["dtype"]),
            profile=_profile(words["profile"] or "default"),
            experts=_optional(_experts, words["experts"]),
            alignment=_optional(_alignment, words["alignment"]),
        )

    @property
    def of_draft(self) -> ImportOptions:
        return replace(
            self, quant_type=self.draft_type, group_size=None, importance=None, global_scale=False
        )

    def quantization(self, quant_type: QuantType) -> Quantization:
        """Return the type with the group size in use for it.

        Raises: UsageError when the type has no such groups.
        """
        if quant_type is self.quant_type and self.group_size is not None:
            return _quantization(quant_type, self.group_size)
        usual = self.profile.group_sizes.get(quant_type, quant_type.group_sizes[0])
        return _quantization(quant_type, self.groups.get(quant_type, usual))

    def quantization_of(self, rule: Rule) -> Quantization | None:
        """Return what a rule asks for, in the groups that it names or else those in use."""
        if rule.quant_type is None:
            return None
        usual = self.quantization(rule.quant_type)
        return usual if rule.group_size is None else Quantization(rule.quant_type, rule.group_size)

    def can_follow(self, rule: Rule, dtype: DType, shape: tuple[int, ...]) -> bool:
        quantization = self.quantization_of(rule)
        if quantization is None:
            return True
        return dtype.is_float and len(shape) > 1 and quantization.divides(shape)

    def global_scale_of(self, quantization: Quantization) -> tuple[int, ...] | None:
        return (1,) if self.global_scale and quantization.quant_type is QuantType.NVFP4 else None

    def importance_of(self, name: str) -> Any:
        return None if self.importance is None else self.importance.vectors.get(name)

    def row_divisor(self, quantization: Quantization) -> int:
        """Return the number that must divide the length of a row: the group size.

        In the ollama profile it is at least 64 for int4 and int8.
        """
        return math.lcm(
            quantization.group_size, self.profile.aligned_to.get(quantization.quant_type, 1)
        )

    def fits(self, quant_type: QuantType, shape: tuple[int, ...]) -> bool:
        return shape[-1] % self.row_divisor(self.quantization(quant_type)) == 0

    def misfit(self, quant_type: QuantType, shape: tuple[int, ...]) -> str:
        divisor = self.row_divisor(self.quantization(quant_type))
        return f"has rows of {shape[-1]:,}, not a multiple of {divisor}"

    def header_alignment(self, data_size: int) -> int:
        if self.alignment is not None:
            return self.alignment
        is_large = not self.profile.is_ollama and data_size >= _PAGE_ALIGNED_FROM
        return PAGE if is_large else _DEFAULT_ALIGNMENT


# One value for all tensors of a type and a group size.
_quantization = lru_cache(maxsize=64)(Quantization)


def _check(options: ImportOptions) -> None:
    """Raise UsageError for an option that another makes useless, or groups that a type can't have.

    Raises: LimitExceededError for many rules.
    """
    check_count(options.rules)
    quantizes = bool(options.quant_type or options.target) or any(
        rule.quant_type is not None for rule in options.rules
    )
    kinds = {options.quant_type, *(rule.quant_type for rule in options.rules)}
    example = 'Add quant="int4", for example.'
    for is_wrong, message, hint in (
        (
            options.group_size is not None and options.quant_type is None,
            "a group size needs a quantization type",
            example[:-1] + "; a rule has its own: GLOB=int4/64.",
        ),
        (
            options.importance is not None and not (quantizes and options.method == "search"),
            "importance needs the method search",
            'Add quant=TYPE and method="search".',
        ),
        (
            options.method != "minmax" and not quantizes,
            f"the method {options.method} needs a quantization type",
            example,
        ),
        (
            options.requantize and not (quantizes or options.draft_type),
            "requantize needs a quantization type",
            example,
        ),
        (
            options.pure and options.quant_type is None,
            "pure needs a quantization type",
            example,
        ),
        (
            options.pure and options.target is not None,
            "pure can't be used with a target, which chooses each tensor's type",
            "Leave out one of the two.",
        ),
        (
            options.global_scale and QuantType.NVFP4 not in kinds,
            "only nvfp4 has a global scale",
            'Add quant="nvfp4".',
        ),
        (
            options.draft_type is not None and options.draft is None,
            "draft_quant is for a draft model, which is missing",
            "Add draft=DIR.",
        ),
    ):
        if is_wrong:
            raise UsageError(message, hint=hint)
    if options.quant_type is not None:
        options.quantization(options.quant_type)


def _check_arguments(given: ImportArguments) -> None:
    if unknown := sorted(given.keys() - ImportArguments.__annotations__.keys()):
        raise UsageError(
            f"unknown import option {unknown[0]!r}",
            hint=f"Use one of: {', '.join(ImportArguments.__annotations__)}.",
        )
    lists = {name: given.get(name) or () for name in ("rules", "licenses", "parameters")}
    for name, value in lists.items():
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
            raise UsageError(f"{name} is {value!r}: it must be a list of texts")


def _optional(parse: Callable[[Any], _T], value: Any) -> _T | None:
    return None if value is None else parse(value)


def _type(text: str | None) -> QuantType | None:
    return None if text in (None, "none") else QuantType.parse(str(text))


def _modelfile(given: ImportArguments) -> tuple[Modelfile, Path]:
    path, modelfile, folder = given.get("modelfile"), Modelfile(), Path()
    if path is not None:
        folder = Path(path).absolute().parent
        modelfile = Modelfile.parse(read_own(path, MAX_MODELFILE, follow=True), os.fspath(path))
    return modelfile.with_options(
        given.get("template"),
        given.get("system"),
        given.get("licenses") or (),
        parse_parameters(given.get("parameters") or ()),
    ), folder


def _resolve(path: str | None, folder: Path) -> str | None:
    return resolve_path(path, folder) if path else None


def _parse_word(values: Mapping[str, _T], what: str, word: str) -> _T:
    if word not in values:
        raise UsageError(f"unknown {what} {word!r}", hint=f"Use one of: {', '.join(values)}.")
    return values[word]


_profile = partial(_parse_word, PROFILES, "profile")
_experts = partial(_parse_word, {form.value: form for form in Experts}, "form of experts")


def _alignment(value: int) -> int:
    if not _DEFAULT_ALIGNMENT <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise UsageError(
            f"alignment {value} is not a power of two "
            f"from {_DEFAULT_ALIGNMENT} to {_MAX_ALIGNMENT:,}"
        )
    return value
