"""Roles and layouts: what a tensor is for its model, and which way round it is stored.

Layouts: which tensors of which models are stored as ``[..., in, out]``.

A table and pure functions; no weight is read.

Groups run along the last axis, and a scale per group of inputs is what every runtime multiplies
with. Tensors that a model keeps the other way round are therefore transposed when they are
quantized (docs/formats.md section 3). Ollama's importer does not do that, so neither does the
``ollama`` profile.

Sources: transformers 5.23.0 pytorch_utils.py `Conv1D` and the models that use it; the experts of
modeling_gpt_oss.py, modeling_llama4.py, modeling_aria.py, modeling_openai_privacy_filter.py
(``is_transposed=True``), of modeling_dbrx.py `DbrxExpertGLU.forward`
(``intermediate_states.matmul(expert_w2)``), and conversion_mapping.py ``qwen3_vl_moe``, which says
that published checkpoints are transposed and newer ones may not be. The same in mlx_lm 0.32.2
models/gpt2.py, llama4.py, dbrx.py, qwen3_vl_moe.py `sanitize`.

Roles: what a tensor is for its model, as far as a policy asks: an expert's weight, an embedding, a
gate. Pure.

Ollama tells that from names alone; the ``default`` profile from shapes and config.json too, since
names differ between architectures. Sources: ollama/ollama@fb307609 x/create/create.go
`ShouldQuantize`, `isStackedExpertWeight`, `isRoutingGate`, x/create/quantpolicy.go `isVision`;
mlx_lm 0.32.2 models/granitemoe.py, step3p5.py, switch_layers.py (names of stacks); transformers
5.23.0 modeling_gpt2.py (wte, wpe), modeling_t5.py (shared), modeling_gpt_oss.py (``…_bias``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from blobstore.formats.checkpoint import GROUP, SourceConfig
from blobstore.importer.options import Experts, ImportOptions, Profile
from blobstore.source.weights import Form, SourceWeight, is_expert

Shape = tuple[int, ...]
MATRIX, STACK = 2, 3
"""Dimensions of a weight matrix, and of a stack of them."""
MIN_ELEMENTS = 1024
"""Smaller tensors are not quantized."""

# Names of tensors, or parts of names, for every policy. Which bits they get is in policy.py.
VISION = ("vision", "visual")
AUDIO = ("audio_tower", "embed_audio")
HEAD = "lm_head.weight"
SENSITIVE = (".v_proj", ".k_proj", "down_proj")
"""Projections whose errors hurt a model most."""
_TOKENS = ("embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight", "wte.weight")
_NO_TOKENS = ("per_layer", *VISION, "audio")

_OTHER_MODALITY, _EMBEDDING = "part of another modality", "an embedding"
_NORM, _GATE = "a norm", "a routing gate"
_WORDS = (
    *((word, _OTHER_MODALITY) for word in AUDIO),
    ("embed", _EMBEDDING),
    ("norm", _NORM),
    ("ln_", _NORM),
)
_ROUTING_GATES = (
    ".mlp.gate.weight",
    ".mixer.gate.weight",
    ".shared_expert_gate.weight",
    ".router.proj.weight",
)

_STACKS = re.compile(
    r"\.(?:switch_mlp|switch_glu)\.|\.moe\.(?:gate|up|down)_proj\.|(?:block_sparse_moe|mlp)\.(?:input|output)_linear\."
)
_GATES = frozenset({"gate", "router", "wg", "classifier"})
_EMBEDDINGS = frozenset({"wte", "wpe", "shared", "emb", "embd"})
_HEADS = frozenset(
    {
        "lm_head",
        "output",
        "head",
        "output_layer",
        "output_projection",
        "proj_out",
        "ff_out",
        "embed_out",
        "decoder",
        "unembed",
    }
)


def contains(name: str, words: tuple[str, ...]) -> bool:
    """Return True when one of the words is a part of the name."""
    return any(word in name for word in words)


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor is in, or None."""
    match = re.search(r"\.layers\.([0-9]{1,18})\.", name, re.ASCII)
    return int(match[1]) if match else None


