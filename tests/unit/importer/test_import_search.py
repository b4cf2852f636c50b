"""Imports with a search, importance and global scales equal the kernels, in any chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import PYCODE_MOE, QUANT_TYPES
from support.checkpoints import BF16, normal, safetensors_bytes, small_tensors, write_checkpoint
from support.weights import assert_same_parts, random_importance

import blobstore
from blobstore import QuantizedArray
from blobstore.importer.making import CHUNK
from blobstore.store.local.store import Store, open_store

Array = np.ndarray[Any, Any]
Snapshot = Callable[[Store], dict[str, str]]
W = "x.weight"
UP = "model.layers.0.mlp.up_proj.weight"
EXPERT = "model.layers.0.mlp.experts.{}.up_proj.weight"
STACK = "model.layers.0.mlp.experts.up_proj.weight"


def imported(
    store: Store, folder: Path, tensors: dict[str, Array], **options: Any
) -> blobstore.Model:
    blobstore.import_model(write_checkpoint(folder / "m", tensors), "m", store=store, **options)
    return blobstore.open_model("m", store=store, verify=True)


def parts(model: blobstore.Model, name: str) -> QuantizedArray[Array]:
    array = model[name].numpy()
    assert isinstance(array, QuantizedArray)
    return array


@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_a_search_stores_what_the_kernel_finds(
    store: Store, tmp_path: Path, quant: str, weighed: bool
) -> None:
    weights = normal("w", 40, 192)
    importance = random_importance(192) if weighed else None
    given = {W: importance} if importance is not None else None
    model = imported(store, tmp_path, {W: weights}, quant=quant, method="search", importance=given)
    wanted = blobstore.quantize(weights, quant, method="search", importance=importance)
    assert_same_parts(parts(model, W), wanted)


@pytest.mark.parametrize(
    ("quant", "kind"), [("int4", BF16), ("nvfp4", BF16), ("mxfp4", np.dtype(np.float32))]
)
def test_importance_goes_on_where_a_chunk_ends_inside_a_row(
    store: Store, tmp_path: Path, quant: str, kind: Any
) -> None:
    rows = CHUNK // kind.itemsize // 192 + 9
    assert CHUNK % (192 * kind.itemsize) != 0
    weights, importance = normal("big", rows, 192, dtype=kind), random_importance(192)
    model = imported(
        store,
        tmp_path,
        {W: weights},
        quant=quant,
        method="search",
        importance={W: importance},
        jobs=2,
    )
    wanted = blobstore.quantize(weights, quant, method="search", importance=importance, jobs=2)
    assert_same_parts(parts(model, W), wanted)
    other = blobstore.quantize(weights[-9:], quant, method="search")
    assert parts(model, W).weight[-9:].tobytes() != other.weight.tobytes(), (
        "the importance matters at the end"
    )


@pytest.mark.parametrize("quant", ["int4", "int8", "mxfp4"])
def test_each_stacked_expert_has_its_own_importance(
    store: Store, tmp_path: Path, quant: str
) -> None:
    tensors = {EXPERT.format(e): normal(f"e{e}", 32, 64) for e in range(3)}
    importance = {EXPERT.format(e): random_importance(64, seed=e) for e in (0, 2)}
    options: dict[str, Any] = {"quant": quant, "method": "search", "importance": importance}
    stacked = parts(imported(store, tmp_path, tensors, experts="stacked", **options), STACK)
    packed = imported(store, tmp_path, tensors, experts="packed", **options)
    for e in range(3):
        name = EXPERT.format(e)
        wanted = blobstore.quantize(
            tensors[name], quant, method="search", importance=importance.get(name)
        )
        assert_same_parts(parts(packed, name), wanted)
        assert stacked.weight[e].tobytes() == wanted.weight.tobytes()
        assert stacked.scale[e].tobytes() == wanted.scale.tobytes()


def test_the_ollama_profile_can_search(store: Store) -> None:
    blobstore.import_model(
        PYCODE_MOE, "m", store=store, quant="int4", method="search", profile="ollama"
    )
    source = load_file(PYCODE_MOE / "model.safetensors")
    with blobstore.open_model("m", store=store) as model:
        assert "blobstore.json" not in model.documents()
        stack = next(name for name in model if name.endswith("experts.up_proj.weight"))
        group, projection = stack.split(".experts.")
        weights = np.stack(
            [source[f"{group}.experts.{number}.{projection}"] for number in range(8)]
        )
        found = parts(model, stack)
        assert found.group_size == 64
        assert_same_parts(
            found, blobstore.quantize(weights, "int4", group_size=64, method="search")
        )


@pytest.mark.parametrize("quant", ["int4", "nvfp4"])
def test_threads_change_nothing(tmp_path: Path, snapshot: Snapshot, quant: str) -> None:
    source = write_checkpoint(tmp_path / "m")
    importance = {UP: random_importance(64)}
    stores = [open_store(tmp_path / str(jobs)) for jobs in (1, 4)]
    for store, jobs in zip(stores, (1, 4), strict=True):
        options: dict[str, Any] = {"global_scale": quant == "nvfp4", "jobs": jobs}
        blobstore.import_model(
            source, "m", store=store, quant=quant, method="search", importance=importance, **options
        )
    assert snapshot(stores[0]) == snapshot(stores[1])


def test_uniform_importance_is_none_but_is_recorded(tmp_path: Path) -> None:
    tensors = small_tensors()
    kept = []
    for number, importance in enumerate([None, {UP: np.full(64, 4.0, np.float32)}]):
        store = open_store(tmp_path / str(number))
        model = imported(
            store, tmp_path, tensors, quant="int4", method="search", importance=importance
        )
        kept.append(
            (model.manifest.tensor_layers, json.loads(model.document("blobstore.json"))["options"])
        )
    assert kept[0][0] == kept[1][0]
    assert kept[0][1]["importance"] is None
    assert kept[1][1]["importance"].startswith("sha256:")


def test_a_file_and_a_mapping_are_the_same_importance(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    vectors = {UP: random_importance(64), "lm_head.weight": random_importance(64, seed=1)}
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes(vectors, {"made": "elsewhere"}))
    forms: list[Any] = [
        file,
        str(file),
        vectors,
        dict(reversed(vectors.items())),
        {name: v.astype(np.float64) for name, v in vectors.items()},
    ]
    digests = {
        blobstore.import_model(
            source, "m", store=store, quant="int4", method="search", importance=form
        ).digest
        for form in forms
    }
    assert len(digests) == 1


def test_other_importance_is_another_document(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    vector = random_importance(64)
    other = vector.copy()
    other[5] += 1
    seen = set()
    for given in ({UP: vector}, {UP: other}, {"lm_head.weight": vector}, {}, None):
        blobstore.import_model(
            source, "m", store=store, quant="int4", method="search", importance=given
        )
        document = blobstore.open_model("m", store=store).document("blobstore.json")
        options = json.loads(document)["options"]
        assert list(options)[:6] == [
            "quant",
            "group_size",
            "groups",
            "method",
            "importance",
            "global_scale",
        ]
        seen.add(options["importance"])
    assert len(seen) == 5


def test_the_given_arrays_are_not_kept(store: Store, tmp_path: Path) -> None:
    vector = random_importance(64)
    plan = blobstore.plan_import(
        write_checkpoint(tmp_path / "m"), quant="int4", method="search", importance={UP: vector}
    )
    assert plan.options.importance is not None
    before = plan.options.importance.vectors[UP].copy()
    vector[:] = 0
    np.testing.assert_array_equal(plan.options.importance.vectors[UP], before)


@pytest.mark.parametrize("method", ["minmax", "search"])
@pytest.mark.parametrize("scale", [1e-4, 0.02, 30.0])
def test_a_global_scale_is_stored_and_read_back(
    store: Store, tmp_path: Path, method: str, scale: float
) -> None:
    weights = normal("w", 40, 192, scale=scale)
    model = imported(
        store,
        tmp_path,
        {W: weights, "n": normal("n", 7)},
        quant="nvfp4",
        method=method,
        global_scale=True,
    )
    wanted = blobstore.quantize(weights, "nvfp4", method=method, global_scale=True)
    assert wanted.global_scale is not None
    assert_same_parts(parts(model, W), wanted)
    np.testing.assert_array_equal(model[W].dequantize(), blobstore.dequantize(wanted))
    for dtype in ("bfloat16", "float16"):
        expected = blobstore.dequantize(wanted).astype(
            {"bfloat16": BF16, "float16": np.float16}[dtype]
        )
        assert model[W].dequantize(dtype).tobytes() == expected.tobytes()
    names: dict[Any, list[str]] = {
        "ollama": [W, f"{W}_scale", f"{W}.global_scale"],
        "mlx": [W, "x.scales", "x.global_scale"],
    }
    for form, keys in names.items():
        arrays = model.arrays("numpy", names=form)
        assert [key for key in arrays if key != "n"] == keys
        assert (arrays[keys[2]].dtype, arrays[keys[2]].shape) == (np.float32, (1,))
    for library in ("torch", "mlx"):
        stored = getattr(model[W], library)().global_scale
        assert float(stored[0]) == float(wanted.global_scale[0])


def test_a_global_scale_is_that_of_all_chunks_and_of_converted_weights(
    store: Store, tmp_path: Path
) -> None:
    weights = normal("big", CHUNK // 4 // 192 + 9, 192, dtype=np.float32)
    weights[-1, -1] = 3.999
    model = imported(
        store, tmp_path, {W: weights}, quant="nvfp4", global_scale=True, dtype="bfloat16"
    )
    wanted = blobstore.quantize(weights.astype(BF16), "nvfp4", global_scale=True)
    others = blobstore.quantize(weights[:-1], "nvfp4", global_scale=True)
    assert wanted.global_scale is not None
    assert others.global_scale is not None
    assert wanted.global_scale[0] != others.global_scale[0]
    assert_same_parts(parts(model, W), wanted)


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_experts_have_a_global_scale_each_or_one_for_the_stack(
    store: Store, tmp_path: Path, experts: str
) -> None:
    tensors = {EXPERT.format(e): normal(f"e{e}", 32, 64, scale=0.001 * 8**e) for e in range(3)}
    importance = {EXPERT.format(1): random_importance(64)}
    options: dict[str, Any] = {
        "quant": "nvfp4",
        "method": "search",
        "importance": importance,
        "global_scale": True,
    }
    model = imported(store, tmp_path, tensors, experts=experts, **options)
    if experts == "packed":
        factors = set()
        for name, weights in tensors.items():
            wanted = blobstore.quantize(
                weights,
                "nvfp4",
                method="search",
                importance=importance.get(name),
                global_scale=True,
            )
            assert_same_parts(parts(model, name), wanted)
            assert wanted.global_scale is not None
            factors.add(float(wanted.global_scale[0]))
        assert len(factors) == 3
        return
    found = parts(model, STACK)
    whole = blobstore.quantize(
        np.stack([*tensors.values()]), "nvfp4", method="search", global_scale=True
    )
    assert found.global_scale is not None
    assert whole.global_scale is not None
    assert found.global_scale.tobytes() == whole.global_scale.tobytes()
    for e in (0, 2):
        assert found.weight[e].tobytes() == whole.weight[e].tobytes()
        assert found.scale[e].tobytes() == whole.scale[e].tobytes()


def test_only_nvfp4_tensors_have_a_global_scale(store: Store, tmp_path: Path) -> None:
    model = imported(store, tmp_path, small_tensors(), quant="nvfp4", global_scale=True)
    for tensor in model.values():
        array = tensor.numpy()
        has = isinstance(array, QuantizedArray) and array.global_scale is not None
        assert has == (tensor.quant_type is not None and tensor.quant_type.value == "nvfp4"), (
            tensor.name
        )
    assert parts(model, "lm_head.weight").quant_type.value == "mxfp8"


@pytest.mark.parametrize(
    "given",
    [{1: np.ones(64)}, {"\ud800": np.ones(64)}, {UP: [[1.0], [1.0, 2.0]]}],
    ids=["int", "text", "ragged"],
)
def test_a_mapping_that_is_none_of_names_to_vectors_is_wrong_use(
    tmp_path: Path, given: Any
) -> None:
    with pytest.raises(blobstore.errors.UsageError):
        blobstore.plan_import(
            write_checkpoint(tmp_path / "m"), quant="int4", method="search", importance=given
        )
