"""The JSON documents of an exported folder: as they were stored, but for a config.json that would claim what is not there.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blobstore.checkpoint import parse_config
from blobstore.dtypes import DType

MODELOPT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt says how it quantized a checkpoint; mlx-lm and vLLM read it."""

_CLAIMS = frozenset({"quantization", "quantization_config", "compression_config"})
_DTYPES = ("dtype", "torch_dtype")
_WORDS = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}


def exported_config(raw: bytes, dtype: DType | None, quantization: Mapping[str, Any] | None) -> tuple[bytes, list[str]]:
    """Return the config.json of the export and the names of the settings that were taken out of it.

    What speaks of a quantization is removed, also from the configs in it; ``quantization`` is put in, and with ``dtype`` the
    dtype of the weights. When there is nothing to change the bytes are the stored ones. Raises: as `parse_config`.
    """
    config = parse_config(raw)
    changed = {key: _without_claims(value) for key, value in config.items() if key not in _CLAIMS}
    if dtype is not None:
        changed = _with_dtype(changed, _WORDS[dtype])
        if not any(key in changed for key in _DTYPES):
            changed["torch_dtype"] = _WORDS[dtype]
    removed = sorted(
        {key for part in (config, *config.values()) if isinstance(part, dict) for key in part if key in _CLAIMS}
    )
    if quantization is not None:
        changed["quantization"] = dict(quantization)
    if changed == config and list(changed) == list(config):
        return raw, []
    return f"{json.dumps(changed, indent=2, ensure_ascii=False)}\n".encode(), removed


def _without_claims(value: Any) -> Any:
    return {key: item for key, item in value.items() if key not in _CLAIMS} if isinstance(value, dict) else value


def _with_dtype(config: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return the config with that dtype wherever it, or one in it, names one."""
    return {
        key: word
        if key in _DTYPES and isinstance(value, str)
        else _with_dtype(value, word)
        if isinstance(value, dict)
        else value
        for key, value in config.items()
    }
