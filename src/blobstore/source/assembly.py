"""Assembly: the weights of a checkpoint, put together from their tensors, for an import. Pure.

Which tensors are a quantized weight is in producers.py; whatever looks packed and is in no row that
is imported is refused by name.

Refusals: tensors that look packed and are in no format that is imported: refused by name, none is
guessed. Pure.

Sources of the signs that producers.py has no row for: quanto, huggingface/optimum-quanto @3dd9e9df
optimum/quanto/tensor/qtensor.py `save_to_state_dict`, @1a707590 tensor/weights/qbits.py (``_data``,
``_scale``, ``_shift``; packed codes are ``_data._data``); torchao, pytorch/ao @19264180
torchao/prototype/safetensors/safetensors_support.py `flatten_tensor_state_dict`
(``X._weight_qdata``, ``X._weight_scale``); bitsandbytes as in producers.py, whose codes have the
dtype of ``bnb_4bit_quant_storage``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from blobstore.errors import UnsupportedSourceError, UsageError, quoted
from blobstore.formats.checkpoint import ModuleQuantization, QuantizationSettings, SourceConfig
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Part, Quantization, QuantType
from blobstore.source.inventory import Inventory, SourceTensor
from blobstore.source.producers import (
    BLOCK_FP8,
    COMPRESSED_NVFP4,
    GPT_OSS,
    MLX,
    MODELOPT_NVFP4,
    OWN,
    Producer,
    Stored,
    counting_row,
    importing_row,
)
from blobstore.source.weights import FP8_BLOCK, Form, SourceWeight, is_expert, named_twice

_OTHER_FP8 = frozenset({DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ})
_E4M3 = frozenset({DType.F8_E4M3})
_ANY = frozenset(DType)
_BYTES = frozenset({DType.U8})
_SIGNED_BYTES = frozenset({DType.I8})
_WORDS = frozenset({DType.U32})
_INTEGERS = frozenset({DType.I32, DType.U32, DType.I64})
_LEAST_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Sign:
    """What shows a format: a tensor with ``suffix`` and a dtype, beside one named with ``beside`` instead of it.

    In ``reason``, ``{beside}`` stands for that one. Without a suffix, weights and experts are
    meant.
    """

    suffix: str
    dtypes: frozenset[DType]
    reason: str
    beside: str = ""


_INT8 = "weights of 8-bit integers with scales are not imported"
_FP8_SCALE = (
    "its scale {beside} is of another dtype or shape than those of FP8 blocks (BF16, F16 or F32)"
)
# The most telling sign first. All of these are tensors that no row of producers.py has taken.
_SIGNS = (
    Sign("", _OTHER_FP8, "only F8_E4M3 weights are decoded"),
    Sign("", _E4M3, _FP8_SCALE, "_scale_inv"),
    Sign("", _E4M3, _FP8_SCALE, "_scale"),
    Sign("", _E4M3, "an FP8 weight without a scale for each block of it (X.weight_scale_inv)"),
    Sign(
        ".weight_packed",
        _BYTES,
        "packed weights need X.weight_scale (F8_E4M3) and X.weight_global_scale beside them",
    ),
    Sign(".weight_packed", _INTEGERS, "weights packed into integers are not imported"),
    Sign(".qweight", _INTEGERS, "AWQ and GPTQ weights are not imported"),
    Sign("", _ANY, "bitsandbytes weights are not imported", ".absmax"),
    Sign("._data", _ANY, "quanto weights are not imported", "._scale"),
    Sign("._data._data", _ANY, "quanto weights are not imported", "._scale"),
    Sign("_qdata", _ANY, "torchao weights are not imported", "_scale"),
    Sign(
        ".weight",
        _BYTES,
        "packed weights need X.weight_scale (F8_E4M3) and X.weight_scale_2 beside them",
        ".weight_scale",
    ),
    Sign(
        ".weight",
        _BYTES,
        "packed weights need X.weight_scale (F8_E4M3) and X.weight_scale_2 beside them",
        ".weight_scale_2",
    ),
    Sign(
        "",
        _BYTES,
        "packed experts that are stacked, with {beside}, are not imported",
        "_weight_scale",
    ),
    Sign(".weight", _SIGNED_BYTES, _INT8, ".weight_scale"),
    Sign(".weight", _SIGNED_BYTES, _INT8, ".SCB"),
    Sign(".weight", _WORDS, "{beside} do not fit weights that MLX packed", ".scales"),
    Sign(".weight", _WORDS, "its scales are missing, beside {beside}", ".biases"),
    Sign("_blocks", _BYTES, "{beside} do not fit blocks of gpt-oss", "_scales"),
)
_KNOWN_METHODS = frozenset({"fp8", "modelopt", "compressed-tensors", "mxfp4"})
_CODES = _INTEGERS | _BYTES | _SIGNED_BYTES | {DType.I16, DType.U16, DType.U64} | _E4M3 | _OTHER_FP8


def check_unpacked(tensors: Mapping[str, SourceTensor], inventory: Inventory) -> None:
    """Raise UnsupportedSourceError when one of the ``tensors``, which no producer explains, holds packed weights."""
    for name, reason in look_packed(tensors, inventory.tensors, inventory.config):
        raise UnsupportedSourceError(
            f"{quoted(name)} is {tensors[name].dtype}: {reason}",
            tensor=name,
            path=tensors[name].file.path,
            hint="Import the unquantized checkpoint.",
        )


def look_packed(
    tensors: Mapping[str, Stored], everything: Mapping[str, Stored], config: SourceConfig | None
) -> Iterator[tuple[str, str]]:
    """Yield those of the ``tensors``, which no producer explains, that seem to hold packed weights, and why it seems so.

    ``everything`` has what may lie beside them. One may be named more than once.
    """
    for sign in _SIGNS:
        for name, tensor in tensors.items():
            if tensor.dtype not in sign.dtypes or not name.endswith(sign.suffix):
                continue
            beside = name.removesuffix(sign.suffix) + sign.beside
            if (beside in everything or not sign.beside) and (
                sign.suffix or _may_be_weight(name, tensor)
            ):
                yield (
                    name,
                    sign.reason.format(
                        beside=_described(beside, everything) if sign.beside else ""
                    ),
                )
    for name in tensors:
        if (row := counting_row(name, everything)) is not None and not row.imported:
            yield name, f"{row.name} weights are not imported"
    yield from _unexplained(tensors, config or SourceConfig())


def _may_be_weight(name: str, tensor: Stored) -> bool:
    """Return True for whatever is called a weight, and for matrices of experts, which often are not; no scale is one."""
    return name.endswith(".weight") or (
        is_expert(name) and len(tensor.shape) > 1 and "scale" not in name.rpartition(".")[2]
    )


def _described(name: str, everything: Mapping[str, Stored]) -> str:
    return f"{quoted(name)} ({everything[name].dtype} {list(everything[name].shape)})"


def _unexplained(tensors: Mapping[str, Stored], config: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield the tensors that config.json calls quantized, and that are stored in no way that is known."""
    method, settings = config.quant_method, config.mlx_quantization
    for name, tensor in tensors.items():
        if method is not None and method not in _KNOWN_METHODS:
            if tensor.dtype in _CODES and tensor.nbytes * 8 // tensor.dtype.bits >= _LEAST_ELEMENTS:
                yield (
                    name,
                    f"config.json says that it was quantized by {quoted(method)}, which is not imported",
                )
        elif tensor.dtype is DType.U8 and name.endswith("_blocks") and method == "mxfp4":
            yield name, "its _scales are missing"
        elif (
            tensor.dtype is DType.U32
            and settings is not None
            and _module_of(name, settings) is not None
        ):
            yield name, "its scales are missing, and config.json says that MLX quantized it"


