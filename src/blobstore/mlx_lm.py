"""A stored model for mlx-lm: `load` gives what ``mlx_lm.load`` gives for a folder, with quantized layers as stored.

Each layer's type and group size come from its stored arrays, so a model may mix them. Experts are stacked as mlx-lm's
``SwitchLinear`` wants them, whether the store has them packed or stacked.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blobstore.checkpoint import CONFIG_NAME
from blobstore.errors import BlobStoreError, InvalidNameError, UnsupportedSourceError, UsageError
from blobstore.loader import Model, open_model
from blobstore.names import ModelName, file_name
from blobstore.store import Store
from blobstore.strictjson import parse_object

_log = logging.getLogger("blobstore.mlx_lm")

_PARTS = "weight|scales|biases|global_scale"
_NUMBERED = re.compile(rf"(?P<parent>.+)\.experts\.(?P<expert>[0-9]+)\.(?P<projection>[^.]+)\.(?P<part>{_PARTS})")
_STACKED = re.compile(rf"(?P<parent>.+)\.experts\.(?P<projection>[^.]+)\.(?P<part>{_PARTS})")
_DRAFT_TENSORS = "draft."
_DRAFT_DOCUMENTS = "draft/"
_EXPERT_MODULES = ("switch_mlp", "experts.switch_glu", "experts")


def load(name: str | ModelName, *, store: Store) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` of a stored model, for ``mlx_lm.generate`` and its kin.

    The architecture is the one of the stored config.json, the tokenizer the one of the stored tokenizer files; no code
    from the model is run. On a CPU, unquantized experts are converted to float32, because MLX multiplies them only in
    that type there (mlx 0.32.4, ``GatherMM``).

    Raises: as `open_model`; UsageError without the ``lm`` extra; UnsupportedSourceError when mlx-lm does not know the
    architecture, or the stored tensors are not those that it needs.
    """
    with open_model(name, store=store) as model:
        return _build(model), _tokenizer(model)


def continue_text(model: Any, tokenizer: Any, prompt: str, max_tokens: int) -> Iterator[str]:
    """Yield the continuation of ``prompt``, the text of one token at a time, at temperature 0, until the model ends it.

    Raises: UsageError for an empty prompt, or one that is no Unicode text.
    """
    from mlx_lm import stream_generate

    if not prompt or any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UsageError("the prompt is empty" if not prompt else "the prompt is no valid text")
    for response in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
        yield response.text


def _build(model: Model) -> Any:
    utils = _import_utils()
    config = parse_object(model.document(CONFIG_NAME), CONFIG_NAME, rule="Q1")
    # How the layers are quantized is a fact of the store now; the source's settings would speak of other arrays.
    config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    weights = _weights(model)
    try:
        # Private in mlx-lm 0.32, but the only table of its architectures; load_model insists on files in a folder.
        model_class, args_class = utils._get_classes(config)  # noqa: SLF001
        network = model_class(args_class.from_dict(config))
        weights = _with_stacked_experts(weights, {path for path, _ in network.named_modules()})
        if hasattr(network, "sanitize"):
            weights = network.sanitize(weights)
        _quantize_layers(network, weights, utils)
        network.eval()
        _honour_global_scales(network, weights)
        network.load_weights(list(weights.items()), strict=True)
    except BlobStoreError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedSourceError(f"mlx-lm can't build model {model.name}: {error}", model=str(model.name)) from error
    _make_runnable(network)
    return network


def _import_utils() -> Any:
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise UsageError("mlx-lm is not installed", hint="Install the extra: pip install 'blobstore[lm]'.") from error
    return utils


def _weights(model: Model) -> dict[str, Any]:
    arrays = model.arrays("mlx", names="mlx")
    return {name: array for name, array in arrays.items() if not name.startswith(_DRAFT_TENSORS)}


