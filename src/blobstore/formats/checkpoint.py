"""config.json and tokenizer.json, which others own; names of tensors and folders of a checkpoint.

Rule Q1: config.json is a strict JSON object of at most 16 MiB, and its quantization settings, if it
has them, are settings that MLX has. Unknown keys are ignored, keys are compared exactly. It may
contain the numbers ``Infinity``, ``-Infinity`` and ``NaN``: transformers 4 and mlx-lm write them
(time_step_limit of Mamba 2). The shard index is in source/files.py.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from blobstore.errors import UsageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.dtypes import (
    ColumnSettings,
    Quantization,
    QuantType,
    WeightGroup,
    has_order,
)
from blobstore.formats.strictjson import (
    Document,
    InvalidError,
    Key,
    parse_document,
    parse_object,
    without_none,
)

CONFIG_NAME = "config.json"
DRAFT_PREFIX = "draft."
"""The prefix of a draft model's tensors (x/create/manifest.go, ollama/ollama@1d7605bf)."""
DRAFT_FOLDER = "draft/"
"""Where a draft model's documents and files are in a model's folder."""
FILE_TYPE = "file_type"
"""The key for the requested type in an exported file's metadata: Ollama's word for it."""
FILE_TYPES = frozenset(kind.value for kind in QuantType)
"""Its values; a file with another value is not an export of ours."""

_LAYER = (
    r"(?:|model\.|language_model\.|language_model\.model\.|model\.language_model\.|backbone\.|language_model\.backbone\."
    r"|model\.language_model\.backbone\.|mtp\.)layers\.[0-9]+"
)
GROUP = re.compile(
    rf"(?P<group>{_LAYER}\.(?:mlp\.experts|mlp\.shared_experts|moe\.experts|mixer\.experts|mixer\.shared_experts|mlp\.switch_mlp))"
    r"\.(?P<rest>.+)",
    re.ASCII | re.DOTALL,
)


def group_of(name: str) -> str | None:
    """Return the prefix of the expert group that a tensor belongs to, or None."""
    match = GROUP.fullmatch(name)
    return match["group"] if match else None


_TAGGED_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def parse_config(raw: bytes, what: str = CONFIG_NAME) -> dict[str, Any]:
    """Return the object in a config.json, unchanged.

    Raises: DocumentError (rule Q1) if it is not one; LimitExceededError over 16 MiB or 64 levels.
    """
    return parse_object(raw, what, rule="Q1", non_finite=True)


def with_floats(value: Any) -> Any:
    """Return a value of a config.json, each ``{"__float__": "Infinity"}`` and the like as a float.

    Source: transformers 5.23.0 configuration_utils.py `PreTrainedConfig._encode_special_floats`.
    """
    if isinstance(value, dict):
        tagged = value.get("__float__") if len(value) == 1 else None
        if isinstance(tagged, str) and tagged in _TAGGED_FLOATS:
            return _TAGGED_FLOATS[tagged]
        return {key: with_floats(item) for key, item in value.items()}
    return [with_floats(item) for item in value] if isinstance(value, list) else value


# Group size and bits of settings without them.
#
# Source: mlx/nn/layers/quantized.py `_defaults_for_mode`, MLX 0.32.4.
_MODE_DEFAULTS = {
    kind.mode: {"group_size": kind.group_sizes[0], "bits": kind.bits} for kind in QuantType
} | {"affine": {"group_size": 64, "bits": 4}}

