"""Quantized weights as tensors of a header, of programs whose weights are only counted.

Each has its tensors by suffix, its config.json, what it is (type, group, format) and the shape of
its values, [96, 128] for all that keep it. Shapes as in the sources that
blobstore/source/producers.py names.
"""

from __future__ import annotations

from typing import Any

from support.sparse import Tensors

CONFIG_OF_4_BITS: dict[str, dict[str, Any]] = {
    "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}
}
CONFIG_OF_4_BITS["quantization_config"]["config_groups"] = {
    "group_0": {"weights": {"num_bits": 4, "group_size": 32}}
}
GROUPS_OF_TWO = {
    "a": {"weights": {"num_bits": 4, "group_size": 32}},
    "b": {"weights": {"num_bits": 8, "group_size": 64}},
}
CONFIG_OF_TWO = {
    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": GROUPS_OF_TWO}
}
BITNET = {"quantization_config": {"quant_method": "bitnet"}}
ROWS, COLS = 96, 128
PACKED: dict[str, tuple[Tensors, Any, str, tuple[int, ...]]] = {
    "awq": (
        {
            ".qweight": ("I32", (COLS, ROWS // 8)),
            ".qzeros": ("I32", (4, ROWS // 8)),
            ".scales": ("F16", (4, ROWS)),
        },
        None,
        "int4/32 AWQ",
        (ROWS, COLS),
    ),
    **{
        f"gptq {bits}": (
            {
                ".qweight": ("I32", (COLS * bits // 32, ROWS)),
                ".qzeros": ("I32", (2, ROWS * bits // 32)),
                ".scales": ("F16", (2, ROWS)),
                ".g_idx": ("I32", (COLS,)),
            },
            None,
            f"int{bits}/64 GPTQ",
            (ROWS, COLS),
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq, one scale a row, by its config": (
        {".qweight": ("I32", (COLS // 8, ROWS)), ".scales": ("F16", (1, ROWS))},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "int4 GPTQ",
        (ROWS, COLS),
    ),
    "compressed-tensors int4": (
        {
            ".weight_packed": ("I32", (ROWS, COLS // 8)),
            ".weight_scale": ("BF16", (ROWS, COLS // 32)),
            ".weight_shape": ("I64", (2,)),
        },
        CONFIG_OF_4_BITS,
        "int4/32 compressed-tensors",
        (ROWS, COLS),
    ),
    "compressed-tensors int8 of two widths": (
        {
            ".weight_packed": ("I32", (ROWS, COLS // 4)),
            ".weight_scale": ("BF16", (ROWS, COLS // 64)),
        },
        CONFIG_OF_TWO,
        "int8/64 compressed-tensors",
        (ROWS, COLS),
    ),
    "compressed-tensors int4 with zero points, without a config": (
        {
            ".weight_packed": ("I32", (ROWS, COLS // 8)),
            ".weight_scale": ("BF16", (ROWS, COLS // 32)),
            ".weight_zero_point": ("I32", (ROWS // 8, COLS // 32)),
        },
        None,
        "int4 compressed-tensors",
        (ROWS, COLS),
    ),
    "compressed-tensors mxfp4": (
        {".weight_packed": ("U8", (ROWS, COLS // 2)), ".weight_scale": ("U8", (ROWS, COLS // 32))},
        None,
        "mxfp4/32 compressed-tensors",
        (ROWS, COLS),
    ),
    "compressed-tensors mixfp4": (
        {
            ".weight_packed": ("U8", (ROWS, COLS // 2)),
            ".weight_scale": ("F8_E4M3", (ROWS, COLS // 16)),
            ".weight_global_scale": ("F32", (1,)),
        },
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mixfp4-pack-quantized",
            }
        },
        "mixfp4/16 compressed-tensors NVFP4",
        (ROWS, COLS),
    ),
    "compressed-tensors int4 in bytes": (
        {".weight_packed": ("I8", (ROWS, COLS // 2)), ".weight_scale": ("BF16", (ROWS, 1))},
        None,
        "int4 compressed-tensors",
        (ROWS, COLS),
    ),
    "compressed-tensors int8": (
        {
            ".weight": ("I8", (ROWS, COLS)),
            ".weight_scale": ("BF16", (ROWS, 1)),
            ".weight_zero_point": ("I8", (ROWS, 1)),
        },
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        "int8 compressed-tensors",
        (ROWS, COLS),
    ),
    "fp8, one scale a row": (
        {
            ".weight": ("F8_E4M3", (ROWS, COLS)),
            ".weight_scale": ("F32", (ROWS, 1)),
            ".input_scale": ("F32", (1,)),
        },
        None,
        "fp8 FP8",
        (ROWS, COLS),
    ),
    "fp8 with exponents for blocks": (
        {".weight": ("F8_E4M3", (ROWS, COLS)), ".scale": ("F8_E8M0", (ROWS // 32, COLS // 64))},
        None,
        "fp8 block FP8",
        (ROWS, COLS),
    ),
    "mxfp8": (
        {".weight": ("F8_E4M3", (ROWS, COLS)), ".weight_scale": ("U8", (ROWS, COLS // 32))},
        None,
        "mxfp8/32 MXFP8",
        (ROWS, COLS),
    ),
    "fp4 experts": (
        {".weight": ("I8", (ROWS, COLS // 2)), ".scale": ("F8_E8M0", (ROWS, COLS // 32))},
        {"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"},
        "mxfp4/32 FP4",
        (ROWS, COLS),
    ),
    "modelopt int4 awq": (
        {
            ".weight": ("U8", (ROWS // 2, COLS)),
            ".weight_scale": ("F32", (ROWS, COLS // 32)),
            ".pre_quant_scale": ("BF16", (COLS,)),
        },
        {"quantization_config": {"quant_method": "modelopt"}},
        "int4/32 ModelOpt",
        (ROWS, COLS),
    ),
    "modelopt mxfp4": (
        {".weight": ("U8", (ROWS, COLS // 2)), ".weight_scale": ("U8", (ROWS, COLS // 32))},
        {"quantization_config": {"quant_method": "modelopt"}},
        "mxfp4/32 ModelOpt",
        (ROWS, COLS),
    ),
    "modelopt nvfp4 awq": (
        {
            ".weight": ("U8", (ROWS, COLS // 2)),
            ".weight_scale": ("F8_E4M3", (ROWS, COLS // 16)),
            ".weight_scale_2": ("F32", ()),
            ".pre_quant_scale": ("BF16", (COLS,)),
        },
        None,
        "nvfp4/16 ModelOpt NVFP4",
        (ROWS, COLS),
    ),
    "bitnet": (
        {".weight": ("U8", (ROWS // 4, COLS)), ".weight_scale": ("BF16", (1,))},
        BITNET,
        "bitnet BitNet",
        (ROWS, COLS),
    ),
    "bitsandbytes in BF16": (
        {
            ".weight": ("BF16", (ROWS * COLS // 4, 1)),
            ".weight.absmax": ("F32", (ROWS * COLS // 64,)),
            ".weight.quant_map": ("F32", (16,)),
            ".weight.quant_state.bitsandbytes__fp4": ("U8", (90,)),
        },
        None,
        "fp4/64 bitsandbytes",
        (ROWS * COLS,),
    ),
    "bitsandbytes int8": (
        {".weight": ("I8", (ROWS, COLS)), ".SCB": ("F32", (ROWS,)), ".weight_format": ("U8", ())},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "int8 bitsandbytes int8",
        (ROWS, COLS),
    ),
    "eetq": (
        {".weight": ("I8", (COLS, ROWS)), ".weight_scales": ("F16", (ROWS,))},
        None,
        "int8 EETQ",
        (COLS, ROWS),
    ),
    "exl2": (
        {
            ".q_weight": ("I32", (COLS * 5 // 32, ROWS)),
            ".q_scale": ("I32", (2, ROWS // 8)),
            ".q_invperm": ("I32", (COLS,)),
            ".q_scale_max": ("F16", (2,)),
            ".q_groups": ("I16", (4,)),
        },
        None,
        "exl2 EXL2",
        (ROWS, COLS),
    ),
    "exl3": (
        {
            ".trellis": ("I16", (COLS // 16, ROWS // 16, 40)),
            ".suh": ("F16", (COLS,)),
            ".svh": ("F16", (ROWS,)),
        },
        None,
        "exl3 EXL3",
        (ROWS, COLS),
    ),
    **{
        f"mlx {bits} bits": (
            {
                ".weight": ("U32", (ROWS, COLS * bits // 32)),
                ".scales": ("BF16", (ROWS, 2)),
                ".biases": ("BF16", (ROWS, 2)),
            },
            {"quantization": {"group_size": 64, "bits": bits}},
            f"int{bits}/64 MLX",
            (ROWS, COLS),
        )
        for bits in (2, 3, 5, 6)
    },
    "mlx with a global scale": (
        {
            ".weight": ("U32", (ROWS, COLS // 8)),
            ".scales": ("U8", (ROWS, COLS // 16)),
            ".global_scale": ("F32", (ROWS,)),
        },
        None,
        "nvfp4/16 MLX",
        (ROWS, COLS),
    ),
}

UNCLEAR: dict[str, tuple[Tensors, Any, str]] = {
    "mlx without a config": (
        {
            ".weight": ("U32", (ROWS, COLS // 8)),
            ".scales": ("BF16", (ROWS, 2)),
            ".biases": ("BF16", (ROWS, 2)),
        },
        None,
        "MLX's shapes fit int2/128 and int4/64 and int8/32, and no config.json says which",
    ),
    "mlx of another type than its config's": (
        {
            ".weight": ("U32", (ROWS, COLS // 8)),
            ".scales": ("BF16", (ROWS, 2)),
            ".biases": ("BF16", (ROWS, 2)),
        },
        {"quantization": {"group_size": 32, "bits": 4}},
        "and config.json's is another",
    ),
    "compressed-tensors without a config": (
        {".weight_packed": ("I32", (ROWS, COLS // 8)), ".weight_scale": ("BF16", (ROWS, 4))},
        None,
        "of how many bits",
    ),
    "bytes of nobody": (
        {".weight": ("U8", (ROWS, COLS)), ".weight_scale": ("BF16", (1,))},
        None,
        "how many codes are in a byte",
    ),
    "qweight without scales": ({".qweight": ("I32", (ROWS, COLS))}, None, "they look packed"),
    "what a method that is unknown has packed": (
        {".W_q": ("U8", (ROWS, COLS))},
        {"quantization_config": {"quant_method": "hqq"}},
        "they look packed",
    ),
    "exponents of nothing": (
        {".scales_of_blocks": ("F8_E8M0", (ROWS, COLS))},
        None,
        "they look packed, or like scales",
    ),
}