def _with_stacked_experts(weights: dict[str, Any], modules: set[str]) -> dict[str, Any]:
    """Return the weights with experts under the module that holds them all, as ``[experts, ...]``.

    Names for which the network has no such module stay as they are: its own ``sanitize`` may know them.
    """
    import mlx.core as mx

    result: dict[str, Any] = {}
    numbered: dict[str, dict[int, Any]] = defaultdict(dict)
    for name, array in weights.items():
        if (match := _NUMBERED.fullmatch(name)) and (target := _expert_module(match, modules)):
            numbered[f"{target}.{match['part']}"][int(match["expert"])] = array
        elif (match := _STACKED.fullmatch(name)) and (target := _expert_module(match, modules)):
            result[f"{target}.{match['part']}"] = array
        else:
            result[name] = array
    return result | {name: mx.stack([arrays[i] for i in sorted(arrays)]) for name, arrays in numbered.items()}


def _expert_module(match: re.Match[str], modules: set[str]) -> str | None:
    candidates = (f"{match['parent']}.{module}.{match['projection']}" for module in _EXPERT_MODULES)
    return next((path for path in candidates if path in modules), None)


def _quantize_layers(network: Any, weights: dict[str, Any], utils: Any) -> None:
    """Replace each layer whose scales are stored by its quantized form, with the bits and groups that its arrays have."""
    from mlx import nn

    def settings(path: str, module: Any) -> Any:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        return utils.infer_quant_config(path, module, weights)

    nn.quantize(network, class_predicate=settings)


def _honour_global_scales(network: Any, weights: dict[str, Any]) -> None:
    """Give the double-scaled layers a forward pass of their own: MLX multiplies by no global scale on a CPU (0.32.4).

    It is float32, because products without the global scale may be beyond what float16 holds.
    """
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear

    class ScaledLinear(nn.QuantizedLinear):  # type: ignore[misc]  # mlx has no types
        def __call__(self, x: Any) -> Any:
            return super().__call__(x.astype(mx.float32) * self.global_scale).astype(x.dtype)

    class ScaledSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]  # as above
        def __call__(self, x: Any, indices: Any, sorted_indices: bool = False) -> Any:  # noqa: FBT001, FBT002  # mlx-lm's
            options = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
            arrays = (x.astype(mx.float32), self.weight, self.scales)
            products = mx.gather_qmm(*arrays, rhs_indices=indices, sorted_indices=sorted_indices, **options)
            products = products * self.global_scale[indices][..., None, None]
            return (products + self.bias[indices][..., None, :] if "bias" in self else products).astype(x.dtype)

    scaled = {nn.QuantizedLinear: ScaledLinear, QuantizedSwitchLinear: ScaledSwitchLinear}
    for path, module in network.named_modules():
        name = f"{path}.global_scale"
        if name not in weights:
            continue
        if type(module) not in scaled:
            raise UnsupportedSourceError(f"{name!r}: mlx-lm has no double-scaled {type(module).__name__}", tensor=path)
        if type(module) is QuantizedSwitchLinear:
            weights[name] = mx.broadcast_to(weights[name].reshape(-1), (module.num_experts,))
        module.global_scale = weights[name]
        module.__class__ = scaled[type(module)]  # a new module would quantize random weights first


def _make_runnable(network: Any) -> None:
    """Convert the unquantized floats to float32 where MLX could not multiply unquantized experts otherwise; evaluate."""
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchLinear

    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and any(isinstance(module, SwitchLinear) for module in network.modules()):
        _log.info("unquantized experts: float32, because MLX has no other on a CPU")
        for module in network.modules():
            if not module.children() and not hasattr(module, "bits"):
                module.set_dtype(mx.float32)
    mx.eval(network.parameters())


def _tokenizer(model: Model) -> Any:
    """Return mlx-lm's tokenizer for the stored tokenizer files, which it can only read from a folder."""
    config = parse_object(model.document(CONFIG_NAME), CONFIG_NAME, rule="Q1")
    with tempfile.TemporaryDirectory(prefix="blobstore-tokenizer-") as folder:
        for name in (name for name in model.documents() if not name.startswith(_DRAFT_DOCUMENTS)):
            try:
                Path(folder, file_name(name)).write_bytes(model.document(name))
            except InvalidNameError as error:
                raise UnsupportedSourceError(f"model {model.name}: {error}", model=str(model.name)) from None
        try:
            return _import_utils().load_tokenizer(Path(folder), eos_token_ids=config.get("eos_token_id"))
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise UnsupportedSourceError(
                f"the tokenizer of {model.name} can't be loaded: {error}", model=str(model.name)
            ) from error
