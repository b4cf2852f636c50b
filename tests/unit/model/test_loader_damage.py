"""A damaged model never opens as a smaller one: a typed error names the damage."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import stores
from support.checkpoints import normal, raw_safetensors, safetensors_bytes

import blobstore
from blobstore.errors import BlobStoreError, CorruptDataError, NotFoundError, UnsupportedSourceError
from blobstore.kernels.arrays import Array
from blobstore.model.loader import Model
from blobstore.store.local.store import Store

NAME = "a.weight"


def _blob(quant_type: str = "int4", group_size: int | None = None) -> bytes:
    arrays, metadata = stores.stored_arrays(NAME, normal("a", 4, 128), quant_type, group_size)
    return safetensors_bytes(arrays, metadata)


def linked(store: Store, blob: bytes) -> Path:
    """Link the model ``m`` of that blob and a sound one; return where the blob lies."""
    stores.link_by_hand(
        store, "m", {NAME: blob, "b.weight": safetensors_bytes({"b.weight": normal("b", 4, 64)})}
    )
    return stores.blob_path(store, blob)


def assert_names_all(error: BlobStoreError, blob: Path, tensor: str | None = NAME) -> None:
    """A ``tensor`` of None: whatever name the damaged header has."""
    digest = blob.name.replace("-", ":")
    assert (error.model, error.blob) == ("m:latest", digest)
    assert error.tensor == (tensor or error.tensor)
    for part in ("m:latest", digest, tensor or NAME):
        assert part in error.message


def refused(store: Store, blob: Path, kind: type[BlobStoreError]) -> None:
    with pytest.raises(kind) as caught:
        blobstore.open_model("m", store=store)
    assert_names_all(caught.value, blob)


def test_a_blob_missing_of_another_size_or_without_a_header(store: Store) -> None:
    path = linked(store, blob := _blob())
    for left in (blob[:100], blob[:-1], blob + b"\0", bytes(len(blob))):
        path.write_bytes(left)
        refused(store, path, CorruptDataError)
    path.unlink()
    refused(store, path, NotFoundError)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.long)])
def test_bits_of_a_header(store: Store, step: int) -> None:
    """Reading at once finds a flipped bit; else a typed error, or as many tensors as there were."""
    path = linked(store, blob := _blob())
    for bit in range(0, 8 * (8 + int.from_bytes(blob[:8], "little")), step):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises((CorruptDataError, UnsupportedSourceError)) as caught:
            blobstore.open_model("m", store=store, verify=True)
        assert_names_all(caught.value, path, None)
        try:
            assert len(blobstore.open_model("m", store=store)) == 2
        except (CorruptDataError, UnsupportedSourceError) as error:
            assert_names_all(error, path, None)


def test_a_damaged_document(store: Store) -> None:
    of_json = {"mediaType": "application/vnd.ollama.image.json"}
    layer = stores.layer_by_hand(store, "config.json", b'{"a":1}') | of_json
    path = stores.manifest_path(store, "m")
    path.parent.mkdir(parents=True)
    weights = stores.layer_by_hand(store, "x", safetensors_bytes({"x": normal("x", 3)}))
    path.write_text(json.dumps({"schemaVersion": 2, "layers": [weights, layer]}))
    stores.blob_path(store, b'{"a":1}').write_bytes(b'{"a":2}')
    with pytest.raises(CorruptDataError):
        blobstore.open_model("m", store=store, verify=True)
    model = blobstore.open_model("m", store=store)
    with pytest.raises(CorruptDataError) as caught:
        model.document("config.json")
    assert (caught.value.model, caught.value.blob) == ("m:latest", layer["digest"])
    stores.blob_path(store, b'{"a":1}').unlink()
    with pytest.raises(NotFoundError, match=r"config\.json"):
        blobstore.open_model("m", store=store).document("config.json")


Parts = dict[str, Array]
Change = Callable[[Parts], object]


def _without(suffix: str) -> Change:
    return lambda parts: parts.pop(NAME + suffix)


def _with(suffix: str, array: Array) -> Change:
    return lambda parts: parts.update({NAME + suffix: array})


@pytest.mark.parametrize(
    ("quant_type", "change", "says"),
    [
        ("int4", _without(".scale"), "scale"),
        ("int4", _without(".bias"), "bias"),
        ("int4", _without(""), "no quantiz"),
        ("int4", _with(".scale", np.ones((4, 4), np.int32)), "I32"),
        ("int4", _with(".scale", normal("s", 4, 2)), r"\[4, 2\], not BF16 \[4, 4\]"),
        ("int4", _with("", np.ones((4, 15), np.uint32)), "groups"),
        ("int4", _with("", np.array(1, np.uint32)), "rank 0"),
        ("mxfp8", _with(".bias", normal("s", 4, 4)), "bias"),
        ("nvfp4", _with(".global_scale", np.ones(2, np.float32)), r"F32 \[2\]"),
    ],
)
def test_companions_that_do_not_fit(
    store: Store, quant_type: str, change: Change, says: str
) -> None:
    parts, metadata = stores.stored_arrays(NAME, normal("a", 4, 128), quant_type)
    change(parts)
    path = linked(store, safetensors_bytes(parts, metadata))
    with pytest.raises(CorruptDataError, match=says) as caught:
        blobstore.open_model("m", store=store)
    assert_names_all(caught.value, path, None)


def test_two_blobs_that_hold_the_same_tensor(store: Store) -> None:
    one, two = (safetensors_bytes({"same": np.full(3, value, np.float32)}) for value in (1, 2))
    stores.link_by_hand(store, "m", {"same": one, "other": two})
    with pytest.raises(CorruptDataError, match="same") as caught:
        blobstore.open_model("m", store=store)
    assert (caught.value.model, caught.value.tensor) == ("m:latest", "same")
    assert caught.value.blob == stores.blob_path(store, two).name.replace("-", ":")


def test_a_tensor_beyond_the_limits_is_refused(store: Store) -> None:
    tensor = {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}
    refused(store, linked(store, raw_safetensors({NAME: tensor}, b"x")), BlobStoreError)


W = "x.weight"


def opened(store: Store, arrays: stores.Arrays, metadata: dict[str, str]) -> Model:
    stores.link_by_hand(store, "m", {W: safetensors_bytes(arrays, metadata)})
    return blobstore.open_model("m", store=store)


def kind(model: Model, name: str) -> str:
    return f"{model[name].quant_type}/{model[name].group_size}"


def test_the_blobs_metadata(store: Store) -> None:
    weights = normal("w", 4, 256)
    for form in ("int4/128", "int8/32", "nvfp4/16", "mxfp4/32", "mxfp8/32"):
        quant_type, _, size = form.partition("/")
        model = opened(store, *stores.stored_arrays(W, weights, quant_type, int(size)))
        assert (kind(model, W), model[W].shape) == (form, (4, 256))
        wanted = blobstore.quantize(weights, quant_type, group_size=int(size))
        assert np.array_equal(model[W].dequantize(), blobstore.dequantize(wanted))


def test_a_tensors_own_metadata_win_over_the_blobs(store: Store) -> None:
    arrays, metadata = stores.stored_arrays(W, normal("w", 4, 256), "int8", 64)
    more, _ = stores.stored_arrays("y.weight", normal("y", 4, 256), "int4", 128)
    metadata |= {"y.weight.quant_type": "int4", "y.weight.group_size": "128"}
    model = opened(store, arrays | more, metadata)
    assert (kind(model, W), kind(model, "y.weight")) == ("int8/64", "int4/128")
    assert model["y.weight"].shape == (4, 256)


def test_without_metadata_the_only_answer_is_taken(store: Store) -> None:
    arrays, _ = stores.stored_arrays(W, normal("w", 4, 256), "int4", 32)
    assert kind(opened(store, arrays, {}), W) == "int4/32"
    for groups, answers in ((4, "int4/64, int8/32"), (3, "none")):
        arrays[f"{W}.scale"] = arrays[f"{W}.bias"] = normal("s", 4, groups)
        with pytest.raises(CorruptDataError, match=answers) as caught:
            opened(store, arrays, {})
        assert_names_all(caught.value, stores.blob_path(store, safetensors_bytes(arrays)), W)


def test_floats_and_integers_without_a_scale_or_metadata_are_just_that(store: Store) -> None:
    arrays, metadata = stores.stored_arrays(W, normal("w", 4, 256), "int4")
    beside = {"norm": normal("n", 256), "y.bias": normal("b", 4)}
    alone = {
        "ids": np.arange(8, dtype=np.uint32),
        "ids.bias": np.ones(8, np.float32),
        "z": normal("z", 4, 8),
        "z.scale": normal("s", 4),
    }
    blobs = {W: safetensors_bytes(arrays | beside, metadata), "z": safetensors_bytes(alone)}
    stores.link_by_hand(store, "m", blobs)
    model = blobstore.open_model("m", store=store)
    assert set(model) == {W, *beside, *alone}
    assert [name for name in model if model[name].quant_type] == [W]


def test_an_unknown_type_is_unsupported(store: Store) -> None:
    arrays, _ = stores.stored_arrays(W, normal("w", 4, 256), "int4")
    unknown: list[tuple[dict[str, str], str]] = [
        ({"quant_type": ""}, "''"),
        ({f"{W}.quant_type": "int5", "quant_type": "int4"}, "int5"),
        ({"quant_type": "int4", "group_size": "٣٢"}, "٣٢"),
        ({"quant_type": "nvfp4", "group_size": "32"}, "32"),
        ({"quant_type": "int4", "group_size": "9" * 5000}, "999"),
    ]
    for metadata, says in unknown:
        with pytest.raises(UnsupportedSourceError, match=says) as caught:
            opened(store, arrays, metadata)
        assert (caught.value.tensor, caught.value.model) == (W, "m:latest")


def test_names_in_the_blob_are_the_truth(store: Store) -> None:
    tensors = {f"layer.experts.{number}.weight": normal(str(number), 2, 4) for number in range(3)}
    other = safetensors_bytes({"right.name": normal("r", 3)})
    stores.link_by_hand(
        store, "m", {"layer.experts": safetensors_bytes(tensors), "wrong.name": other}
    )
    assert set(blobstore.open_model("m", store=store)) == {*tensors, "right.name"}
