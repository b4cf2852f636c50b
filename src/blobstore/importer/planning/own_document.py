"""``blobstore.json``: what is needed to repeat an import and to give the source's files back. No times, no paths. Pure.

It is read by provenance.py.
"""

from __future__ import annotations

from typing import Any

from blobstore import strictjson
from blobstore.checkpoint import SourceConfig
from blobstore.coverage import Coverage, Tally
from blobstore.importer.options import ImportOptions
from blobstore.importer.policies.runtimes import form_of_experts
from blobstore.provenance import VERSION
from blobstore.source.files import NOT_ITS_OWN
from blobstore.source.inventory import Inventory


def own_document(inventory: Inventory, options: ImportOptions, draft: Inventory | None, coverage: Coverage) -> bytes:
    """Return the document of an import of ``inventory`` with ``options``: one line of compact JSON and a newline."""
    document = {
        "version": VERSION,
        "options": _options(options, inventory.config),
        "sources": _sources(inventory),
        "coverage": _coverage(coverage),
    }
    if draft is not None:
        document["draft"] = {"quant": options.draft_type and options.draft_type.value, "sources": _sources(draft)}
    return strictjson.encode(document) + b"\n"


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


def _sources(inventory: Inventory) -> list[dict[str, Any]]:
    return [
        {
            "name": file.name,
            "size": file.size,
            "metadata": dict(sorted(file.metadata.items())),
            "tensors": file.tensor_names,
        }
        for file in inventory.files
    ]
