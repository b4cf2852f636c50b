"""``blobstore.json``: what is needed to repeat an import and to give the source's files back. No times, no paths. Pure.

It is read by provenance.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from blobstore import strictjson
from blobstore.checkpoint import SourceConfig
from blobstore.coverage import Coverage, Tally
from blobstore.documents import MAX_DOCUMENT
from blobstore.errors import LimitExceededError
from blobstore.importer.options import ImportOptions
from blobstore.importer.policies.runtimes import form_of_experts
from blobstore.provenance import OWN_DOCUMENT, VERSION
from blobstore.source.files import NOT_ITS_OWN
from blobstore.source.inventory import Inventory


def own_document(inventory: Inventory, options: ImportOptions, draft: Inventory | None, coverage: Coverage) -> bytes:
    """Return the document of an import of ``inventory`` with ``options``: one line of compact JSON and a newline.

    It is put together from pieces, because the metadata of many files may be one large text that is repeated.
    Raises: LimitExceededError when it would be more than a document of a stored model may be.
    """
    head = {"version": VERSION, "options": _options(options, inventory.config)}
    pieces = [_open(head), *_sources(inventory), b',"coverage":', strictjson.encode(_coverage(coverage))]
    if draft is not None:
        pieces += (b',"draft":', _open({"quant": options.draft_type and options.draft_type.value}), *_sources(draft), b"}")
    pieces.append(b"}\n")
    if (size := sum(map(len, pieces))) > MAX_DOCUMENT:
        what = f"{inventory.path} would have a {OWN_DOCUMENT} of {size:,} bytes, at most {MAX_DOCUMENT:,}"
        hint = "It keeps the metadata of all files. Import with --profile ollama, which has no such document."
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
        "left_out": [{"name": one.name, "reason": one.reason, "count": one.count} for one in left_out],
    }


def _options(options: ImportOptions, config: SourceConfig | None) -> dict[str, Any]:
    quantization = options.quantization(options.quant_type) if options.quant_type is not None else None
    return {
        "quant": quantization.quant_type.value if quantization else None,
        "group_size": quantization.group_size if quantization else None,
        "groups": {kind.value: size for kind, size in sorted(options.groups.items(), key=lambda item: item[0].value)},
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
    """Yield the next member of an object, the source's files, in pieces; equal metadata are encoded once."""
    encoded: dict[int, bytes] = {}
    start = b',"sources":['
    for file in inventory.files:
        metadata = encoded.get(id(file.metadata))
        if metadata is None:
            metadata = encoded[id(file.metadata)] = strictjson.encode(dict(sorted(file.metadata.items())))
        yield start + _open({"name": file.name, "size": file.size})
        yield b',"metadata":'
        yield metadata
        yield b',"tensors":%b}' % strictjson.encode(file.tensor_names)
        start = b","
    yield b"]"
