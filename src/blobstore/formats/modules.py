"""Settings of modules: how ``quantization_config`` of a config.json says they were quantized.

compressed-tensors has groups of modules; GPTQ, AWQ and AutoRound have settings for all modules,
which those of one may replace. Sources at each class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

_BITS, _GPTQ_BITS, _AWQ_BITS = range(1, 9), (2, 3, 4, 8), (4,)
_PACKINGS = tuple(f"auto_round{kind}" for kind in ("", ":auto_gptq", ":auto_awq", ":gptqmodel"))
# Targets with at most three repetitions, of one character each: quick for names of that length.
_TARGET = re.compile(
    r"re:(?:[\w^$|().-]|\\[.d])*(?:(?:\.[*+]|\\d\+)(?:[\w^$|().-]|\\[.d])*){0,3}", re.ASCII
)
_LONGEST = 256
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Words:
    """Codes of ``bits`` in 32-bit words, from the lowest bits up.

    The lower ``used`` bits of a word have codes; if that is not all, no code is cut in two.
    """

    bits: int
    used: int = _WORD_BITS

    @classmethod
    def of(cls, bits: int) -> tuple[Words, Words]:
        """Return the two ways: dense words, and words of whole codes."""
        return cls(bits), cls(bits, _WORD_BITS - _WORD_BITS % bits)

    def count(self, codes: int) -> int:
        """Return how many words hold so many codes."""
        return -(-codes * self.bits // self.used)

    def codes(self, words: int) -> int:
        """Return how many codes fit into so many words."""
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
