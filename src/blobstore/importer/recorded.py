"""Recorded: the options of an import, read back from the ``blobstore.json`` that it left, or guessed without it.

Rule B1: its ``options`` are options of an import. Pure; what else it holds is read in provenance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from blobstore.digest import Digest
from blobstore.dtypes import DType
from blobstore.errors import BlobStoreError, DocumentError, quoted
from blobstore.importer.options import ImportOptions
from blobstore.importer.policies.rules import Rule
from blobstore.importer.profiles import PROFILES, Experts
from blobstore.kernels import check_method
from blobstore.provenance import OWN_DOCUMENT, RULE, Provenance
from blobstore.quant import Quantization, QuantType

_METHODS = ("minmax", "search")
_DTYPES = (None, DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True, slots=True)
class RecordedImport:
    """What an import was asked for. ``importance``: the digest of what weighed its search; ``draft``: it had a draft model.

    The options have neither: both are files that the document does not hold.
    """

    options: ImportOptions
    importance: Digest | None
    draft: bool


def recorded_import(raw: bytes) -> RecordedImport:
    """Return what ``blobstore.json`` says. Raises: DocumentError (rule B1), for another version too."""
    provenance = Provenance.parse(raw)
    options, draft = provenance.options or {}, provenance.draft
    try:
        importance = options["importance"]
        draft_type = _optional(QuantType.parse, draft.quant) if draft is not None else None
        return RecordedImport(
            replace(_options(options), draft_type=draft_type),
            None if importance is None else Digest.parse(importance),
            draft is not None,
        )
    except (LookupError, TypeError, ValueError, AttributeError, BlobStoreError) as error:
        raise DocumentError(f"{OWN_DOCUMENT}: no options of an import: {error} (rule {RULE})", rule=RULE) from None


def possible_options(file_type: str | None) -> Iterator[ImportOptions]:
    """Yield what an import may have been asked for, the usual first: for a model whose options are not known any more.

    ``file_type``: what its config blob says; None when that is not known either.
    """
    kinds = [kind for kind in QuantType if file_type in (kind.value, None)]
    for kind, method, dtype, profile in product((*kinds, None), _METHODS, _DTYPES, PROFILES.values()):
        usual = ImportOptions(quant_type=kind, method=method, dtype=dtype, profile=profile)
        if kind is None:
            if method == _METHODS[0]:
                yield usual
            continue
        sizes = (None, *kind.group_sizes) if len(kind.group_sizes) > 1 else (None,)
        for size, requantize in product(sizes, (False, True)):
            yield replace(usual, group_size=size, requantize=requantize)


def _options(given: dict[str, Any]) -> ImportOptions:
    """Return the options of a document. Raises: KeyError, TypeError, ValueError, BlobStoreError for invalid ones."""
    kind = _optional(QuantType.parse, given["quant"])
    group_size = _integer(given["group_size"]) if kind is not None else None
    groups = {QuantType.parse(name): _integer(size) for name, size in given["groups"].items()}
    asked = {kind: group_size} if kind is not None and group_size is not None else {}
    for quant_type, size in (*groups.items(), *asked.items()):
        Quantization(quant_type, size)  # which raises when the type has no such groups
    return ImportOptions(
        quant_type=kind,
        group_size=group_size,
        groups=groups,
        method=check_method(given["method"]),
        global_scale=_boolean(given["global_scale"]),
        rules=tuple(Rule.parse(text) for text in given["rules"]),
        requantize=_boolean(given["requantize"]),
        dtype=_optional(DType.parse_float, given["dtype"]),
        profile=PROFILES[given["profile"]],
        experts=Experts(given["experts"]),
        alignment=_optional(_integer, given["alignment"]),
    )


def _optional(parse: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else parse(value)


def _integer(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise TypeError(f"{quoted(value)} is not a whole number above 0")
    return value


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{quoted(value)} is neither true nor false")
    return value
