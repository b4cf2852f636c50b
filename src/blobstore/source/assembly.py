"""Assembly: the weights of a checkpoint, put together from their tensors, for an import. Pure.

producers.py says which tensors make a quantized weight. Tensors that look packed, but match no
imported row, are refused by name (`look_packed`); nothing is guessed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import TypeAlias

from blobstore.errors import UnsupportedSourceError, UsageError, quoted
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import (
    ColumnSettings,
    DType,
    Part,
    Quantization,
    QuantType,
    WeightGroup,
    Words,
    float_dtype,
)
from blobstore.source.codes import IntegerCodes, four_bits_of, int8_of
from blobstore.source.coding import Coding
from blobstore.source.folders import SourceTensor
from blobstore.source.producers import (
    ANY_FP8,
    BITSANDBYTES,
    BITSANDBYTES_INT8,
    BLOCK_FP8,
    CHANGED_BY,
    COMPRESSED_INTEGERS,
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    DEEPSEEK_FP4,
    DEEPSEEK_FP8,
    GPT_OSS,
    GPTQ,
    IMPORTED,
    KV_CACHE_SCALES,
    MLX,
    MODELOPT_NVFP4,
    OWN,
    REFUSED_FORMATS,
    REFUSED_METHODS,
    TOOLS,
    Found,
    Producer,
    TensorLike,
    row_of,
)
from blobstore.source.weights import Form, SourceWeight, is_expert, named_twice

# Their linear weights are [inputs, outputs], and transformers transposes them for bitsandbytes
# (5.24.0 integrations/bitsandbytes.py `Bnb4bitQuantize`).
_CONV1D = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
_NVFP4 = Quantization(QuantType.NVFP4, 16)
_MXFP4 = Quantization(QuantType.MXFP4, 32)
_MXFP8 = Quantization(QuantType.MXFP8, 32)
# Its shapes are those of 2 bits in groups of 64, in every matrix.
_SAME_AS_2_BITS = Quantization(QuantType.INT4, 32)
_WORD_BYTES = 4


def source_weights(
    tensors: Mapping[str, SourceTensor],
    config: SourceConfig | None,
    states: Mapping[str, bytes] | None = None,
) -> tuple[SourceWeight, ...]:
    """Return the weights of a checkpoint, sorted by name; companions are part of their weight.

    ``states``: the bytes of the tensors that say how a weight is stored (`STATED`), by their names.

    Raises: UnsupportedSourceError, with tensor, format and reason, if a weight is packed in another
    way, if its parts do not fit together or one is missing, or if two weights have one name.
    """
    method = config.quant_method if config is not None else None
    # Quark stores FP8 as others do.
    imported = (*BLOCK_FP8, OWN) if method in REFUSED_METHODS else IMPORTED
    rows = {name: row for name in tensors if (row := row_of(name, tensors, imported))}
    consumed = set(rows)
    unknown = config.unknown_coding if config is not None else None
    weights = []
    for name, producer in rows.items():
        if unknown is not None and producer not in (MLX, OWN):
            reason = f"config.json has {quoted(unknown)}, which is not supported"
            raise _refused(tensors[name], producer.name, reason)
        found = Found(producer, name, tensors, lambda: config, states or {})
        weights.append(_READERS[producer](found))
        # Scales of activations belong to the module: X.input_scale and X.weight.
        module = found.base.removesuffix(".weight")
        consumed.update(found.base + suffix for suffix in producer.companions)
        consumed.update(module + suffix for suffix in producer.dropped)
        for suffix, reason in CHANGED_BY.items():
            if module + suffix in tensors and module + suffix not in consumed:
                raise _refusal(found, f"{reason}, by {quoted(module + suffix)}")
    if not {MLX, OWN}.issuperset(rows.values()):
        consumed.update(name for name in tensors if name.endswith(KV_CACHE_SCALES))
    rest = {name: tensor for name, tensor in tensors.items() if name not in consumed}
    for name, reason in look_packed(rest, tensors, config):
        raise _refused(rest[name], str(rest[name].dtype), reason)
    result = sorted(
        [*weights, *map(SourceWeight.plain, rest.values())], key=lambda weight: weight.name
    )
    for one, other in pairwise(result):
        if one.name == other.name:
            raise named_twice(one.name, one, other)
    return tuple(result)


_Found: TypeAlias = Found[SourceTensor]


def _companions(match: _Found) -> dict[str, SourceTensor]:
    parts = {stored: match.companion(suffix) for suffix, stored in match.row.companions.items()}
    return {stored: part for stored, part in parts.items() if part is not None}


def _refusal(match: _Found, reason: str, hint: str | None = None) -> UnsupportedSourceError:
    return _refused(match.tensor, match.row.name, reason, hint)


def _unclear_error(match: _Found, what: str, then: str = "") -> UnsupportedSourceError:
    """Return the error for what config.json, or its absence, leaves open."""
    if match.read_config() is None:
        return _refusal(
            match, f"no config.json says {what}{then}", "Import the folder with its config.json."
        )
    return _refusal(match, f"config.json does not say {what}{then}")


def _refused(
    tensor: SourceTensor, kind: str, reason: str, hint: str | None = None
) -> UnsupportedSourceError:
    with_tool = (
        f"Dequantize it with {tool}, or i" for name, tool in TOOLS.items() if name in reason
    )
    return UnsupportedSourceError(
        f"{quoted(tensor.name)} is {kind}: {reason}",
        tensor=tensor.name,
        path=tensor.file.path,
        hint=hint or f"{next(with_tool, 'I')}mport the unquantized checkpoint.",
    )


def _codes(match: _Found, quantization: Quantization) -> SourceWeight:
    """Return a weight whose codes have our layout; its companions must have our sizes."""
    parts, tensor, producer = _companions(match), match.tensor, match.row
    *lead, last = tensor.shape or (0,)
    if producer.joined:
        last = last * lead.pop() if lead else 0
    words = (*lead, last // (1 if tensor.dtype is DType.U32 else _WORD_BYTES))
    shape = quantization.logical_shape(words)
    scale = parts[".scale"]
    dtype = scale.dtype if quantization.quant_type.is_affine else DType.BF16
    if not dtype.is_float:
        raise _refusal(
            match,
            f"its scale {quoted(scale.name)} is {dtype}, and those of {quantization} are floats",
        )
    weight = SourceWeight(
        match.weight_name,
        dtype,
        shape,
        tensor,
        parts,
        Form.CODES,
        producer.name,
        quantization,
        producer.inverse_scale,
    )
    if math.prod(words) * _WORD_BYTES != tensor.nbytes or not quantization.divides(shape):
        raise _refusal(match, f"{list(tensor.shape)} are not whole groups of {quantization}")
    whole = quantization.parts(shape, dtype, global_scale=weight.global_scale_shape)
    wanted = {part.suffix: part for part in whole}
    for suffix, part in wanted.items():
        if suffix and (reason := _unfit(parts.get(suffix), part)) is not None:
            raise _refusal(match, reason)
    if ".bias" in parts.keys() - wanted.keys():
        raise _refusal(
            match, f"it has biases, {quoted(parts['.bias'].name)}, and {quantization} has none"
        )
    return weight


def _unfit(tensor: SourceTensor | None, part: Part) -> str | None:
    """Return why the tensor is not that array; None if it has the shape and the dtype.

    A scale's E4M3 or E8M0 bits may have any 8-bit dtype.
    """
    what = part.suffix[1:].replace("_", " ")
    if tensor is None:
        return f"its {what} is missing"
    is_global = part.suffix == ".global_scale"
    has_shape = tensor.shape == part.shape and (not is_global or tensor.shape in ((), (1,)))
    is_bits = part.dtype is DType.U8 and tensor.dtype.bits == DType.U8.bits
    if has_shape and (is_bits or tensor.dtype is part.dtype):
        return None
    wanted = ", and not one F32" if is_global else f", not {part.dtype} {list(part.shape)}"
    return f"its {what} {quoted(tensor.name)} is {tensor.dtype} {list(tensor.shape)}{wanted}"


def _mlx(match: _Found) -> SourceWeight:
    if (scale := match.tensors.get(f"{match.base}.global_scale")) is not None:
        # mlx_lm 0.32.2 models/switch_layers.py `_quantize_experts`; left out, all weights would be
        # wrong by a factor.
        raise _refusal(
            match,
            f"its global scale {quoted(scale.name)}, which MLX counts in 2688ths, is not imported",
        )
    module = match.mlx
    if module is None:
        return _codes(match, _infer(match))
    try:
        quantization = module.quantization
    except UsageError as error:
        bits, size, scale = module.bits, module.group_size, match.scale
        (*lead, rows, _) = match.tensor.shape if len(match.tensor.shape) > 1 else (0, 0)
        cols = size * (scale.shape[-1] if scale.shape else 0)
        codes = IntegerCodes(bits, rows, cols, size, scale.dtype, Words(bits), "biases")
        reason = _misfit(match, codes, lead)
        if module.mode != "affine" or not scale.dtype.is_float:
            reason = f"{bits} bits in groups of {size} ({module.mode}) are not supported"
        if reason is not None:
            raise _refusal(match, reason, error.hint) from None
        return _coded(match, codes)
    return _codes(match, quantization)


def _infer(match: _Found) -> Quantization:
    """Return the only quantization that the tensors' shapes allow.

    Raises: UnsupportedSourceError if the shapes allow none, or several.
    """
    possible = []
    for quantization in (
        Quantization(kind, size) for kind in QuantType for size in kind.group_sizes
    ):
        if quantization.quant_type.is_affine == (".bias" in _companions(match)):
            with suppress(UnsupportedSourceError):
                _codes(match, quantization)
                possible.append(quantization)
    if possible == [_SAME_AS_2_BITS]:
        raise _unclear_error(match, "how it was quantized", f": {possible[0]}, or 2 bits in 64")
    if len(possible) != 1:
        answers = ", ".join(map(str, possible)) or "none"
        raise _unclear_error(match, "how it was quantized", f", and its shapes fit {answers}")
    return possible[0]


def _small_floats(
    match: _Found, quantization: Quantization, name: str | None = None
) -> SourceWeight:
    """Read floats of 4 bits, unless config.json says that such tensors hold other codes.

    ``name``: their format in compressed-tensors. Sources: compressed-tensors as above; AutoRound's
    ``mx_int`` (intel/auto-round 0.16.1 export/export_to_autoround/qlinear_int.py).
    """
    _check_floats(match, quantization)
    formats, usual = match.config.packed_formats, {name, "mixed-precision"}
    integers = {text for text in match.config.data_types if "int" in text}
    said = sorted(integers or (formats if formats.isdisjoint(usual) else ()))
    if said and name is not None:
        raise _refusal(match, f"config.json says that its format is {', '.join(said)}")
    sizes = match.config.float_group_sizes(4) - {quantization.group_size}
    if sizes and quantization == _NVFP4:
        raise _refusal(
            match,
            f"config.json says that its groups have {min(sizes)} values, and those of NVFP4 have"
            f" {quantization.group_size}",
        )
    return _codes(match, quantization)


def _check_floats(match: _Found, quantization: Quantization) -> None:
    """Raise if compressed-tensors says that the weights are something else."""
    bits, size = quantization.quant_type.bits, quantization.group_size
    if not match.config.has_floats(bits, None if quantization == _MXFP8 else size):
        raise _refusal(match, f"config.json names no weights of {bits}-bit floats like these")


def _fp8(match: _Found) -> SourceWeight:
    shape, scale = match.tensor.shape, match.scale
    if len(shape) < 2 or not match.tensor.nbytes:  # noqa: PLR2004
        raise _refusal(match, f"{list(shape)} is not a matrix")
    if match.row.scale == "_scale":
        _check_floats(match, _MXFP8)
    said, group = match.config.fp8_block_size, (1, _MXFP8.group_size)
    # The rows and columns that may share a scale, as config.json has them.
    sizes = sorted(size for size in match.config.float_group_sizes(8) if size > 0)
    blocks = [said] if said else [(1, size) for size in sizes]
    groups = (*shape[:-1], shape[-1] // _MXFP8.group_size)
    by_32 = not scale.dtype.is_float and scale.shape == groups and group in (blocks or [group])
    if by_32 and match.tensor.dtype is DType.F8_E4M3:
        return _codes(match, _MXFP8)
    if scale.dtype is DType.U8 and not by_32:
        raise _refusal(
            match, f"its scale {quoted(scale.name)} is U8 {list(scale.shape)}, and not for 32 codes"
        )
    return SourceWeight(
        match.name,
        DType.BF16,
        shape,
        match.tensor,
        _companions(match),
        Form.FP8,
        match.row.name,
        inverse_scale=match.config.has_inverse_scales and match.row.scale == "_scale_inv",
        block=group if by_32 else _fp8_block(match, shape, scale.shape, blocks),
    )


def _fp8_block(
    match: _Found,
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    possible: list[tuple[int, int]],
) -> tuple[int, int]:
    """Return the rows and columns that share a scale: of a matrix, a row, a group or a block."""
    *lead, rows, cols = shape
    for block in possible:
        blocks = -(-rows // block[0]), -(-cols // block[1])
        if scale in ((*lead, *blocks), (*lead, blocks[0], 1, blocks[1], 1)):
            return block
    strategies = [weights.get("strategy") for weights in match.config.group_weights]
    if not possible or "tensor" in strategies or "channel" in strategies:
        if scale in ((*lead,), (*lead, 1)):
            return rows, cols
        if scale in ((*lead, rows), (*lead, rows, 1)):
            return 1, cols
        if lead and scale == (*lead, 1, cols):  # FBGEMM's experts, whose inputs come first
            return rows, 1
    if not possible:
        raise _unclear_error(match, "which weights share a scale", " (weight_block_size)")
    blocks_text = " or ".join(f"{height}x{width}" for height, width in possible)
    raise _refusal(
        match,
        f"its scale {quoted(match.scale.name)} is {list(scale)}, which does not fit blocks of"
        f" {blocks_text} in {list(shape)}",
    )


def _integers(match: _Found) -> SourceWeight:
    """Read compressed-tensors' integer codes: config.json and the tensors must agree on them."""
    if match.config.quant_method != "compressed-tensors":
        raise _unclear_error(match, "that compressed-tensors stored its integer codes")
    groups = match.config.integer_groups
    verdicts = [(group.names(match.base), group) for group in groups]
    named = [group for verdict, group in verdicts if verdict]
    possible = named or [group for verdict, group in verdicts if verdict is None] or groups
    codes = {lie for group in possible for lie in _row_codes(match, group)}
    is_permuted = any(group.permuted for group in possible)
    if not codes and is_permuted and match.companion(".weight_g_idx") is None:
        raise _refusal(match, "its columns are permuted (actorder), and X.weight_g_idx is missing")
    if len(codes) != 1:
        tensors = ", ".join(
            f"{quoted(part.name)} {part.dtype} {list(part.shape)}"
            for part in (match.tensor, *_companions(match).values())
        )
        raise _unclear_error(match, "how it was quantized", f", if its tensors are {tensors}")
    return _coded(match, codes.pop())


