"""Model checkpoints as a content-addressed store of quantized tensor blobs, in Ollama's format.

The public API; every name is imported when it is first used, so that ``import blobstore`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blobstore import errors as errors
    from blobstore import mlx_lm as mlx_lm
    from blobstore import remote as remote
    from blobstore.arrays import QuantizedArray as QuantizedArray
    from blobstore.errors import BlobStoreError as BlobStoreError
    from blobstore.export import ExportResult as ExportResult
    from blobstore.export import export_model as export_model
    from blobstore.importer import ImportPlan as ImportPlan
    from blobstore.importer import ImportResult as ImportResult
    from blobstore.importer import import_model as import_model
    from blobstore.importer import plan_import as plan_import
    from blobstore.inspection import Inspection as Inspection
    from blobstore.inspection import inspect as inspect
    from blobstore.inspection import read_header as read_header
    from blobstore.kernels import dequantize as dequantize
    from blobstore.kernels import quantize as quantize
    from blobstore.loader import Model as Model
    from blobstore.loader import open_model as open_model
    from blobstore.metadata import MetadataEdit as MetadataEdit
    from blobstore.metadata import edit_metadata as edit_metadata
    from blobstore.metadata import read_metadata as read_metadata
    from blobstore.quality import ModelQuality as ModelQuality
    from blobstore.quality import measure_quality as measure_quality
    from blobstore.runtimes import Verdict as Verdict
    from blobstore.store import Store as Store
    from blobstore.store import open_store as open_store
    from blobstore.tensors import Tensor as Tensor

_HOME = {
    "BlobStoreError": "errors",
    "ExportResult": "export",
    "ImportPlan": "importer",
    "ImportResult": "importer",
    "Inspection": "inspection",
    "MetadataEdit": "metadata",
    "Model": "loader",
    "ModelQuality": "quality",
    "QuantizedArray": "arrays",
    "Store": "store",
    "Tensor": "tensors",
    "Verdict": "runtimes",
    "dequantize": "kernels",
    "edit_metadata": "metadata",
    "export_model": "export",
    "import_model": "importer",
    "inspect": "inspection",
    "measure_quality": "quality",
    "open_model": "loader",
    "open_store": "store",
    "plan_import": "importer",
    "quantize": "kernels",
    "read_header": "inspection",
    "read_metadata": "metadata",
}
_MODULES = frozenset({"errors", "mlx_lm", "remote"})

__all__ = sorted([*_HOME, *_MODULES, "__version__"])  # noqa: PLE0605  # the table is the list


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"blobstore.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"blobstore.{_HOME[name]}"), name)
    raise AttributeError(f"module 'blobstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
