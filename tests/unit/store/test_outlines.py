"""Outlines: for any blobs, the names and forms of the tensors themselves, or the same error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support.checkpoints import raw_safetensors
from support.stores import layer_by_hand

from blobstore import open_store
from blobstore.errors import BlobStoreError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import ModelName
from blobstore.store.local.store import Store
from blobstore.store.stored_model import ModelOutline, StoredModel

CONFIG = {"quantization": {"bits": 4, "group_size": 32}}
WIDTH = {"U32": 4, "BF16": 2, "F32": 4, "U8": 1}
NAMES = ("a", "b", "a.b", "é", 'q"', "layers.1.a")
BLOB_TYPE = {"quant_type": "int4", "group_size": "32"}
TENSORS = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from(["int4", "int8", "nvfp4", "plain", "codes", "broken", "global"]),
    st.sampled_from([None, "own", "blob", "wrong", "absent", "transposed"]),
)
BLOBS = st.lists(st.lists(TENSORS, min_size=1, max_size=3), min_size=1, max_size=4)


def arrays_of(name: str, kind: str) -> dict[str, tuple[str, list[int]]]:
    """Return the stored arrays of a tensor of 2 rows and 64 columns."""
    if kind in ("plain", "codes"):
        return {name: ("BF16" if kind == "plain" else "U32", [2, 64])}
    if kind in ("nvfp4", "global"):
        found = {name: ("U32", [2, 8]), f"{name}.scale": ("U8", [2, 4])}
        return found | ({f"{name}.global_scale": ("F32", [1])} if kind == "global" else {})
    bits, groups = (8, 1) if kind == "int8" else (4, 2)
    scale = ("BF16", [2, groups])
    found = {name: ("U32", [2, 2 * bits]), f"{name}.scale": scale, f"{name}.bias": scale}
    if kind == "broken":
        del found[f"{name}.bias"]
    return found


def metadata_of(name: str, kind: str, how: str | None) -> dict[str, str]:
    """Return what metadata say of a tensor."""
    said = {"global": "nvfp4", "plain": "int4", "codes": "int4", "broken": "int4"}.get(kind, kind)
    size = "16" if said == "nvfp4" else "64" if said == "int8" else "32"
    if how == "blob":
        return {"quant_type": said, "group_size": size}
    own = {f"{name}.quant_type": said, f"{name}.group_size": size}
    return {
        None: {},
        "own": own,
        "wrong": own | {f"{name}.group_size": "17"},
        "absent": {f"{name}x.quant_type": said},
        "transposed": own | {f"{name}.transposed": "true"},
    }[how]


def blob_of(tensors: Sequence[tuple[str, str, str | None]], salt: int, **more: str) -> bytes:
    """Return a blob with these tensors, and ``more`` metadata; the first of a name counts."""
    entries: dict[str, Any] = {}
    metadata = dict(more)
    offset = 0
    for name, kind, how in tensors:
        if name in entries:
            continue
        for key, (dtype, shape) in arrays_of(name, kind).items():
            end = offset + WIDTH[dtype] * shape[0] * (shape[1] if len(shape) > 1 else 1)
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        metadata |= metadata_of(name, kind, how)
    header = {"__metadata__": metadata, **entries} if metadata else entries
    return raw_safetensors(header, bytes([salt]) * offset)


def model_of(store: Store, blobs: Sequence[bytes]) -> StoredModel:
    """Return a model of blobs, written by hand."""

    def layer(name: str, data: bytes, kind: str) -> Descriptor:
        return Descriptor.checked(
            layer_by_hand(store, name, data) | {"mediaType": f"application/vnd.ollama.image.{kind}"}
        )

    config = layer("config.json", json.dumps(CONFIG).encode(), "json")
    layers = [layer(str(number), data, "tensor") for number, data in enumerate(blobs)]
    name = ModelName.parse("m:x")
    return StoredModel(name, Manifest(layers=(config, *layers)), store)


FORM = (
    "shape",
    "quantization",
    "value_dtype",
    "has_global_scale",
    "transposed",
    "parameters",
    "nbytes",
    "type_name",
    "type_text",
)


def values_of(form: Any) -> list[Any]:
    """Return the fields of a form."""
    return [getattr(form, name) for name in FORM]


def found_in(model: StoredModel, *, outlined: bool) -> Any:
    """Return the tensors of each blob, by an outline or by themselves; or the error."""
    layers = model.manifest.tensor_layers
    try:
        if not outlined:
            each = model.tensors_of_each(layers)
            return [[(one.name, values_of(one)) for one in some] for some in each]
        outline = ModelOutline.of(model, layers)
        names = iter(outline.names)
        forms = iter(outline.forms)
        return [
            [(next(names), values_of(next(forms))) for _ in range(count)]
            for count in outline.counts
        ]
    except BlobStoreError as error:
        return type(error), str(error)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(tmp_path_factory.mktemp("outlines"))


@given(BLOBS)
def test_an_outline_has_what_the_tensors_have(home: Store, blobs: list[Any]) -> None:
    model = model_of(home, [blob_of(one, salt) for salt, one in enumerate(blobs)])
    assert found_in(model, outlined=True) == found_in(model, outlined=False)


@pytest.mark.parametrize("kind", ["int8", "global", "plain"])
def test_tensors_of_one_form_are_read_by_one(home: Store, kind: str) -> None:
    how = None if kind == "plain" else "own"
    blobs = [blob_of([(f"t.{number}", kind, how)], number) for number in range(50)]
    model = model_of(home, blobs)
    outline = ModelOutline.of(model, model.manifest.tensor_layers)
    assert outline.names == [f"t.{number}" for number in range(50)]
    assert len(set(outline.forms)) == 1
    assert found_in(model, outlined=True) == found_in(model, outlined=False)


@pytest.mark.parametrize(
    ("sound", "broken", "more"),
    [
        ([("t", "int4", "own")], [("u", "int4", "own")], {"v.quant_type": "int4"}),
        ([("t", "int4", "blob")], [("u", "int4", None)], BLOB_TYPE | {"quant_type": "int8"}),
        ([("t", "int4", "blob"), ("p", "plain", None)], [("q", "plain", None)], BLOB_TYPE),
        ([("t", "nvfp4", "own")], [("u", "nvfp4", None)], {"u.quant_type": "nvfp"}),
        ([("t", "plain", None)], [("u", "plain", None)], {"u.quant_type": "int4"}),
    ],
)
def test_a_blob_that_breaks_a_rule_behind_a_sound_one_that_is_like_it(
    home: Store, sound: list[Any], broken: list[Any], more: dict[str, str]
) -> None:
    model = model_of(home, [blob_of(sound, 1), blob_of(broken, 2, **more)])
    found = found_in(model, outlined=True)
    assert isinstance(found, tuple)
    assert found == found_in(model, outlined=False)
