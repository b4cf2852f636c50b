"""Options: what a user asks of an import, checked once.

Profiles: presets of what an import writes, ours and Ollama's (docs/formats.md). Values.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from blobstore.errors import UsageError
from blobstore.formats.dtypes import DType
from blobstore.formats.modelfile import Modelfile, resolve_path
from blobstore.formats.modelfile_commands import MAX_MODELFILE, parse_parameters
from blobstore.formats.quant import Quantization, QuantType
from blobstore.importer.policies.rules import Importance, PolicyFile, Rule, check_count
from blobstore.io.ranges import FileReader
from blobstore.kernels.scales import check_method


class Experts(enum.Enum):
    """The form of mixture-of-experts weights: one blob of all tensors of a group, or one tensor a projection."""

    PACKED = "packed"
    STACKED = "stacked"


@dataclass(frozen=True, slots=True)
class Profile:
    """A preset of five independent options (docs/design.md, "Glossary"); ``group_sizes`` are int4's and int8's.

    ``aligned_to``: what must divide a row besides its groups. ``unstated_group_sizes``: producers
    whose weights' group size is not in the metadata. ``knows_layouts``: what tensors are, and how
    they lie, goes by the model's architecture too, and not by Ollama's tests of names alone.
    """

    name: str
    group_sizes: dict[QuantType, int]
    aligned_to: dict[QuantType, int]
    experts: Experts
    page_aligned: bool
    own_document: bool
    unstated_group_sizes: frozenset[str]
    knows_layouts: bool


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="default",
            group_sizes={QuantType.INT4: 32, QuantType.INT8: 64},
            aligned_to={},
            experts=Experts.PACKED,
            page_aligned=True,
            own_document=True,
            unstated_group_sizes=frozenset(),
            knows_layouts=True,
        ),
        Profile(
            name="ollama",
            group_sizes={QuantType.INT4: 64, QuantType.INT8: 64},
            # Ollama quantizes int4 and int8 only when 64 divides the rows, whatever the group.
            aligned_to={QuantType.INT4: 64, QuantType.INT8: 64},
            experts=Experts.STACKED,
            page_aligned=False,
            own_document=False,
            # x/create/prequant.go `prequantPatterns`: only compressed-tensors' row has a default.
            unstated_group_sizes=frozenset({"ModelOpt NVFP4"}),
            knows_layouts=False,
        ),
    )
}

PAGE = 16_384
"""Apple's page size, and a multiple of everybody else's."""
_PAGE_ALIGNED_FROM = 2**20
_DEFAULT_ALIGNMENT = 8
_MAX_ALIGNMENT = 2**20
_MATRIX_RANK = 2


PolicyFunction = Callable[[str, tuple[int, ...], str], str | None]
"""Decides of an output tensor by its name, shape and dtype."""


class ImportArguments(TypedDict, total=False):
    """What `plan_import` and `import_model` take, all optional; ``blobstore import --help`` says the same.

    ``quant``: int4, int8, nvfp4, mxfp4, mxfp8, or None to keep the weights. ``group_size``: of that
    type; None is the profile's. ``method``: how scales are chosen, "minmax" or "search".
    ``importance``, for "search": what each input column's squared error counts; a .safetensors
    file, or a mapping, with one vector a tensor, by the source's names. ``global_scale``: nvfp4
    weights get one, a power of two a tensor. ``rules``: texts GLOB=TYPE that decide for output
    tensors of such names, the last one first; ``policy``: a TOML or JSON file of rules, groups and
    method (docs/cli.md), or a function that is asked for each matrix, by name, shape and dtype
    (``"BF16"``), and returns a type, or None to leave it to the rest. ``target_size``: the stored
    bytes, or ``target_bpw``: the bits of tensor data a parameter, that the model is to have at
    most; each tensor gets the type that loses least of what fits (docs/quantization.md, "Targets").
    ``requantize``: dequantize weights that are quantized in the source, and quantize them again.
    ``dtype``: bfloat16, float16 or float32, to convert float weights first. ``profile``: "default"
    or "ollama". ``experts``: "packed" or "stacked"; None is what the architecture needs, else the
    profile's. ``alignment``: of the data in each blob, bytes. ``draft``: a checkpoint whose tensors
    are stored beside the model's as its draft model, quantized to ``draft_quant``. ``modelfile``: a
    Modelfile; ``template``, ``system``, ``licenses`` and ``parameters`` (texts KEY=VALUE) win over
    what it says, licences add up.
    """

    quant: str | None
    group_size: int | None
    method: str | None
    importance: str | os.PathLike[str] | Mapping[str, Any] | None
    global_scale: bool
    rules: Sequence[str]
    policy: str | os.PathLike[str] | PolicyFunction | None
    target_size: int | None
    target_bpw: float | None
    requantize: bool
    dtype: str | None
    profile: str
    experts: str | None
    alignment: int | None
    draft: str | os.PathLike[str] | None
    draft_quant: str | None
    modelfile: str | os.PathLike[str] | None
    template: str | None
    system: str | None
    licenses: Sequence[str]
    parameters: Sequence[str]


@dataclass(frozen=True, slots=True)
class Target:
    """What a model is to be at most, one of both: ``nbytes`` stored for it, or ``bits`` of tensor data a parameter."""

    nbytes: int | None
    bits: float | None

    @classmethod
    def parse(cls, nbytes: int | None, bits: float | None) -> Target | None:
        """Return the target that is given, if one is.

        Raises: UsageError for both, or for none above 0.
        """
        if nbytes is None and bits is None:
            return None
        if nbytes is not None and bits is not None:
            raise UsageError(
                "give one target: a size or bits per weight", hint="Leave out one of the two."
            )
        value = nbytes if nbytes is not None else bits
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise UsageError(
                f"invalid target: {value!r}",
                hint="A size in bytes, or bits per weight such as 4.25.",
            )
        if nbytes is not None and not isinstance(nbytes, int):
            raise UsageError(f"invalid size: {nbytes!r}", hint="Give whole bytes.")
        return cls(nbytes, bits)

    def budget(self, parameters: int) -> int:
        """Return the bytes that a model of so many parameters may have: stored ones, or of tensor data."""
        return self.nbytes if self.nbytes is not None else int((self.bits or 0) * parameters / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """The options of an import, all valid.

    ``group_size`` is the asked type's, ``groups`` are those of any type.

    ``experts`` None is what the architecture needs, else the profile's; ``alignment`` None is the
    profile's. ``source``: the checkpoint that the Modelfile names; ``draft``: the draft's.
    """

    quant_type: QuantType | None = None
    group_size: int | None = None
    groups: Mapping[QuantType, int] = field(default_factory=dict)
    method: str = "minmax"
    importance: Importance | None = None
    global_scale: bool = False
    rules: tuple[Rule, ...] = ()
    decide: PolicyFunction | None = None
    target: Target | None = None
    requantize: bool = False
    dtype: DType | None = None
    profile: Profile = PROFILES["default"]
    experts: Experts | None = None
    alignment: int | None = None
    modelfile: Modelfile = field(default_factory=Modelfile)
    source: Path | None = None
    draft: Path | None = None
    draft_type: QuantType | None = None

    @classmethod
    def parse(cls, **given: Unpack[ImportArguments]) -> ImportOptions:
        """Return options from a user's words.

        ``quant`` None or "none" keeps the weights as they are.

        What is given wins over the policy file; its rules come before those that are given.

        Raises: UsageError for an unknown word, a group size that the type does not have, an option
        that says nothing without another; LimitExceededError for over 1,000 rules with patterns; as
        `PolicyFile.read`, `Importance.parse` and `Modelfile.parse`.
        """
        _check_arguments(given)
        policy = given.get("policy")
        decide = policy if callable(policy) else None
        file = PolicyFile() if policy is None or callable(policy) else PolicyFile.read(policy)
        preset = _profile(given.get("profile", "default"))
        quant = given.get("quant") if given.get("quant") is not None else file.quant
        importance, dtype, experts = (
            given.get("importance"),
            given.get("dtype"),
            given.get("experts"),
        )
        modelfile, folder = _modelfile(given)
        draft = given.get("draft") or (
            modelfile.draft and resolve_path(modelfile.draft, folder, Path.home())
        )
        options = cls(
            quant_type=_type(quant),
            group_size=given.get("group_size"),
            groups=file.groups,
            method=check_method(given.get("method") or file.method or "minmax"),
            importance=None if importance is None else Importance.parse(importance),
            global_scale=given.get("global_scale", False),
            rules=(*file.rules, *map(Rule.parse, given.get("rules", ()))),
            decide=decide,
            target=Target.parse(given.get("target_size"), given.get("target_bpw")),
            requantize=given.get("requantize", False),
            dtype=None if dtype is None else DType.parse_float(dtype),
            profile=preset,
            experts=_experts(experts) if experts is not None else None,
            alignment=_alignment(given.get("alignment")),
            modelfile=modelfile,
            source=resolve_path(modelfile.source, folder, Path.home())
            if modelfile.source is not None
            else None,
            draft=Path(draft) if draft else None,
            draft_type=_type(given.get("draft_quant")),
        )
        options._check()
        return options

    def _check(self) -> None:
        """Raise UsageError when an option says nothing, or a type has no such groups; LimitExceededError for many rules."""
        check_count(self.rules)
        quantizes = bool(self.quant_type or self.target) or any(
            rule.quant_type is not None for rule in self.rules
        )
        if self.group_size is not None and self.quant_type is None:
            raise UsageError(
                "a group size needs a quantization type",
                hint="Add `quant='int4'`, for example; a rule has its own: GLOB=int4/64.",
            )
        if self.importance is not None and not (quantizes and self.method == "search"):
            raise UsageError(
                "importance needs the method search", hint="Add `quant=TYPE` `method='search'`."
            )
        if self.method != "minmax" and not quantizes:
            raise UsageError(
                f"the method {self.method} needs a quantization type",
                hint="Add `quant='int4'`, for example.",
            )
        if self.requantize and not (quantizes or self.draft_type):
            raise UsageError(
                "quantizing again needs a quantization type",
                hint="Add `quant='int4'`, for example.",
            )
        ruled = {rule.quant_type for rule in self.rules}
        if self.global_scale and QuantType.NVFP4 not in {self.quant_type, *ruled}:
            raise UsageError("only nvfp4 has a global scale", hint="Add `quant='nvfp4'`.")
        if self.draft_type is not None and self.draft is None:
            raise UsageError("there is no draft model to quantize", hint="Add `draft=DIR`.")
        if self.quant_type is not None:
            self.quantization(self.quant_type)

    @property
    def of_draft(self) -> ImportOptions:
        """The options of the draft model: its own type, in that type's usual groups."""
        return replace(
            self, quant_type=self.draft_type, group_size=None, importance=None, global_scale=False
        )

    def quantization(self, quant_type: QuantType) -> Quantization:
        """Return the type with the group size in use for it.

        Raises: UsageError when the type has no such groups.
        """
        if quant_type is self.quant_type and self.group_size is not None:
            return Quantization(quant_type, self.group_size)
        usual = self.profile.group_sizes.get(quant_type, quant_type.group_sizes[0])
        return Quantization(quant_type, self.groups.get(quant_type, usual))

    def ruled(self, rule: Rule) -> Quantization | None:
        """Return what a rule asks for, in the groups that it names or else those in use."""
        if rule.quant_type is None:
            return None
        usual = self.quantization(rule.quant_type)
        return usual if rule.group_size is None else Quantization(rule.quant_type, rule.group_size)

    def can_follow(self, rule: Rule, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Return True when a tensor of that dtype and shape can be what the rule asks for."""
        quantization = self.ruled(rule)
        if quantization is None:
            return True
        return dtype.is_float and len(shape) >= _MATRIX_RANK and quantization.divides(shape)

    def row_divisor(self, quant_type: QuantType) -> int:
        """Return what divides the length of a row that can be quantized: a group (in the ollama profile at least 64)."""
        return math.lcm(
            self.quantization(quant_type).group_size, self.profile.aligned_to.get(quant_type, 1)
        )

    def fits(self, quant_type: QuantType, shape: tuple[int, ...]) -> bool:
        """Return True when the rows of ``shape`` can be quantized to the type."""
        return shape[-1] % self.row_divisor(quant_type) == 0

    def misfit(self, quant_type: QuantType, shape: tuple[int, ...]) -> str:
        """Return why rows of ``shape`` can't be quantized to the type."""
        return f"has rows of {shape[-1]:,}, not a multiple of {self.row_divisor(quant_type)}"

    def header_alignment(self, data_size: int) -> int:
        """Return what a blob's data region is aligned to, in bytes, for ``data_size`` bytes of data."""
        if self.alignment is not None:
            return self.alignment
        return (
            PAGE
            if self.profile.page_aligned and data_size >= _PAGE_ALIGNED_FROM
            else _DEFAULT_ALIGNMENT
        )


_LISTS = ("rules", "licenses", "parameters")


def _check_arguments(given: ImportArguments) -> None:
    """Raise UsageError for an option that does not exist, and for a text where a list of texts belongs."""
    if unknown := sorted(given.keys() - ImportArguments.__annotations__.keys()):
        known = ", ".join(ImportArguments.__annotations__)
        raise UsageError(f"an import has no option {unknown[0]!r}", hint=f"It has: {known}.")
    for name in _LISTS:
        value: object = given.get(name) or ()
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
            raise UsageError(f"{name} is {value!r}: it must be a list of texts")


def _type(text: str | None) -> QuantType | None:
    return None if text in (None, "none") else QuantType.parse(str(text))


def _modelfile(given: ImportArguments) -> tuple[Modelfile, Path]:
    """Return the Modelfile with what is given beside it, and the folder that its paths start from."""
    path, modelfile = given.get("modelfile"), Modelfile()
    if path is not None:
        with FileReader(path) as reader:
            modelfile = Modelfile.parse(
                reader.read(0, min(reader.size, MAX_MODELFILE + 1)), reader.name
            )
    modelfile = modelfile.with_options(
        template=given.get("template"),
        system=given.get("system"),
        licenses=given.get("licenses") or (),
        parameters=parse_parameters(given.get("parameters") or ()),
    )
    return modelfile, Path(path).absolute().parent if path is not None else Path()


def _profile(name: str) -> Profile:
    if name not in PROFILES:
        raise UsageError(f"unknown profile {name!r}", hint=f"Use one of: {', '.join(PROFILES)}.")
    return PROFILES[name]


def _experts(text: str) -> Experts:
    try:
        return Experts(text)
    except ValueError:
        raise UsageError(
            f"unknown form of experts {text!r}", hint="Use one of: packed, stacked."
        ) from None


def _alignment(value: int | None) -> int | None:
    if value is not None and (
        not _DEFAULT_ALIGNMENT <= value <= _MAX_ALIGNMENT or value & (value - 1)
    ):
        raise UsageError(
            f"an alignment of {value} is not a power of two from {_DEFAULT_ALIGNMENT} to {_MAX_ALIGNMENT:,}"
        )
    return value
