"""Model checkpoints as a content-addressed store of quantized tensor blobs, in Ollama's format.

This is the public API. A name is imported when it is first used, so that ``import blobstore`` is
fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blobstore import errors, mlx_lm
    from blobstore.errors import BlobStoreError
    from blobstore.export.run import ExportResult, export_model
    from blobstore.importer.planning.document import write_plan
    from blobstore.importer.planning.outputs import ImportPlan
    from blobstore.importer.planning.travel import read_plan
    from blobstore.importer.run import ImportResult, import_model, make_blob, plan_import, run_plan
    from blobstore.inspection.inspect import inspect, read_header
    from blobstore.inspection.inspection import Inspection
    from blobstore.inspection.metadata import MetadataEdit, edit_metadata, read_metadata
    from blobstore.inspection.quality import ModelQuality, measure_quality
    from blobstore.kernels.arrays import QuantizedArray
    from blobstore.kernels.quantize import dequantize, quantize
    from blobstore.model.facts import Verdict
    from blobstore.model.loader import Model, open_model
    from blobstore.model.tensors import Tensor
    from blobstore.source.addresses import open_folder
    from blobstore.source.folders import Folder
    from blobstore.store.layered import LayeredStore
    from blobstore.store.local.store import Store, open_store
    from blobstore.store.memory import MemoryStore
    from blobstore.store.transfer import transfer

_HOME = {
    "BlobStoreError": "errors",
    "ExportResult": "export.run",
    "Folder": "source.folders",
    "ImportPlan": "importer.planning.outputs",
    "ImportResult": "importer.run",
    "Inspection": "inspection.inspection",
    "LayeredStore": "store.layered",
    "MemoryStore": "store.memory",
    "MetadataEdit": "inspection.metadata",
    "Model": "model.loader",
    "ModelQuality": "inspection.quality",
    "QuantizedArray": "kernels.arrays",
    "Store": "store.local.store",
    "Tensor": "model.tensors",
    "Verdict": "model.facts",
    "dequantize": "kernels.quantize",
    "edit_metadata": "inspection.metadata",
    "export_model": "export.run",
    "import_model": "importer.run",
    "inspect": "inspection.inspect",
    "make_blob": "importer.run",
    "measure_quality": "inspection.quality",
    "open_folder": "source.addresses",
    "open_model": "model.loader",
    "open_store": "store.local.store",
    "plan_import": "importer.run",
    "quantize": "kernels.quantize",
    "read_header": "inspection.inspect",
    "read_metadata": "inspection.metadata",
    "read_plan": "importer.planning.travel",
    "run_plan": "importer.run",
    "transfer": "store.transfer",
    "write_plan": "importer.planning.document",
}
_MODULES = frozenset({"errors", "mlx_lm"})

__all__ = [
    "BlobStoreError",
    "ExportResult",
    "Folder",
    "ImportPlan",
    "ImportResult",
    "Inspection",
    "LayeredStore",
    "MemoryStore",
    "MetadataEdit",
    "Model",
    "ModelQuality",
    "QuantizedArray",
    "Store",
    "Tensor",
    "Verdict",
    "__version__",
    "dequantize",
    "edit_metadata",
    "errors",
    "export_model",
    "import_model",
    "inspect",
    "make_blob",
    "measure_quality",
    "mlx_lm",
    "open_folder",
    "open_model",
    "open_store",
    "plan_import",
    "quantize",
    "read_header",
    "read_metadata",
    "read_plan",
    "run_plan",
    "transfer",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"blobstore.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"blobstore.{_HOME[name]}"), name)
    raise AttributeError(f"module 'blobstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