def _coded(match: _Found, codes: IntegerCodes, producer: str = "") -> SourceWeight:
    *lead, _, _ = match.tensor.shape
    return _decoded(match, codes, match.scale.dtype, (*lead, codes.rows, codes.cols), producer)


def _decoded(
    match: _Found, coding: Coding, dtype: DType, shape: tuple[int, ...], producer: str = ""
) -> SourceWeight:
    return SourceWeight(
        match.weight_name,
        dtype,
        shape,
        match.tensor,
        _companions(match),
        Form.CODED,
        producer or match.row.name,
        coding.quantization,
        coding=coding,
    )


def _columns(match: _Found) -> SourceWeight:
    """Read GPTQ's and AWQ's integer codes: config.json and the tensors must agree on them."""
    possible = match.config.column_settings(match.base)
    if not possible:
        if (said := match.config.quant_method) in (None, "gptq", "awq"):
            raise _unclear_error(match, "how it was quantized")
        raise _refusal(match, f"config.json says that it was quantized by {quoted(said)}")
    if match.companion(".qzeros") is None:
        raise _refusal(match, "its zero points, X.qzeros (I32), are missing")
    verdicts = [_column_codes(match, one) for one in possible]
    fitting = [codes for codes in verdicts if isinstance(codes, IntegerCodes)]
    if len(fitting) != 1:
        reasons = [reason for reason in verdicts if isinstance(reason, str)]
        raise _refusal(match, reasons[0] if reasons else "config.json has several settings for it")
    (codes,) = fitting
    return _coded(match, codes, "AWQ" if codes.along_rows else "GPTQ")


