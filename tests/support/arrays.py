"""Arrays of numpy, torch and mlx by their bytes, so that NaN and -0 count as what they are."""

from typing import Any

import mlx.core as mx
import numpy as np
import torch

from blobstore.kernels.arrays import Array
from blobstore.model.loader import Tensor


def bits(array: Any) -> bytes:
    if 0 in array.shape:
        return b""
    if isinstance(array, torch.Tensor):
        return bytes(array.contiguous().reshape(-1).view(torch.uint8).numpy())
    if isinstance(array, mx.array) and array.dtype != mx.bool_:
        return np.array(array.reshape(-1).view(mx.uint8)).tobytes()
    return np.array(array).tobytes()


def plain(tensor: Tensor) -> Array:
    array = tensor.numpy()
    assert isinstance(array, np.ndarray)
    return array


def bits_of_parts(quantized: Any) -> list[bytes]:
    parts = (quantized.weight, quantized.scale, quantized.bias)
    return [bits(part) for part in parts if part is not None]
