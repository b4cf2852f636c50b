"""RulePolicy: a policy that a rule for some tensors makes of another one. Pure.

For each tensor a rule knows one of three things: types to try in turn, of which the first whose groups divide the rows is
taken; `KEEP`, its source's dtype; or None, which leaves it to the other policy.
"""

from __future__ import annotations

from typing import Protocol

from blobstore.importer.options import ImportOptions
from blobstore.importer.policies.policy import Policy, is_matrix, unfit
from blobstore.importer.policies.roles import Roles
from blobstore.quant import Quantization, QuantType

Types = tuple[QuantType, ...]

KEEP: Types = ()
_KEPT = "is kept by its architecture's policy"


class Rule(Protocol):
    """What one architecture decides for itself."""

    def types(self, name: str, asked: QuantType) -> Types | None:
        """Return the types to try in turn, `KEEP`, or None to leave the tensor to the general policy."""


class RulePolicy:
    """A policy that follows a rule, and another policy where the rule leaves a tensor to it.

    What a rule decides holds for weight matrices and stacks of experts of at least 1024 elements, as in the general
    policy. Ollama asks neither there: it would quantize smaller ones, and try to with a bias whose name holds ``.v_proj``.
    """

    def __init__(
        self, rule: Rule, others: Policy, asked: QuantType, options: ImportOptions, roles: Roles, why: str = _KEPT
    ) -> None:
        self._rule = rule
        self._others = others
        self._asked = asked
        self._options = options
        self._roles = roles
        self._why = why

    def wants(self, name: str, shape: tuple[int, ...]) -> bool:
        """See `Policy`."""
        types = self._rule.types(name, self._asked)
        return self._others.wants(name, shape) if types is None else bool(types) and is_matrix(name, shape, self._roles)

    def base_type(self, name: str) -> QuantType:
        """See `Policy`: the last type that is tried."""
        types = self._rule.types(name, self._asked)
        return types[-1] if types else self._others.base_type(name)

    def quantization(self, name: str, shape: tuple[int, ...]) -> Quantization | None:
        """See `Policy`: the first type that fits."""
        types = self._rule.types(name, self._asked)
        if types is None:
            return self._others.quantization(name, shape)
        if not is_matrix(name, shape, self._roles):
            return None
        fitting = (quant_type for quant_type in types if self._options.fits(quant_type, shape))
        return next((self._options.quantization(quant_type) for quant_type in fitting), None)

    def reason(self, name: str, shape: tuple[int, ...]) -> str:
        """See `Policy`."""
        types = self._rule.types(name, self._asked)
        if types is None:
            return self._others.reason(name, shape)
        if not types:
            return self._why
        return unfit(name, shape, self._roles) or self._options.misfit(types[-1], shape)
