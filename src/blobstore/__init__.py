"""Model checkpoints as a content-addressed store of quantized tensor blobs, in Ollama's format.

This is the public API. A name is imported when it is first used, so that ``import blobstore`` is
fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from blobstore._version import __version__ as __version__

if TYPE_CHECKING:
    from blobstore import distributed as distributed, errors as errors, mlx_lm as mlx_lm
    from blobstore.errors import BlobStoreError as BlobStoreError
    from blobstore.export.artifact import Artifact as Artifact, open_artifact as open_artifact
    from blobstore.export.folder import ExportResult as ExportResult, export_model as export_model
    from blobstore.importer.batch import work_on_batch as work_on_batch
    from blobstore.importer.outputs import ImportPlan as ImportPlan
    from blobstore.importer.planfile import read_plan as read_plan, write_plan as write_plan
    from blobstore.importer.repair import repair_model as repair_model
    from blobstore.importer.run import (
        ImportResult as ImportResult,
        import_model as import_model,
        make_blob as make_blob,
        plan_import as plan_import,
        run_plan as run_plan,
    )
    from blobstore.importer.worker import (
        commit_plan as commit_plan,
        work_on_plan as work_on_plan,
    )
    from blobstore.inspection.comparison import diff_models as diff_models
    from blobstore.inspection.inspect import inspect as inspect, read_header as read_header
    from blobstore.inspection.inspection import Inspection as Inspection
    from blobstore.inspection.listing import list_models as list_models
    from blobstore.inspection.metadata import (
        MetadataEdit as MetadataEdit,
        edit_metadata as edit_metadata,
        read_metadata as read_metadata,
    )
    from blobstore.inspection.quality import (
        ModelQuality as ModelQuality,
        measure_quality as measure_quality,
    )
    from blobstore.kernels.arrays import QuantizedArray as QuantizedArray
    from blobstore.kernels.quantize import dequantize as dequantize, quantize as quantize
    from blobstore.model.facts import Verdict as Verdict
    from blobstore.model.loader import Model as Model, Tensor as Tensor, open_model as open_model
    from blobstore.source.addresses import open_folder as open_folder
    from blobstore.source.folders import Folder as Folder
    from blobstore.store.archive.archive import Archive as Archive, open_archive as open_archive
    from blobstore.store.archive.saving import save_models as save_models
    from blobstore.store.bucket.bucket_store import (
        BucketStore as BucketStore,
        open_bucket_store as open_bucket_store,
    )
    from blobstore.store.care.prune import prune as prune, undo_prune as undo_prune
    from blobstore.store.care.usage import measure_usage as measure_usage
    from blobstore.store.care.verify import verify as verify
    from blobstore.store.layered import LayeredStore as LayeredStore
    from blobstore.store.local.store import (
        Store as Store,
        open_store as open_store,
        pack as pack,
        unpack as unpack,
    )
    from blobstore.store.memory import MemoryStore as MemoryStore
    from blobstore.store.registry.store import (
        RegistryAccess as RegistryAccess,
        RegistryStore as RegistryStore,
        pull as pull,
        push as push,
    )
    from blobstore.store.signing.key_pairs import PrivateKey as PrivateKey, PublicKey as PublicKey
    from blobstore.store.signing.signed_models import (
        SignaturePolicy as SignaturePolicy,
        check_signatures as check_signatures,
        sign_model as sign_model,
    )
    from blobstore.store.transfer import transfer as transfer

_HOME = {
    "Artifact": "export.artifact",
    "Archive": "store.archive.archive",
    "BlobStoreError": "errors",
    "BucketStore": "store.bucket.bucket_store",
    "ExportResult": "export.folder",
    "Folder": "source.folders",
    "ImportPlan": "importer.outputs",
    "ImportResult": "importer.run",
    "Inspection": "inspection.inspection",
    "LayeredStore": "store.layered",
    "MemoryStore": "store.memory",
    "MetadataEdit": "inspection.metadata",
    "Model": "model.loader",
    "ModelQuality": "inspection.quality",
    "PrivateKey": "store.signing.key_pairs",
    "PublicKey": "store.signing.key_pairs",
    "QuantizedArray": "kernels.arrays",
    "RegistryAccess": "store.registry.store",
    "RegistryStore": "store.registry.store",
    "SignaturePolicy": "store.signing.signed_models",
    "Store": "store.local.store",
    "Tensor": "model.loader",
    "Verdict": "model.facts",
    "check_signatures": "store.signing.signed_models",
    "commit_plan": "importer.worker",
    "dequantize": "kernels.quantize",
    "diff_models": "inspection.comparison",
    "edit_metadata": "inspection.metadata",
    "export_model": "export.folder",
    "import_model": "importer.run",
    "inspect": "inspection.inspect",
    "list_models": "inspection.listing",
    "make_blob": "importer.run",
    "measure_quality": "inspection.quality",
    "measure_usage": "store.care.usage",
    "open_archive": "store.archive.archive",
    "open_artifact": "export.artifact",
    "open_bucket_store": "store.bucket.bucket_store",
    "open_folder": "source.addresses",
    "open_model": "model.loader",
    "open_store": "store.local.store",
    "pack": "store.local.store",
    "plan_import": "importer.run",
    "prune": "store.care.prune",
    "pull": "store.registry.store",
    "push": "store.registry.store",
    "quantize": "kernels.quantize",
    "read_header": "inspection.inspect",
    "read_metadata": "inspection.metadata",
    "read_plan": "importer.planfile",
    "repair_model": "importer.repair",
    "run_plan": "importer.run",
    "save_models": "store.archive.saving",
    "sign_model": "store.signing.signed_models",
    "transfer": "store.transfer",
    "undo_prune": "store.care.prune",
    "unpack": "store.local.store",
    "verify": "store.care.verify",
    "work_on_batch": "importer.batch",
    "work_on_plan": "importer.worker",
    "write_plan": "importer.planfile",
}
_MODULES = frozenset({"distributed", "errors", "mlx_lm"})

__all__ = sorted([*_HOME, *_MODULES, "__version__"])  # noqa: PLE0605  # the table is the list


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"blobstore.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"blobstore.{_HOME[name]}"), name)
    raise AttributeError(f"module 'blobstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
