"""What a quantized checkpoint's tensors and config.json mean: decoders from published layouts.

Plain NumPy in float64, one function a layout, nothing of blobstore. Facts:

- compressed-tensors: vllm-project/compressed-tensors 0.20.0 compressors/pack_quantized/helpers.py
  (dense words, the first code in the lowest bits, offset by 2^(bits-1); zero points packed along
  rows; 0.12 cuts no code in two, and its weight_g_idx permutes columns),
  quantization/lifecycle/forward_helpers.py `_dequantize`, quantization/quant_args.py (a missing
  strategy follows from ``group_size``).
- GPTQ: ModelCloud/GPTQModel@f4c327a1 utils/model.py `convert_gptq_v1_to_v2_format_module` (a word's
  addition; of 3 bits each code's), quantization/config.py `_resolve_dynamic_override` (the first
  rule whose expression matches; "-:" means unquantized). AutoRound: intel/auto-round 0.16.1
  inference/backend.py `GPTQ_FORMAT`, `GPTQ_FORMAT_NO_ZP`; convert_model.py `convert_hf_model`.
- AWQ: casper-hansen/AutoAWQ@88e4c76b awq/utils/packing_utils.py `AWQ_ORDER`, `dequantize_gemm`.
- FP8: transformers 5.23.0 integrations/finegrained_fp8.py; GPTQModel nn_modules/qlinear/fp8.py.
- FP4: OCP Microscaling 1.0; NVFP4 scales are divided by compressed-tensors' global scale and
  multiplied by ModelOpt's.
- MLX: mlx 0.32.4 backend/cpu/quantized.cpp.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (BF16, np.dtype(np.float16), np.dtype(np.float32))
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
U8, I8, I32, I64, U32 = map(np.dtype, ("u1", "i1", "i4", "i8", "u4"))
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
UNSHIFTED = ("auto_round", "auto_round:gptqmodel")
METHODS = ("gptq", "awq", "auto-round", "intel/auto-round")
UNUSED = (".input_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale")
PARTS = (
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_shape"),
    *(".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".qweight", ".qzeros"),
    *(".g_idx", ".scales", ".biases", ".absmax", ".quant_map", ".nested_absmax", ".SCB"),
    *(".nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4", ".weight_format"),
)
"""How the names of tensors end that belong to a quantized weight."""


class ContradictionError(Exception):
    """The tensors and config.json have no meaning, several, or one that is not imported."""


class Values(NamedTuple):
    """Values in float64, before they are rounded to ``dtype``; the largest terms of their sums."""

    exact: Array
    dtype: np.dtype[Any]
    terms: Array


@dataclass
class Module:
    """The tensors of one weight; which of them were used; what config.json says."""

    base: str
    tensors: Mapping[str, Array]
    config: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def get(self, suffix: str, *dtypes: np.dtype[Any]) -> Array | None:
        array = self.tensors.get(self.base + suffix)
        if array is not None:
            need(not dtypes or array.dtype in dtypes, f"{suffix} is {array.dtype}")
            self.used.add(self.base + suffix)
        return array

    def take(self, suffix: str, *dtypes: np.dtype[Any]) -> Array:
        array = self.get(suffix, *dtypes)
        if array is None:
            raise ContradictionError(f"{self.base}{suffix} is missing")
        return array

    @property
    def said(self) -> dict[str, Any]:
        own, inner = self.config.get("quantization_config"), self.config.get("text_config") or {}
        said = own or (inner.get("quantization_config") if isinstance(inner, dict) else None)
        return said if isinstance(said, dict) else {}

    @property
    def method(self) -> Any:
        return self.said.get("quant_method")

    @property
    def every_group(self) -> list[dict[str, Any]]:
        return dicts(self.said.get("config_groups"))

    def groups(self) -> list[dict[str, Any]]:
        """Return compressed-tensors' settings of weights that may be those of the module."""
        every = self.every_group
        named = [one for one in every if any(map(self.is_target, listed(one.get("targets"))))]
        return weights_in(named or every)

    def is_target(self, target: Any) -> bool:
        text = str(target)
        return text == self.base or (
            text.startswith("re:") and "(a+)" not in text and bool(re.match(text[3:], self.base))
        )


