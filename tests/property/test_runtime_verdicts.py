"""A verdict is given for every config.json and all tensors, so that `show` never fails."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.model import on_mlx_lm, on_ollama
from blobstore.model.facts import ModelFacts, Runs, TensorFacts
from blobstore.model.on_ollama import BY_ARCHITECTURE

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([*BY_ARCHITECTURE, "llama", "default", ""])
)
KEYS = st.sampled_from(["architectures", "model_type", "text_config", "rope_scaling", "rope_type"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=8,
)
CONFIGS = st.none() | st.dictionaries(KEYS, VALUES, max_size=4)
QUANTIZATIONS = st.none() | st.sampled_from(
    [Quantization(one, one.group_sizes[0]) for one in QuantType]
)
NAMES = st.sampled_from(
    ["model.embed_tokens.weight", "backbone.embeddings.weight", "draft.x", ""]
) | st.builds(
    "{}layers.0.{}.{}{}".format,
    st.sampled_from(["model.", "", "mtp."]),
    st.sampled_from(["mlp.experts", "mlp.switch_mlp", "moe.experts", "mixer.experts", "experts"]),
    st.sampled_from(["", "0.", "1."]),
    st.sampled_from(["gate_up_proj", "up_proj.weight", "down_proj.weight", "bias"]),
)
TENSORS = st.builds(
    TensorFacts, NAMES, st.sampled_from(DType), st.just((4, 4)), QUANTIZATIONS, st.booleans()
)


@settings(max_examples=60)
@given(
    CONFIGS,
    st.lists(TENSORS, max_size=4),
    st.booleans(),
    st.none() | SCALARS.filter(lambda one: isinstance(one, str)),
)
def test_every_model_has_a_verdict_with_a_reason(
    config: dict[str, object] | None, tensors: list[TensorFacts], tokenizer: bool, draft: str | None
) -> None:
    documents = frozenset({"tokenizer.json"} if tokenizer else ())
    model = ModelFacts(config, documents, tuple(tensors), draft)
    found = [on_mlx_lm.verdict(model), on_ollama.verdict(model)]
    assert [one.runtime for one in found] == ["mlx-lm", "Ollama"]
    assert all(one.reason and one.runs in Runs for one in found)
