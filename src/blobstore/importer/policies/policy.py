"""Policy: which type each tensor gets. Pure; the general policy of docs/formats.md section 6 (others: architectures.py).

Source of the facts: ollama/ollama@fb307609 x/create/create.go `GetTensorQuantization`, x/create/quantpolicy.go, and the
recorded plans in fixtures/ollama-records. A policy sees output tensors: stacked experts have rank 3 already.
"""

from __future__ import annotations

import math
from typing import Protocol

from blobstore.importer.options import ImportOptions
from blobstore.importer.policies.roles import NamedRoles, Roles
from blobstore.quant import Quantization, QuantType

_MIN_ELEMENTS = 1024
_SENSITIVE = (".v_proj", ".k_proj", "down_proj")


class Policy(Protocol):
    """Decides the quantization of one output tensor by its name and shape.

    A packed group of experts gets one type: there only `wants` is asked, so that what a policy keeps is kept, and what it
    would promote gets the asked type.
    """

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True when the tensor is one that gets quantized if groups divide its rows."""

    def base_type(self, name: str) -> QuantType:
        """Return the type whose groups must divide the tensor's rows, or it is not quantized at all."""

    def quantization(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """Return the quantization, or None to keep the source's dtype."""

    def reason(self, name: str, shape: tuple[int, ...]) -> str:
        """Return why a tensor that is kept is kept, as the end of a sentence that begins with its name."""


class GeneralPolicy:
    """The policy for architectures without one of their own, for one asked type."""

    def __init__(self, asked: QuantType, options: ImportOptions, roles: Roles | None = None) -> None:
        self._asked = asked
        self._options = options
        self._roles = roles or NamedRoles()

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        """See `Policy`: a weight matrix other than an embedding, norm, gate or part of another modality's tower."""
        return self._roles.kept_as(name, shape) is None and is_matrix(name, shape, self._roles)

    def quantization(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """See `Policy`: the asked type, or 8 bits for the head and the sensitive projections."""
        base = self.base_type(name)
        if not self.wants(name, shape) or not self._options.fits(base, shape):
            return None
        promoted = self._promotes(name, shape) and self._options.fits(base.eight_bit, shape)
        return self._options.quantization(base.eight_bit if promoted else base)

    def base_type(self, name: str) -> QuantType:
        """See `Policy`: 8 bits for the head, else the asked type."""
        return self._asked.eight_bit if name.endswith("lm_head.weight") else self._asked

    def reason(self, name: str, shape: tuple[int, ...]) -> str:
        """See `Policy`."""
        role = self._roles.kept_as(name, shape)
        if role is not None:
            return f"is {role}"
        return unfit(name, shape, self._roles) or self._options.misfit(self.base_type(name), shape)

    def _promotes(self, name: str, shape: tuple[int, ...]) -> bool:
        if not any(word in name for word in _SENSITIVE):
            return False
        return self._asked is QuantType.INT4 or (self._asked.bits == 4 and not self._roles.is_expert(name, shape))  # noqa: PLR2004


def is_matrix(name: str, shape: tuple[int, ...], roles: Roles) -> bool:
    """Return True for a weight matrix, or a stack of experts', of at least 1024 elements."""
    return unfit(name, shape, roles) is None


def unfit(name: str, shape: tuple[int, ...], roles: Roles) -> str | None:
    """Say why a tensor is not a weight matrix, or a stack of experts', of at least 1024 elements; None when it is one."""
    expert = roles.is_expert(name, shape)
    if not (expert or name.endswith(".weight")):
        return "is not called a weight"
    if math.prod(shape) < _MIN_ELEMENTS:
        return f"has fewer than {_MIN_ELEMENTS:,} weights"
    if len(shape) == 2 or (len(shape) == 3 and expert):  # noqa: PLR2004  # a matrix, or a stack of them
        return None
    return f"has {len(shape)} dimensions and is not known as a stack of experts" if len(shape) > 2 else "is not a matrix"  # noqa: PLR2004