def _column_codes(match: _Found, settings: ColumnSettings) -> IntegerCodes | str:
    """Return how the codes lie if the weight is quantized so, or why it is not."""
    if settings.reason is not None:
        return settings.reason
    words, has_order = Words(settings.bits), match.companion(".g_idx") is not None
    lines, last = match.tensor.shape if len(match.tensor.shape) == 2 else (0, 0)  # noqa: PLR2004
    cols, rows = (lines, words.codes(last)) if settings.is_awq else (words.codes(lines), last)
    codes = IntegerCodes(
        settings.bits,
        rows,
        cols,
        settings.group_size or max(1, cols),
        match.scale.dtype,
        words,
        "words",
        permuted=settings.permuted and has_order,
        transposed=True,
        along_rows=settings.is_awq,
        zero_is_less_one=settings.zero_is_less_one,
    )
    if (reason := _misfit(match, codes)) is not None:
        return reason
    if settings.permuted and not has_order and match.scale.shape[0] > 1:
        return "its columns are permuted (desc_act), and X.g_idx is missing"
    return codes


def _misfit(match: _Found, codes: IntegerCodes, lead: Iterable[int] = ()) -> str | None:
    """Return why the tensors are not those of such codes; None if they are."""
    parts, lead = {"": match.tensor, **_companions(match)}, tuple(lead)
    one_each = {lead, (*lead, 1), (*lead, 1, 1)}
    wanted = {suffix: (dtype, shape) for suffix, dtype, shape in codes.shapes(lead)}
    for suffix, (dtype, shape) in wanted.items():
        part = parts.get(suffix)
        if part is None and suffix == ".order" and not codes.permuted:
            continue
        if part is None:
            return f"its {suffix[1:]} is missing"
        is_one = not codes.by_row and shape == lead and part.shape in one_each
        has_dtype = part.dtype is dtype or not suffix
        if not part.nbytes or not has_dtype or not (part.shape == shape or is_one):
            return (
                f"{quoted(part.name)} is {part.dtype} {list(part.shape)}, and {codes.bits} bits in"
                f" groups of {codes.group} need {dtype} {list(shape)}"
            )
    others = parts.keys() - wanted.keys() - {".shape"}
    return f"{quoted(parts[min(others)].name)} belongs to another format" if others else None


