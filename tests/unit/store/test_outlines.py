"""Outlines: for any blobs, the names and forms of the tensors themselves, or the same error."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.checkpoints import BF16, safetensors_bytes
from support.stores import layer_by_hand

from blobstore import open_store
from blobstore.errors import BlobStoreError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import ModelName
from blobstore.store.local.store import Store
from blobstore.store.stored_model import ModelOutline, StoredModel

CONFIG = {"quantization": {"bits": 4, "group_size": 32}}
U8, U32, F32 = np.uint8, np.uint32, np.float32
ARRAYS: dict[str, dict[str, tuple[Any, ...]]] = {
    "plain": {"": (BF16, 2, 64)},
    "codes": {"": (U32, 2, 64)},
    "int4": {"": (U32, 2, 8), ".scale": (BF16, 2, 2), ".bias": (BF16, 2, 2)},
    "int8": {"": (U32, 2, 16), ".scale": (BF16, 2, 1), ".bias": (BF16, 2, 1)},
    "broken": {"": (U32, 2, 8), ".scale": (BF16, 2, 2)},
    "nvfp4": {"": (U32, 2, 8), ".scale": (U8, 2, 4)},
    "global": {"": (U32, 2, 8), ".scale": (U8, 2, 4), ".global_scale": (F32, 1)},
}
"""The stored arrays of a tensor of 2 rows and 64 columns, by kind and what follows its name."""
SAID = {"int8": ("int8", "64"), "nvfp4": ("nvfp4", "16"), "global": ("nvfp4", "16")}
TENSORS = st.tuples(
    st.sampled_from(("a", "b", "a.b", "é", 'q"', "layers.1.a")),
    st.sampled_from(list(ARRAYS)),
    st.sampled_from([None, "own", "blob", "wrong", "absent", "transposed"]),
)
BLOBS = st.lists(st.lists(TENSORS, min_size=1, max_size=3), min_size=1, max_size=4)


def metadata_of(name: str, kind: str, how: str | None) -> dict[str, str]:
    said, size = SAID.get(kind, ("int4", "32"))
    own = {f"{name}.quant_type": said, f"{name}.group_size": size}
    return {
        None: {},
        "blob": {"quant_type": said, "group_size": size},
        "own": own,
        "wrong": own | {f"{name}.group_size": "17"},
        "absent": {f"{name}x.quant_type": said},
        "transposed": own | {f"{name}.transposed": "true"},
    }[how]


def blob_of(tensors: Sequence[tuple[str, str, str | None]], salt: int) -> bytes:
    """Return a blob with these tensors; the first of a name counts."""
    arrays: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for name, kind, how in tensors:
        if name not in arrays:
            for after, (dtype, *shape) in ARRAYS[kind].items():
                arrays[name + after] = np.full(shape, salt, dtype)
            metadata |= metadata_of(name, kind, how)
    return safetensors_bytes(arrays, metadata)


def model_of(store: Store, blobs: Sequence[bytes]) -> StoredModel:
    config = layer_by_hand(store, "config.json", json.dumps(CONFIG).encode())
    config["mediaType"] = "application/vnd.ollama.image.json"
    layers = [layer_by_hand(store, str(number), data) for number, data in enumerate(blobs)]
    manifest = Manifest(layers=tuple(map(Descriptor.from_json, (config, *layers))))
    return StoredModel(ModelName.parse("m:x"), manifest, store)


FIELDS = (
    *("shape", "quantization", "value_dtype", "has_global_scale", "transposed"),
    *("parameters", "nbytes", "type_name", "type_text"),
)


def found_in(model: StoredModel, *, outlined: bool) -> Any:
    """Return names and fields of all tensors, by an outline or by themselves; or the error."""
    layers = model.manifest.tensor_layers
    try:
        if outlined:
            outline = ModelOutline.of(model, layers)
            found: Any = (list(outline.counts), outline.names, outline.forms)
        else:
            each = list(model.tensors_of_each(layers))
            tensors = [one for some in each for one in some]
            found = ([len(some) for some in each], [one.name for one in tensors], tensors)
        *others, forms = found
        return others, [[getattr(one, field) for field in FIELDS] for one in forms]
    except BlobStoreError as error:
        return type(error), str(error)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(tmp_path_factory.mktemp("outlines"))


@given(BLOBS)
def test_an_outline_has_what_the_tensors_have(home: Store, blobs: list[Any]) -> None:
    model = model_of(home, [blob_of(one, salt) for salt, one in enumerate(blobs)])
    assert found_in(model, outlined=True) == found_in(model, outlined=False)
