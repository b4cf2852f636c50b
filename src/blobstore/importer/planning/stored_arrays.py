"""The arrays that are stored for a tensor, and the headers of blobs with like arrays. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Part, Quantization
from blobstore.formats.safetensors.codec import HeaderPattern


@dataclass(frozen=True, slots=True, eq=False)
class StoredArrays:
    """The arrays of a tensor, in stored order, and their bytes: by suffix, and of all.

    Tensors of one dtype, shape and type share one value: it is made once for 100,000 tensors.
    """

    parts: tuple[Part, ...]
    sizes: Mapping[str, int]
    nbytes: int

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(
        dtype: DType,
        shape: tuple[int, ...],
        quantization: Quantization | None,
        global_scale: tuple[int, ...] | None,
    ) -> StoredArrays:
        """Return the arrays of a tensor of that dtype and shape before quantization."""
        if quantization is None:
            parts: tuple[Part, ...] = (Part("", dtype, shape),)
        else:
            parts = tuple(quantization.parts(shape, dtype, global_scale=global_scale))
        sizes = {part.suffix: part.nbytes for part in parts}
        return StoredArrays(parts, MappingProxyType(sizes), sum(sizes.values()))

    @property
    def companions(self) -> tuple[Part, ...]:
        """The arrays other than the weight itself: scales, biases, a global scale."""
        return self.parts[1:]

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # the values of `of` live as long
    def pattern(self, metadata: tuple[tuple[str, str], ...], align: int) -> HeaderPattern:
        """Return the headers of blobs that hold one tensor with these arrays."""
        arrays = [(part.suffix, part.dtype, part.shape) for part in self.parts]
        return HeaderPattern(arrays, dict(metadata), align)


@functools.lru_cache(maxsize=8)  # a model has a few kinds of groups; each may be of 100,000 arrays
def group_pattern(
    members: tuple[tuple[str, StoredArrays], ...], metadata: tuple[tuple[str, str], ...], align: int
) -> HeaderPattern:
    """Return the headers of groups with these tensors: names within the group, and arrays."""
    arrays = [
        (rest + part.suffix, part.dtype, part.shape)
        for rest, stored in members
        for part in stored.parts
    ]
    return HeaderPattern(arrays, dict(metadata), align)
