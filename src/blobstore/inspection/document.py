"""Document: an inspection as JSON, in huggingface.js's shape and some more.

Source of the shape: huggingface/huggingface.js@028fe00b packages/hub/src/lib/parse-safetensors-metadata.ts
`SafetensorsParseFromRepo`. Headers and the index are what the files hold, names and metadata exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blobstore.inspection.inspection import Inspection
from blobstore.safetensors import Header


def inspection_document(inspection: Inspection) -> dict[str, Any]:
    """Return the JSON document of an inspection: ``header``, or ``index`` and ``headers`` by file name; counts; notes.

    For several files without an index, one is made of their tensors. A stored model's files are its
    blobs, by their layers' names.
    """
    document: dict[str, Any] = {"sharded": inspection.sharded}
    headers = {name: _header(header) for name, header in inspection.headers.items()}
    if inspection.sharded:
        document |= {"index": _index(inspection), "headers": headers}
    else:
        document["header"] = next(iter(headers.values()))
    return document | {
        "parameter_count": dict(inspection.parameter_count),
        "parameters": inspection.parameters,
        "name": inspection.name,
        "kind": inspection.kind.value,
        "files": [{"name": file.name, "bytes": file.nbytes} for file in inspection.files],
        "tensors": len(inspection.tensors),
        "bytes": inspection.nbytes,
        "bits_per_weight": inspection.bits_per_weight,
        "quantization": [
            {
                "type": found.type,
                "bits": found.bits,
                "group_size": found.group_size,
                "format": found.format,
                "tensors": found.tensors,
                "parameters": found.parameters,
            }
            for found in inspection.quantizations
        ],
        "notes": list(inspection.notes),
    }


def _header(header: Header) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
    for name, entry in header.tensors.items():
        entries[name] = {"dtype": entry.dtype.value, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
    return entries


def _index(inspection: Inspection) -> Mapping[str, Any]:
    if inspection.index is not None:
        return inspection.index
    places = {name: file.name for file in inspection.files for name in file.header.tensors}
    return {"metadata": {"total_size": inspection.nbytes}, "weight_map": places}
