"""Adapters: what was trained beside a model, and is not one. They are told apart by file and tensor names. Pure.

Sources: huggingface/peft (utils/constants.py `SAFETENSORS_WEIGHTS_NAME`; utils/save_and_load.py `get_peft_model_state_dict`:
names begin with ``base_model.model.``); mlx_lm 0.32.2 tuner/utils.py, tuner/lora.py (``adapters.safetensors``,
``lora_a`` and ``lora_b``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from blobstore.errors import UnsupportedSourceError

_FILES = frozenset({"adapter_model.safetensors", "adapters.safetensors"})
_PEFT_PREFIX = "base_model.model."
_MLX_SUFFIXES = (".lora_a", ".lora_b")
_HINT = (
    "Merge it into its model first, and import the result: with PEFT, model.merge_and_unload() and save_pretrained(); "
    "with mlx-lm, mlx_lm.fuse."
)


def adapter_among(names: Iterable[str]) -> str | None:
    """Return the first file name that only adapters have, or None."""
    return next((name for name in sorted(names) if name in _FILES), None)


def are_adapters(names: Collection[str]) -> bool:
    """Return True when all these tensors are an adapter's."""
    return bool(names) and (
        all(name.startswith(_PEFT_PREFIX) for name in names) or all(name.endswith(_MLX_SUFFIXES) for name in names)
    )


def adapter_error(path: str) -> UnsupportedSourceError:
    """Return the error that says that a path leads to an adapter, and what to do with it."""
    return UnsupportedSourceError(
        f"{path} is an adapter, not a model: it needs the model that it changes", path=path, hint=_HINT
    )