_CODING = re.compile(r"^weights?_|transform|rotat|hadamard|spinquant|_semantics$", re.ASCII)
_GROUP = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_ARGS = frozenset(
    {
        *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure"),
        *("dynamic", "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    }
)


@dataclass(frozen=True, kw_only=True)
class ModuleQuantization(Document):
    """How MLX quantized a module.

    mlx-lm's ``convert`` writes the arguments that a model's predicate gives to ``to_quantized``.
    Bits or group size may be missing (RWKV-7: ``{"bits": 8}``) or None (the recipes, such as
    mixed_4_6); then the mode's defaults hold.
    """

    group_size: Literal[16, 32, 64, 128]
    bits: Literal[1, 2, 3, 4, 5, 6, 8]
    mode: str = "affine"

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        mode = value.get("mode", "affine")
        if mode not in tuple(_MODE_DEFAULTS):
            raise InvalidError(f"Input should be one of {', '.join(_MODE_DEFAULTS)}", "mode")
        filled = {**value, **_MODE_DEFAULTS[mode], **without_none(value)}
        if not all(type(filled.get(key, 0)) is int for key in ("bits", "group_size")):
            raise InvalidError("bits and group_size are integers")
        return super().fields_of(filled)

    @property
    def quantization(self) -> Quantization:
        """The same as a type and a group size. Raises: UsageError if no `QuantType` is the same."""
        for kind in QuantType:
            if (kind.mode, kind.bits) == (self.mode, self.bits):
                return Quantization(kind, self.group_size)
        raise UsageError(
            f"{self.mode} in {self.bits} bits is not stored",
            hint="Quantize the original checkpoint to int4 or int8.",
        )


@dataclass(frozen=True, kw_only=True)
class QuantizationSettings(ModuleQuantization):
    """MLX's ``quantization`` of a config.json: the general settings, and those of ``modules``.

    A module's settings replace all general ones, its mode too; False leaves it unquantized, True
    means the general ones. Source: mlx_lm/utils.py `load_model` at version 0.32.2.
    """

    modules: Mapping[str, bool | ModuleQuantization] = field(default_factory=dict)

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        if missing := sorted({"bits", "group_size"} - value.keys()):
            raise InvalidError(f"{missing[0]} is missing")
        own = {key for _, key, *_ in ModuleQuantization.json_keys()}
        others = {key: item for key, item in value.items() if key not in own}
        modules = {key: item for key, item in others.items() if isinstance(item, dict | bool)}
        general = {key: item for key, item in value.items() if key not in modules}
        return super().fields_of({**general, "modules": modules})

    def of(self, module: str) -> ModuleQuantization | None:
        """Return how the module of that path is quantized; None if it is not."""
        own = self.modules.get(module, True)
        if isinstance(own, bool):
            return self if own else None
        return own


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Document):
    """The config.json of a checkpoint: the keys that are checked, and ``others`` as they are."""

    architectures: list[str] | None = None
    model_type: str | None = None
    quantization: QuantizationSettings | None = None
    quantization_config: dict[str, Any] | None = None
    text_config: dict[str, Any] | None = None
    others: Annotated[Mapping[str, Any], Key(None)] = field(default_factory=dict)

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        known = {key for _, key, *_ in cls.json_keys()}
        others = {key: item for key, item in value.items() if key not in known}
        return {**super().fields_of(value), "others": others}

    @classmethod
    def parse(cls, raw: bytes, what: str = "config.json") -> SourceConfig:
        """Return the config in ``raw``.

        Raises: DocumentError (rule Q1) if it is not a strict JSON object, or MLX does not have its
        quantization settings.
        """
        return parse_document(cls, parse_config(raw, what), what, "Q1")

    @property
    def mlx_quantization(self) -> QuantizationSettings | None:
        """MLX's settings: ``quantization``, or ``quantization_config`` without ``quant_method``.

        Source: mlx_lm/utils.py `load_model` at version 0.32.2. Raises: DocumentError (rule Q1) if
        MLX does not have them.
        """
        settings = self.quantization_config or {}
        if self.quantization is not None or "quant_method" in settings or "bits" not in settings:
            return self.quantization
        return parse_document(
            QuantizationSettings, settings, "config.json: quantization_config", "Q1"
        )

    @property
    def quant_method(self) -> str | None:
        method = self._settings_and_groups[0].get("quant_method")
        return method if isinstance(method, str) else None

    @property
    def fp8_block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share an FP8 weight's scale.

        They are ``weight_block_size``, or ``block_structure`` of the groups' weights; of ModelOpt's
        ``fp8_pb_wo`` 128 and 128, which it does not write. Sources: transformers 5.23.0
        utils/quantization_config.py `FineGrainedFP8Config`; vllm-project/compressed-tensors
        @dc235db7 quantization/quant_args.py `block_structure`; nvidia-modelopt 0.47.0
        torch/quantization/config.py `FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG`.
        """
        settings = self._settings_and_groups[0]
        is_blockwise = str(settings.get("quant_algo")).lower() == "fp8_pb_wo"
        own = [128, 128] if is_blockwise else settings.get("weight_block_size")
        structures = (weights.get("block_structure") for weights in self.group_weights)
        sizes = {
            tuple(size)
            for size in (own, *structures)
            if isinstance(size, list) and [type(n) for n in size] == [int, int] and min(size) > 0
        }
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def packed_formats(self) -> frozenset[str]:
        """The formats that ``quantization_config`` names, for all weights and for groups of them.

        Source: vllm-project/compressed-tensors@2737f885 compressors/mixfp4/base.py: a format with
        NVFP4's tensors, but another meaning of its scales.
        """
        return _texts("format", self._settings_and_groups)

    @property
    def data_types(self) -> frozenset[str]:
        """The ``data_type`` of AutoRound's weights, for all and for single modules.

        Source: intel/auto-round 0.16.1 schemes.py `QuantizationScheme`.
        """
        settings = self._settings_and_groups[0]
        modules = settings.get("extra_config")
        return _texts(
            "data_type", [settings, *(modules if isinstance(modules, dict) else {}).values()]
        )

    def float_group_sizes(self, bits: int) -> set[int]:
        """Return the sizes of the groups of such floats that ``quantization_config`` names."""
        kind = {"num_bits": bits, "type": "float"}.items()
        return {
            item["group_size"]
            for item in (*self.group_weights, *self._settings_and_groups[:1])
            if type(item.get("group_size")) is int
            and ((bits, item.get("quant_algo")) == (4, "NVFP4") or kind <= item.items())
        }

    @property
    def integer_groups(self) -> list[WeightGroup]:
        """The groups of ``quantization_config`` whose weights are integers."""
        return [
            one for one in map(WeightGroup.of, self._settings_and_groups[1:]) if one is not None
        ]

    def column_settings(self, module: str) -> list[ColumnSettings]:
        """Return how GPTQ, AWQ or AutoRound may have quantized a module, the general way first.

        Settings for a module's name come before these. GPTQModel's ``dynamic`` and AutoRound's
        ``extra_config`` name modules by regular expressions too, which are not evaluated: the
        tensors' shapes tell them apart. Sources: ModelCloud/GPTQModel@f4c327a1
        quantization/config.py `dynamic_get`; AutoAWQ@88e4c76b awq/models/_config.py;
        intel/auto-round 0.16.1 inference/convert_model.py, inference/backend.py
        `GPTQ_FORMAT_NO_ZP` (``auto_round:gptqmodel`` stores zero points as they are),
        inference/convert_model.py `convert_hf_model` (GPTQ without a ``packing_format``).
        """
        said = self._settings_and_groups[0]
        if self.quant_method not in ("gptq", "awq", "auto-round", "intel/auto-round"):
            return []
        given = [said.get(key) for key in ("extra_config", "dynamic")]
        rules = {name: rule for one in given if isinstance(one, dict) for name, rule in one.items()}
        own = rules.get(module)
        others = [own] if own is not None else [{}, *rules.values()]
        settings = (
            ColumnSettings.of({**said, **other}) for other in others if isinstance(other, dict)
        )
        return list(dict.fromkeys(one for one in settings if one is not None))

    @property
    def has_inverse_scales(self) -> bool:
        """True if ``X_scale_inv`` of FP8 are what codes are divided by.

        Source: ModelCloud/GPTQModel@f4c327a1 nn_modules/qlinear/fp8.py `dequantize_weight`. Others
        multiply by a tensor of that name.
        """
        return self._settings_and_groups[0].get("weight_scale_semantics") == "inverse"

    def has_floats(self, bits: int, group_size: int | None = None) -> bool:
        """Return False if compressed-tensors' groups are all of other weights than such floats.

        ``group_size``: None for any. Groups without one may have any, too.
        """
        groups, sizes = self.group_weights, (group_size, None)
        return not (groups and self.quant_method == "compressed-tensors") or any(
            (item.get("type", "float"), item.get("num_bits", 8)) == ("float", bits)
            and (group_size is None or item.get("group_size") in sizes)
            for item in groups
        )

    @property
    def unknown_coding(self) -> str | None:
        """A key that says how weights are coded, in a way that no row of producers.py reads.

        These are all keys of a group and of its weights but the known ones, and at the top those
        whose names speak of weights, transforms, rotations or the meaning of scales. An empty value
        says nothing. Source: vllm-project/compressed-tensors@02012432 quantization/quant_args.py
        `QuantizationArgs`, quant_scheme.py `QuantizationScheme`.
        """
        settings, *groups = self._settings_and_groups
        known = {
            *frozenset({"weight_block_size", "weight_scale_method"}),
            *(["weight_scale_semantics"] if self.has_inverse_scales else []),
        }
        keys = [key for key in settings if _CODING.search(key) and settings[key]]
        keys = [key for key in keys if key not in known]
        keys += [
            f"config_groups: {key}"
            for group in groups
            for key in group
            if key not in _GROUP and group[key]
        ]
        keys += [
            f"weights: {key}"
            for weights in self.group_weights
            for key, value in weights.items()
            if (value and key not in _ARGS)
            # Columns of floats are permuted.
            or (key == "actorder" and has_order(weights) and weights.get("type", "int") != "int")
        ]
        return min(keys, default=None)

    @property
    def group_weights(self) -> list[dict[str, Any]]:
        """The settings of weights in each group of ``quantization_config``."""
        weights = (group.get("weights") for group in self._settings_and_groups[1:])
        return [item for item in weights if isinstance(item, dict)]

    @property
    def _settings_and_groups(self) -> list[dict[str, Any]]:
        inner = (self.text_config or {}).get("quantization_config")
        settings = self.quantization_config or (inner if isinstance(inner, dict) else {})
        groups = settings.get("config_groups")
        named = groups.values() if isinstance(groups, dict) else ()
        return [settings, *(group for group in named if isinstance(group, dict))]

    @property
    def sizes(self) -> dict[str, Any]:
        """The top level's values by their keys; None for a missing key that is read."""
        return {**{key: getattr(self, key) for _, key, *_ in self.json_keys()}, **self.others}

    @property
    def width(self) -> int | None:
        """The hidden size, the text model's if it has one; None if config.json does not say it.

        Sources: the ``attribute_map`` of transformers 5.23.0 configuration_gpt2.py,
        configuration_dbrx.py.
        """
        own = [self.sizes.get(key) for key in ("hidden_size", "n_embd", "d_model")]
        sizes = ((self.text_config or {}).get("hidden_size"), *own)
        return next((size for size in sizes if type(size) is int and size > 0), None)

    @property
    def architecture(self) -> str:
        text_type = (self.text_config or {}).get("model_type")
        named = next(iter(self.architectures or ()), None) or self.model_type
        return named or (text_type if isinstance(text_type, str) else "")


def _texts(key: str, items: Iterable[object]) -> frozenset[str]:
    values = (item.get(key) for item in items if isinstance(item, dict))
    return frozenset(value for value in values if isinstance(value, str))


def settings_of(
    read: Callable[[Descriptor], bytes], manifest: Manifest
) -> Callable[[], QuantizationSettings | None]:
    """Return a function that reads a model's config.json, once, and returns MLX's settings or None.

    Blobs without metadata need it: Ollama writes none for an MLX source whose settings have no
    ``mode`` (fixtures/ollama-records, d_mlx_int4), and the shapes of int4 in groups of 64 are those
    of int8 in groups of 32. The function raises NotFoundError, CorruptDataError (also
    DocumentError, rule Q1) or StorageError for a config.json that is missing or damaged.
    """

    @functools.cache
    def settings() -> QuantizationSettings | None:
        layer = manifest.document(CONFIG_NAME)
        return SourceConfig.parse(read(layer)).mlx_quantization if layer is not None else None

    return settings


@dataclass(frozen=True, slots=True)
class ParserFamily:
    """An architecture family: words in its names, and what Ollama's parser for it can do."""

    words: tuple[str, ...]
    parser: str
    renderer: str
    tools: bool = True
    thinking: bool = True


# Tried in order: the more particular name first.
_FAMILIES = (
    ParserFamily(("glm4", "glm-4"), "glm-4.7", "glm-4.7"),
    ParserFamily(("deepseek",), "deepseek3", "deepseek3"),
    ParserFamily(("qwen3_5", "qwen3next", "qwen3_next"), "qwen3.5", "qwen3.5"),
    # Its parser can think only when the template does.
    ParserFamily(("qwen3",), "qwen3", "qwen3-coder", thinking=False),
    ParserFamily(("gemma4",), "gemma4", "gemma4"),
    ParserFamily(("cohere2",), "cohere", "cohere"),
    ParserFamily(("nemotronh", "nemotron_h"), "nemotron-3-nano", "nemotron-3-nano"),
    ParserFamily(("laguna",), "laguna", "laguna"),
    ParserFamily(("glimmer",), "glimmer", "glimmer"),
)


def family_of(config: SourceConfig | None, parser: str | None) -> ParserFamily | None:
    """Return the family whose parser the user names, else the architecture's, or None."""
    if parser:
        return next((family for family in _FAMILIES if family.parser == parser), None)
    config = config or SourceConfig()
    names = [name.lower() for name in (*(config.architectures or ()), config.model_type or "")]
    named = ((family, name) for name in names for family in _FAMILIES)
    return next(
        (family for family, name in named if any(map(name.__contains__, family.words))), None
    )


TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATE_DOCUMENTS = ("tokenizer_config.json", "chat_template.json")
"""Documents that may have a chat template in them."""


def templates_in(read: Callable[[str], bytes | None]) -> Iterator[str]:
    """Yield the chat templates that JSON documents have; ``read`` returns one by its name."""
    for name in TEMPLATE_DOCUMENTS:
        text = read(name) or b"{}"
        if b"\0" in text:  # not JSON: a hole of the disk is not decoded
            continue
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            continue
        template = document.get("chat_template") if isinstance(document, dict) else None
        if isinstance(template, str):
            yield template
        elif isinstance(template, list):  # transformers' form for several named templates
            yield from (str(item.get("template")) for item in template if isinstance(item, dict))


_MODEL = re.compile(r'"model"\s*:\s*\{\s*"type"\s*:\s*("[^"\\]*")')
_WHITESPACE = r"\s+(?!\S)|\s+"
# Look-around, back references, atomic groups and possessive repetition; others are passed over.
_NOT_IN_RE2 = re.compile(
    r"(\\[1-9])|\\[pP]\{\w*\}|\\.|\[(?:\\.|[^\]\\])*\]|(\(\?(?:[=!>]|<[=!])|[*+?}]\+)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A tokenizer: its model's type, how it splits texts first, and its added tokens.

    ``splits``: the regular expressions of its ``Split`` steps. ``replaces_spaces``: its decoder
    turns "▁" into a space, as SentencePiece's do.
    """

    kind: str | None
    splits: tuple[str, ...]
    replaces_spaces: bool
    tokens: frozenset[str]

    @classmethod
    def read(cls, raw: bytes) -> Self | None:
        try:
            text = raw.decode()
            value = _without_vocabulary(text) or json.loads(text)
            kind, added = value["model"].get("type"), value.get("added_tokens") or []
            splits = (
                step["pattern"].get("Regex")
                for step in _steps(value.get("pre_tokenizer"), "pretokenizers")
                if step.get("type") == "Split" and isinstance(step.get("pattern"), dict)
            )
            return cls(
                kind if isinstance(kind, str) else None,
                tuple(str(split) for split in splits if split),
                any(
                    step.get("type") == "Replace" and step.get("pattern") == {"String": "▁"}
                    for step in _steps(value.get("decoder"), "decoders")
                ),
                frozenset(str(token["content"]) for token in added),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    @property
    def strange_split(self) -> str | None:
        """The first regular expression that RE2, and so Go, does not have; None without one.

        Ollama rewrites the usual end of one, white space before a word (ollama/ollama@0f41bb42
        x/tokenizer/tokenizer_load.go `rewritePatternForRE2`).
        """
        for split in self.splits:
            matches = _NOT_IN_RE2.finditer(split.replace(_WHITESPACE, r"\s+"))
            if any(match[1] or match[2] for match in matches):
                return split
        return None


def _without_vocabulary(text: str) -> dict[str, Any] | None:
    """Return the document up to its model's type; None if these do not come in this order.

    The vocabulary, which comes after it, has most of the bytes. Source: huggingface/tokenizers
    tokenizers/src/tokenizer/serialization.rs: the model comes last, and its type is its first key.
    """
    match = _MODEL.search(text)
    if match is None:
        return None
    try:
        value = json.loads(f'{text[: match.start()]}"model":{{"type":{match[1]}}}}}')
    except ValueError:  # that model is within another value
        return None
    return value if isinstance(value, dict) else None


def _steps(value: Any, key: str) -> Iterator[dict[str, Any]]:
    steps = value[key] if isinstance(value, dict) and value.get("type") == "Sequence" else [value]
    yield from (step for step in steps if isinstance(step, dict))
