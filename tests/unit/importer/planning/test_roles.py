"""Names of experts and their groups; which tensors are stored as ``[..., in, out]``."""

import itertools
import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from support.inventories import source_tensor

from blobstore.errors import UnsupportedSourceError
from blobstore.formats.checkpoint import SourceConfig, group_of
from blobstore.formats.dtypes import DType
from blobstore.importer.options import PROFILES
from blobstore.importer.plan import projections
from blobstore.importer.roles import inputs_first, stacked_group_of
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


# Weights that are stored as ``[..., in, out]``, by config.json and names

Shapes = Mapping[str, tuple[int, ...]]
MLP = "model.layers.3.mlp.experts"
LANGUAGE = "model.language_model.layers.3.mlp.experts"
LLAMA4 = "language_model.model.layers.1.feed_forward.experts"
DBRX = "transformer.blocks.0.ffn.experts.mlp"


def turned(model_type: str, tensors: Shapes, profile: str = "default", **config: Any) -> set[str]:
    """Return the names of the tensors that are transposed in a checkpoint of that model type."""
    weights = [SourceWeight.plain(source_tensor(name, *shape)) for name, shape in tensors.items()]
    parsed = SourceConfig.parse(json.dumps({"model_type": model_type, **config}).encode())
    return set(inputs_first(weights, parsed, PROFILES[profile]))


def fused(experts: str) -> dict[str, tuple[int, ...]]:
    return {f"{experts}.gate_up_proj": (4, 64, 192), f"{experts}.down_proj": (4, 96, 64)}


@pytest.mark.parametrize(
    ("model_type", "tensors", "others"),
    [
        (
            "gpt_oss",
            fused(MLP),
            {f"{MLP}.gate_up_proj_bias": (4, 192), "model.layers.3.o_proj.weight": (64, 64)},
        ),
        ("qwen3_vl_moe", fused(LANGUAGE), {}),
        ("llama4", fused(LLAMA4), {f"{LLAMA4[:-7]}shared_expert.down_proj.weight": (64, 96)}),
        ("aria", {"language_model.model.layers.0.mlp.experts.fc2.weight": (4, 96, 64)}, {}),
        (
            "gpt2",
            {f"h.0.{name}.weight": (64, 64) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")}
            | {"transformer.h.11.crossattention.q_attn.weight": (64, 64)},
            {"wte.weight": (64, 64), "model.h.0.attn.c_attn.weight": (192, 64)},
        ),
        ("dbrx", {f"{DBRX}.w2": (256, 64)}, {f"{DBRX}.w1": (256, 64), f"{DBRX}.v1": (256, 64)}),
        ("gpt_bigcode", {}, {"transformer.h.0.attn.c_attn.weight": (96, 64)}),  # nn.Linear
        ("", {}, {"h.0.mlp.c_fc.weight": (64, 256)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_by_model_type(model_type: str, tensors: Shapes, others: Shapes) -> None:
    assert turned(model_type, {**tensors, **others}) == set(tensors)
    assert turned(model_type, {**tensors, **others}, "ollama") == set()


def test_a_shape_that_says_otherwise_counts_for_the_whole_checkpoint() -> None:
    config: dict[str, Any] = {"text_config": {"hidden_size": 64}}
    published = {f"{LANGUAGE}.gate_up_proj": (4, 64, 128), f"{LANGUAGE}.down_proj": (4, 64, 64)}
    assert turned("qwen3_vl_moe", published, **config) == set(published)
    newer = {f"{LANGUAGE}.gate_up_proj": (4, 128, 64), f"{LANGUAGE}.down_proj": (4, 64, 64)}
    assert turned("qwen3_vl_moe", newer, **config) == set()
