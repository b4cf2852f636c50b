"""A stored tensor's type: by its own metadata, else by the blob's, else by the shapes."""

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes
from support.stores import Arrays, blob_path, link_by_hand, stored_arrays

import blobstore
from blobstore.errors import CorruptDataError, UnsupportedSourceError
from blobstore.model.loader import Model
from blobstore.store.local.store import Store

W = "x.weight"


def opened(store: Store, arrays: Arrays, metadata: dict[str, str]) -> Model:
    link_by_hand(store, "m", {W: safetensors_bytes(arrays, metadata)})
    return blobstore.open_model("m", store=store)


def kind(model: Model, name: str) -> str:
    return f"{model[name].quant_type}/{model[name].group_size}"


@pytest.mark.parametrize(
    ("quant_type", "group_size"),
    [("int4", 128), ("int8", 32), ("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32)],
)
def test_the_blobs_metadata(store: Store, quant_type: str, group_size: int) -> None:
    model = opened(store, *stored_arrays(W, normal("w", 4, 256), quant_type, group_size))
    assert (kind(model, W), model[W].shape) == (f"{quant_type}/{group_size}", (4, 256))
    wanted = blobstore.dequantize(
        blobstore.quantize(normal("w", 4, 256), quant_type, group_size=group_size)
    )
    assert np.array_equal(model[W].dequantize(), wanted)


def test_a_tensors_own_metadata_win_over_the_blobs(store: Store) -> None:
    arrays, metadata = stored_arrays(W, normal("w", 4, 256), "int8", 64)
    more, _ = stored_arrays("y.weight", normal("y", 4, 256), "int4", 128)
    metadata |= {"y.weight.quant_type": "int4", "y.weight.group_size": "128"}
    model = opened(store, arrays | more, metadata)
    assert (kind(model, W), kind(model, "y.weight")) == ("int8/64", "int4/128")
    assert model["y.weight"].shape == (4, 256)


def test_without_metadata_the_only_answer_is_taken(store: Store) -> None:
    arrays, _ = stored_arrays(W, normal("w", 4, 256), "int4", 32)
    assert kind(opened(store, arrays, {}), W) == "int4/32"


@pytest.mark.parametrize("groups", [4, 3], ids=["two answers", "none"])
def test_without_metadata_no_or_two_answers_are_an_error(store: Store, groups: int) -> None:
    arrays, _ = stored_arrays(W, normal("w", 4, 256), "int4", 64)
    arrays[f"{W}.scale"] = arrays[f"{W}.bias"] = normal("s", 4, groups)
    with pytest.raises(
        CorruptDataError, match="int4/64, int8/32" if groups == 4 else "none"
    ) as caught:
        opened(store, arrays, {})
    digest = blob_path(store, safetensors_bytes(arrays, {})).name.replace("-", ":")
    assert (caught.value.tensor, caught.value.model, caught.value.blob) == (W, "m:latest", digest)


def test_floats_and_integers_without_a_scale_or_metadata_are_just_that(store: Store) -> None:
    arrays, metadata = stored_arrays(W, normal("w", 4, 256), "int4")
    beside = {"norm": normal("n", 256), "y.bias": normal("b", 4)}
    alone = {
        "ids": np.arange(8, dtype=np.uint32),
        "ids.bias": np.ones(8, np.float32),
        "z": normal("z", 4, 8),
        "z.scale": normal("s", 4),
    }
    blobs = {W: safetensors_bytes(arrays | beside, metadata), "z": safetensors_bytes(alone)}
    link_by_hand(store, "m", blobs)
    model = blobstore.open_model("m", store=store)
    assert set(model) == {W, *beside, *alone}
    assert [name for name in model if model[name].quant_type] == [W]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"quant_type": ""}, "''"),
        ({f"{W}.quant_type": "int5", "quant_type": "int4"}, "int5"),
        ({"quant_type": "int4", "group_size": "٣٢"}, "٣٢"),
        ({"quant_type": "nvfp4", "group_size": "32"}, "32"),
        ({"quant_type": "int4", "group_size": "9" * 5000}, "999"),
    ],
)  # fmt: skip
def test_a_type_that_does_not_exist_is_unsupported(
    store: Store, metadata: dict[str, str], says: str
) -> None:
    arrays, _ = stored_arrays(W, normal("w", 4, 256), "int4")
    with pytest.raises(UnsupportedSourceError, match=says) as caught:
        opened(store, arrays, metadata)
    assert (caught.value.tensor, caught.value.model) == (W, "m:latest")


def test_names_in_the_blob_are_the_truth(store: Store) -> None:
    tensors = {f"layer.experts.{number}.weight": normal(str(number), 2, 4) for number in range(3)}
    other = safetensors_bytes({"right.name": normal("r", 3)})
    link_by_hand(store, "m", {"layer.experts": safetensors_bytes(tensors), "wrong.name": other})
    assert set(blobstore.open_model("m", store=store)) == {*tensors, "right.name"}
