"""Assembly: the weights of a checkpoint, put together from their tensors, for an import. Pure.

Which tensors are a quantized weight is in producers.py; whatever looks packed and is in no row that is imported is refused
by name (refusals.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from blobstore.checkpoint import SourceConfig
from blobstore.dtypes import DType
from blobstore.errors import UnsupportedSourceError, UsageError, quoted
from blobstore.quant import Part, Quantization, QuantType
from blobstore.source.inventory import Inventory, SourceTensor
from blobstore.source.producers import (
    BLOCK_FP8,
    COMPRESSED_NVFP4,
    GPT_OSS,
    MLX,
    MODELOPT_NVFP4,
    OWN,
    Producer,
    importing_row,
)
from blobstore.source.refusals import check_unpacked
from blobstore.source.weights import FP8_BLOCK, Form, SourceWeight, named_twice

_NVFP4 = Quantization(QuantType.NVFP4, 16)
_MXFP4 = Quantization(QuantType.MXFP4, 32)
_WORD_BYTES = 4
PACKED_FORMATS = frozenset({"nvfp4-pack-quantized", "mixed-precision"})
"""What compressed-tensors calls a checkpoint with NVFP4 weights: others have the same tensors with another meaning."""


def source_weights(inventory: Inventory) -> tuple[SourceWeight, ...]:
    """Return the weights of a checkpoint, sorted by name; companions are part of their weight.

    Raises: UnsupportedSourceError naming tensor, format and reason for whatever is packed in another way, has parts that
    do not fit together, or lacks one, and for two weights of one name.
    """
    found = {name: row for name in inventory.tensors if (row := importing_row(name, inventory.tensors))}
    consumed = set(found)
    weights = []
    for name, producer in found.items():
        weights.append(_READERS[producer.name](_Found(inventory, producer, name)))
        base = name.removesuffix(producer.weight)
        # Activations' scales hang on the module, also where the weight is FP8: X.weight, X.input_scale.
        module = base.removesuffix(".weight")
        consumed.update(base + suffix for suffix in producer.companions)
        consumed.update(module + suffix for suffix in producer.dropped)
    rest = {name: tensor for name, tensor in inventory.tensors.items() if name not in consumed}
    check_unpacked(rest, inventory)
    result = sorted([*weights, *map(SourceWeight.plain, rest.values())], key=lambda weight: weight.name)
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
        names = {"": self.name} | {stored: self.base + suffix for suffix, stored in self.producer.companions.items()}
        return {stored: tensors[name] for stored, name in names.items() if name in tensors}

    @property
    def config(self) -> SourceConfig:
        return self.inventory.config or SourceConfig()

    @property
    def config_hint(self) -> str | None:
        return "Import the folder with its config.json." if self.inventory.config is None else None

    def unsaid(self, what: str) -> str:
        """Return that nothing says ``what``."""
        return f"no config.json says {what}" if self.inventory.config is None else f"config.json does not say {what}"

    def refused(self, reason: str, hint: str | None = None) -> UnsupportedSourceError:
        """Return the error that says why the weight is not imported."""
        return UnsupportedSourceError(
            f"{quoted(self.name)} is {self.producer.name}: {reason}",
            tensor=self.name,
            path=self.inventory.tensors[self.name].file.path,
            hint=hint or "Import the unquantized checkpoint.",
        )


def _codes(found: _Found, quantization: Quantization, name: str) -> SourceWeight:
    """Return a weight whose codes are stored as ours are, byte for byte; its companions must have the right sizes."""
    parts, producer = found.parts, found.producer
    *lead, last = parts[""].shape or (0,)
    if producer.joined:
        last = last * lead.pop() if lead else 0
    words = (*lead, last // (1 if parts[""].dtype is DType.U32 else _WORD_BYTES))
    shape = quantization.logical_shape(words)
    scale = parts[".scale"]
    dtype = scale.dtype if quantization.quant_type.is_affine else DType.BF16
    if not dtype.is_float:
        raise found.refused(f"its scale {quoted(scale.name)} is {dtype}, and those of {quantization} are floats")
    weight = SourceWeight(name, dtype, shape, parts, Form.CODES, producer.name, quantization, producer.inverse_global_scale)
    if math.prod(words) * _WORD_BYTES != parts[""].nbytes or not quantization.divides(shape):
        raise found.refused(f"{list(parts[''].shape)} are not whole groups of {quantization}")
    wanted = {part.suffix: part for part in quantization.parts(shape, dtype, global_scale=weight.global_scale_shape)}
    for suffix, part in wanted.items():
        if suffix and not _holds(parts.get(suffix), part):
            raise found.refused(_unfit(parts.get(suffix), part))
    if ".bias" in parts.keys() - wanted.keys():
        raise found.refused(f"it has biases, {quoted(parts['.bias'].name)}, and {quantization} has none")
    return weight


def _holds(tensor: SourceTensor | None, part: Part) -> bool:
    """Return True when the tensor has the bytes of that array: a scale's E4M3 or E8M0 bits may have any 8-bit dtype."""
    if tensor is None or (part.suffix == ".global_scale" and tensor.shape not in ((), (1,))):
        return False
    return tensor.shape == part.shape and (tensor.dtype is part.dtype or (part.dtype is DType.U8 and tensor.dtype.bits == 8))  # noqa: PLR2004


