"""Keys: what a planned blob's bytes depend on, as a hash. The journal finds earlier blobs by it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from blobstore.importer.planning.outputs import OutputTensor, PlannedBlob
from blobstore.source.weights import SourceFile, SourceWeight

_ARITHMETIC = 1
"""Goes up when the same weights are quantized to other bytes than before."""


def entry_keys(blobs: Sequence[PlannedBlob]) -> Iterator[str]:
    """Yield the key of each blob: of its header, its sources' bytes and files, and the method.

    The header has names, dtypes, shapes and types. A file's state is its path, device, inode, size
    and times: a source that is written to, replaced or moved has other keys.
    """
    files: dict[int, str] = {}
    for blob in blobs:
        texts = []
        for tensor in blob.tensors:
            texts.append(_made(tensor, blob))
            texts += [_stored(source, files) for source in tensor.sources]
        start = b"%d\n%b" % (_ARITHMETIC, blob.header)
        yield hashlib.sha256(start + "".join(texts).encode()).hexdigest()


def _made(tensor: OutputTensor, blob: PlannedBlob) -> str:
    """Say what the header does not say about how a tensor is made."""
    options = blob.options
    importance = options.importance.digest.hex if options.importance is not None else ""
    return f"{tensor.name}\n{tensor.copies}\n{tensor.dtype.value}\n{options.method}\n{importance}\n"


def _stored(source: SourceWeight, files: dict[int, str]) -> str:
    parts = "\n".join(
        [
            f"{suffix} {part.dtype.value} {part.offset} {part.nbytes} {_state(part.file, files)}"
            for suffix, part in source.parts.items()
        ]
    )
    kind = f"{source.form.value} {source.dtype.value} {source.quantization}"
    return f"{source.name}\n{kind} {source.inverse_global_scale} {source.shape}\n{parts}\n"


def _state(file: SourceFile, known: dict[int, str]) -> str:
    """Return the text of a file's state, which is made once a file."""
    state = known.get(id(file))
    if state is None:
        state = known[id(file)] = f"{file.identity.key} {file.path!r}"
    return state
