"""Expert groups: the names in one, their numeric order, and what experts have in common."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest
from support.inventories import source_tensor

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.checkpoint import group_of
from blobstore.formats.dtypes import DType
from blobstore.importer.plan import (
    packed_order,
    projections,
)
from blobstore.importer.roles import stacked_group_of
from blobstore.source.weights import SourceWeight

LAYER_PREFIXES = (
    "",
    "model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "backbone.",
    "language_model.backbone.",
    "model.language_model.backbone.",
    "mtp.",
)
MARKERS = (
    "mlp.experts",
    "mlp.shared_experts",
    "moe.experts",
    "mixer.experts",
    "mixer.shared_experts",
    "mlp.switch_mlp",
)
GROUP = "model.layers.1.mlp.experts"


def _tensor(
    rest: str, shape: tuple[int, ...] = (64, 32), dtype: DType = DType.BF16
) -> SourceWeight:
    return SourceWeight.plain(source_tensor(f"{GROUP}.{rest}", *shape, dtype=dtype))


@pytest.mark.parametrize(("prefix", "marker"), list(itertools.product(LAYER_PREFIXES, MARKERS)))
def test_group_is_the_prefix_without_the_dot(prefix: str, marker: str) -> None:
    for layer in ("0", "7", "123"):
        group = f"{prefix}layers.{layer}.{marker}"
        for rest in ("0.up_proj.weight", "11.down_proj.bias", "gate_up_proj", "down_proj.weight"):
            assert group_of(f"{group}.{rest}") == group


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.experts.",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.expert.0.up_proj.weight",
        "model.layers.1.mlp.shared_expert.up_proj.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.1.mlp.experts_bias.weight",
        "model.layers.1.experts.gate_up_proj",
        "model.layers.1.mixer.switch_mlp.up_proj.weight",
        "model.layers.1.moe.shared_experts.up_proj.weight",
        "model.layers.1.self_attn.experts.0.up_proj.weight",
        "model.layers.1.block.mlp.experts.0.up_proj.weight",
        "model.layers.mlp.experts.0.up_proj.weight",
        "model.layers.one.mlp.experts.0.up_proj.weight",
        "model.layers.-1.mlp.experts.0.up_proj.weight",
        "model.layers.\u0663.mlp.experts.0.up_proj.weight",
        "model.layers.1_mlp.experts.0.up_proj.weight",
        "modelxlayers.1.mlp.experts.0.up_proj.weight",
        "model.model.layers.1.mlp.experts.0.up_proj.weight",
        "draft.model.layers.1.mlp.experts.0.up_proj.weight",
        "model.visual.layers.1.mlp.experts.0.up_proj.weight",
        " model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layer.1.mlp.experts.0.up_proj.weight",
        "MODEL.layers.1.mlp.experts.0.up_proj.weight",
    ],
)
def test_near_misses_belong_to_no_group(name: str) -> None:
    assert group_of(name) is None
    assert stacked_group_of(name) is None


@pytest.mark.parametrize("marker", MARKERS)
def test_only_numbered_weights_are_stacked(marker: str) -> None:
    group = f"model.layers.1.{marker}"
    assert stacked_group_of(f"{group}.0.up_proj.weight") == group
    assert stacked_group_of(f"{group}.17.w1.weight") == group
    for rest in (
        "up_proj.weight",
        "gate_up_proj",
        "0.up_proj.bias",
        "0.up_proj",
        "0.weight_scale",
        "x0.up_proj.weight",
    ):
        assert stacked_group_of(f"{group}.{rest}") is None


def test_packed_order_counts_experts_as_numbers() -> None:
    rests = [
        f"{expert}.{name}"
        for expert in range(12)
        for name in ("down_proj.weight", "gate_proj.weight", "up_proj.weight")
    ]
    shuffled = random.Random(0).sample(rests, len(rests))
    assert [tensor.name for tensor in packed_order(GROUP, map(_tensor, shuffled))] == [
        f"{GROUP}.{rest}" for rest in rests
    ]


def test_packed_order_puts_unnumbered_tensors_last_by_name() -> None:
    rests = [
        "gate_up_proj",
        "0.up_proj.weight",
        "down_proj",
        "0.up_proj.bias",
        "10.up_proj.bias",
        "9.up_proj.bias",
    ]
    assert [
        tensor.name.removeprefix(f"{GROUP}.") for tensor in packed_order(GROUP, map(_tensor, rests))
    ] == [
        "0.up_proj.bias",
        "0.up_proj.weight",
        "9.up_proj.bias",
        "10.up_proj.bias",
        "down_proj",
        "gate_up_proj",
    ]


def test_projections_are_sorted_and_their_experts_numbered() -> None:
    by_name = {
        f"{expert}.{name}.weight": _tensor(f"{expert}.{name}.weight")
        for expert in range(11)
        for name in ("w2", "w1")
    }
    shuffled = random.Random(0).sample(list(by_name.values()), len(by_name))
    assert list(projections(GROUP, shuffled).items()) == [
        (f"{name}.weight", tuple(by_name[f"{expert}.{name}.weight"] for expert in range(11)))
        for name in ("w1", "w2")
    ]


def test_projections_may_differ_from_each_other() -> None:
    up, down = (
        _tensor("0.up_proj.weight", (64, 32)),
        _tensor("0.down_proj.weight", (32, 64), DType.F32),
    )
    assert projections(GROUP, [up, down]) == {
        "down_proj.weight": (down,),
        "up_proj.weight": (up,),
    }


def test_unnumbered_tensors_are_no_projections() -> None:
    assert projections(GROUP, map(_tensor, ("gate_up_proj", "down_proj.weight", "bias"))) == {}
    assert projections(GROUP, []) == {}


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (("0.up.weight", "2.up.weight"), "1.up.weight"),
        (("1.up.weight", "2.up.weight"), "0.up.weight"),
        (("0.up.weight", "1.up.weight", "0.down.weight"), "1.down.weight"),
        (("0.up.weight", "1.up.weight", "1.down.weight"), "0.down.weight"),
        (("0.up.weight", "1.up.weight", "1.up.bias"), "0.up.bias"),
    ],
)
def test_gap_in_the_expert_numbers_is_named(present: tuple[str, ...], missing: str) -> None:
    with pytest.raises(UnsupportedSourceError, match="must all be there") as caught:
        projections(GROUP, map(_tensor, present))
    assert caught.value.tensor == f"{GROUP}.{missing}"
    assert f"{GROUP}.{missing}" in str(caught.value)


def test_gap_before_a_huge_expert_number_costs_no_memory() -> None:
    tensors = [_tensor("0.up.weight"), _tensor("1000000.up.weight")]
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedSourceError) as caught:
            projections(GROUP, tensors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.tensor == f"{GROUP}.1.up.weight"
    assert peak < 2**20


def test_expert_number_beyond_pythons_digits_is_a_typed_error() -> None:
    tensors = [_tensor("0.up.weight"), _tensor("1" * 5000 + ".up.weight")]
    with pytest.raises(UnsupportedSourceError):
        projections(GROUP, tensors)


@pytest.mark.parametrize("number", ["01", "00", "007"])
def test_expert_number_written_in_another_way_is_refused(number: str) -> None:
    with pytest.raises(UnsupportedSourceError, match=number) as caught:
        projections(GROUP, [_tensor("0.up.weight"), _tensor(f"{number}.up.weight")])
    assert caught.value.tensor == f"{GROUP}.{number}.up.weight"


@pytest.mark.parametrize(
    "odd",
    [
        _tensor("2.up.weight", (32, 32)),
        _tensor("2.up.weight", (64, 64)),
        _tensor("2.up.weight", (32, 64)),
        _tensor("2.up.weight", (64, 32, 1)),
        _tensor("2.up.weight", (64, 32), DType.F16),
        _tensor("2.up.weight", (64, 32), DType.F32),
    ],
)
def test_experts_of_one_projection_have_one_shape_and_dtype(odd: SourceWeight) -> None:
    tensors = [odd if expert == 2 else _tensor(f"{expert}.up.weight") for expert in range(4)]
    with pytest.raises(UnsupportedSourceError) as caught:
        projections(GROUP, tensors)
    assert caught.value.tensor == odd.name
    for words in (
        GROUP,
        f"{GROUP}.0.up.weight is BF16 [64, 32]",
        f"{odd.name} is {odd.dtype} {list(odd.shape)}",
    ):
        assert words in str(caught.value)