def _row_codes(match: _Found, group: WeightGroup) -> Iterator[IntegerCodes]:
    """Yield how the codes lie if the weight is quantized so: once, or not at all."""
    if len(match.tensor.shape) < 2 or not match.tensor.nbytes:  # noqa: PLR2004
        return
    (*lead, rows, last), bits, scale = match.tensor.shape, group.bits, match.scale
    zeros = ("",) if group.symmetric else ("bytes", "words")
    ways = Words.of(bits) if match.tensor.dtype is DType.I32 else (None,)
    for words, form in product(ways, zeros):
        cols = last if words is None else words.codes(last)
        if group.group_size is not None:
            cols = group.group_size * (scale.shape[-1] if scale.shape else 0)
        size = group.group_size or cols
        codes = IntegerCodes(
            bits, rows, cols, size, scale.dtype, words, form, group.by_row, group.permuted
        )
        if cols and _misfit(match, codes, lead) is None:
            yield codes
            return


def _blocks(match: _Found) -> SourceWeight:
    """Read bitsandbytes' codes. The shape of 4-bit ones is in their quant state only."""
    config, parts, is_int8 = match.config, _companions(match), match.row is BITSANDBYTES_INT8
    parts[""] = match.tensor
    other = match.settings.get("load_in_4bit" if is_int8 else "load_in_8bit")
    if config.quant_method not in (None, "bitsandbytes") or other is True:
        raise _refusal(match, "config.json says that it was quantized in another way")
    if config.model_type in _CONV1D:
        raise _refusal(match, f"for it the weights of {config.model_type} are transposed")
    try:
        if is_int8:
            stored = int8_of(parts, float_dtype(config.sizes))
        else:
            stored = four_bits_of(parts, match.states.get(parts[".quant_state"].name, b""))
    except ValueError as error:
        raise _refusal(match, str(error)) from None
    if len(stored[2]) != 2 or not match.tensor.nbytes:  # noqa: PLR2004
        raise _refusal(match, f"{list(stored[2])} is not a matrix")
    return _decoded(match, *stored)


