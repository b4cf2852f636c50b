"""How a stored model's config.json says that MLX quantized its weights: for blobs whose metadata say nothing.

Ollama writes no metadata for an MLX source whose settings have no ``mode`` (fixtures/ollama-records, d_mlx_int4), and the
shapes of int4 in groups of 64 are those of int8 in groups of 32.
"""

from __future__ import annotations

import functools

from blobstore.checkpoint import CONFIG_NAME, QuantizationSettings, SourceConfig
from blobstore.documents import Manifest
from blobstore.store import Store
from blobstore.stored import Settings


def settings_of(store: Store, manifest: Manifest) -> Settings:
    """Return what reads the settings of a model's config.json, once; None where it has none.

    It raises NotFoundError, CorruptDataError (also DocumentError, rule Q1) or StorageError for a config.json that is missing
    or damaged.
    """

    @functools.cache
    def read() -> QuantizationSettings | None:
        layer = manifest.document(CONFIG_NAME)
        return SourceConfig.parse(store.blobs.read(layer)).mlx_quantization if layer is not None else None

    return read
