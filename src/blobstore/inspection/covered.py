"""Covered: how much of its source a stored model holds, from what the import recorded."""

from __future__ import annotations

from blobstore import safetensors
from blobstore.budget import Budget
from blobstore.coverage import Coverage, Tally
from blobstore.documents import Manifest
from blobstore.provenance import OWN_DOCUMENT, Provenance
from blobstore.store import Store
from blobstore.stored import stored_tensors


def stored_coverage(store: Store, manifest: Manifest) -> Coverage:
    """Return the coverage that was recorded when a model was imported; where none was, what is stored is counted.

    Then the source's own numbers are None: Ollama does not record them.

    Raises: NotFoundError, CorruptDataError or StorageError when a blob is not as the manifest says; DocumentError (rule B1);
    LimitExceededError.
    """
    layer = manifest.document(OWN_DOCUMENT)
    recorded = Provenance.parse(store.blobs.read(layer)).coverage if layer is not None else None
    return recorded if recorded is not None else _counted(store, manifest, has_own=layer is not None)


def _counted(store: Store, manifest: Manifest, *, has_own: bool) -> Coverage:
    tensors, budget = 0, Budget("the model")
    for layer in manifest.tensor_layers:
        with store.blobs.open(layer) as reader:
            tensors += len(list(stored_tensors(safetensors.read_header(reader, budget))))
    files = len(manifest.json_layers) + len(manifest.file_layers) - has_own
    return Coverage(Tally(None, tensors), Tally(None, files))