def _own(match: _Found) -> SourceWeight:
    metadata = match.tensors[match.name].file.metadata
    prefix = f"{match.name}." if f"{match.name}.quant_type" in metadata else ""
    try:
        quantization = Quantization.from_metadata(metadata, prefix)
    except KeyError:
        raise _refusal(match, "the metadata of its file do not say how it was quantized") from None
    except UsageError as error:
        raise _refusal(match, str(error), error.hint) from None
    return replace(
        _codes(match, quantization), transposed=metadata.get(f"{match.name}.transposed") == "true"
    )


_READERS: Mapping[Producer, Callable[[_Found], SourceWeight]] = {
    MLX: _mlx,
    COMPRESSED_NVFP4: partial(_small_floats, quantization=_NVFP4, name="nvfp4-pack-quantized"),
    MODELOPT_NVFP4: partial(_small_floats, quantization=_NVFP4),
    # mlx-lm's name of it ends in ".weight", too (ml-explore/mlx-lm@1245c2ec
    # mlx_lm/models/gpt_oss.py `sanitize`).
    GPT_OSS: partial(_codes, quantization=_MXFP4),
    OWN: _own,
    COMPRESSED_MXFP4: partial(_small_floats, quantization=_MXFP4, name="mxfp4-pack-quantized"),
    **dict.fromkeys(COMPRESSED_INTEGERS, _integers),
    GPTQ: _columns,
    **dict.fromkeys((*BLOCK_FP8, DEEPSEEK_FP8), _fp8),
    DEEPSEEK_FP4: partial(_codes, quantization=_MXFP4),
    **dict.fromkeys((*BITSANDBYTES.values(), BITSANDBYTES_INT8), _blocks),
}


