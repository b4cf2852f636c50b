"""Types of elements, by the names in safetensors' headers, and the quantized forms of weights.

Facts: docs/formats.md section 3. A *group* is ``group_size`` consecutive values of the last
dimension, which share one scale (and, for the affine types, one bias). *Codes* are packed into U32
words, the first code in the lowest bits.

``quantization_config`` of a config.json says how modules were quantized: compressed-tensors has
groups of modules; GPTQ, AWQ and AutoRound have settings for all modules, which those of one may
replace. Sources at each class.

Source: safetensors README, "Format", and safetensors/src/tensor.rs `Dtype` at version 0.8.0. No
numpy here: kernels/arrays.py makes numpy's types of their names.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from blobstore.errors import UsageError


class DType(enum.Enum):
    """An element type; the value is its name in a header.

    One row a type, in the library's order, which is that of their alignment: the name, ``bits`` of
    an element, ``array_name`` in numpy, ml_dtypes and torch (None if they have no packed type), and
    ``mlx_name``, as which MLX loads it (None if it does not; mlx 0.32.4, mlx/io/safetensors.cpp
    `dtype_from_safetensor_str`).
    """

    _value_: str
    bits: int
    array_name: str | None
    mlx_name: str | None

    BOOL = "BOOL", 8, "bool", "bool_"
    F4 = "F4", 4
    F6_E2M3 = "F6_E2M3", 6
    F6_E3M2 = "F6_E3M2", 6
    U8 = "U8", 8, "uint8", "uint8"
    I8 = "I8", 8, "int8", "int8"
    F8_E5M2 = "F8_E5M2", 8, "float8_e5m2"
    F8_E4M3 = "F8_E4M3", 8, "float8_e4m3fn", "uint8"
    F8_E8M0 = "F8_E8M0", 8, "float8_e8m0fnu", "uint8"
    F8_E4M3FNUZ = "F8_E4M3FNUZ", 8, "float8_e4m3fnuz"
    F8_E5M2FNUZ = "F8_E5M2FNUZ", 8, "float8_e5m2fnuz"
    I16 = "I16", 16, "int16", "int16"
    U16 = "U16", 16, "uint16", "uint16"
    F16 = "F16", 16, "float16", "float16"
    BF16 = "BF16", 16, "bfloat16", "bfloat16"
    I32 = "I32", 32, "int32", "int32"
    U32 = "U32", 32, "uint32", "uint32"
    F32 = "F32", 32, "float32", "float32"
    C64 = "C64", 64, "complex64", "complex64"
    F64 = "F64", 64, "float64"
    I64 = "I64", 64, "int64", "int64"
    U64 = "U64", 64, "uint64", "uint64"

    def __new__(
        cls, name: str, bits: int = 0, array_name: str | None = None, mlx_name: str | None = None
    ) -> Self:
        member = object.__new__(cls)
        member._value_ = name
        member.bits = bits
        member.array_name = array_name
        member.mlx_name = mlx_name
        return member

    # By identity: Enum's own hashes the name, in Python, 30 times a tensor of an import.
    __hash__ = object.__hash__

    @classmethod
    def parse_float(cls, text: str) -> DType:
        """Return the float type of a user's word: bfloat16, float16, float32 or a header's name.

        Raises: UsageError for any other word, and for a value that is not a string.
        """
        try:
            return FLOAT_NAMES[text.lower()]
        except (AttributeError, KeyError):
            raise UsageError(
                f"unknown dtype {text!r}", hint="Use one of: bfloat16, float16, float32."
            ) from None

    @property
    def is_float(self) -> bool:
        """True for the types that models are trained in and can be quantized: BF16, F16, F32."""
        return self in FLOATS

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of an array of this type: exact for whole bytes, rounded up for a sub-byte type."""
        return -(-math.prod(shape) * self.bits // 8)

    def __str__(self) -> str:
        return str(self.value)


FLOATS = (DType.BF16, DType.F16, DType.F32)
FP8 = (DType.F8_E4M3, DType.F8_E5M2)
"""The types of 8-bit floats that are decoded."""
FLOAT_NAMES = {
    name: dtype for dtype in FLOATS for name in (dtype.value.lower(), str(dtype.array_name))
}
"""What users call the types of `FLOATS`: bf16, bfloat16 and so on."""
DTYPE_BY_NAME = {dtype.value: dtype for dtype in DType}
"""Header name → DType; a plain dict because the header parser looks up one name a tensor."""


def fits_mlx(dtype: DType, shape: Sequence[int]) -> bool:
    """Return True if MLX has arrays of that dtype and shape."""
    return dtype.mlx_name is not None and max(shape, default=0) <= 2**31 - 1


def parameters_of(shape: Sequence[int]) -> int:
    """Return the number of weights in a tensor of that shape.

    A rank-0 tensor counts 0: it is a setting, not a weight (a mask's value, a scale), and the
    Hub's counts exclude it too. Source: huggingface/huggingface.js@028fe00b
    packages/hub/src/lib/parse-safetensors-metadata.ts.
    """
    return math.prod(shape) if shape else 0


def float_dtype(config: Mapping[str, Any]) -> DType:
    """Return the dtype that config.json names for weights; BF16 where it names none of ours."""
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            with suppress(UsageError):
                return DType.parse_float(str(section.get(key)))
    return DType.BF16


AFFINE_GROUP_SIZES = (32, 64, 128)
_WORD_BITS = 32
_MAX_DIGITS = 9


class QuantType(enum.Enum):
    """A quantized form; the value is Ollama's ``quant_type``.

    One row a type: its name, ``mode``, MLX's word for it, the ``bits`` of a code, and the
    ``group_sizes`` that it can have.
    """

    _value_: str
    mode: str
    bits: int
    group_sizes: tuple[int, ...]

    INT4 = "int4", "affine", 4, AFFINE_GROUP_SIZES
    INT8 = "int8", "affine", 8, AFFINE_GROUP_SIZES
    NVFP4 = "nvfp4", "nvfp4", 4, (16,)
    MXFP4 = "mxfp4", "mxfp4", 4, (32,)
    MXFP8 = "mxfp8", "mxfp8", 8, (32,)

    def __new__(
        cls, name: str, mode: str = "", bits: int = 0, group_sizes: tuple[int, ...] = ()
    ) -> Self:
        member = object.__new__(cls)
        member._value_ = name
        member.mode, member.bits, member.group_sizes = mode, bits, group_sizes
        return member

    __hash__ = object.__hash__  # by identity, as DType's

    @classmethod
    def parse(cls, text: str) -> QuantType:
        """Return the type of a user's word; as in Ollama, q4 and fp4 mean int4, q8 and fp8 int8.

        Raises: UsageError for any other word, and for a value that is not a string.
        """
        try:
            name = text.lower()
            return cls(_ALIASES.get(name, name))
        except (AttributeError, ValueError):
            known = f"Use one of: {', '.join(member.value for member in cls)}."
            # q4_K_M and int3 are other programs' words.
            if bits := re.search(r"(?<![0-9])[2-8](?![0-9])", str(text)):
                known = f"The nearest is int{4 if int(bits[0]) <= 4 else 8}. {known}"  # noqa: PLR2004
            raise UsageError(f"unknown quantization type {text!r}", hint=known) from None

    @property
    def is_affine(self) -> bool:
        """True if values are ``code * scale + bias``; False if small floats times scales."""
        return self.mode == "affine"

    @property
    def eight_bit(self) -> QuantType:
        return QuantType.INT8 if self.is_affine else QuantType.MXFP8

    def __str__(self) -> str:
        return str(self.value)


_ALIASES = {"q4": "int4", "fp4": "int4", "q8": "int8", "fp8": "int8"}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored array of a tensor.

    ``suffix`` is added to the tensor's name: "", ".scale", ".bias", ".global_scale".
    """

    suffix: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one tensor is quantized: a type and a group size that the type can have."""

    quant_type: QuantType
    group_size: int

    def __post_init__(self) -> None:
        if type(self.group_size) is not int or self.group_size not in self.quant_type.group_sizes:
            possible = ", ".join(str(size) for size in self.quant_type.group_sizes)
            raise UsageError(
                f"{self.quant_type} has no group size {self.group_size!r}",
                hint=f"Use one of: {possible}.",
            )

    @staticmethod
    @lru_cache(maxsize=64)
    def parse(quant_type: str, group_size: str | None) -> Quantization:
        """Return the quantization in words; without a group size it is the type's first one.

        Raises: UsageError for an unknown type or a group size that the type does not have.
        """
        parsed = QuantType.parse(quant_type)
        size = group_size or str(parsed.group_sizes[0])
        is_number = size.isascii() and size.isdigit() and len(size) <= _MAX_DIGITS
        return Quantization(parsed, int(size) if is_number else 0)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], prefix: str) -> Quantization:
        """Return the quantization in metadata, whose keys begin with ``prefix``.

        Raises: KeyError without a ``quant_type``; as `parse`.
        """
        return cls.parse(metadata[f"{prefix}quant_type"], metadata.get(f"{prefix}group_size"))

    def divides(self, shape: Sequence[int]) -> bool:
        return len(shape) > 0 and shape[-1] % self.group_size == 0

    def parts(
        self, shape: Sequence[int], dtype: DType, *, global_scale: Sequence[int] | None = None
    ) -> Iterator[Part]:
        """Yield the stored arrays for a source of ``shape`` and float ``dtype``, in stored order.

        The weight is U32 ``[..., cols * bits / 32]``; scale (and bias) are ``[..., cols /
        group_size]``, in the source's dtype for the affine types and U8 bit patterns for the
        others. ``global_scale`` is the shape of a double-scaled tensor's global scale, ``[1]`` or
        ``[]``; None if the tensor does not have one.
        """
        *lead, cols = shape
        groups = (*lead, cols // self.group_size)
        yield Part("", DType.U32, (*lead, cols * self.quant_type.bits // _WORD_BITS))
        yield Part(".scale", dtype if self.quant_type.is_affine else DType.U8, groups)
        if self.quant_type.is_affine:
            yield Part(".bias", dtype, groups)
        if global_scale is not None:
            yield Part(".global_scale", DType.F32, tuple(global_scale))

    def logical_shape(self, weight_shape: Sequence[int]) -> tuple[int, ...]:
        return (*weight_shape[:-1], weight_shape[-1] * _WORD_BITS // self.quant_type.bits)

    def __str__(self) -> str:
        return f"{self.quant_type}/{self.group_size}"


_BITS, _GPTQ_BITS, _AWQ_BITS = range(1, 9), (2, 3, 4, 8), (4,)
_PACKINGS = tuple(f"auto_round{kind}" for kind in ("", ":auto_gptq", ":auto_awq", ":gptqmodel"))
# Targets with at most three repetitions, of one character each: quick for names of that length.
_TARGET = re.compile(
    r"re:(?:[\w^$|().-]|\\[.d])*(?:(?:\.[*+]|\\d\+)(?:[\w^$|().-]|\\[.d])*){0,3}", re.ASCII
)
_LONGEST = 256


@dataclass(frozen=True, slots=True)
class Words:
    """Codes of ``bits`` in 32-bit words, from the lowest bits up.

    The lower ``used`` bits of a word have codes; if that is not all, no code is cut in two.
    `count` returns the words that hold so many codes, `codes` the codes in so many words.
    """

    bits: int
    used: int = _WORD_BITS

    @classmethod
    def of(cls, bits: int) -> tuple[Words, Words]:
        """Return the two ways: dense words, and words of whole codes."""
        return cls(bits), cls(bits, _WORD_BITS - _WORD_BITS % bits)

    def count(self, codes: int) -> int:
        return -(-codes * self.bits // self.used)

    def codes(self, words: int) -> int:
        return words * self.used // self.bits


def has_order(weights: Mapping[str, Any]) -> bool:
    """Return True if settings of compressed-tensors say that columns are permuted."""
    return weights.get("actorder") in (True, "group", "dynamic")


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """How compressed-tensors quantized the weights of some modules as integers.

    ``group_size``: None for a scale for each row (``by_row``) or each matrix. ``targets``: classes
    or paths of modules, or ``re:`` and a regular expression that a path begins with. ``permuted``:
    a tensor says which group each column is in. Sources: vllm-project/compressed-tensors@ac8e2ba8
    quantization/quant_args.py `QuantizationArgs`, utils/match.py `match_name`; 0.12.2
    quantization/lifecycle/initialize.py (a ``weight_g_idx``), lifecycle/forward.py
    `_process_quantization` (what it means). 0.20 has no permuted columns.
    """

    bits: int
    group_size: int | None
    by_row: bool
    symmetric: bool
    targets: tuple[str, ...]
    permuted: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Self | None:
        """Return the group in config.json; None unless it is one of integers."""
        weights, targets = group.get("weights"), group.get("targets")
        if not isinstance(weights, dict) or weights.get("type", "int") != "int":
            return None
        bits, size = weights.get("num_bits", 8), weights.get("group_size")
        strategy = weights.get("strategy") or (
            "channel" if size == -1 else "group" if size else "tensor"
        )
        if type(bits) is not int or bits not in _BITS:
            return None
        in_groups = strategy == "group" and type(size) is int and size > 0
        if not in_groups and strategy not in ("channel", "tensor"):
            return None
        return cls(
            bits,
            size if in_groups else None,
            strategy != "tensor",
            weights.get("symmetric", True) is True,
            tuple(map(str, targets)) if isinstance(targets, list) else (),
            has_order(weights),
        )

    def names(self, module: str) -> bool | None:
        """Return True if a target is the module's path, or a regular expression that matches it.

        None if a target may be the module's class, or is an expression that is not evaluated: only
        those that are quick for every name are.
        """
        expressions = [target for target in self.targets if _TARGET.fullmatch(target)]
        with suppress(re.error):
            if module in self.targets or any(
                re.match(target[3:], module[-_LONGEST:]) for target in expressions
            ):
                return True
            others = {*self.targets} - {*expressions}
            return (
                None if any(target[:1].isupper() or ":" in target for target in others) else False
            )
        return None


@dataclass(frozen=True, slots=True)
class ColumnSettings:
    """How GPTQ, AWQ or AutoRound quantized the weights of a module.

    ``group_size``: None for one scale for each output. ``reason``: why this is not read.
    """

    bits: int
    group_size: int | None
    is_awq: bool = False
    zero_is_less_one: bool = False
    permuted: bool = False
    reason: str | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self | None:
        """Return the settings in config.json; None if bits or group size are missing."""
        bits = said.get("bits", said.get("w_bit"))
        size = said.get("group_size", said.get("q_group_size"))
        if type(bits) is not int or type(size) is not int or (size < 1 and size != -1):
            return None
        method = str(said.get("quant_method"))
        if is_auto := "auto-round" in method:
            method = str(said.get("packing_format", "auto"))
        is_plain = is_auto and method != "auto" and ("gptq" not in method or "gptqmodel" in method)
        is_awq = "awq" in method
        forms = ("gemm",) if is_awq else ("gptq", "gptq_v2")
        form = str(said.get("checkpoint_format", forms[0]))
        version = str(said.get("version", "gemm")).lower()
        reason = None
        if bits not in (_AWQ_BITS if is_awq else _GPTQ_BITS):
            reason = f"{bits} bits of {'AWQ' if is_awq else 'GPTQ'} have no layout of their own"
        elif is_awq and version != "gemm":
            reason = f"AWQ's version {version!r} has another layout"
        elif is_auto and "packing_format" not in said and "backend" in said:
            reason = "config.json does not say its packing_format"  # as older versions
        elif form not in forms:
            reason = f"its checkpoint_format {form!r} has another layout"
        elif said.get("packing_format", _PACKINGS[0]) not in _PACKINGS:
            reason = f"its packing_format {method!r} is unknown"
        is_less_one = not is_plain and form == "gptq"
        groups = size if size > 0 else None
        return cls(bits, groups, is_awq, is_less_one, said.get("desc_act") is True, reason)
