"""Groups of experts, and the checks of a plan. Pure.

The weights of a mixture's experts have two forms (docs/formats.md section 2). *Packed*: all tensors
under a group's prefix lie in one blob, under their own names. *Stacked*: the numbered experts'
weights of one projection become one tensor ``[experts, out, in]``.

The checks: names are unique, every blob can be read back, rules and types can be followed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blobstore.errors import (
    CorruptDataError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats.checkpoint import GROUP
from blobstore.formats.safetensors.header import Header
from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.importer.policies.options import ImportOptions
from blobstore.importer.policies.policy import Policy
from blobstore.importer.policies.rules import RuleBook
from blobstore.source.weights import SourceWeight, named_twice
from blobstore.store.stored import stored_tensors

_NUMBERED = re.compile(r"(?P<expert>[0-9]+)\.(?P<projection>.+)", re.ASCII | re.DOTALL)

_MAX_DIGITS = 9
_LONG_NAME = 10_000
"""Characters from which on the name of an array may be beyond `Header.check_limits`."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of a group's numbered experts: ``weights[e]`` is expert e's.

    All have one dtype and shape.
    """

    name: str
    weights: tuple[SourceWeight, ...]


def stacked_group_of(name: str) -> str | None:
    """Return the group prefix of a numbered expert's weight, which may be stacked, or None."""
    match = GROUP.fullmatch(name)
    return (
        match["group"]
        if match and name.endswith(".weight") and _NUMBERED.fullmatch(match["rest"])
        else None
    )


def packed_order(group: str, weights: Iterable[SourceWeight]) -> list[SourceWeight]:
    """Return a group's weights by expert number, then by projection name.

    Unnumbered ones after them.

    The numbers have passed `projections`.
    """

    def key(weight: SourceWeight) -> tuple[float, str]:
        rest = weight.name[len(group) + 1 :]
        match = _NUMBERED.fullmatch(rest)
        return (int(match["expert"]), match["projection"]) if match else (float("inf"), rest)

    return sorted(weights, key=key)


def projections(
    group: str, weights: Iterable[SourceWeight], *, one_type: bool = True
) -> list[Projection]:
    """Return the numbered experts of a group by projection, sorted by projection name.

    Unnumbered weights are ignored.

    Raises: UnsupportedSourceError when a number is written in another way than "12", when a
    projection has not the same experts 0 to N-1 as the others, or when experts of one projection
    differ in shape, or, of ``one_type``, in dtype or quantization.
    """
    by_projection: dict[str, dict[int, SourceWeight]] = defaultdict(dict)
    for weight in weights:
        match = _NUMBERED.fullmatch(weight.name[len(group) + 1 :])
        if match is None:
            continue
        if len(match["expert"]) > _MAX_DIGITS or str(int(match["expert"])) != match["expert"]:
            raise UnsupportedSourceError(
                f"{quoted(weight.name)} has no plain expert number", tensor=weight.name
            )
        by_projection[match["projection"]][int(match["expert"])] = weight
    _check_numbers(group, by_projection)
    result = [
        Projection(name, tuple(experts[number] for number in sorted(experts)))
        for name, experts in sorted(by_projection.items())
    ]
    for projection in result:
        _check_layout(group, projection, one_type=one_type)
    return result


def _check_numbers(group: str, by_projection: Mapping[str, Mapping[int, SourceWeight]]) -> None:
    count = max((max(experts) + 1 for experts in by_projection.values()), default=0)
    for name, experts in sorted(by_projection.items()):
        # The first gap is within the first len(experts) + 1 numbers, however large the largest one
        # is.
        missing = next((number for number in range(count) if number not in experts), None)
        if missing is not None:
            raise UnsupportedSourceError(
                f"the expert group {group} has no {group}.{missing}.{name}: "
                f"experts 0 to {count - 1} must all be there",
                tensor=f"{group}.{missing}.{name}",
            )


def _check_layout(group: str, projection: Projection, *, one_type: bool) -> None:
    first = projection.weights[0]
    for weight in projection.weights:
        if weight.shape != first.shape or (one_type and weight.layout != first.layout):
            raise UnsupportedSourceError(
                f"experts of {group} differ: {first.name} is {_described(first)}, "
                f"{weight.name} is {_described(weight)} "
                f"({weight.file.path})",
                tensor=weight.name,
                path=weight.file.path,
            )


def _described(weight: SourceWeight) -> str:
    return f"{weight.quantization or weight.tensor.dtype} {list(weight.shape)}"


