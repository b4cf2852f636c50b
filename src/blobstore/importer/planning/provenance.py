"""``blobstore.json``: what repeats an import and gives the source's files back, written.

And its options, read back. Pure.

No times and no paths are written. The document itself is read in formats/provenance.py; here its
options are read as those of an import (rule B1), or guessed where an early version left none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from blobstore.errors import BlobStoreError, DocumentError, LimitExceededError, quoted
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.coverage import Coverage, Tally
from blobstore.formats.documents import MAX_DOCUMENT
from blobstore.formats.dtypes import DType
from blobstore.formats.provenance import OWN_DOCUMENT, RULE, VERSION, Provenance
from blobstore.formats.quant import Quantization, QuantType
from blobstore.importer.policies.options import PROFILES, Experts, ImportOptions
from blobstore.importer.policies.policy import form_of_experts
from blobstore.importer.policies.rules import Rule
from blobstore.kernels.scales import check_method
from blobstore.names import Digest
from blobstore.source.files import NOT_ITS_OWN
from blobstore.source.inventory import Inventory


def own_document(
    inventory: Inventory, options: ImportOptions, draft: Inventory | None, coverage: Coverage
) -> bytes:
    """Return the document of an import of ``inventory`` with ``options``: one line of compact JSON and a newline.

    It is put together from pieces, because the metadata of many files may be one large text that is
    repeated. Raises: LimitExceededError when it would be more than a document of a stored model may
    be.
    """
    head = {"version": VERSION, "options": _options(options, inventory.config)}
    pieces = [
        _open(head),
        *_sources(inventory),
        b',"coverage":',
        strictjson.encode(_coverage(coverage)),
    ]
    if draft is not None:
        pieces += (
            b',"draft":',
            _open({"quant": options.draft_type and options.draft_type.value}),
            *_sources(draft),
            b"}",
        )
    pieces.append(b"}\n")
    if (size := sum(map(len, pieces))) > MAX_DOCUMENT:
        what = f"{inventory.path} would have a {OWN_DOCUMENT} of {size:,} bytes, at most {MAX_DOCUMENT:,}"
        hint = "It keeps the metadata of all files. Import with `profile='ollama'`, which has no such document."
        raise LimitExceededError(f"limit exceeded: {what}", path=inventory.path, hint=hint)
    return b"".join(pieces)


def _open(members: Mapping[str, Any]) -> bytes:
    """Return a JSON object without its last brace, for more members."""
    return strictjson.encode(members)[:-1]


def _coverage(coverage: Coverage) -> dict[str, Any]:
    return {
        "tensors": _tally(coverage.tensors),
        "files": _tally(coverage.files),
        "heads": dict(coverage.heads),
        "kept_whole": coverage.kept_whole,
    }


def _tally(tally: Tally) -> dict[str, Any]:
    """Return what a source's tensors or files became."""
    left_out = [one for one in tally.left_out if one.reason not in NOT_ITS_OWN]
    return {
        "source": tally.source,
        "stored": tally.stored,
        "derived": dict(tally.derived),
        "left_out": [
            {"name": one.name, "reason": one.reason, "count": one.count} for one in left_out
        ],
    }


def _options(options: ImportOptions, config: SourceConfig | None) -> dict[str, Any]:
    quantization = (
        options.quantization(options.quant_type) if options.quant_type is not None else None
    )
    return {
        "quant": quantization.quant_type.value if quantization else None,
        "group_size": quantization.group_size if quantization else None,
        "groups": {
            kind.value: size
            for kind, size in sorted(options.groups.items(), key=lambda item: item[0].value)
        },
        "method": options.method,
        "importance": str(options.importance.digest) if options.importance else None,
        "global_scale": options.global_scale,
        "rules": [str(rule) for rule in options.rules],
        "requantize": options.requantize,
        "dtype": options.dtype.value if options.dtype else None,
        "profile": options.profile.name,
        "experts": form_of_experts(config, options).value,
        "alignment": options.alignment,
    }


def _sources(inventory: Inventory) -> Iterator[bytes]:
    """Yield the next member of an object, the source's files, in pieces.

    Equal metadata are encoded once.
    """
    encoded: dict[int, bytes] = {}
    start = b',"sources":['
    for file in inventory.files:
        metadata = encoded.get(id(file.metadata))
        if metadata is None:
            metadata = encoded[id(file.metadata)] = strictjson.encode(
                dict(sorted(file.metadata.items()))
            )
        yield start + _open({"name": file.name, "size": file.size})
        yield b',"metadata":'
        yield metadata
        yield b',"tensors":%b}' % strictjson.encode(file.tensor_names)
        start = b","
    yield b"]"


_METHODS = ("minmax", "search")
_DTYPES = (None, DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True, slots=True)
class RecordedImport:
    """What an import was asked for.

    ``importance``: the digest of what weighed its search; ``draft``: it had a draft model.

    The options have neither: both are files that the document does not hold.
    """

    options: ImportOptions
    importance: Digest | None
    draft: bool


def recorded_import(raw: bytes) -> RecordedImport:
    """Return what ``blobstore.json`` says.

    Raises: DocumentError (rule B1), for another version too.
    """
    provenance = Provenance.parse(raw)
    options, draft = provenance.options or {}, provenance.draft
    try:
        importance = options["importance"]
        draft_type = _optional(QuantType.parse, draft.quant) if draft is not None else None
        return RecordedImport(
            replace(_recorded_options(options), draft_type=draft_type),
            None if importance is None else Digest.parse(importance),
            draft is not None,
        )
    except (LookupError, TypeError, ValueError, AttributeError, BlobStoreError) as error:
        raise DocumentError(
            f"{OWN_DOCUMENT}: no options of an import: {error} (rule {RULE})", rule=RULE
        ) from None


def possible_options(file_type: str | None) -> Iterator[ImportOptions]:
    """Yield what an import may have been asked for, the usual first: for a model whose options are not known any more.

    ``file_type``: what its config blob says; None when that is not known either.
    """
    kinds = [kind for kind in QuantType if file_type in (kind.value, None)]
    for kind, method, dtype, profile in product(
        (*kinds, None), _METHODS, _DTYPES, PROFILES.values()
    ):
        usual = ImportOptions(quant_type=kind, method=method, dtype=dtype, profile=profile)
        if kind is None:
            if method == _METHODS[0]:
                yield usual
            continue
        sizes = (None, *kind.group_sizes) if len(kind.group_sizes) > 1 else (None,)
        for size, requantize in product(sizes, (False, True)):
            yield replace(usual, group_size=size, requantize=requantize)


def _recorded_options(given: dict[str, Any]) -> ImportOptions:
    """Return the options of a document.

    Raises: KeyError, TypeError, ValueError, BlobStoreError for invalid ones.
    """
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
