"""Opened models: their answers, and where their tensors lie.

A model of 50,000 tensors stays open in 4 MB, because only finished answers are kept: objects are
made of them when they are needed, and freed together. Reading the headers of so many blobs takes
seconds, so the answers of a large model are also kept in its store.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Self

from blobstore._version import __version__
from blobstore.errors import TensorNotFoundError, quoted
from blobstore.names import Digest, ModelName

KEPT_FROM = 2000
"""Tensors from which on the answers of a model are kept in its store."""
_VERSION = 2


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's answers without and with its tensors, both without its name, and its treemap.

    ``counts``: how many tensors each layer of tensors of the manifest has, as JSON.
    """

    facts: bytes
    columns: bytes
    counts: bytes
    treemap: bytes

    @property
    def _parts(self) -> tuple[bytes, ...]:
        return (self.facts, self.columns, self.counts, self.treemap)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return sum(map(len, self._parts))

    def document(self) -> dict[str, Any]:
        """Return the answer without tensors, but for name and state."""
        document: dict[str, Any] = json.loads(self.facts)
        return document

    def columns_of(self, name: ModelName, digest: Digest) -> bytes:
        """Return the answer with tensors, with the model's name and ID."""
        head = json.dumps({"model": str(name), "id": str(digest)}, separators=(",", ":"))
        return head[:-1].encode() + b"," + self.columns[1:]

    def layer_of(self, tensor: str) -> int:
        """Return the number of a tensor's layer. Raises: TensorNotFoundError."""
        try:
            place = json.loads(self.columns)["names"].index(tensor)
        except ValueError:
            message = f"the model has no tensor {quoted(tensor)}"
            raise TensorNotFoundError(message, tensor=tensor) from None
        return bisect_right(list(accumulate(json.loads(self.counts))), place)

    def encode(self) -> bytes:
        """Return it as a document for a store: a line with versions and a checksum, four more."""
        body = b"\n".join(self._parts)
        head = {"version": _VERSION, "blobstore": __version__, "crc32": zlib.crc32(body)}
        return json.dumps(head).encode() + b"\n" + body

    @classmethod
    def parse(cls, document: bytes) -> Self | None:
        """Return the model in a document; None if another version wrote it, or it is damaged."""
        head, _, body = document.partition(b"\n")
        expected = {"version": _VERSION, "blobstore": __version__, "crc32": zlib.crc32(body)}
        parts = body.split(b"\n")
        if head != json.dumps(expected).encode() or len(parts) != len(fields(cls)):
            return None
        return cls(*parts)
