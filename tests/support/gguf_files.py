"""GGUF files, valid ones and others, written field by field."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.formats.gguf import GGUF_TYPES

TYPES = {kind.name: kind for kind in GGUF_TYPES}
U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """Return a type and a value: a U32, F32, bool, text or array of texts, or bytes as they are."""
    match value:
        case bytes():
            return value
        case bool():
            return struct.pack("<IB", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", F32, value)
        case str():
            return struct.pack("<I", STRING) + text(value)
        case _:
            items = b"".join(text(item) for item in value)
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + items


@dataclass
class Described:
    """A tensor; ``offset`` None is the right one."""

    name: str | bytes
    kind: str | int
    shape: Sequence[int]
    data: bytes = b""
    offset: int | None = None


@dataclass
class GgufFile:
    metadata: list[tuple[str | bytes, Any]]
    tensors: list[Described]
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int, int] | None = None
    align: int = 32
    tail: bytes = b""

    @property
    def raw(self) -> bytes:
        tensors, keys = self.counts or (len(self.tensors), len(self.metadata))
        head = self.magic + struct.pack("<IQQ", self.version, tensors, keys)
        head += b"".join(text(key) + value_of(value) for key, value in self.metadata)
        data = b""
        for one in self.tensors:
            data += bytes(-len(data) % self.align)
            kind = TYPES[one.kind].number if isinstance(one.kind, str) else one.kind
            offset = len(data) if one.offset is None else one.offset
            head += text(one.name) + struct.pack("<I", len(one.shape))
            head += struct.pack(f"<{len(one.shape)}Q", *reversed(one.shape))
            head += struct.pack("<IQ", kind, offset)
            data += one.data
        return head + bytes(-len(head) % self.align) + data + self.tail


def model(kind: str, data: bytes, shape: Sequence[int], architecture: str = "qwen2") -> GgufFile:
    """Return a model without layers, whose head has that type."""
    width = shape[-1]
    metadata: list[tuple[str | bytes, Any]] = [
        ("general.architecture", architecture),
        (f"{architecture}.block_count", 0),
        (f"{architecture}.embedding_length", width),
    ]
    embedding = Described("token_embd.weight", "F32", (2, width), bytes(8 * width))
    return GgufFile(metadata, [embedding, Described("output.weight", kind, shape, data)])
