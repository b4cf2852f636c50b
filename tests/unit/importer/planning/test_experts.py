"""Groups of experts: the names in one, their numeric order, and what experts have in common."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest
from support.inventories import source_tensor

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.checkpoint import group_of
from blobstore.formats.dtypes import DType
from blobstore.importer.plan import packed_order, projections
from blobstore.importer.roles import stacked_group_of
from blobstore.source.weights import SourceWeight

PREFIXES = (
    *("", "model.", "language_model.", "language_model.model.", "model.language_model."),
    *("backbone.", "language_model.backbone.", "model.language_model.backbone.", "mtp."),
)
MARKERS = (
    *("mlp.experts", "mlp.shared_experts", "mlp.switch_mlp", "moe.experts"),
    *("mixer.experts", "mixer.shared_experts"),
)
GROUP = "model.layers.1.mlp.experts"


def tensor(rest: str, shape: tuple[int, ...] = (64, 32), dtype: DType = DType.BF16) -> SourceWeight:
    return SourceWeight.plain(source_tensor(f"{GROUP}.{rest}", *shape, dtype=dtype))


def test_a_group_is_the_prefix_without_the_dot() -> None:
    rests = ("0.up_proj.weight", "11.down_proj.bias", "gate_up_proj", "down_proj.weight")
    for prefix, marker, rest in itertools.product(PREFIXES, MARKERS, rests):
        assert group_of(f"{prefix}layers.123.{marker}.{rest}") == f"{prefix}layers.123.{marker}"


def test_near_misses_belong_to_no_group() -> None:
    for name in (
        "model.layers.1.mlp.experts.",
        "model.layers.1.mlp.expert.0.up_proj.weight",
        "model.layers.1.mlp.shared_expert.up_proj.weight",
        "model.layers.1.mlp.experts_bias.weight",
        "model.layers.1.experts.gate_up_proj",
        "model.layers.1.mixer.switch_mlp.up_proj.weight",
        "model.layers.1.block.mlp.experts.0.up_proj.weight",
        "model.layers.one.mlp.experts.0.up_proj.weight",
        "model.layers.-1.mlp.experts.0.up_proj.weight",
        "model.layers.\u0663.mlp.experts.0.up_proj.weight",
        "modelxlayers.1.mlp.experts.0.up_proj.weight",
        "draft.model.layers.1.mlp.experts.0.up_proj.weight",
        "model.visual.layers.1.mlp.experts.0.up_proj.weight",
        " model.layers.1.mlp.experts.0.up_proj.weight",
        "MODEL.layers.1.mlp.experts.0.up_proj.weight",
    ):
        assert (group_of(name), stacked_group_of(name)) == (None, None), name


def test_only_numbered_weights_are_stacked() -> None:
    for group in (f"model.layers.1.{marker}" for marker in MARKERS):
        assert stacked_group_of(f"{group}.0.up_proj.weight") == group
        assert stacked_group_of(f"{group}.17.w1.weight") == group
        for rest in ("up_proj.weight", "gate_up_proj", "0.up_proj.bias", "x0.up_proj.weight"):
            assert stacked_group_of(f"{group}.{rest}") is None


def test_experts_are_in_the_order_of_their_numbers_and_others_last_by_name() -> None:
    rests = ["0.up.bias", "0.up.weight", "9.up.bias", "10.up.bias", "down_proj", "gate_up_proj"]
    shuffled = random.Random(0).sample(rests, len(rests))
    assert [one.name for one in packed_order(GROUP, map(tensor, shuffled))] == [
        f"{GROUP}.{rest}" for rest in rests
    ]


def test_projections_are_sorted_and_their_experts_numbered() -> None:
    shapes = {"w1": (64, 32), "w2": (32, 64)}  # projections may differ from each other
    experts = {
        name: [tensor(f"{expert}.{name}.weight", shape) for expert in range(11)]
        for name, shape in shapes.items()
    }
    shuffled = random.Random(0).sample([*experts["w2"], *experts["w1"]], 22)
    assert list(projections(GROUP, shuffled).items()) == [
        (f"{name}.weight", tuple(experts[name])) for name in ("w1", "w2")
    ]
    assert projections(GROUP, map(tensor, ("gate_up_proj", "down_proj.weight"))) == {}


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (("0.up.weight", "2.up.weight"), "1.up.weight"),
        (("1.up.weight", "2.up.weight"), "0.up.weight"),
        (("0.up.weight", "1.up.weight", "0.down.weight"), "1.down.weight"),
        (("0.up.weight", "1.up.weight", "1.up.bias"), "0.up.bias"),
    ],
)
def test_a_gap_in_the_expert_numbers_is_named(present: tuple[str, ...], missing: str) -> None:
    with pytest.raises(UnsupportedSourceError, match="must all exist") as caught:
        projections(GROUP, map(tensor, present))
    assert caught.value.tensor == f"{GROUP}.{missing}"


def test_a_huge_expert_number_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        for number in ("1000000", "1" * 5000):  # Python reads no number of 5,000 digits
            with pytest.raises(UnsupportedSourceError):
                projections(GROUP, [tensor("0.up.weight"), tensor(f"{number}.up.weight")])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", ["01", "00"])
def test_an_expert_number_written_in_another_way_is_refused(number: str) -> None:
    with pytest.raises(UnsupportedSourceError) as caught:
        projections(GROUP, [tensor("0.up.weight"), tensor(f"{number}.up.weight")])
    assert caught.value.tensor == f"{GROUP}.{number}.up.weight"


@pytest.mark.parametrize(
    "odd",
    [
        tensor("2.up.weight", (32, 64)),
        tensor("2.up.weight", (64, 32, 1)),
        tensor("2.up.weight", (64, 32), DType.F16),
    ],
)
def test_experts_of_one_projection_have_one_shape_and_dtype(odd: SourceWeight) -> None:
    tensors = [odd if expert == 2 else tensor(f"{expert}.up.weight") for expert in range(4)]
    with pytest.raises(UnsupportedSourceError) as caught:
        projections(GROUP, tensors)
    assert caught.value.tensor == odd.name
    assert f"{GROUP}.0.up.weight is BF16 [64, 32]" in str(caught.value)
    assert f"{odd.name} is {odd.dtype} {list(odd.shape)}" in str(caught.value)
