"""Adapters: what fine-tuning made of some weights of a base model, merged into them. Pure.

Sources:

- PEFT: huggingface/peft 0.21.2 utils/constants.py `SAFETENSORS_WEIGHTS_NAME`;
  tuners/lora/config.py `LoraConfig`; tuners/lora/layer.py
  `Linear.merge`, `Embedding.get_delta_weight`; tuners/lora/variants.py `DoraLinearVariant`;
  tuners/lora/model.py `_create_and_replace` (patterns), utils/other.py `get_pattern_key`;
  utils/save_and_load.py `get_peft_model_state_dict` (names of tensors).
- mlx-lm: mlx_lm 0.32.2 tuner/utils.py `load_adapters`; tuner/lora.py, tuner/dora.py `fuse`.

Rule A1: every tensor of an adapter is used, and every setting that changes what tensors mean is
known, or the adapter is refused.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, takewhile
from typing import Annotated, Any

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.strictjson import Between, Document, parse_document, parse_object
from blobstore.source.coding import MAGNITUDE, TALL, WIDE, LowRank
from blobstore.source.folders import SourceTensor
from blobstore.source.weights import SourceWeight

CONFIG = "adapter_config.json"
PEFT_FILE, MLX_FILE = "adapter_model.safetensors", "adapters.safetensors"
RULE = "A1"
_PREFIX = "base_model.model."
_EMBEDDING = re.compile(r"\.(?:\w*emb\w*|wte)\.")
# Settings that do not change what tensors mean. Unknown ones must be unset.
_PEFT_IGNORES = re.compile(
    "auto_mapping|base_model_name_or_path|corda_config|ensure_weight_tying|eva_config"
    "|exclude_modules|inference_mode|layers_pattern|layers_to_transform|loftq_config|lora_dropout"
    "|lora_ga_config|megatron_config|megatron_core|peft_version|qalora_group_size|revision"
    "|runtime_config|target_modules|task_type"
)
_PEFT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # Those that leave the base as it is. PiSSA and others change it first.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_PART = r"(?:[\w^$|.-]|\\[.d]|\[(?:0-9|[0-9]+)\])*"
# Patterns that are quick for every name of that length.
_QUICK = re.compile(rf"{_PART}(?:(?:\.[*+]|\\d\+){_PART})?", re.ASCII)
_LONGEST, _MOST_PATTERNS = 256, 1000
_Rank = Annotated[int, Between(1, 2**20)]
_Number = Annotated[int, Between(-(2**31), 2**31)] | float


def adapter_among(names: Iterable[str]) -> str | None:
    """Return the first file name that only adapters have, or None."""
    return next((name for name in sorted(names) if name in (PEFT_FILE, MLX_FILE)), None)


def are_adapters(names: Collection[str]) -> bool:
    """Return True when all these tensors are an adapter's."""
    return bool(names) and (
        all(name.startswith(_PREFIX) for name in names)
        or all(name.endswith((".lora_a", ".lora_b")) for name in names)
    )