_LEAST_ELEMENTS = 1024
_INTEGERS = {DType.U8, DType.I8, DType.I16, DType.U16, DType.I32, DType.U32, DType.I64, DType.U64}
_CODES = ANY_FP8 | _INTEGERS


def look_packed(
    tensors: Mapping[str, TensorLike],
    everything: Mapping[str, TensorLike],
    config: SourceConfig | None,
) -> Iterator[tuple[str, str]]:
    """Yield the names of ``tensors`` that seem to hold packed weights, and why it seems so.

    ``tensors`` match no producer; ``everything`` includes their possible companions. One
    may be named more than once.
    """
    config = config or SourceConfig()
    if (named := REFUSED_METHODS.get(config.quant_method or "")) is not None:
        yield from _of_method(tensors, named)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    for sign in REFUSED_FORMATS:
        if dtypes.isdisjoint(sign.dtypes):
            continue
        for name, tensor in tensors.items():
            if not name.endswith(sign.suffix) or tensor.dtype not in sign.dtypes:
                continue
            companion = name.removesuffix(sign.suffix) + sign.companion
            other = everything.get(companion) if sign.companion else tensor
            may_be_weight = name.endswith(".weight") or (
                is_expert(name) and len(tensor.shape) > 1 and "scale" not in name.rpartition(".")[2]
            )
            if other is not None and (sign.suffix or may_be_weight):
                shown = f"{quoted(companion)} ({other.dtype} {list(other.shape)})"
                yield name, sign.reason.format(companion=shown)
    for name in tensors:
        if (row := row_of(name, everything)) is not None and row not in IMPORTED:
            yield name, f"{row.name} weights are not imported"
    yield from _unexplained(tensors, config)


def _of_method(tensors: Mapping[str, TensorLike], method: str) -> Iterator[tuple[str, str]]:
    """Yield the tensors that may hold codes of a method that is not imported."""
    for name, tensor in tensors.items():
        if tensor.dtype in _CODES and tensor.nbytes * 8 // tensor.dtype.bits >= _LEAST_ELEMENTS:
            said = f"config.json says that it was quantized by {method}"
            yield name, f"{said}, but not in a form that is imported"


def _unexplained(
    tensors: Mapping[str, TensorLike], config: SourceConfig
) -> Iterator[tuple[str, str]]:
    """Yield the tensors that config.json calls quantized, but whose format is unknown."""
    method, settings = config.quant_method, config.mlx_quantization
    if method not in (None, "fp8", "modelopt", "compressed-tensors", "mxfp4"):
        yield from _of_method(tensors, quoted(method))
    for name, tensor in tensors.items():
        is_weight = name.endswith(".weight") and tensor.dtype in _INTEGERS
        is_quantized = method or settings or config.quantization_config
        module = name.removesuffix(".weight")
        if tensor.dtype is DType.U8 and name.endswith("_blocks") and method == "mxfp4":
            yield name, "its _scales are missing"
        elif is_weight and len(tensor.shape) > 1 and is_quantized:
            yield name, "its scales are missing"
        elif is_weight and tensor.dtype is DType.U32 and settings and settings.of(module):
            yield name, "its scales are missing, and config.json says that MLX quantized it"
