"""What a user asks of an export, checked. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from blobstore.dtypes import DType
from blobstore.errors import UsageError

DEFAULT_SHARD = 5_000_000_000
"""huggingface_hub's 5GB (2.4.0 serialization/_base.py ``MAX_SHARD_SIZE``)."""
AS_SOURCE = "source"


class Form(enum.Enum):
    """Whose folder is written: names of quantized tensors as stored, or mlx-lm's."""

    SAFETENSORS = "safetensors"
    MLX = "mlx"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """``dequantize``: the dtype of all floats, or None. ``max_shard_size``: bytes; None keeps the source's files."""

    form: Form
    dequantize: DType | None
    max_shard_size: int | None

    @classmethod
    def parse(cls, form: str, dequantize: str | DType | None, max_shard_size: int | str) -> ExportOptions:
        """Return the options that these words are. Raises: UsageError for an unknown word or an invalid size."""
        try:
            chosen = Form(form)
        except ValueError:
            raise UsageError(f"unknown format {form!r}", hint="Use one of: safetensors, mlx.") from None
        dtype = DType.parse_float(dequantize) if isinstance(dequantize, str) else dequantize
        if dtype is not None and not dtype.is_float:
            raise UsageError(f"weights are dequantized to bfloat16, float16 or float32, not {dtype}")
        if max_shard_size == AS_SOURCE:
            if chosen is Form.MLX:
                raise UsageError("the source's files hold other tensors than mlx-lm's", hint="Give a size, such as 5GB.")
            return cls(chosen, dtype, None)
        if type(max_shard_size) is not int or max_shard_size < 1:
            raise UsageError(f"invalid shard size: {max_shard_size!r}", hint=f"Give bytes, or {AS_SOURCE!r} for its files.")
        return cls(chosen, dtype, max_shard_size)
