"""Groups of experts: the names in one, their numeric order, and what experts have in common."""

import itertools
import tracemalloc

import pytest
from support.inventories import source_tensor

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.checkpoint import group_of
from blobstore.formats.dtypes import DType
from blobstore.importer.plan import projections
from blobstore.importer.roles import stacked_group_of
from blobstore.source.weights import SourceWeight

PREFIXES = ("", "model.language_model.", "language_model.backbone.", "mtp.")
MARKERS = (
    *("mlp.experts", "mlp.shared_experts", "mlp.switch_mlp", "moe.experts"),
    *("mixer.experts", "mixer.shared_experts"),
)
GROUP = "model.layers.1.mlp.experts"


def tensor(rest: str, shape: tuple[int, ...] = (64, 32), dtype: DType = DType.BF16) -> SourceWeight:
    return SourceWeight.plain(source_tensor(f"{GROUP}.{rest}", *shape, dtype=dtype))


def test_the_group_of_a_name_and_whether_it_is_stacked() -> None:
    for prefix, marker in itertools.product(PREFIXES, MARKERS):
        group = f"{prefix}layers.123.{marker}"
        for rest in ("0.up_proj.weight", "17.w1.weight"):
            assert group_of(f"{group}.{rest}") == stacked_group_of(f"{group}.{rest}") == group
        for rest in ("11.down_proj.bias", "gate_up_proj", "up_proj.weight", "x0.up_proj.weight"):
            assert (group_of(f"{group}.{rest}"), stacked_group_of(f"{group}.{rest}")) == (
                group,
                None,
            )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.shared_expert.up_proj.weight",
        "model.layers.1.block.mlp.experts.0.up_proj.weight",
        "model.layers.\u0663.mlp.experts.0.up_proj.weight",
        "draft.model.layers.1.mlp.experts.0.up_proj.weight",
        "model.visual.layers.1.mlp.experts.0.up_proj.weight",
    ],
)
def test_near_misses_belong_to_no_group(name: str) -> None:
    assert (group_of(name), stacked_group_of(name)) == (None, None)


@pytest.mark.parametrize(
    ("present", "named"),
    [
        (("0.up.weight", "2.up.weight"), "1.up.weight"),
        (("1.up.weight", "2.up.weight"), "0.up.weight"),
        (("0.up.weight", "1.up.weight", "0.down.weight"), "1.down.weight"),
        (("0.up.weight", "01.up.weight"), "01.up.weight"),
    ],
)
def test_a_missing_or_misnumbered_expert_is_named(present: tuple[str, ...], named: str) -> None:
    with pytest.raises(UnsupportedSourceError) as caught:
        projections(GROUP, map(tensor, present))
    assert caught.value.tensor == f"{GROUP}.{named}"


def test_a_huge_expert_number_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        for number in ("1000000", "1" * 5000):  # Python reads no number of 5,000 digits
            with pytest.raises(UnsupportedSourceError):
                projections(GROUP, [tensor("0.up.weight"), tensor(f"{number}.up.weight")])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


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
    with pytest.raises(UnsupportedSourceError, match=r"BF16 \[64, 32\]") as caught:
        projections(GROUP, tensors)
    assert caught.value.tensor == odd.name
    assert f"{odd.dtype} {list(odd.shape)}" in str(caught.value)