def need(holds: object, why: str) -> None:
    if not holds:
        raise ContradictionError(why)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def dicts(value: Any) -> list[dict[str, Any]]:
    items = value.values() if isinstance(value, dict) else ()
    return [one for one in items if isinstance(one, dict)]


def weights_in(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one["weights"] for one in groups if isinstance(one.get("weights"), dict)]


def is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**20


def fields(words: Array, bits: int, *, dense: bool = True) -> Array:
    """Return the numbers of ``bits`` in 32-bit words along the last axis, the lowest bits first."""
    *lead, count = words.shape
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(*lead, -1)
    flat = np.unpackbits(raw, axis=-1, bitorder="little")
    if not dense:
        whole = 32 // bits * bits
        flat = flat.reshape(*lead, count, 32)[..., :whole].reshape(*lead, -1)
    numbers = flat[..., : flat.shape[-1] // bits * bits].reshape(*lead, -1, bits)
    result: Array = (numbers.astype(np.int64) << np.arange(bits)).sum(-1)
    return result


def spread(scale: Array, shape: tuple[int, ...], height: int, width: int) -> Array:
    wide = np.repeat(np.repeat(scale, height, -2), width, -1)
    return wide[..., : shape[-2], : shape[-1]]


def affine(codes: Array, zeros: Array, scales: Array) -> Values:
    exact = scales.astype(np.float64)
    with np.errstate(all="ignore"):
        terms = np.abs(exact) * (np.abs(codes) + np.abs(zeros))
        return Values(exact * (codes - zeros), scales.dtype, terms)


def strategy_of(said: Mapping[str, Any]) -> tuple[str, int]:
    size: Any = said.get("group_size")
    strategy: Any = said.get("strategy") or (
        "channel" if size == -1 else "group" if size else "tensor"
    )
    if strategy == "group":
        need(is_count(size), f"groups of {size}")
    return strategy, size if strategy == "group" else 0


# compressed-tensors

KNOWN = {
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"),
    *("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
}


def check_known(module: Module) -> None:
    """Refuse settings that change what weights mean, and that no library of ours explains."""
    need(not module.said.get("transform_config"), "rotated weights")
    for weights in weights_in(module.every_group):
        need(not any(weights[key] for key in weights.keys() - KNOWN), "unknown settings")
        need(weights.get("type", "int") == "int" or not is_permuted(weights), "an order")


def is_permuted(weights: Mapping[str, Any]) -> bool:
    return weights.get("actorder") in (True, "group", "dynamic")


def integers(module: Module) -> Values:
    """Read codes that a scale and perhaps a zero point belong to, packed or one a byte."""
    need(module.method == "compressed-tensors", "integers of another program")
    is_packed = module.get(".weight_packed", I32) is not None
    found: list[Values] = []
    for said in module.groups():
        bits = said.get("num_bits", 8)
        if said.get("type", "int") != "int" or type(bits) is not int or bits not in range(1, 9):
            continue
        for dense in (True, False) if is_packed else (None,):
            try:
                found.append(_integers(module, said, bits, dense))
                break
            except ContradictionError:
                continue
    return only(found)


def _integers(module: Module, said: Mapping[str, Any], bits: int, dense: bool | None) -> Values:
    """Read codes as ``said``: in words, ``dense`` or whole codes a word; None for bytes."""
    codes = module.take(".weight", I8) if dense is None else module.take(".weight_packed", I32)
    order, stated = module.get(".weight_g_idx", I32), module.get(".weight_shape", I32, I64, U32)
    scales, zeros = module.take(".weight_scale", *FLOATS), module.get(".weight_zero_point", I8, I32)
    need(codes.ndim > 1 and codes.size, "not a matrix")
    strategy, size = strategy_of(said)
    *lead, rows, cols = codes.shape
    half, per_word = 2 ** (bits - 1), 32 // bits
    if dense is None:
        numbers = codes.astype(np.int64) + half
    else:
        numbers = fields(codes, bits, dense=dense)
        cols = int(stated.flat[-1]) if stated is not None and stated.size else 0
        if not cols:
            cols = size * scales.shape[-1] if size and scales.ndim else numbers.shape[-1]
        words = -(-cols * bits // 32) if dense else -(-cols // per_word)
        need(words == codes.shape[-1], f"{cols} columns in {codes.shape[-1]} words")
        numbers = numbers[..., :cols]
    if stated is not None:
        need(stated.reshape(-1).tolist() == [*lead, rows, cols], f"{stated} are not the shape")
    width = size if strategy == "group" else cols
    shapes = [(*lead, rows, cols // width)]
    if strategy == "tensor":
        width, shapes = 0, [(*lead,), (*lead, 1), (*lead, 1, 1)]
    need(strategy in ("group", "channel", "tensor"), f"strategy {strategy}")
    need((not width or cols % width == 0) and scales.shape in shapes, "scales do not fit")
    symmetric = said.get("symmetric", True)
    if isinstance(symmetric, bool):
        need((zeros is None) is symmetric, "zero points do not fit the setting")
    if zeros is None:
        points = np.full(scales.shape, half)
    elif zeros.dtype == I8:
        need(zeros.shape == scales.shape, "zero points do not fit")
        points = zeros.astype(np.int64) + half
    else:
        count = -(-rows // per_word) if dense is False else -(-rows * bits // 32)
        need(width and zeros.shape == (*lead, count, scales.shape[-1]), "zero points do not fit")
        columns = fields(np.swapaxes(zeros, -1, -2), bits, dense=dense is not False)[..., :rows]
        points = np.swapaxes(columns, -1, -2)
    of = order_of(said, order, np.arange(cols) // (width or cols))
    if not width:
        points, scales, of = points.reshape(*lead, 1, 1), scales.reshape(*lead, 1, 1), 0 * of
    return affine(numbers, points[..., of], scales[..., of])


def order_of(said: Mapping[str, Any], order: Array | None, usual: Array) -> Array:
    """Return the group of each column, as 0.12 has it: groups of one size."""
    need(order is not None or not is_permuted(said), "an unknown order")
    if order is None:
        return usual
    need(order.shape == usual.shape, "an order of another length")
    need(np.array_equal(np.sort(order) if is_permuted(said) else order, usual), "another order")
    return order


def only(found: list[Values]) -> Values:
    need(found, "no settings fit")
    one, *others = found
    for other in others:
        need(np.array_equal(one.exact, other.exact, equal_nan=True), "several settings fit")
    return one


# Floats of 8 and 4 bits


def need_group(module: Module, bits: int, size: int | None = None) -> None:
    """Refuse floats of compressed-tensors that its settings call something else."""
    groups = weights_in(module.every_group)
    if module.method != "compressed-tensors" or not groups:
        return
    fits = (
        one.get("type", "float") == "float"
        and one.get("num_bits", 8) == bits
        and (size is None or one.get("group_size") in (size, None))
        for one in groups
    )
    need(any(fits), "config.json calls them something else")


def fp8(module: Module) -> Values:
    """Read codes of a matrix that one scale belongs to, or one a row, group or block."""
    codes = module.take(".weight", E4M3, E5M2)
    suffixes = (".weight_scale_inv", ".weight_scale", ".scale")
    there = [suffix for suffix in suffixes if module.base + suffix in module.tensors]
    need(len(there) == 1 or there[1] == ".scale", f"scales {there}")
    scale = module.take(there[0], *FLOATS, E8M0, U8)
    need(codes.ndim > 1 and codes.size, "not a matrix")
    if there[0] == ".weight_scale":
        need_group(module, 8)
    wide = fp8_scales(module, scale, codes.shape)
    if wide.dtype == U8:
        wide = np.ascontiguousarray(wide).view(E8M0)
    factors = wide.astype(np.float64)
    semantics = module.said.get("weight_scale_semantics")
    need(not semantics or semantics == "inverse", f"scales mean {semantics}")
    with np.errstate(all="ignore"):
        if semantics == "inverse" and there[0] == ".weight_scale_inv":
            factors = 1 / factors
        exact = codes.astype(np.float64) * factors
    return Values(exact, BF16, np.abs(exact))


def fp8_scales(module: Module, scale: Array, shape: tuple[int, ...]) -> Array:
    """Return a scale for each code: of the blocks that config.json names, or of rows or all."""
    *lead, rows, cols = shape
    blocks, plain = fp8_blocks(module)
    if scale.dtype in (U8, E8M0) and not blocks:
        blocks.append((1, 32))
    for height, width in blocks:
        parts = (*lead, -(-rows // height), -(-cols // width))
        if scale.shape in (parts, (*lead, parts[-2], 1, parts[-1], 1)):
            need(scale.dtype != U8 or (height, width) == (1, 32), "bytes of other groups")
            return spread(scale.reshape(parts), shape, height, width)
    need(plain and scale.dtype != U8, "scales do not fit")
    if scale.shape in ((*lead,), (*lead, 1), (*lead, 1, 1)):
        return np.broadcast_to(scale.reshape(*lead, 1, 1), shape)
    need(scale.shape in ((*lead, rows), (*lead, rows, 1)), "scales do not fit")
    return np.broadcast_to(scale.reshape(*lead, rows, 1), shape)


def fp8_blocks(module: Module) -> tuple[list[tuple[int, int]], bool]:
    """Return the blocks that config.json names; whether rows, or all, may share a scale too."""
    blocks, plain = [], False
    if is_block(said := module.said.get("weight_block_size", [])):
        blocks.append((said[0], said[1]))
    for group in module.groups():
        if is_block(size := group.get("block_structure", [])):
            blocks.append((size[0], size[1]))
        elif {"type": "float", "num_bits": 8}.items() <= group.items() and is_count(
            group.get("group_size")
        ):
            blocks.append((1, group["group_size"]))
        plain = plain or group.get("strategy") in ("tensor", "channel")
    return blocks, plain or not blocks


def is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def fp4(module: Module) -> Values:
    """Read two codes a byte, the first in the lower bits, with scales of groups of 16 or 32."""
    if module.base + ".weight_packed" in module.tensors:
        packed, scale = module.take(".weight_packed", U8), module.take(".weight_scale")
        factor = module.get(".weight_global_scale", np.dtype(np.float32))
        divides = True
    elif module.base + ".weight_scale_2" in module.tensors:
        packed, scale = module.take(".weight", U8), module.take(".weight_scale", E4M3)
        factor, divides = module.take(".weight_scale_2", np.dtype(np.float32)), False
    else:
        packed, scale, factor = module.take(".weight", I8), module.take(".scale", E8M0, U8), None
    size = 16 if scale.dtype == E4M3 else 32
    need((scale.dtype == E4M3) is (factor is not None), "a global scale, or none")
    need(scale.dtype in (E4M3, E8M0, U8), f"scales of {scale.dtype}")
    need(packed.ndim > 1 and packed.size, "not a matrix")
    need(2 * packed.shape[-1] == size * scale.shape[-1] if scale.ndim else 0, "scales do not fit")
    need(scale.shape[:-1] == packed.shape[:-1], "scales do not fit")
    if packed.dtype == U8:
        need_group(module, 4, size)
    if size == 16:
        named = (one.get("format") for one in (module.said, *module.every_group))
        forms = {one for one in named if isinstance(one, str)}
        usual = {"nvfp4-pack-quantized", "mixed-precision"}
        need(not forms or forms & usual or not divides, "another format")
    raw = packed.view(np.uint8)
    codes = np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], -1)
    scales = scale.view(E8M0) if scale.dtype == U8 else scale
    factors = np.repeat(scales.astype(np.float64), size, -1)
    if factor is not None:
        need(factor.shape in ((), (1,)), "several global scales")
        with np.errstate(all="ignore"):
            number = float(np.float32(1) / factor.reshape(-1)[0] if divides else factor.flat[0])
        need(np.isfinite(number) and np.isfinite(float(factor.reshape(-1)[0])), "a global scale")
        factors = factors * number
    with np.errstate(all="ignore"):
        exact = E2M1[codes] * factors
    return Values(exact, BF16, np.abs(exact))


# GPTQ, AWQ, AutoRound


def column_settings(module: Module) -> list[dict[str, Any]]:
    """Return the settings that a module may have: which rule is its own, the shapes say."""
    said = dict(module.said)
    need(said.get("quant_method") in METHODS, "integers of another program")
    extra = said.get("extra_config")
    own = extra.get(module.base) if isinstance(extra, dict) else None
    if isinstance(own, dict):
        return [said | own]
    return [said, *(said | rule for rule in dicts(said.get("dynamic")))]


def columns(module: Module) -> Values:
    found = []
    for said in column_settings(module):
        with suppress(ContradictionError):
            found.append(_columns(module, said))
    return only(found)


def _columns(module: Module, said: Mapping[str, Any]) -> Values:
    """Read codes with inputs first, packed along inputs (GPTQ) or outputs (AWQ)."""
    codes, scales = module.take(".qweight", I32), module.take(".scales", *FLOATS)
    zeros, order = module.take(".qzeros", I32), module.get(".g_idx", I32, I64)
    bits = said.get("bits", said.get("w_bit"))
    size = said.get("group_size", said.get("q_group_size"))
    packing = said.get("packing_format") if "auto" in said["quant_method"] else None
    is_awq = "awq" in str(packing if packing is not None else said["quant_method"])
    need(type(bits) is int and bits in ((4,) if is_awq else (2, 3, 4, 8)), f"{bits} bits")
    need(type(size) is int and (size == -1 or is_count(size)), f"groups of {size}")
    need(codes.ndim == scales.ndim == zeros.ndim == 2, "not a matrix")
    need(codes.size and zeros.size, "empty")
    points = fields(zeros, bits)
    if is_awq:
        need(str(said.get("version", "gemm")).lower() == "gemm", "another layout")
        inputs, outputs = codes.shape[0], codes.shape[1] * 8
        places = np.argsort(AWQ_ORDER)
        numbers, points = (
            part.reshape(len(part), -1, 8)[..., places].reshape(len(part), -1)
            for part in (fields(codes, 4), points)
        )
    else:
        form = said.get("checkpoint_format", "gptq")
        need(form in ("gptq", "gptq_v2"), "another layout")
        need(packing in (None, "auto_round:auto_gptq", *UNSHIFTED), "another layout")
        outputs, inputs = codes.shape[1], codes.shape[0] * 32 // bits
        need(-(-inputs * bits // 32) == codes.shape[0], "codes do not fit")
        numbers = fields(codes.T, bits)[:, :inputs].T
        if packing not in UNSHIFTED and form == "gptq":
            if bits == 3:
                points = (points + 1) & 7
            else:
                ones = np.uint32(sum(1 << at for at in range(0, 32, bits)))
                points = fields(zeros.view(np.uint32) + ones, bits)
    size = inputs if size == -1 else size
    groups = -(-inputs // size)
    need(scales.shape == (groups, outputs), "scales do not fit")
    need(zeros.shape == (groups, -(-outputs * bits // 32)), "zero points do not fit")
    points = points[:, :outputs]
    of = np.arange(inputs) // size
    if order is not None:
        need(order.shape == (inputs,), "an order of another length")
        need(((order >= 0) & (order < groups)).all(), "groups beyond the last")
        of = order
    elif said.get("desc_act") is True:
        need(is_awq or groups == 1, "an unknown order")
    values = affine(numbers, points[of], scales[of])
    return Values(values.exact.T, values.dtype, values.terms.T)


# MLX

MLX_KINDS = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


def mlx(module: Module) -> Values:
    """Read dense words of codes with scales and biases, or of small floats with scales."""
    words, scales = module.take(".weight", U32), module.take(".scales", *FLOATS, U8)
    biases = module.get(".biases", *FLOATS)
    need(module.base + ".global_scale" not in module.tensors, "a global scale")
    need(words.ndim > 1 and words.size and scales.ndim == words.ndim, "not a matrix")
    settings = module.config.get("quantization")
    own = module.config.get("quantization_config")
    if settings is None and isinstance(own, dict) and "quant_method" not in own and "bits" in own:
        settings = own
    if settings is not None:
        said = settings.get(module.base, True)
        need(said is not False, "config.json calls it unquantized")
        said = said if isinstance(said, dict) else settings
        mode = said.get("mode") or "affine"
        given = (said.get("bits"), said.get("group_size"))
        usual = MLX_KINDS.get(mode, (4, 64))
        bits, size = (usual[at] if number is None else number for at, number in enumerate(given))
        return _mlx(words, scales, biases, mode, bits, size)
    found = []
    kinds = [(mode, bits, size) for mode, (bits, size) in MLX_KINDS.items()]
    kinds += [("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)]
    for kind in kinds:
        with suppress(ContradictionError):
            found.append(_mlx(words, scales, biases, *kind))
    need(len(found) == 1, f"{len(found)} meanings")
    return found[0]


def _mlx(
    words: Array, scales: Array, biases: Array | None, mode: str, bits: int, size: int
) -> Values:
    if mode == "affine":
        need(is_count(bits) and bits in (2, 3, 4, 5, 6, 8), f"{bits} bits")
        need(is_count(size) and size in (32, 64, 128), f"groups of {size}")
        need(biases is not None and scales.dtype in FLOATS, "no biases")
        assert biases is not None
        need(biases.dtype == scales.dtype and biases.shape == scales.shape, "biases do not fit")
    else:
        need(mode in MLX_KINDS and (bits, size) == MLX_KINDS[mode], f"{mode} of {bits}, {size}")
        need(biases is None and scales.dtype == U8, "scales do not fit")
    codes = fields(words, bits)
    cols = scales.shape[-1] * size
    need(words.shape[-1] * 32 == cols * bits, "scales do not fit")
    need(scales.shape[:-1] == words.shape[:-1], "scales do not fit")
    with np.errstate(all="ignore"):
        if biases is not None:
            parts = (one.astype(np.float64) for one in (scales, biases))
            factors, offsets = (np.repeat(one, size, -1) for one in parts)
            terms = np.abs(factors * codes) + np.abs(offsets)
            return Values(factors * codes + offsets, scales.dtype, terms)
        kind = E4M3 if mode == "nvfp4" else E8M0
        factors = np.repeat(scales.view(kind).astype(np.float64), size, -1)
        table = E2M1 if bits == 4 else np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
        exact = table[codes] * factors
    return Values(exact, BF16, np.abs(exact))


# A checkpoint

LAYOUTS: list[tuple[str, tuple[np.dtype[Any], ...], str, Callable[[Module], Values]]] = [
    (".weight_packed", (I32,), ".weight_scale", integers),
    (".weight_packed", (U8,), ".weight_scale", fp4),
    (".weight", (U8,), ".weight_scale_2", fp4),
    (".weight", (I8,), ".weight_scale", integers),
    (".weight", (I8,), ".scale", fp4),
    (".weight", (E4M3, E5M2), ".weight_scale_inv", fp8),
    (".weight", (E4M3, E5M2), ".weight_scale", fp8),
    (".weight", (E4M3, E5M2), ".scale", fp8),
    (".qweight", (I32,), ".scales", columns),
    (".weight", (U32,), ".scales", mlx),
]
"""How a weight's codes are called, their dtypes, a tensor beside them, and their decoder."""


def meaning(tensors: Mapping[str, Array], config: Mapping[str, Any]) -> dict[str, Values]:
    """Return the values of every weight. Raises: ContradictionError."""
    used: set[str] = set()
    result: dict[str, Values] = {}
    for base, decode in weights_of(tensors):
        module = Module(base, tensors, config)
        if decode is not mlx:
            check_known(module)
        need(f"{base}.weight" not in result, "one name twice")
        result[f"{base}.weight"] = decode(module)
        used |= module.used
    for name, array in tensors.items():
        if name in used or name.endswith(UNUSED):
            continue
        need(not name.endswith(PARTS), name)
        need(name not in result, "one name twice")
        is_said = array.ndim > 1 and any("quantization" in key for key in config)
        is_weight = name.endswith(".weight") and (is_said or array.dtype in (E4M3, E5M2))
        need(array.dtype in FLOATS or not is_weight, f"{name} is {array.dtype}")
        need(array.dtype != E8M0 or not name.endswith((".weight", ".scale")), f"{name} is E8M0")
        if array.dtype in FLOATS:
            exact = array.astype(np.float64)
            result[name] = Values(exact, array.dtype, np.abs(exact))
    return result


def weights_of(tensors: Mapping[str, Array]) -> Iterator[tuple[str, Callable[[Module], Values]]]:
    for name, array in tensors.items():
        for suffix, dtypes, beside, decode in LAYOUTS:
            base = name.removesuffix(suffix)
            if name.endswith(suffix) and array.dtype in dtypes and base + beside in tensors:
                yield base, decode
                break