def check_names(blobs: Iterable[PlannedBlob]) -> None:
    """Raise UnsupportedSourceError when two blobs or two stored arrays would have one name."""
    blobs = tuple(blobs)
    tensors = {tensor.name for blob in blobs for tensor in blob.tensors}
    # No suffix ends in another: arrays of one name are of two tensors of one name, or are a tensor
    # and another one's companion.
    is_unique = len(tensors) == sum(len(blob.tensors) for blob in blobs) and not any(
        tensor.name + part.suffix in tensors
        for blob in blobs
        for tensor in blob.tensors
        for part in tensor.stored.companions
    )
    if not is_unique or len({blob.name for blob in blobs}) < len(blobs):
        _find_equal_names(blobs)


def _find_equal_names(blobs: Iterable[PlannedBlob]) -> None:
    """Raise the error of the first blob with a name that another has."""
    blob_names: set[str] = set()
    array_names: dict[str, OutputTensor] = {}
    for blob in blobs:
        for tensor in blob.tensors:
            for name in (tensor.name + part.suffix for part in tensor.parts):
                if name in array_names:
                    raise named_twice(name, array_names[name].sources[0], tensor.sources[0])
                array_names[name] = tensor
        if blob.name in blob_names:
            raise UnsupportedSourceError(
                f"two blobs would have the name {quoted(blob.name)}", blob=blob.name
            )
        blob_names.add(blob.name)


def check_readable(blobs: Iterable[PlannedBlob]) -> None:
    """Raise UnsupportedSourceError when a blob would be read back as other tensors.

    U32 values beside a ``.scale`` look like quantized codes. How a blob of one tensor is read does
    not depend on its name, nor that of a group of experts on the group's: one of each kind is
    checked.
    """
    seen: set[object] = set()
    for blob in blobs:
        kind = _kind(blob)
        if kind is None or kind not in seen:
            _check_readable(blob)
            seen.add(kind)


def _kind(blob: PlannedBlob) -> object:
    """Return what decides how a blob is read; None if names do, too."""
    # Metadata with a dot in their key are about a tensor, and long names may be beyond a limit.
    is_long = any(len(one.name) > _LONG_NAME for one in blob.tensors)
    return None if is_long or any("." in key for key in blob.metadata) else blob.pattern


def _check_readable(blob: PlannedBlob) -> None:
    planned = {tensor.name: (tensor.quantization, tensor.transposed) for tensor in blob.tensors}
    try:
        header = Header(blob.entries, blob.metadata, len(blob.header))
        header.check_limits(f"blob {blob.name[:80]}")
        read = {
            tensor.name: (tensor.quantization, tensor.transposed)
            for tensor in stored_tensors(header)
        }
    except CorruptDataError as error:
        raise UnsupportedSourceError(
            f"{blob.name!r} could not be read back: {error}", tensor=error.tensor
        ) from None
    if read != planned:
        name = min(name for name in planned | read if planned.get(name) != read.get(name))
        raise UnsupportedSourceError(
            f"{name!r} would be read back as part of a quantized tensor", tensor=name
        )


def check_quantizable(
    blobs: tuple[PlannedBlob, ...], options: ImportOptions, policy: Policy | None
) -> None:
    """Raise UsageError when the groups of the asked type divide none of the wanted tensors."""
    tensors = [tensor for blob in blobs for tensor in blob.tensors]
    if (
        policy is None
        or options.quant_type is None
        or any(tensor.quantization is not None for tensor in tensors)
    ):
        return
    book = RuleBook(options.rules)
    for tensor in tensors:
        if book.rule_for(tensor.name) is not None:
            continue  # kept because a rule says so
        quant_type = policy.base_type(tensor.name)
        if policy.wants(tensor.name, tensor.shape) and not options.fits(quant_type, tensor.shape):
            divisor = options.row_divisor(options.quantization(quant_type))
            raise UsageError(
                f"nothing can be quantized to {options.quant_type}: the rows of {tensor.name!r} "
                f"{list(tensor.shape)} are not a multiple of {divisor}",
                tensor=tensor.name,
            )


def check_rules(blobs: Iterable[PlannedBlob], options: ImportOptions) -> None:
    """Raise UsageError for a rule that no tensor follows, by its name or because of its rows."""
    if not options.rules:
        return
    tensors = {tensor.name: tensor for blob in blobs for tensor in blob.tensors}
    for rule in options.rules:
        named = [tensors[name] for name in rule.matching(tensors)]
        if not named:
            raise UsageError(
                f"no tensor's name matches the rule {quoted(str(rule))}",
                hint="`blobstore plan SOURCE` shows the names.",
            )
        if rule.quant_type is not None and not any(
            options.can_follow(rule, tensor.dtype, tensor.shape) for tensor in named
        ):
            tensor = named[0]
            raise UsageError(
                f"the rule {quoted(str(rule))} is for nothing that can be quantized so: "
                f"{quoted(tensor.name)} is "
                f"{tensor.dtype} {list(tensor.shape)}",
                tensor=tensor.name,
            )
