"""A verdict is given for every config.json and all tensors, so that `show` never fails."""

from hypothesis import given, settings, strategies as st

from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.model import on_mlx_lm, on_ollama
from blobstore.model.facts import ModelFacts, Runs, TensorFacts
from blobstore.model.on_ollama import BY_ARCHITECTURE

TEXTS = st.sampled_from([*BY_ARCHITECTURE, "llama", "default", ""])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
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
    [
        *("model.embed_tokens.weight", "backbone.embeddings.weight", "draft.x", ""),
        *("model.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.moe.experts.1.up_proj.weight"),
        *("layers.0.mlp.switch_mlp.down_proj.weight", "layers.0.mixer.experts.0.bias"),
    ]
)
TENSORS = st.builds(
    TensorFacts, NAMES, st.sampled_from(DType), st.just((4, 4)), QUANTIZATIONS, st.booleans()
)


@settings(max_examples=40)
@given(CONFIGS, st.lists(TENSORS, max_size=4), st.booleans(), st.none() | TEXTS)
def test_every_model_has_a_verdict_with_a_reason(
    config: dict[str, object] | None, tensors: list[TensorFacts], tokenizer: bool, draft: str | None
) -> None:
    documents = frozenset({"tokenizer.json"} if tokenizer else ())
    model = ModelFacts(config, documents, tuple(tensors), draft)
    found = [on_mlx_lm.verdict(model), on_ollama.verdict(model)]
    assert [one.runtime for one in found] == ["mlx-lm", "Ollama"]
    assert all(one.reason and one.runs in Runs for one in found)