def embeds_tokens(name: str, shape: Shape) -> bool:
    """Return True for a table of tokens, by the names that architectures have for it."""
    embeds = name.endswith(_TOKENS) and not contains(name, _NO_TOKENS)
    return embeds and len(shape) == MATRIX and math.prod(shape) >= MIN_ELEMENTS


class Roles:
    """Says what tensors are, by their names alone, as Ollama's importer does."""

    def is_expert(self, name: str, shape: Shape) -> bool:  # noqa: ARG002  # the name says it
        """Return True for a weight of a mixture's experts, one expert's or a stack of them.

        Shared experts are included.
        """
        return is_expert(name)

    def kept_as(self, name: str, shape: Shape) -> str | None:
        """Return what the tensor is, where that is never quantized: "an embedding"; else None.

        Experts are exempt from the tests of words, but not where another modality has them.
        """
        if name.endswith(_ROUTING_GATES):
            return _GATE
        if contains(name, VISION):
            return _OTHER_MODALITY
        if self.is_expert(name, shape):
            return None
        return next((role for word, role in _WORDS if word in name), None)


@dataclass(frozen=True, slots=True)
class ModelRoles(Roles):
    """Roles by names, shapes and what config.json says of the model's sizes.

    ``experts``: how many a layer has. ``tables``: the numbers of rows that only tables of tokens
    and positions have.
    """

    experts: frozenset[int]
    tables: frozenset[int]

    @classmethod
    def of(cls, config: SourceConfig | None) -> ModelRoles:
        # Where the hidden size is the number of positions too (Llama 2: 4096), a projection has as
        # many rows as their table.
        tables = _numbers(config, _TABLE_SIZES) - _numbers(config, _WIDTHS)
        return cls(_numbers(config, _EXPERT_COUNTS), tables)

    def is_expert(self, name: str, shape: Shape) -> bool:
        """See `Roles`: also stacks of other names, or with as many matrices as there are experts.

        Biases are not.
        """
        if name.endswith("_bias"):
            return False
        if is_expert(name):
            return True
        if len(shape) != STACK or not name.endswith(".weight") or "conv" in name:
            return False
        return shape[0] in self.experts or _STACKS.search(name) is not None

    def kept_as(self, name: str, shape: Shape) -> str | None:
        if name.endswith(("_bias", ".bias")):
            return "a bias"
        role = super(ModelRoles, self).kept_as(name, shape)
        if role is not None or len(shape) != MATRIX:
            return role
        if shape[0] in self.experts and not _GATES.isdisjoint(name.split(".")):
            return _GATE
        return _EMBEDDING if self._is_table(name, shape) else None

    def _is_table(self, name: str, shape: Shape) -> bool:
        """Return True for a table of tokens or positions, by its name or its number of rows.

        A head, or a tensor in a layer, is not one.
        """
        parents, _, module = name.removesuffix(".weight").rpartition(".")
        if not name.endswith(".weight") or not (module in _EMBEDDINGS or shape[0] in self.tables):
            return False
        return module not in _HEADS and not any(part.isdigit() for part in parents.split("."))


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TABLE_SIZES = ("vocab_size", "max_position_embeddings", "n_positions", "n_ctx")
_WIDTHS = ("hidden_size", "n_embd", "d_model")


def _numbers(config: SourceConfig | None, keys: tuple[str, ...]) -> frozenset[int]:
    """Return the numbers above 1 of those keys, in config.json and the configs in it about text.

    One row or one expert tells nothing.
    """
    if config is None:
        return frozenset()
    inner = (config.text_config, *map(config.others.get, ("llm_config", "ffn_config")))
    sections = [config.sizes, *(section for section in inner if isinstance(section, dict))]
    return frozenset(
        value
        for section in sections
        for key in keys
        if type(value := section.get(key)) is int and value > 1
    )


class InputsFirst(NamedTuple):
    """Tensors stored as ``[..., in, out]``, as patterns of whole names.

    ``from_hidden`` have the model's hidden size as their inputs, ``to_hidden`` as their outputs.
    """

    from_hidden: str
    to_hidden: str

    def says_otherwise(self, name: str, shape: tuple[int, ...], hidden: int | None) -> bool:
        """Return True when the hidden axis is at the other end, as in ``[..., out, in]``."""
        first, last = shape[-2:]
        if hidden is None or first == last:
            return False
        inputs = last if re.fullmatch(self.from_hidden, name, re.ASCII) else first
        return inputs == hidden