def _module_of(name: str, settings: QuantizationSettings) -> ModuleQuantization | None:
    """Return how MLX says that it quantized the module of a weight, or None."""
    return settings.of(name.removesuffix(".weight")) if name.endswith(".weight") else None


_NVFP4 = Quantization(QuantType.NVFP4, 16)
_MXFP4 = Quantization(QuantType.MXFP4, 32)
_WORD_BYTES = 4
PACKED_FORMATS = frozenset({"nvfp4-pack-quantized", "mixed-precision"})
"""What compressed-tensors calls a checkpoint with NVFP4 weights: others have the same tensors with another meaning."""


def source_weights(inventory: Inventory) -> tuple[SourceWeight, ...]:
    """Return the weights of a checkpoint, sorted by name; companions are part of their weight.

    Raises: UnsupportedSourceError naming tensor, format and reason for whatever is packed in
    another way, has parts that do not fit together, or lacks one, and for two weights of one name.
    """
    found = {
        name: row for name in inventory.tensors if (row := importing_row(name, inventory.tensors))
    }
    consumed = set(found)
    weights = []
    for name, producer in found.items():
        weights.append(_READERS[producer.name](_Found(inventory, producer, name)))
        base = name.removesuffix(producer.weight)
        # Activations' scales hang on the module, also where the weight is FP8: X.weight,
        # X.input_scale.
        module = base.removesuffix(".weight")
        consumed.update(base + suffix for suffix in producer.companions)
        consumed.update(module + suffix for suffix in producer.dropped)
    rest = {name: tensor for name, tensor in inventory.tensors.items() if name not in consumed}
    check_unpacked(rest, inventory)
    result = sorted(
        [*weights, *map(SourceWeight.plain, rest.values())], key=lambda weight: weight.name
    )
    for one, other in pairwise(result):
        if one.name == other.name:
            raise named_twice(one.name, one, other)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class _Found:
    """A quantized weight that was found: where, and whose."""

    inventory: Inventory
    producer: Producer
    name: str

    @property
    def base(self) -> str:
        return self.name.removesuffix(self.producer.weight)

    @property
    def parts(self) -> dict[str, SourceTensor]:
        """The tensors by the suffix of the array that they become."""
        tensors = self.inventory.tensors
        names = {"": self.name} | {
            stored: self.base + suffix for suffix, stored in self.producer.companions.items()
        }
        return {stored: tensors[name] for stored, name in names.items() if name in tensors}

    @property
    def config(self) -> SourceConfig:
        return self.inventory.config or SourceConfig()

    @property
    def config_hint(self) -> str | None:
        return "Import the folder with its config.json." if self.inventory.config is None else None

    def unsaid(self, what: str) -> str:
        """Return that nothing says ``what``."""
        return (
            f"no config.json says {what}"
            if self.inventory.config is None
            else f"config.json does not say {what}"
        )

    def refused(self, reason: str, hint: str | None = None) -> UnsupportedSourceError:
        """Return the error that says why the weight is not imported."""
        return UnsupportedSourceError(
            f"{quoted(self.name)} is {self.producer.name}: {reason}",
            tensor=self.name,
            path=self.inventory.tensors[self.name].file.path,
            hint=hint or "Import the unquantized checkpoint.",
        )


