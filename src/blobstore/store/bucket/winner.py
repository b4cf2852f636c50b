"""The error of a lost race for a tag: which model has it now."""

from __future__ import annotations

from blobstore.errors import BlobStoreError, ConflictError
from blobstore.formats.documents import Manifest
from blobstore.formats.provenance import OWN_DOCUMENT, Provenance
from blobstore.names import Digest, ModelName
from blobstore.store.bucket.object_blobs import BucketBlobs

_SHOWN = 3


def lost_race(name: ModelName, raw: bytes | None, blobs: BucketBlobs) -> ConflictError:
    """Return the error for a tag that another writer moved.

    ``raw``: the manifest that the tag has now, None if it was removed.
    """
    hint = "Check the model, and try again."
    if raw is None:
        message = f"another writer removed {name} meanwhile, or there never was one"
        return ConflictError(message, model=str(name), hint=hint)
    said = f"it is sha256:{Digest.of(raw).hex}{_origin(raw, blobs)}"
    return ConflictError(
        f"another writer moved {name} meanwhile: {said}", model=str(name), hint=hint
    )


def _origin(raw: bytes, blobs: BucketBlobs) -> str:
    """Return a manifest's size, type and source for a message, as far as they can be read."""
    try:
        manifest = Manifest.parse(raw)
        said = f", {manifest.size:,} bytes in {len(manifest.layers):,} layers"
    except BlobStoreError:
        return ""
    try:
        document = manifest.document(OWN_DOCUMENT)
        if document is None:
            return said
        found = Provenance.parse(blobs.read(document))
    except BlobStoreError:
        return said
    quant = (found.options or {}).get("quant")
    files = [file.name for file in found.sources[:_SHOWN]]
    more = ", …" if len(found.sources) > _SHOWN else ""
    return f"{said}, imported{f' as {quant}' if quant else ''} from {', '.join(files)}{more}"
