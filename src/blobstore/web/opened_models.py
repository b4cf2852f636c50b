"""Opened models: their answers, and where their tensors lie.

A model of 50,000 tensors stays open in 4 MB, because only finished answers are kept: objects are
made of them when they are needed, and freed together. Reading the headers of so many blobs takes
seconds, so the answers of a large model are also kept in its store.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Self

from blobstore import __version__
from blobstore.errors import TensorNotFoundError, quoted
from blobstore.names import Digest, ModelName

KEPT_FROM = 2000
"""Tensors from which on the answers of a model are kept in its store."""
_VERSION = 1


class TensorRow(NamedTuple):
    """A tensor in short."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's answers without and with its tensors, both without its name.

    ``counts``: how many tensors each layer of tensors of the manifest has, as JSON.
    """

    facts: bytes
    columns: bytes
    counts: bytes

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return len(self.facts) + len(self.columns) + len(self.counts)

    def document(self) -> dict[str, Any]:
        """Return the answer without tensors, but for name and state."""
        document: dict[str, Any] = json.loads(self.facts)
        return document

    def columns_of(self, name: ModelName, digest: Digest) -> bytes:
        """Return the answer with tensors, with the model's name and ID."""
        head = json.dumps({"model": str(name), "id": str(digest)}, separators=(",", ":"))
        return head[:-1].encode() + b"," + self.columns[1:]

    def tensors(self) -> Iterator[TensorRow]:
        """Return its tensors, in the order of the answer."""
        found = json.loads(self.columns)
        rows = (found["names"], found["types"], map(tuple, found["shapes"]), found["sizes"])
        return map(TensorRow._make, zip(*rows, strict=True))

    def layer_of(self, tensor: str) -> int:
        """Return the number of a tensor's layer. Raises: TensorNotFoundError."""
        try:
            place = json.loads(self.columns)["names"].index(tensor)
        except ValueError:
            message = f"the model has no tensor {quoted(tensor)}"
            raise TensorNotFoundError(message, tensor=tensor) from None
        return bisect_right(list(accumulate(json.loads(self.counts))), place)

    def encode(self) -> bytes:
        """Return it as a document for a store: a line with versions and a checksum, three more."""
        body = b"\n".join((self.facts, self.columns, self.counts))
        head = {"version": _VERSION, "blobstore": __version__, "crc32": zlib.crc32(body)}
        return json.dumps(head).encode() + b"\n" + body

    @classmethod
    def parse(cls, document: bytes) -> Self | None:
        """Return the model in a document; None if another version wrote it, or it is damaged."""
        head, _, body = document.partition(b"\n")
        expected = {"version": _VERSION, "blobstore": __version__, "crc32": zlib.crc32(body)}
        parts = body.split(b"\n")
        if head != json.dumps(expected).encode() or len(parts) != 3:  # noqa: PLR2004  # its fields
            return None
        return cls(*parts)