def adapter_error(path: str) -> UnsupportedSourceError:
    """Return the error for a path that leads to an adapter, with a hint."""
    return UnsupportedSourceError(
        f"{path} is an adapter, not a model: it needs the model that it changes",
        path=path,
        hint=f"Import its model, and merge it: blobstore import MODEL --adapter {path}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peft(Document):
    """PEFT's settings that say what tensors mean."""

    r: _Rank = 8
    lora_alpha: _Number = 8
    rank_pattern: Mapping[str, _Rank] | None = None
    alpha_pattern: Mapping[str, _Number] | None = None
    use_rslora: bool | None = False
    use_dora: bool | None = False
    fan_in_fan_out: bool | None = False
    bias: str = "none"
    modules_to_save: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MlxLm(Document):
    """mlx-lm's ``lora_parameters``. An early ``alpha`` scaled, too; later ones are ignored."""

    rank: _Rank
    scale: _Number
    dropout: Any = None
    keys: Any = None


@dataclass(frozen=True, slots=True)
class _Rules:
    """What an adapter's names and settings mean.

    ``kinds``: for each kind of module the ends of its tensors' names, and whether their product is
    transposed. ``scale``: the rank and the scale of a module. ``weights``: what the names of
    tensors contain that are weights themselves.
    """

    kinds: Sequence[tuple[Mapping[str, str], bool]]
    scale: Callable[[str], tuple[int, float]]
    weights: re.Pattern[str]


def adapted_weights(
    weights: Iterable[SourceWeight],
    tensors: Mapping[str, SourceTensor],
    raw: bytes,
    path: str,
    *,
    ties_head: bool,
) -> tuple[SourceWeight, ...]:
    """Return the weights of a base model, with the changes of an adapter.

    ``raw``: the adapter's document, at ``path``. ``ties_head``: the base's config.json says that
    its head has the weights of its embedding.

    Raises: UnsupportedSourceError, with the adapter's tensor or the setting, for what does not fit
    the base or can't be merged; DocumentError (rule A1).
    """
    said, base = parse_object(raw, path, rule=RULE), {weight.name: weight for weight in weights}
    rules = (_peft if "peft_type" in said else _mlx_lm)(said, path)
    ends = {end: "" for kind, _ in rules.kinds for end in kind.values()}
    modules: dict[str, dict[str, SourceTensor]] = defaultdict(dict)
    ties_head = ties_head or not any(
        name.endswith(("lm_head.weight", "embed_out.weight", "output.weight")) for name in base
    )
    for name, tensor in tensors.items():
        if name.startswith(_PREFIX) and ties_head and _EMBEDDING.search(name):
            raise _refused(tensor, "the base's head has the same weights, and would change, too")
        own, end = name.removeprefix(_PREFIX), next(filter(name.endswith, ends), None)
        if end is not None:
            modules[own.removesuffix(end)][end] = tensor
        elif rules.weights.search(name):
            _replace(base, own.replace(".base_layer.", "."), tensor)
        else:
            raise _refused(tensor, "its name is unknown")
    for module, parts in modules.items():
        _change(base, module, parts, rules)
    return tuple(base.values())


def _refused(tensor: SourceTensor, reason: str) -> UnsupportedSourceError:
    shown = f"{quoted(tensor.name)} ({tensor.dtype} {list(tensor.shape)})"
    return UnsupportedSourceError(
        f"the adapter's {shown} can't be merged: {reason}",
        tensor=tensor.name,
        path=tensor.file.path,
    )


def _unsupported(path: str, what: str) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        f"{path}: {what} can't be merged",
        path=path,
        hint="Merge it with the library that made it, and import the result.",
    )


def _peft(said: Mapping[str, Any], path: str) -> _Rules:
    known = {field.name for field in fields(_Peft)}
    odd = [
        f"{key} {quoted(str(value))}"
        for key, value in said.items()
        if (
            key not in _PEFT_VALUES
            and key not in known
            and value
            and not _PEFT_IGNORES.fullmatch(key)
        )
        or value not in _PEFT_VALUES.get(key, (value,))
    ]
    config = parse_document(_Peft, {} if odd else said, path, RULE)
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    odd += [f"the pattern {quoted(one)}" for one in (*ranks, *alphas) if not _QUICK.fullmatch(one)]
    if odd or max(len(ranks), len(alphas)) > _MOST_PATTERNS:
        raise _unsupported(path, odd[0] if odd else f"over {_MOST_PATTERNS:,} patterns")
    rank_of, alpha_of = _matcher(ranks, config.r), _matcher(alphas, config.lora_alpha)

    def scale(module: str) -> tuple[int, float]:
        rank = rank_of(module)
        return rank, alpha_of(module) / (math.sqrt(rank) if config.use_rslora else rank)

    saved = [re.escape(f"{module}.") for module in config.modules_to_save or ()]
    biases = [] if config.bias == "none" else [r"\.bias\Z"]
    weights = re.compile("|".join([r"\.base_layer\.", *biases, *saved]))
    linear = {TALL: ".lora_B.weight", WIDE: ".lora_A.weight"}
    embedding = {TALL: ".lora_embedding_B", WIDE: ".lora_embedding_A"}
    if config.use_dora:  # magnitudes of a transposed weight are those of its columns
        linear[MAGNITUDE] = ".lora_magnitude_vector"
        return _Rules([] if config.fan_in_fan_out else [(linear, False)], scale, weights)
    return _Rules([(linear, bool(config.fan_in_fan_out)), (embedding, True)], scale, weights)


