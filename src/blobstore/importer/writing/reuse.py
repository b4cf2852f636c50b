"""Reuse: the key under which the journal knows a planned blob: a hash of everything that its bytes depend on. Pure."""

from __future__ import annotations

import hashlib

from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.source.weights import SourceWeight

_ARITHMETIC = 1
"""Goes up when the same weights are quantized to other bytes than before."""


def entry_key(blob: PlannedBlob) -> str:
    """Return the key of a blob: its header, where its sources' bytes lie and in which state of their files, the method.

    The header has names, dtypes, shapes and types. A file's state is its path, device, inode, size and times: a source
    that is written to, replaced or moved has other keys.
    """
    hashed = hashlib.sha256(b"%d\n" % _ARITHMETIC)
    hashed.update(blob.header)
    for tensor in blob.tensors:
        hashed.update(_made(tensor, blob).encode())
        for source in tensor.sources:
            hashed.update(_stored(source).encode())
    return hashed.hexdigest()


def _made(tensor: OutputTensor, blob: PlannedBlob) -> str:
    """Say what the header does not say about how a tensor is made."""
    options = blob.options
    importance = options.importance.digest.hex if options.importance is not None else ""
    return f"{tensor.name}\n{tensor.copies}\n{tensor.dtype}\n{options.method}\n{importance}\n"


def _stored(source: SourceWeight) -> str:
    parts = (
        f"{suffix} {part.dtype} {part.offset} {part.nbytes} {part.file.identity.key} {part.file.path!r}"
        for suffix, part in source.parts.items()
    )
    form = f"{source.form.value} {source.dtype} {source.quantization} {source.inverse_global_scale} {source.shape}"
    return f"{source.name}\n{form}\n" + "\n".join(parts) + "\n"