_LAYER = r"(?:.+\.)?layers\.[0-9]+\."
_FUSED = InputsFirst(rf"{_LAYER}mlp\.experts\.gate_up_proj", rf"{_LAYER}mlp\.experts\.down_proj")
# mlx-lm's own GPT-2 (model.h.N…) has them as [out, in].
_CONV1D = InputsFirst(
    r"(?:transformer\.|encoder\.)?h\.[0-9]+\.(?:(?:attn|crossattention)\.(?:c_attn|q_attn)|mlp\.c_fc)\.weight",
    r"(?:transformer\.|encoder\.)?h\.[0-9]+\.(?:attn|crossattention|mlp)\.c_proj\.weight",
)
# By config.json's ``model_type``.
_ROWS: Mapping[str, InputsFirst] = {
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), _CONV1D),
    **dict.fromkeys(
        ("gpt_oss", "openai_privacy_filter", "qwen3_vl_moe", "qwen3_vl_moe_text"), _FUSED
    ),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        InputsFirst(
            rf"{_LAYER}feed_forward\.experts\.gate_up_proj",
            rf"{_LAYER}feed_forward\.experts\.down_proj",
        ),
    ),
    **dict.fromkeys(
        ("aria", "aria_text"),
        InputsFirst(rf"{_LAYER}mlp\.experts\.fc1\.weight", rf"{_LAYER}mlp\.experts\.fc2\.weight"),
    ),
    # The experts of w2 lie below each other, [experts * ffn, hidden]: transposed, each has columns
    # of its own.
    "dbrx": InputsFirst(r"(?!)", r"transformer\.blocks\.[0-9]+\.ffn\.experts\.mlp\.w2"),
}


def inputs_first(
    weights: Iterable[SourceWeight], config: SourceConfig | None, profile: Profile
) -> frozenset[str]:
    """Return the names of the weights that a checkpoint stores as ``[..., in, out]``.

    None of them when a shape shows that this checkpoint has them the other way round, or in a
    profile that does not care.
    """
    if config is None or profile.is_ollama or (row := _ROWS.get(config.model_type or "")) is None:
        return frozenset()
    pattern = re.compile(f"{row.from_hidden}|{row.to_hidden}", re.ASCII)
    shapes = {
        weight.name: weight.shape
        for weight in weights
        if weight.form is Form.PLAIN
        and len(weight.shape) >= MATRIX
        and pattern.fullmatch(weight.name)
    }
    contradicts = any(
        row.says_otherwise(name, shape, config.width) for name, shape in shapes.items()
    )
    return frozenset() if contradicts else frozenset(shapes)


NUMBERED = re.compile(r"(?P<expert>[0-9]+)\.(?P<projection>.+)", re.ASCII | re.DOTALL)
"""What follows the prefix of a numbered expert's tensor."""


def stacked_group_of(name: str) -> str | None:
    """Return the group prefix of a numbered expert's weight, which may be stacked, or None."""
    match = GROUP.fullmatch(name)
    return (
        match["group"]
        if match and name.endswith(".weight") and NUMBERED.fullmatch(match["rest"])
        else None
    )


# Runners of Ollama that read no packed experts: x/models/cohere2_moe/cohere2_moe.go
# `loadStackedExperts` at fb307609 ends with "missing stacked expert weights". Those of Qwen3.5 and
# Qwen3-Next, Laguna, Nemotron-H, GLM-4 MoE Lite and Gemma 4 collect numbered experts too
# (`collectPerExpertProjection`, `collectExpertProjection`, `collectAndStackExpertWeights`).
_STACKED_ONLY = frozenset({"Cohere2MoeForCausalLM"})


def needs_stacked_experts(config: SourceConfig | None) -> bool:
    """Return True when Ollama runs the architecture with stacked experts only."""
    return config is not None and config.architecture in _STACKED_ONLY


def form_of_experts(config: SourceConfig | None, options: ImportOptions) -> Experts:
    """Return the form of experts: the asked one, else the one that runs, else the profile's."""
    if options.experts is not None:
        return options.experts
    return Experts.STACKED if needs_stacked_experts(config) else options.profile.experts