def _unfit(tensor: SourceTensor | None, part: Part) -> str:
    what = part.suffix[1:].replace("_", " ")
    if tensor is None:
        return f"its {what} is missing"
    if part.suffix == ".global_scale":
        return f"its global scale {quoted(tensor.name)} is {tensor.dtype} {list(tensor.shape)}, and not one F32"
    return f"its {what} {quoted(tensor.name)} is {tensor.dtype} {list(tensor.shape)}, not {part.dtype} {list(part.shape)}"


def _mlx(found: _Found) -> SourceWeight:
    if (scale := found.inventory.tensors.get(f"{found.base}.global_scale")) is not None:
        # mlx_lm 0.32.2 models/switch_layers.py `_quantize_experts`; left out, all weights would be wrong by a factor.
        raise found.refused(f"its global scale {quoted(scale.name)}, which MLX counts in 2688ths, is not imported")
    settings = found.config.mlx_quantization
    module = settings.of(found.base) if settings is not None else None
    if module is None:
        return _codes(found, _inferred(found), found.name)
    try:
        quantization = module.quantization
    except UsageError as error:
        reason = f"{module.bits} bits in groups of {module.group_size} ({module.mode}) have no type here"
        raise found.refused(reason, error.hint) from None
    return _codes(found, quantization, found.name)


def _inferred(found: _Found) -> Quantization:
    """Return the only quantization that the tensors' shapes allow. Raises: UnsupportedSourceError for none or several."""
    possible = []
    for quantization in (Quantization(kind, size) for kind in QuantType for size in kind.group_sizes):
        if quantization.quant_type.is_affine == (".bias" in found.parts):
            try:
                _codes(found, quantization, found.name)
            except UnsupportedSourceError:
                continue
            possible.append(quantization)
    if len(possible) != 1:
        answers = ", ".join(map(str, possible)) or "none"
        raise found.refused(f"{found.unsaid('how it was quantized')}, and its shapes fit {answers}", found.config_hint)
    return possible[0]


def _nvfp4(found: _Found) -> SourceWeight:
    if (scale := found.inventory.tensors.get(f"{found.base}.pre_quant_scale")) is not None:
        # ModelOpt's NVFP4_AWQ: the weights were divided by it, and no layernorm took it up (unified_export_hf.py).
        raise found.refused(f"its inputs are scaled by {quoted(scale.name)} (AWQ), which no stored form has")
    formats = found.config.packed_formats
    if formats and found.producer is COMPRESSED_NVFP4 and formats.isdisjoint(PACKED_FORMATS):
        raise found.refused(f"config.json says that its format is {', '.join(sorted(formats))}")
    return _codes(found, _NVFP4, found.base + ".weight")


def _gpt_oss(found: _Found) -> SourceWeight:
    # As mlx-lm names it (ml-explore/mlx-lm@1245c2ec mlx_lm/models/gpt_oss.py `sanitize`), so that its model finds it.
    return _codes(found, _MXFP4, found.base + ".weight")


def _block_fp8(found: _Found) -> SourceWeight:
    parts = found.parts
    block = found.config.fp8_block_size
    if block not in (None, (FP8_BLOCK, FP8_BLOCK)):
        raise found.refused(f"its blocks are {'x'.join(map(str, block))}, and only 128x128 is decoded")
    shape = parts[""].shape
    if len(shape) < 2:  # noqa: PLR2004
        raise found.refused(f"{list(shape)} is not a matrix")
    wanted = (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))
    scale = parts[".scale"]
    if scale.shape != wanted:
        raise found.refused(f"its scale {quoted(scale.name)} is {list(scale.shape)}, and 128x128 blocks need {list(wanted)}")
    if block is None:
        raise found.refused(f"{found.unsaid('which weights share a scale')} (weight_block_size)", found.config_hint)
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
