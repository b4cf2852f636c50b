"""Importance: what each input column's error counts in a search, by source tensor. Read from a file or given as arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.digest import Digest
from blobstore.dtypes import DType
from blobstore.errors import LimitExceededError, UsageError, quoted
from blobstore.kernels import checked_importance
from blobstore.ranges import FileReader
from blobstore.safetensors import read_header

_LARGEST_FILE = 2**28

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """Vectors of finite float32 numbers >= 0, one a source tensor. ``digest`` is that of names and values."""

    vectors: Mapping[str, Array]
    digest: Digest

    @classmethod
    def parse(cls, given: str | os.PathLike[str] | Mapping[str, Any]) -> Importance:
        """Return the importance that a .safetensors file of F32 vectors, or a mapping of arrays, holds.

        Raises: UsageError when a value is not a vector of finite numbers >= 0, or a name not text; for a file also
        NotFoundError, HeaderError, LimitExceededError (a file of more than 256 MiB), StorageError.
        """
        if not isinstance(given, Mapping | str | os.PathLike):
            raise UsageError(f"importance is a file or a mapping of vectors, not {type(given).__name__}")
        arrays = given if isinstance(given, Mapping) else _read(given)
        names: list[Any] = list(arrays)
        for name in names:
            if not isinstance(name, str) or any("\ud800" <= character <= "\udfff" for character in name):
                raise UsageError(f"importance is given for {name!r}, which is not the name of a tensor")
        vectors = {
            name: checked_importance(array, None, f"the importance of {quoted(name)}")
            for name, array in sorted(arrays.items())
        }
        hashed = hashlib.sha256()
        for name, vector in vectors.items():
            for part in (name.encode(), vector.tobytes()):
                hashed.update(len(part).to_bytes(8, "little"))
                hashed.update(part)
        return cls(vectors, Digest.parse(f"sha256:{hashed.hexdigest()}"))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UsageError unless each vector is for one of the quantized tensors ``shapes`` and as long as its rows."""
        for name, vector in self.vectors.items():
            if name not in shapes:
                raise UsageError(
                    f"importance is given for {quoted(name)}, which is not quantized",
                    hint="Name the source's tensors, and only those that the plan shows with a type.",
                    tensor=name,
                )
            if vector.size != shapes[name][-1]:
                message = f"the importance of {quoted(name)} has {vector.size:,} values for {shapes[name][-1]:,} columns"
                raise UsageError(message, tensor=name)


def _read(path: str | os.PathLike[str]) -> dict[str, Array]:
    with FileReader(path) as reader:
        if reader.size > _LARGEST_FILE:
            message = f"limit exceeded: {reader.name} has {reader.size:,} bytes, at most {_LARGEST_FILE:,} for importance"
            raise LimitExceededError(message, path=reader.name)
        header = read_header(reader)
        header.check_limits(reader.name)
        for name, entry in header.tensors.items():
            if entry.dtype is not DType.F32 or len(entry.shape) != 1:
                raise UsageError(
                    f"{reader.name}: {quoted(name)} is {entry.dtype} {list(entry.shape)}, not one F32 vector",
                    tensor=name,
                    path=reader.name,
                )
        return {
            name: np.frombuffer(reader.read(header.data_start + entry.begin, entry.nbytes), np.float32)
            for name, entry in header.tensors.items()
        }
