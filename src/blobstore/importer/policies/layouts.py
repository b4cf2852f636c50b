"""Layouts: which tensors of which models are stored as ``[..., in, out]``. A table and pure functions; no weight is read.

Groups run along the last axis, and a scale per group of inputs is what every runtime multiplies with. Tensors that a model
keeps the other way round are therefore transposed when they are quantized (docs/formats.md section 3). Ollama's importer
does not do that, so neither does the ``ollama`` profile.

Sources: transformers 5.23.0 pytorch_utils.py `Conv1D` and the models that use it; the experts of modeling_gpt_oss.py,
modeling_llama4.py, modeling_aria.py, modeling_openai_privacy_filter.py (``is_transposed=True``), of modeling_dbrx.py
`DbrxExpertGLU.forward` (``intermediate_states.matmul(expert_w2)``), and conversion_mapping.py ``qwen3_vl_moe``, which says
that published checkpoints are transposed and newer ones may not be. The same in mlx_lm 0.32.2 models/gpt2.py, llama4.py,
dbrx.py, qwen3_vl_moe.py `sanitize`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blobstore.checkpoint import SourceConfig
from blobstore.importer.profiles import Profile
from blobstore.source.weights import Form, SourceWeight

_MATRIX_RANK = 2


@dataclass(frozen=True, slots=True)
class InputsFirst:
    """Tensors stored as ``[..., in, out]``, as patterns of whole names.

    ``from_hidden`` have the model's hidden size as their inputs, ``to_hidden`` as their outputs.
    """

    from_hidden: re.Pattern[str]
    to_hidden: re.Pattern[str]

    @classmethod
    def of(cls, from_hidden: str, to_hidden: str) -> InputsFirst:
        """Return the row for two patterns."""
        return cls(re.compile(from_hidden, re.ASCII), re.compile(to_hidden, re.ASCII))

    def contains(self, name: str) -> bool:
        """Return True when the row is about the tensor of that name."""
        return bool(self.from_hidden.fullmatch(name) or self.to_hidden.fullmatch(name))

    def says_otherwise(self, name: str, shape: tuple[int, ...], hidden: int | None) -> bool:
        """Return True when the shape shows that the tensor is ``[..., out, in]``: its hidden axis is at the other end."""
        first, last = shape[-2:]
        if hidden is None or first == last:
            return False
        return last == hidden if self.from_hidden.fullmatch(name) else first == hidden


_LAYER = r"(?:.+\.)?layers\.[0-9]+\."
_FUSED = InputsFirst.of(rf"{_LAYER}mlp\.experts\.gate_up_proj", rf"{_LAYER}mlp\.experts\.down_proj")
# mlx-lm's own GPT-2 (model.h.N…) has them as [out, in].
_CONV1D = InputsFirst.of(
    r"(?:transformer\.|encoder\.)?h\.[0-9]+\.(?:(?:attn|crossattention)\.(?:c_attn|q_attn)|mlp\.c_fc)\.weight",
    r"(?:transformer\.|encoder\.)?h\.[0-9]+\.(?:attn|crossattention|mlp)\.c_proj\.weight",
)
_ROWS: Mapping[str, InputsFirst] = {
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), _CONV1D),
    **dict.fromkeys(("gpt_oss", "openai_privacy_filter", "qwen3_vl_moe", "qwen3_vl_moe_text"), _FUSED),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        InputsFirst.of(rf"{_LAYER}feed_forward\.experts\.gate_up_proj", rf"{_LAYER}feed_forward\.experts\.down_proj"),
    ),
    **dict.fromkeys(
        ("aria", "aria_text"),
        InputsFirst.of(rf"{_LAYER}mlp\.experts\.fc1\.weight", rf"{_LAYER}mlp\.experts\.fc2\.weight"),
    ),
    # The experts of w2 lie below each other, [experts * ffn, hidden]: transposed, each has columns of its own.
    "dbrx": InputsFirst.of(r"(?!)", r"transformer\.blocks\.[0-9]+\.ffn\.experts\.mlp\.w2"),
}
"""By config.json's ``model_type``."""


def inputs_first(weights: Iterable[SourceWeight], config: SourceConfig | None, profile: Profile) -> frozenset[str]:
    """Return the names of the weights that are stored as ``[..., in, out]`` in a checkpoint of that config.json.

    None of them when a shape shows that this checkpoint has them the other way round, or in a profile that does not care.
    """
    if config is None or not profile.knows_layouts or (row := _ROWS.get(config.model_type or "")) is None:
        return frozenset()
    found = {weight.name: weight.shape for weight in weights if _may_be_transposed(weight) and row.contains(weight.name)}
    contradicts = any(row.says_otherwise(name, shape, config.width) for name, shape in found.items())
    return frozenset() if contradicts else frozenset(found)


def _may_be_transposed(weight: SourceWeight) -> bool:
    return weight.form is Form.PLAIN and len(weight.shape) >= _MATRIX_RANK