def _codes(found: _Found, quantization: Quantization, name: str) -> SourceWeight:
    """Return a weight whose codes are stored as ours are, byte for byte.

    Its companions must have the right sizes.
    """
    parts, producer = found.parts, found.producer
    *lead, last = parts[""].shape or (0,)
    if producer.joined:
        last = last * lead.pop() if lead else 0
    words = (*lead, last // (1 if parts[""].dtype is DType.U32 else _WORD_BYTES))
    shape = quantization.logical_shape(words)
    scale = parts[".scale"]
    dtype = scale.dtype if quantization.quant_type.is_affine else DType.BF16
    if not dtype.is_float:
        raise found.refused(
            f"its scale {quoted(scale.name)} is {dtype}, and those of {quantization} are floats"
        )
    weight = SourceWeight(
        name,
        dtype,
        shape,
        parts,
        Form.CODES,
        producer.name,
        quantization,
        producer.inverse_global_scale,
    )
    if math.prod(words) * _WORD_BYTES != parts[""].nbytes or not quantization.divides(shape):
        raise found.refused(f"{list(parts[''].shape)} are not whole groups of {quantization}")
    wanted = {
        part.suffix: part
        for part in quantization.parts(shape, dtype, global_scale=weight.global_scale_shape)
    }
    for suffix, part in wanted.items():
        if suffix and not _holds(parts.get(suffix), part):
            raise found.refused(_unfit(parts.get(suffix), part))
    if ".bias" in parts.keys() - wanted.keys():
        raise found.refused(
            f"it has biases, {quoted(parts['.bias'].name)}, and {quantization} has none"
        )
    return weight


def _holds(tensor: SourceTensor | None, part: Part) -> bool:
    """Return True when the tensor has the bytes of that array: a scale's E4M3 or E8M0 bits may have any 8-bit dtype."""
    if tensor is None or (part.suffix == ".global_scale" and tensor.shape not in ((), (1,))):
        return False
    return tensor.shape == part.shape and (
        tensor.dtype is part.dtype or (part.dtype is DType.U8 and tensor.dtype.bits == 8)  # noqa: PLR2004
    )


def _unfit(tensor: SourceTensor | None, part: Part) -> str:
    what = part.suffix[1:].replace("_", " ")
    if tensor is None:
        return f"its {what} is missing"
    if part.suffix == ".global_scale":
        return f"its global scale {quoted(tensor.name)} is {tensor.dtype} {list(tensor.shape)}, and not one F32"
    return f"its {what} {quoted(tensor.name)} is {tensor.dtype} {list(tensor.shape)}, not {part.dtype} {list(part.shape)}"


def _mlx(found: _Found) -> SourceWeight:
    if (scale := found.inventory.tensors.get(f"{found.base}.global_scale")) is not None:
        # mlx_lm 0.32.2 models/switch_layers.py `_quantize_experts`; left out, all weights would be
        # wrong by a factor.
        raise found.refused(
            f"its global scale {quoted(scale.name)}, which MLX counts in 2688ths, is not imported"
        )
    settings = found.config.mlx_quantization
    module = settings.of(found.base) if settings is not None else None
    if module is None:
        return _codes(found, _inferred(found), found.name)
    try:
        quantization = module.quantization
    except UsageError as error:
        reason = (
            f"{module.bits} bits in groups of {module.group_size} ({module.mode}) have no type here"
        )
        raise found.refused(reason, error.hint) from None
    return _codes(found, quantization, found.name)


def _inferred(found: _Found) -> Quantization:
    """Return the only quantization that the tensors' shapes allow.

    Raises: UnsupportedSourceError for none or several.
    """
    possible = []
    for quantization in (
        Quantization(kind, size) for kind in QuantType for size in kind.group_sizes
    ):
        if quantization.quant_type.is_affine == (".bias" in found.parts):
            try:
                _codes(found, quantization, found.name)
            except UnsupportedSourceError:
                continue
            possible.append(quantization)
    if len(possible) != 1:
        answers = ", ".join(map(str, possible)) or "none"
        raise found.refused(
            f"{found.unsaid('how it was quantized')}, and its shapes fit {answers}",
            found.config_hint,
        )
    return possible[0]


def _nvfp4(found: _Found) -> SourceWeight:
    if (scale := found.inventory.tensors.get(f"{found.base}.pre_quant_scale")) is not None:
        # ModelOpt's NVFP4_AWQ: the weights were divided by it, and no layernorm took it up
        # (unified_export_hf.py).
        raise found.refused(
            f"its inputs are scaled by {quoted(scale.name)} (AWQ), which no stored form has"
        )
    formats = found.config.packed_formats
    if formats and found.producer is COMPRESSED_NVFP4 and formats.isdisjoint(PACKED_FORMATS):
        raise found.refused(f"config.json says that its format is {', '.join(sorted(formats))}")
    return _codes(found, _NVFP4, found.base + ".weight")


def _gpt_oss(found: _Found) -> SourceWeight:
    # As mlx-lm names it (ml-explore/mlx-lm@1245c2ec mlx_lm/models/gpt_oss.py `sanitize`), so that
    # its model finds it.
    return _codes(found, _MXFP4, found.base + ".weight")


def _block_fp8(found: _Found) -> SourceWeight:
    parts = found.parts
    block = found.config.fp8_block_size
    if block not in (None, (FP8_BLOCK, FP8_BLOCK)):
        raise found.refused(
            f"its blocks are {'x'.join(map(str, block))}, and only 128x128 is decoded"
        )
    shape = parts[""].shape
    if len(shape) < 2:  # noqa: PLR2004
        raise found.refused(f"{list(shape)} is not a matrix")
    wanted = (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))
    scale = parts[".scale"]
    if scale.shape != wanted:
        raise found.refused(
            f"its scale {quoted(scale.name)} is {list(scale.shape)}, and 128x128 blocks need {list(wanted)}"
        )
    if block is None:
        raise found.refused(
            f"{found.unsaid('which weights share a scale')} (weight_block_size)", found.config_hint
        )
    return SourceWeight(found.name, DType.BF16, shape, parts, Form.BLOCK_FP8, found.producer.name)


def _own(found: _Found) -> SourceWeight:
    metadata = found.inventory.tensors[found.name].file.metadata
    prefix = f"{found.name}." if f"{found.name}.quant_type" in metadata else ""
    try:
        quantization = Quantization.described(metadata, prefix)
    except KeyError:
        raise found.refused("the metadata of its file do not say how it was quantized") from None
    except UsageError as error:
        raise found.refused(str(error), error.hint) from None
    weight = _codes(found, quantization, found.name)
    return replace(weight, transposed=metadata.get(f"{found.name}.transposed") == "true")


_READERS: Mapping[str, Callable[[_Found], SourceWeight]] = {
    MLX.name: _mlx,
    COMPRESSED_NVFP4.name: _nvfp4,
    MODELOPT_NVFP4.name: _nvfp4,
    GPT_OSS.name: _gpt_oss,
    BLOCK_FP8: _block_fp8,
    OWN.name: _own,
}
