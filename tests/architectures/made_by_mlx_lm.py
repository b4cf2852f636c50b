"""Checkpoints of architectures that transformers does not know or saves in another layout.

mlx-lm's own network of a small configuration gets random values, and what its ``sanitize`` does to
a published checkpoint is undone, step by step. mlx-lm loads the result: so the names are the
published ones.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from architectures.made_by_transformers import TINY

Json = Mapping[str, Any]
Weights = dict[str, Any]
Undo = Callable[[Weights, Json], Weights]
"""Undoes a step of a ``sanitize``: of the weights after it, the weights before it."""


def make(folder: Path, model_type: str, overrides: Json, undo: Sequence[str | list[Any]]) -> None:
    """Write a checkpoint of ``model_type`` into ``folder``.

    The same weights for the same arguments.

    ``undo``: functions of this module, by name, or lists of a name and arguments.
    """
    import mlx.core as mx

    config, seed = _config(model_type, overrides), zlib.crc32(model_type.encode())
    mx.random.seed(seed)  # a new network's vectors are random, too
    published = _random(_network(config), seed)
    for step in undo:
        published = _undo(step)(published, config)
    published = {name: mx.contiguous(value) for name, value in published.items()}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), published, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _config(model_type: str, overrides: Json) -> dict[str, Any]:
    from mlx_lm.utils import _get_classes

    _, args = _get_classes({"model_type": model_type, **overrides})
    known = {field.name for field in fields(args)} if is_dataclass(args) else set()
    tiny = {key: value for key, value in TINY.items() if key in known}
    head = {"architectures": [f"{model_type}ForCausalLM"], "model_type": model_type}
    return {**head, **tiny, **overrides}


def _network(config: Json) -> Any:
    from mlx_lm.utils import _get_classes

    model, args = _get_classes(dict(config))
    return model(args.from_dict(json.loads(json.dumps(config))))


def _random(network: Any, seed: int) -> Weights:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    result: Weights = {}
    for number, (name, value) in enumerate(sorted(tree_flatten(network.parameters()))):
        noise = 0.05 * mx.random.normal(value.shape, key=mx.random.key(seed + number))
        filled = noise if value.ndim > 1 else value.astype(mx.float32) + noise
        is_float = mx.issubdtype(value.dtype, mx.floating)
        result[name] = filled.astype(mx.bfloat16) if is_float else value
    return result


def renamed(pattern: str, replacement: str) -> Undo:
    """Return what gives names that match ``pattern`` their published form."""
    return lambda weights, _: {re.sub(pattern, replacement, k): v for k, v in weights.items()}


def _changed(pattern: str, change: Callable[[Any], Any]) -> Undo:
    """Return what changes arrays whose names match ``pattern``."""
    return lambda weights, _: {
        name: change(value) if re.search(pattern, name) else value
        for name, value in weights.items()
    }


def transposed(pattern: str) -> Undo:
    return _changed(pattern, lambda value: value.swapaxes(-1, -2))


def less_one(pattern: str) -> Undo:
    """Return what takes 1 from the gains of norms."""
    return _changed(pattern, lambda value: value - 1)


def shaped(pattern: str, shape: Sequence[int]) -> Undo:
    return _changed(pattern, lambda value: value.reshape(shape))


def unstacked(
    module: str = "switch_mlp", published: str = "experts", names: Json | None = None
) -> Undo:
    """Return what turns ``L.switch_mlp.P.weight`` into ``L.experts.E.P.weight``; P may change."""
    pattern = re.compile(rf"(.+)\.{re.escape(module)}\.(\w+)\.(weight|bias)")

    def undo(weights: Weights, _: Json) -> Weights:
        result: Weights = {}
        for name, value in weights.items():
            if match := pattern.fullmatch(name):
                layer, projection, part = match.groups()
                end = f"{(names or {}).get(projection, projection)}.{part}"
                group = f"{layer}.{published}"
                result |= {f"{group}.{number}.{end}": one for number, one in enumerate(value)}
            else:
                result[name] = value
        return result

    return undo


def _replaced(taken: Sequence[str], change: Callable[..., Mapping[str, Any]]) -> Undo:
    """Return what replaces ``P.q.weight`` and others of each P by what ``change`` makes of them."""

    def undo(weights: Weights, _: Json) -> Weights:
        result, ending = dict(weights), f".{taken[0]}.weight"
        for parent in (name.removesuffix(ending) for name in weights if name.endswith(ending)):
            pieces = [result.pop(f"{parent}.{part}.weight") for part in taken]
            result |= {f"{parent}.{name}": value for name, value in change(*pieces).items()}
        return result

    return undo


def joined(parts: Sequence[str], whole: str, axis: int = 0, weight: str = ".weight") -> Undo:
    """Return what joins ``P.q.weight`` and ``P.k.weight`` along ``axis``: ``P.qk`` + ``weight``."""
    import mlx.core as mx

    return _replaced(parts, lambda *pieces: {whole + weight: mx.concatenate([*pieces], axis=axis)})


def parted(whole: str, parts: Sequence[str]) -> Undo:
    """Return what splits ``P.qk.weight`` into equal ``P.q.weight`` and ``P.k.weight``."""
    import mlx.core as mx

    names = [f"{part}.weight" for part in parts]
    return _replaced(
        [whole], lambda value: dict(zip(names, mx.split(value, len(names)), strict=True))
    )


def latent_heads(weights: Weights, config: Json) -> Weights:
    """Join the split ``embed_q`` and ``unembed_out`` of latent attention to ``kv_b_proj``."""
    import mlx.core as mx

    def whole(keys: Any, values: Any) -> Weights:
        both = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
        return {"kv_b_proj.weight": both.flatten(0, 1)}

    return _replaced(["embed_q", "unembed_out"], whole)(weights, config)


def convolutions(weights: Weights, config: Json) -> Weights:
    """Give the kernels of convolutions along time torch's order: ``[channels, 1, width]``."""
    kernel = _changed("conv", lambda value: value.moveaxis(2, 1) if value.ndim == 3 else value)
    return kernel(weights, config)


def whole_experts(weights: Weights, config: Json) -> Weights:
    """Join DBRX's ``experts.E.w1.weight`` by rows to ``experts.mlp.w1``; w2 is transposed."""
    import mlx.core as mx

    result = {name: value for name, value in weights.items() if ".experts." not in name}
    for name, first in weights.items():
        if match := re.fullmatch(r"(.+\.experts)\.0\.(\w+)\.weight", name):
            count = config["ffn_config"]["moe_num_experts"]
            every = [weights[f"{match[1]}.{number}.{match[2]}.weight"] for number in range(count)]
            assert first.ndim == 2
            result[f"{match[1]}.mlp.{match[2]}"] = mx.concatenate(
                [one.T for one in every] if match[2] == "w2" else every
            )
    return result


_UNDO: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(convolutions, joined, latent_heads, less_one, parted, renamed, shaped, transposed),
        *(unstacked, whole_experts),
    )
}


def _undo(step: str | list[Any]) -> Undo:
    if isinstance(step, str):
        return _UNDO[step]
    name, *arguments = step
    undo: Undo = _UNDO[name](*arguments)
    return undo