def _matcher(patterns: Mapping[str, Any], usual: Any) -> Callable[[str], Any]:
    compiled = [(re.compile(rf"(?:.*\.)?(?:{one})$"), value) for one, value in patterns.items()]
    return lambda module: next(
        (value for pattern, value in compiled if pattern.match(module[-_LONGEST:])), usual
    )


def _mlx_lm(said: Mapping[str, Any], path: str) -> _Rules:
    kind = said.get("fine_tune_type", "lora")
    if kind == "full":
        return _Rules([], lambda _: (1, 0.0), re.compile(""))
    given: dict[str, Any] = said.get("lora_parameters") or {}
    config = parse_document(_MlxLm, given, f"{path}: lora_parameters", RULE)
    odd = sorted(given.keys() - {field.name for field in fields(_MlxLm)})
    if odd or kind not in ("lora", "dora"):
        raise _unsupported(path, f"lora_parameters {quoted(odd[0])}" if odd else f"{kind}")
    linear = {TALL: ".lora_a", WIDE: ".lora_b"} | ({MAGNITUDE: ".m"} if kind == "dora" else {})
    experts = {TALL: ".lora_b", WIDE: ".lora_a"}
    # Linear modules, embeddings, stacked experts.
    kinds = ((linear, True), (linear, False), (experts, False))
    return _Rules(kinds, lambda _: (config.rank, config.scale), re.compile("(?!)"))


def _replace(base: dict[str, SourceWeight], name: str, tensor: SourceTensor) -> None:
    """Take the adapter's values for a weight's, rounded to its dtype."""
    weight = _find(base, name, tensor)
    if tensor.shape != weight.shape or not tensor.dtype.is_float or weight.transposed:
        raise _refused(tensor, f"{quoted(weight.name)} is {weight.dtype} {list(weight.shape)}")
    base[weight.name] = SourceWeight(
        weight.name, weight.dtype, weight.shape, tensor, quantization=weight.quantization
    )


def _find(base: Mapping[str, SourceWeight], name: str, tensor: SourceTensor) -> SourceWeight:
    """Return the weight of that name, or without its first part, as in headless checkpoints."""
    found = base.get(name) or base.get(name.partition(".")[2])
    if found is None:
        raise _refused(tensor, f"the base has no weight {quoted(name)}")
    return found


def _change(
    base: dict[str, SourceWeight], module: str, parts: Mapping[str, SourceTensor], rules: _Rules
) -> None:
    """Let a module's tensors change its weight, or those of the experts that mlx-lm stacks."""
    name, first = f"{module}.weight", next(iter(parts.values()))
    numbered = (name.replace(".switch_mlp.", f".experts.{number}.") for number in count())
    is_stack = ".switch_mlp." in name and name not in base
    experts = list(takewhile(base.__contains__, numbered)) if is_stack else []
    weights = [base[one] for one in experts] or [_find(base, name, first)]
    shape = (*([len(experts)] if experts else []), *weights[0].shape)
    rank, scale = rules.scale(module)
    given = {end: part.shape for end, part in parts.items()}
    dtypes = [*(part.dtype for part in parts.values()), *(weight.dtype for weight in weights)]
    needed = {}
    fits = len(shape) > 1 and 0 not in shape and all(dtype.is_float for dtype in dtypes)
    for ends, transposed in rules.kinds if fits else ():
        change = LowRank(rank, scale, transposed)
        needed = {end: change.shapes(shape)[suffix] for suffix, end in ends.items()}
        if needed == given and not any(one.change or one.transposed for one in weights):
            break
    else:
        shapes = ", ".join(f"{end[1:]} {list(shape)}" for end, shape in (needed or given).items())
        wanted = f"rank {rank} and {quoted(name)} {list(shape)} need {shapes}"
        raise _refused(first, f"{wanted} of floats, once each")
    own = {suffix: parts[end] for suffix, end in ends.items()}
    for number, weight in enumerate(weights):
        companions = {**weight.companions, **own}
        base[weight.name] = replace(
            weight, companions=companions, change=replace(change, matrix=number)
        )
