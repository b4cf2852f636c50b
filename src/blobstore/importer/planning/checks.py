"""Checks of a plan: every name is there once, every blob can be read back, what was asked can be done. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from blobstore.errors import CorruptDataError, UnsupportedSourceError, UsageError, quoted
from blobstore.importer.options import ImportOptions
from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.importer.policies.policy import Policy
from blobstore.importer.policies.rules import NameIndex, RuleBook
from blobstore.safetensors import Header
from blobstore.source.weights import named_twice
from blobstore.stored import stored_tensors


def check_names(blobs: Iterable[PlannedBlob]) -> None:
    """Raise UnsupportedSourceError when two blobs or two stored arrays would have one name."""
    blob_names: set[str] = set()
    array_names: dict[str, OutputTensor] = {}
    for blob in blobs:
        for tensor in blob.tensors:
            for name in (tensor.name + part.suffix for part in tensor.parts):
                if name in array_names:
                    raise named_twice(name, array_names[name].sources[0], tensor.sources[0])
                array_names[name] = tensor
        if blob.name in blob_names:
            raise UnsupportedSourceError(f"two blobs would have the name {quoted(blob.name)}", blob=blob.name)
        blob_names.add(blob.name)


def check_readable(blobs: Iterable[PlannedBlob]) -> None:
    """Raise when a blob would be read back as other tensors: U32 values beside a ``.scale`` look like quantized codes."""
    for blob in blobs:
        planned = {tensor.name: (tensor.quantization, tensor.transposed) for tensor in blob.tensors}
        try:
            header = Header(blob.entries, blob.metadata, len(blob.header))
            header.check_limits(f"blob {blob.name[:80]}")
            read = {tensor.name: (tensor.quantization, tensor.transposed) for tensor in stored_tensors(header)}
        except CorruptDataError as error:
            raise UnsupportedSourceError(f"{blob.name!r} could not be read back: {error}", tensor=error.tensor) from None
        if read != planned:
            name = min(name for name in planned | read if planned.get(name) != read.get(name))
            raise UnsupportedSourceError(f"{name!r} would be read back as part of a quantized tensor", tensor=name)


def check_quantizable(blobs: tuple[PlannedBlob, ...], options: ImportOptions, policy: Policy | None) -> None:
    """Raise UsageError when a type was asked, some tensor is of the kind that gets it, and the groups divide none."""
    tensors = [tensor for blob in blobs for tensor in blob.tensors]
    if policy is None or options.quant_type is None or any(tensor.quantization is not None for tensor in tensors):
        return
    book = RuleBook(options.rules)
    for tensor in tensors:
        if book.rule_for(tensor.name) is not None:
            continue  # kept because a rule says so
        quant_type = policy.base_type(tensor.name)
        if policy.wants(tensor.name, tensor.shape) and not options.fits(quant_type, tensor.shape):
            raise UsageError(
                f"nothing can be quantized to {options.quant_type}: the rows of {tensor.name!r} {list(tensor.shape)} are "
                f"not a multiple of {options.row_divisor(quant_type)}",
                tensor=tensor.name,
            )


def check_rules(blobs: Iterable[PlannedBlob], options: ImportOptions) -> None:
    """Raise UsageError for a rule that no tensor follows: none has such a name, or none of those can be quantized."""
    tensors = {tensor.name: tensor for blob in blobs for tensor in blob.tensors}
    names = NameIndex(tensors) if options.rules else None
    for rule in options.rules:
        named = [tensors[name] for name in names.matching(rule)] if names is not None else []
        if not named:
            raise UsageError(
                f"no tensor's name matches the rule {quoted(str(rule))}",
                hint="`blobstore plan SOURCE` shows the names.",
            )
        if rule.quant_type is not None and not any(options.can_follow(rule, tensor.dtype, tensor.shape) for tensor in named):
            tensor = named[0]
            raise UsageError(
                f"the rule {quoted(str(rule))} is for nothing that can be quantized so: {quoted(tensor.name)} is "
                f"{tensor.dtype} {list(tensor.shape)}",
                tensor=tensor.name,
            )
