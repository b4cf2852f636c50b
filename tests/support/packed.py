"""Quantized weights as tensors of a header, of programs whose weights are only counted.

Each has its tensors by suffix, its config.json, what it is (type, group, format) and the shape of
its values, [96, 128] for all that keep it. Shapes as in the sources that
blobstore/source/producers.py names.
"""

from typing import Any

from support.sparse import Tensors

ROWS, COLS = 96, 128
Case = tuple[Tensors, Any, str, tuple[int, ...]]


def _case(says: str, rows: str, config: Any = None, shape: tuple[int, ...] = (ROWS, COLS)) -> Case:
    """Return a case of rows, between commas: a suffix, a type and a shape."""
    words = [row.split() for row in rows.split(",")]
    tensors = {suffix: (dtype, tuple(map(int, sizes))) for suffix, dtype, *sizes in words}
    return tensors, config, says, shape


def _method(name: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **more}}


def _mlx(bits: int) -> Case:
    rows = f".weight U32 96 {4 * bits}, .scales BF16 96 2, .biases BF16 96 2"
    return _case(f"int{bits}/64 MLX", rows, {"quantization": {"group_size": 64, "bits": bits}})


def _gptq(bits: int) -> Case:
    sizes = f".qweight I32 {4 * bits} 96, .qzeros I32 2 {3 * bits}"
    return _case(f"int{bits}/64 GPTQ", f"{sizes}, .scales F16 2 96, .g_idx I32 128")


_INT4_GROUPS = {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}
_BNB = ".weight.absmax F32 192, .weight.quant_map F32 16"

PACKED: dict[str, Case] = {
    "awq": _case("int4/32 AWQ", ".qweight I32 128 12, .qzeros I32 4 12, .scales F16 4 96"),
    "gptq 3": _gptq(3),
    "gptq 8": _gptq(8),
    "gptq, one scale a row, by its config": _case(
        "int4 GPTQ", ".qweight I32 16 96, .scales F16 1 96", _method("gptq", bits=4)
    ),
    "compressed-tensors int4": _case(
        "int4/32 compressed-tensors",
        ".weight_packed I32 96 16, .weight_scale BF16 96 4, .weight_shape I64 2",
        _method("compressed-tensors", format="pack-quantized", config_groups=_INT4_GROUPS),
    ),
    "compressed-tensors int4 with zero points, without a config": _case(
        "int4 compressed-tensors",
        ".weight_packed I32 96 16, .weight_scale BF16 96 4, .weight_zero_point I32 12 4",
    ),
    "compressed-tensors mxfp4": _case(
        "mxfp4/32 compressed-tensors", ".weight_packed U8 96 64, .weight_scale U8 96 4"
    ),
    "compressed-tensors int8": _case(
        "int8 compressed-tensors",
        ".weight I8 96 128, .weight_scale BF16 96 1, .weight_zero_point I8 96 1",
        _method("compressed-tensors", format="int-quantized"),
    ),
    "fp8, one scale a row": _case(
        "fp8 FP8", ".weight F8_E4M3 96 128, .weight_scale F32 96 1, .input_scale F32 1"
    ),
    "mxfp8": _case("mxfp8/32 MXFP8", ".weight F8_E4M3 96 128, .weight_scale U8 96 4"),
    "fp4 experts": _case(
        "mxfp4/32 FP4",
        ".weight I8 96 64, .scale F8_E8M0 96 4",
        {**_method("fp8"), "expert_dtype": "fp4"},
    ),
    "modelopt int4 awq": _case(
        "int4/32 ModelOpt",
        ".weight U8 48 128, .weight_scale F32 96 4, .pre_quant_scale BF16 128",
        _method("modelopt"),
    ),
    "bitnet": _case("bitnet BitNet", ".weight U8 24 128, .weight_scale BF16 1", _method("bitnet")),
    "bitsandbytes in BF16": _case(
        "fp4/64 bitsandbytes",
        f".weight BF16 3072 1, {_BNB}, .weight.quant_state.bitsandbytes__fp4 U8 90",
        shape=(12288,),
    ),
    "bitsandbytes int8": _case(
        "int8 bitsandbytes int8",
        ".weight I8 96 128, .SCB F32 96, .weight_format U8",
        _method("bitsandbytes", load_in_8bit=True),
    ),
    "eetq": _case("int8 EETQ", ".weight I8 128 96, .weight_scales F16 96", shape=(128, 96)),
    "exl2": _case(
        "exl2 EXL2",
        ".q_weight I32 20 96, .q_scale I32 2 12, .q_invperm I32 128, .q_scale_max F16 2,"
        ".q_groups I16 4",
    ),
    "exl3": _case("exl3 EXL3", ".trellis I16 8 6 40, .suh F16 128, .svh F16 96"),
    **{f"mlx {bits} bits": _mlx(bits) for bits in (3, 5, 6)},
}

UNCLEAR: dict[str, Case] = {
    "mlx without a config": _case(
        "MLX's shapes fit int2/128 and int4/64 and int8/32, and no config.json says which",
        ".weight U32 96 16, .scales BF16 96 2, .biases BF16 96 2",
    ),
    "compressed-tensors without a config": _case(
        "how many bits", ".weight_packed I32 96 16, .weight_scale BF16 96 4"
    ),
    "what a method that is unknown has packed": _case(
        "they look packed, by HQQ", ".W_q U8 96 128", _method("hqq")
    ),
    "exponents of nothing": _case(
        "they look packed, or like scales", ".scales_of_blocks F8_E8M0 96 128"
    ),
}
