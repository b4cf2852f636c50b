"""Ollama: which models of safetensors its MLX runner loads, as a table and a function. Pure.

Source: ollama/ollama@fb307609 (v0.33.0-rc2). x/models/*/ has one package a family: its `init`
registers architectures, its `LoadWeights` names the tensors that it reads;
x/mlxrunner/model/base/base.go `New` takes the first architecture of config.json and no other;
x/quant/quant.go has the types, which are all of ours, in every group size. A first version is the
first release whose tag has it, at least 0.19.0, the first that reads what we write.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from blobstore.errors import quoted
from blobstore.formats.checkpoint import TOKENIZER
from blobstore.model.facts import Config, ExpertGroup, Layout, ModelFacts, Runs, Verdict

NAME = "Ollama"
VERSION = "0.33.0-rc2"
FIRST_VERSION = "0.19.0"
"""See `blobstore.formats.documents.REQUIRED_OLLAMA`."""

# ``head_dim`` and ``query_pre_attn_scalar`` of a Gemma 3 whose config.json has none.
_GEMMA3_HEAD = 256
_ROPE_SETTINGS = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A package of x/models, as far as it differs from the others.

    - ``architectures``: the names that it registers, with the first version that has each.
    - ``embeddings``: the names under which it looks for the token embedding.
    - ``experts``: where it reads routed experts, and in which layout, with the first version.
    - ``drafts``: the draft architectures that go with it, with the first version.
    - ``senses``: it takes images.
    - ``scaled_experts``: it multiplies by the global scales of experts, which the others ignore.
    - ``scales_by_head``: it scales attention by ``head_dim``, whatever config.json says.
    - ``one_mode``: it takes one quantization mode for all experts.
    - ``needs``: keys of config.json that it requires; of several in one row any.
    - ``token``: a token that it requires.
    - ``rope``: which of `_ROPE_SETTINGS` it reads; ``rope_theta`` is its value where config.json
      has none.
    """

    architectures: Mapping[str, str]
    embeddings: frozenset[str]
    experts: Mapping[tuple[str, Layout], str] = field(default_factory=dict)
    drafts: Mapping[str, str] = field(default_factory=dict)
    senses: bool = False
    scaled_experts: bool = False
    one_mode: bool = False
    scales_by_head: bool = False
    needs: tuple[tuple[str, ...], ...] = ()
    token: str | None = None
    rope: tuple[str, ...] = _ROPE_SETTINGS
    rope_theta: float = 0.0


def _since(version: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, version)


def _embeddings(*prefixes: str, name: str = "embed_tokens.weight") -> frozenset[str]:
    return frozenset(prefix + name for prefix in prefixes)


_PLAIN = _embeddings("model.", "language_model.model.")
_MLP_EXPERTS = list(product(("mlp.experts", "mlp.switch_mlp"), (Layout.STACKED,)))
_DFLASH = _since(
    "0.32.7", "DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"
)

