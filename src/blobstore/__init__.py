"""Model checkpoints as a content-addressed store of quantized tensor blobs, in Ollama's format.

The public API; every name is imported when it is first used, so that ``import blobstore`` costs
nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blobstore import errors as errors
    from blobstore import mlx_lm as mlx_lm
    from blobstore.errors import BlobStoreError as BlobStoreError
    from blobstore.export.run import ExportResult as ExportResult
    from blobstore.export.run import export_model as export_model
    from blobstore.importer.planning.document import write_plan as write_plan
    from blobstore.importer.planning.outputs import ImportPlan as ImportPlan
    from blobstore.importer.planning.travel import read_plan as read_plan
    from blobstore.importer.run import ImportResult as ImportResult
    from blobstore.importer.run import import_model as import_model
    from blobstore.importer.run import make_blob as make_blob
    from blobstore.importer.run import plan_import as plan_import
    from blobstore.importer.run import run_plan as run_plan
    from blobstore.inspection.inspect import inspect as inspect
    from blobstore.inspection.inspect import read_header as read_header
    from blobstore.inspection.inspection import Inspection as Inspection
    from blobstore.inspection.metadata import MetadataEdit as MetadataEdit
    from blobstore.inspection.metadata import edit_metadata as edit_metadata
    from blobstore.inspection.metadata import read_metadata as read_metadata
    from blobstore.inspection.quality import ModelQuality as ModelQuality
    from blobstore.inspection.quality import measure_quality as measure_quality
    from blobstore.kernels.arrays import QuantizedArray as QuantizedArray
    from blobstore.kernels.quantize import dequantize as dequantize
    from blobstore.kernels.quantize import quantize as quantize
    from blobstore.model.facts import Verdict as Verdict
    from blobstore.model.loader import Model as Model
    from blobstore.model.loader import open_model as open_model
    from blobstore.model.tensors import Tensor as Tensor
    from blobstore.source.addresses import open_folder as open_folder
    from blobstore.source.folders import Folder as Folder
    from blobstore.store.layered import LayeredStore as LayeredStore
    from blobstore.store.local.store import Store as Store
    from blobstore.store.local.store import open_store as open_store
    from blobstore.store.memory import MemoryStore as MemoryStore
    from blobstore.store.transfer import transfer as transfer

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

__all__ = sorted([*_HOME, *_MODULES, "__version__"])  # noqa: PLE0605  # the table is the list


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"blobstore.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"blobstore.{_HOME[name]}"), name)
    raise AttributeError(f"module 'blobstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