FAMILIES = (
    # llama/llama.go, qwen3/qwen3.go
    Family(
        architectures=_since("0.19.0", "LlamaForCausalLM"),
        embeddings=_PLAIN,
        rope=(),
        rope_theta=10_000.0,
    ),
    Family(
        architectures=_since("0.19.0", "Qwen3ForCausalLM"),
        embeddings=_PLAIN,
        rope=(),
        rope_theta=1_000_000.0,
    ),
    # gemma3/gemma3.go `parseTextConfig`
    Family(
        architectures=_since("0.19.0", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        embeddings=_PLAIN,
        scales_by_head=True,
        rope=(),
        rope_theta=1_000_000.0,
    ),
    # gemma4/gemma4.go `resolveWeightPrefix`, `LoadWeights`; assistant.go `newAssistantModel` wants
    # a Gemma 4 beside it
    Family(
        architectures=_since("0.21.0", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
        | _since(
            "0.30.3",
            "Gemma4UnifiedForCausalLM",
            "Gemma4UnifiedForConditionalGeneration",
            "gemma4_unified",
        ),
        embeddings=_embeddings(
            *map("".join, product(("", "language_model.", "model.language_model."), ("", "model.")))
        ),
        experts={
            ("moe.experts", Layout.NUMBERED): "0.21.0",
            **dict.fromkeys(
                product(("experts", "moe", "moe.switch_mlp"), (Layout.FUSED,)), "0.31.2"
            ),
        },
        drafts=_since("0.23.1", "Gemma4AssistantForCausalLM", "gemma4_assistant")
        | _since("0.30.3", "Gemma4UnifiedAssistantForCausalLM", "gemma4_unified_assistant"),
    ),
    # glm4_moe_lite/glm4_moe_lite.go `sanitizeExpertWeights`; `SwitchMLP.Forward` multiplies in the
    # mode of the first blob
    Family(
        architectures=_since("0.19.0", "Glm4MoeLiteForCausalLM", "GLM4MoeLite"),
        embeddings=_embeddings("model."),
        experts={
            ("mlp.experts", Layout.NUMBERED): "0.19.0",
            **dict.fromkeys(_MLP_EXPERTS, "0.31.2"),
        },
        one_mode=True,
        needs=(("first_k_dense_replace",),),
        rope=("rope_scaling",),
    ),
    # qwen3_5/qwen3_5.go `resolveTensorPathLayout`, `loadSwitchMLP`; qwen3_5_moe/qwen3_5_moe.go
    Family(
        architectures=_since(
            "0.19.0",
            *map(
                "".join,
                product(
                    ("Qwen3_5", "Qwen3Next"),
                    ("", "Moe"),
                    ("ForCausalLM", "ForConditionalGeneration"),
                ),
            ),
        ),
        embeddings=_embeddings(
            "model.",
            "language_model.model.",
            "language_model.",
            "model.language_model.model.",
            "model.language_model.",
        ),
        experts=dict.fromkeys(
            [("mlp.experts", Layout.NUMBERED), ("mlp.experts", Layout.FUSED), *_MLP_EXPERTS],
            "0.19.0",
        ),
        senses=True,
    ),
    # laguna/laguna.go `resolveWeightPrefix`, `LoadWeights`; dflash/dflash.go `draftTarget`
    Family(
        architectures=_since("0.22.0", "LagunaForCausalLM"),
        embeddings=_embeddings(
            *map("".join, product(("", "language_model.", "model.language_model."), ("model.", "")))
        ),
        experts=dict.fromkeys([("mlp.experts", Layout.NUMBERED), *_MLP_EXPERTS], "0.22.0"),
        drafts=_DFLASH,
        scaled_experts=True,
    ),
    # cohere2_moe/cohere2_moe.go `loadStackedExperts`: "missing stacked expert weights"
    Family(
        architectures=_since("0.30.10", "Cohere2MoeForCausalLM"),
        embeddings=_embeddings("model."),
        experts={
            ("mlp.experts", Layout.STACKED): "0.31.2",
            ("mlp.switch_mlp", Layout.STACKED): "0.30.10",
        },
        rope=(),
        rope_theta=10_000.0,
    ),
    # glimmer/glimmer.go `LoadWeights`, media.go
    Family(
        architectures=_since("0.32.7", "MuseGlimmerForConditionalGeneration"),
        embeddings=_embeddings("model.", "model.language_model."),
        drafts=_DFLASH,
        senses=True,
        needs=(("no_rope_layers", "layer_rope_theta"),),
        token="<|start|>",  # noqa: S106
    ),
    # nemotron_h/nemotron_h.go `parseConfig`, `resolveTensorPathLayout`, `loadLayer`; it has no
    # rotary embedding
    Family(
        architectures=_since(
            "0.32.9",
            "NemotronHForCausalLM",
            "NemotronH_Nano_VL_V2",
            "NemotronH_Nano_Omni_Reasoning_V3",
        ),
        embeddings=_embeddings(
            "",
            "language_model.",
            "model.language_model.",
            "language_model.model.",
            "model.",
            name="backbone.embeddings.weight",
        ),
        experts=dict.fromkeys(
            product(("mixer.experts",), (Layout.NUMBERED, Layout.STACKED)), "0.32.9"
        ),
        scaled_experts=True,
        needs=(("hybrid_override_pattern",), ("num_hidden_layers",)),
    ),
)

BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}


def verdict(model: ModelFacts) -> Verdict:
    """Return the verdict of Ollama's MLX runner."""
    family = BY_ARCHITECTURE.get(model.architecture or "")
    if family is None:
        return Verdict(NAME, VERSION, Runs.NO, _unknown(model))
    if reason := next(_obstacles(model, family), None):
        return Verdict(NAME, VERSION, Runs.NO, reason)
    if reason := next(_doubts(model, family), None):
        return Verdict(NAME, VERSION, Runs.UNKNOWN, reason)
    words = [model.architecture or "", model.types]
    if model.has_other_senses and not family.senses:
        words.append("text only")
    needed = [family.architectures[model.architecture or ""]]
    needed += [family.experts[group.place, group.layout] for group in model.experts]
    needed += [family.drafts[model.draft]] if model.draft is not None else []
    first = max(needed, key=lambda version: [int(part) for part in version.split(".")])
    if first != FIRST_VERSION:
        words.append(f"from version {first}")
    return Verdict(NAME, VERSION, Runs.YES, ", ".join(words))


def _unknown(model: ModelFacts) -> str:
    if model.config is None:
        return "config.json is missing"
    if model.architecture is None:
        return "config.json names no architecture"
    return f"its runner has no {model.architecture}"


def _obstacles(model: ModelFacts, family: Family) -> Iterator[str]:
    if TOKENIZER not in model.documents:
        yield f"{TOKENIZER} is missing"
    if not model.is_described:
        yield "its blobs do not say their types, nor does config.json (mode)"
    section = _text_section(model)
    for keys in family.needs:
        if all(section.get(key) in (None, "", []) for key in keys):
            yield f"its runner needs {' or '.join(keys)} of config.json"
    yield from _tokenizer_obstacles(model, family)
    if not any(tensor.name in family.embeddings for tensor in model.tensors):
        yield (
            "its runner finds no token embedding: none is called"
            f" {' or '.join(sorted(family.embeddings))}"
        )
    for group in model.experts:
        yield from _expert_obstacles(group, family)
    if model.draft is not None and model.draft not in family.drafts:
        yield f"its runner has no draft {model.draft} for {model.architecture}"


def _tokenizer_obstacles(model: ModelFacts, family: Family) -> Iterator[str]:
    """Yield why the runner does not read a tokenizer. Source: x/tokenizer/tokenizer_load.go."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return
    if tokenizer.kind != "BPE":
        yield f"its runner reads tokenizers of type BPE, and this one is {tokenizer.kind}"
    if tokenizer.strange_split is not None and not tokenizer.replaces_spaces:
        yield (
            "its runner's regular expressions (RE2) do not support the tokenizer's:"
            f" {quoted(tokenizer.strange_split)}"
        )
    if family.token is not None and family.token not in tokenizer.tokens:
        yield f"its runner needs the token {family.token}"


def _expert_obstacles(group: ExpertGroup, family: Family) -> Iterator[str]:
    if not family.scaled_experts and any(tensor.double_scaled for tensor in group.tensors):
        yield "its runner ignores the global scales of experts"
    if group.mixed_projection is not None:
        yield (
            f"it stacks experts, and those of {group.name} have several types in"
            f" {group.mixed_projection}"
        )
    if (group.place, group.layout) in family.experts:
        return
    layouts = [layout for place, layout in family.experts if place == group.place]
    if not layouts:
        yield f"its runner reads no experts called {group.place}"
    wanted = " or ".join(layout.value for layout in layouts)
    can_stack = Layout.STACKED in layouts and group.layout is Layout.NUMBERED
    hint = ' (import with experts="stacked")' if can_stack else ""
    yield f"its runner reads experts {wanted}; here they are {group.layout.value}{hint}"


def _doubts(model: ModelFacts, family: Family) -> Iterator[str]:
    """Yield why answers may be wrong; the first is shown, so those about all texts come first."""
    modes = {tensor.mode for group in model.experts for tensor in group.tensors}
    quantized = {tensor.mode for tensor in model.tensors if tensor.quantization is not None}
    if family.one_mode and modes and len(modes | quantized) > 1:
        yield (
            f"its runner takes one quantization for all experts; this model has {model.types},"
            " so answers may be wrong"
        )
    for tensor in model.tensors:
        if not tensor.fits_mlx:  # x/mlxrunner/mlx/io.go `Load`
            yield f"its runner drops the blob of {tensor.name}: MLX has no {tensor.dtype}"
    section = _text_section(model)
    if family.scales_by_head:
        scalar = section.get("query_pre_attn_scalar", _GEMMA3_HEAD)
        if scalar != section.get("head_dim", _GEMMA3_HEAD):
            yield (
                "its runner ignores query_pre_attn_scalar, which is not head_dim, so answers may be"
                " wrong"
            )
    for key in _ROPE_SETTINGS:
        if key not in family.rope and _changes_rotation(
            section, section.get(key), family.rope_theta
        ):
            yield f"its runner does not read {key} of config.json, so answers may be wrong"
    tokenizer = model.tokenizer
    if tokenizer is not None and not (tokenizer.splits or tokenizer.replaces_spaces):
        yield (
            "the tokenizer has no Split step, so answers may be wrong where white space has line"
            " breaks"
        )


def _text_section(model: ModelFacts) -> Config:
    config = model.config or {}
    return next(
        (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)),
        config,
    )


def _changes_rotation(section: Config, settings: object, theta: float) -> bool:
    """Return True if the model's rotation differs from that of a runner without ``settings``."""
    if not isinstance(settings, dict):
        return False
    kinds = {kind: one for kind, one in settings.items() if isinstance(one, dict)}
    if kinds:  # of layers; Gemma 3's sliding ones rotate in one way in all models
        return any(
            _changes_rotation(section, one, theta)
            for kind, one in kinds.items()
            if kind != "sliding_attention"
        )
    scaled = settings.get("rope_type", settings.get("type", "default")) != "default"
    return scaled or settings.get("rope_theta", theta) != section.get("rope_theta", theta)
