"""Quantized sources that are not imported: each is refused with its reason.

A table of what lies in the source (docs/formats.md section 5): formats that are in no row of
producers.py, and those that are, with a part missing, of a wrong shape or dtype, or a config.json
that contradicts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, normal, safetensors_bytes, write_checkpoint
from support.producers import COPIED, Kind, block_fp8, gpt_oss, mlx_affine, nvfp4

import blobstore
from blobstore.cli.main import run
from blobstore.errors import UnsupportedSourceError
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
BF16 = ml_dtypes.bfloat16
UP = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts"


@dataclass(frozen=True)
class Refused:
    """A source, the tensor that the error must name, and words of its message."""

    tensors: dict[str, Array]
    tensor: str
    words: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)


def changed(
    kind: Kind, tensor: str, *words: str, shape: tuple[int, ...] = (4, 128), **changes: Any
) -> Refused:
    """Return a weight of ``kind`` with some tensors changed, by suffix.

    None removes a tensor, a function makes one.
    """
    tensors = dict(kind.make(UP, shape).tensors)
    config = dict(changes.pop("config", kind.config))
    for suffix, change in changes.get("tensors", {}).items():
        name = UP + suffix
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name))
    return Refused(tensors, UP + tensor, words, config)


def mlx(bits: int, group_size: int, mode: str = "affine", modules: Any = ()) -> dict[str, Any]:
    """Return MLX's settings in a config.json."""
    return {"quantization": {"group_size": group_size, "bits": bits, "mode": mode} | dict(modules)}


def method(name: str, **settings: Any) -> dict[str, Any]:
    """Return transformers' settings in a config.json."""
    return {"quantization_config": {"quant_method": name, **settings}}


def odd_bits(bits: int) -> Refused:
    """Return a weight of MLX's other affine widths."""
    tensors = {
        f"{UP}.weight": np.zeros((4, 128 * bits // 32), np.uint32),
        f"{UP}.scales": normal("s", 4, 2),
        f"{UP}.biases": normal("b", 4, 2),
    }
    return Refused(
        tensors,
        f"{UP}.weight",
        (f"{bits} bits in groups of 64 (affine) have no type",),
        mlx(bits, 64),
    )


def ones(*shape: int, dtype: Any = np.float32) -> Callable[[Any], Array]:
    """Return a maker of an array of ones, whatever was there."""
    return lambda _: np.ones(shape, dtype)


def cast(dtype: Any) -> Callable[[Array], Array]:
    """Return a maker of the same values in another dtype."""
    return lambda array: array.astype(np.float32).astype(dtype)


INT4, MXFP4, MLX_NVFP4 = mlx_affine(4, 64), COPIED["mlx mxfp4"], COPIED["mlx nvfp4"]
FP8, CT, MODELOPT, GPT_OSS = block_fp8(), nvfp4(modelopt=False), nvfp4(modelopt=True), gpt_oss()
NO_SCALE = "an FP8 weight without a scale"
PACKED = np.zeros((32, 64), np.int32)

MLX = {f"mlx {bits} bit": odd_bits(bits) for bits in (2, 3, 5, 6)} | {
    "mlx 6 bit in one module": Refused(
        odd_bits(6).tensors,
        f"{UP}.weight",
        ("6 bits",),
        mlx(4, 64, modules={UP: {"group_size": 64, "bits": 6}}),
    ),
    "mlx int4 called int8": changed(
        INT4, ".weight", "its scale", "[4, 2]", "[4, 1]", config=mlx(8, 64)
    ),
    "mlx int4 called 6 bit": changed(INT4, ".weight", "6 bits", config=mlx(6, 64)),
    "mlx groups of 64 called 32": changed(
        INT4, ".weight", "its scale", "[4, 2]", "[4, 4]", config=mlx(4, 32)
    ),
    "mlx groups of 16": changed(INT4, ".weight", "groups of 16", config=mlx(4, 16)),
    "mlx override that contradicts": changed(
        INT4,
        ".weight",
        "its scale",
        config=mlx(4, 64, modules={UP: {"group_size": 128, "bits": 4}}),
    ),
    "mlx affine called mxfp4": changed(
        INT4, ".weight", "BF16 [4, 2], not U8 [4, 4]", config=mlx(4, 32, "mxfp4")
    ),
    "mlx mxfp4 of 8 bits": changed(
        MXFP4, ".weight", "8 bits in groups of 32 (mxfp4)", config=mlx(8, 32, "mxfp4")
    ),
    "mlx mxfp4 called affine": changed(MXFP4, ".weight", "its scale", "U8", config=mlx(4, 32)),
    "mlx mxfp4 called nvfp4": changed(
        MXFP4, ".weight", "[4, 4], not U8 [4, 8]", config=mlx(4, 16, "nvfp4")
    ),
    "mlx mxfp4 with biases": changed(
        MXFP4, ".weight", "it has biases", tensors={".biases": ones(4, 4, dtype=BF16)}
    ),
    "mlx affine with scales of bytes": changed(
        INT4,
        ".weight",
        "its scale",
        "U8",
        tensors=dict.fromkeys((".scales", ".biases"), ones(4, 2, dtype=np.uint8)),
    ),
    "mlx affine with scales and biases of two dtypes": changed(
        INT4,
        ".weight",
        "its bias",
        "F16 [4, 2], not BF16 [4, 2]",
        tensors={".biases": ones(4, 2, dtype=np.float16)},
    ),
    "mlx without biases": changed(
        INT4, ".weight", "its bias is missing", tensors={".biases": None}
    ),
    "mlx without scales": changed(
        INT4, ".weight", "its scales are missing", tensors={".scales": None}
    ),
    "mlx without scales and biases": changed(
        INT4, ".weight", "its scales are missing", tensors={".scales": None, ".biases": None}
    ),
    "mlx with scales of F64": changed(
        INT4, ".weight", ".scales", "F64", tensors={".scales": ones(4, 2, dtype=np.float64)}
    ),
    "mlx with rows that are no whole groups": changed(
        INT4, ".weight", "not whole groups", tensors={".weight": ones(4, 15, dtype=np.uint32)}
    ),
    "mlx of rank 0": changed(
        INT4, ".weight", "not whole groups", tensors={".weight": ones(dtype=np.uint32)}
    ),
    "mlx with a global scale": changed(
        MLX_NVFP4, ".weight", f"{UP}.global_scale", tensors={".global_scale": ones()}
    ),
    "mlx global scale per expert": changed(
        MLX_NVFP4,
        ".weight",
        f"{UP}.global_scale",
        shape=(3, 4, 64),
        tensors={".global_scale": ones(3)},
    ),
    "mlx that a bare config does not explain": changed(
        INT4, ".weight", "int4/64, int8/32", config={}
    ),
    "mlx that fits no type": changed(
        INT4,
        ".weight",
        "none",
        config={},
        tensors=dict.fromkeys((".scales", ".biases"), ones(4, 3, dtype=BF16)),
    ),
}
NVFP4 = {
    "compressed-tensors without a global scale": changed(
        CT, ".weight_packed", "weight_global_scale", tensors={".weight_global_scale": None}
    ),
    "compressed-tensors without a scale": changed(
        CT, ".weight_packed", "weight_scale", tensors={".weight_scale": None}
    ),
    "compressed-tensors with nothing": changed(
        CT,
        ".weight_packed",
        "weight_scale",
        tensors={".weight_scale": None, ".weight_global_scale": None},
    ),
    "compressed-tensors mxfp4": changed(
        CT,
        ".weight_packed",
        "F8_E4M3",
        tensors={".weight_scale": ones(4, 4, dtype=np.uint8), ".weight_global_scale": None},
    ),
    "compressed-tensors with scales of bytes": changed(
        CT, ".weight_packed", "F8_E4M3", tensors={".weight_scale": ones(4, 8, dtype=np.uint8)}
    ),
    "compressed-tensors mixfp4": changed(
        CT,
        ".weight_packed",
        "mixfp4-pack-quantized",
        config=method("compressed-tensors", format="mixfp4-pack-quantized"),
    ),
    "nvfp4 with scales of another shape": changed(
        CT,
        ".weight_packed",
        "its scale",
        "F8_E4M3 [8, 4], not U8 [4, 8]",
        tensors={".weight_scale": ones(8, 4, dtype=E4M3)},
    ),
    "nvfp4 in groups of 32": changed(
        CT,
        ".weight_packed",
        "its scale",
        "[4, 4]",
        tensors={".weight_scale": ones(4, 4, dtype=E4M3)},
    ),
    "nvfp4 with a global scale per row": changed(
        CT, ".weight_packed", "its global scale", "[4]", tensors={".weight_global_scale": ones(4)}
    ),
    "nvfp4 with a global scale of rank 2": changed(
        CT,
        ".weight_packed",
        "its global scale",
        "[1, 1]",
        tensors={".weight_global_scale": ones(1, 1)},
    ),
    "nvfp4 with an empty global scale": changed(
        CT, ".weight_packed", "its global scale", "[0]", tensors={".weight_global_scale": ones(0)}
    ),
    "nvfp4 with a global scale of F16": changed(
        MODELOPT,
        ".weight",
        "its global scale",
        "F16",
        tensors={".weight_scale_2": ones(dtype=np.float16)},
    ),
    "nvfp4 of odd bytes": changed(
        MODELOPT, ".weight", "not whole groups", tensors={".weight": ones(4, 66, dtype=np.uint8)}
    ),
    "nvfp4 of rank 0": changed(
        MODELOPT, ".weight", "not whole groups", tensors={".weight": ones(dtype=np.uint8)}
    ),
    "modelopt without a global scale": changed(
        MODELOPT, ".weight", "weight_scale_2", tensors={".weight_scale_2": None}
    ),
    "modelopt without a scale": changed(
        MODELOPT, ".weight", "weight_scale ", tensors={".weight_scale": None}
    ),
    "modelopt int4 awq": changed(
        MODELOPT, ".weight", "F8_E4M3", tensors={".weight_scale": cast(BF16)}
    ),
    "modelopt nvfp4 awq": changed(
        MODELOPT, ".weight", "pre_quant_scale", tensors={".pre_quant_scale": ones(128, dtype=BF16)}
    ),
    "modelopt with stacked experts": Refused(
        {
            f"{EXPERTS}.gate_up_proj": np.zeros((4, 64, 32), np.uint8),
            f"{EXPERTS}.gate_up_proj_weight_scale": np.ones((4, 64, 4), E4M3),
            f"{EXPERTS}.gate_up_proj_weight_scale_2": np.ones(4, np.float32),
        },
        f"{EXPERTS}.gate_up_proj",
        ("gate_up_proj_weight_scale",),
    ),
    "gpt-oss without scales": changed(
        GPT_OSS, "_blocks", "its _scales are missing", tensors={"_scales": None}
    ),
    "gpt-oss with scales of floats": changed(
        GPT_OSS, "_blocks", "_scales", "F32", tensors={"_scales": cast(np.float32)}
    ),
    "gpt-oss with scales of another shape": changed(
        GPT_OSS,
        "_blocks",
        "its scale",
        "[4, 8], not U8 [4, 4]",
        tensors={"_scales": ones(4, 8, dtype=np.uint8)},
    ),
    "gpt-oss of rank 1": changed(
        GPT_OSS, "_blocks", "not whole groups", tensors={"_blocks": ones(16, dtype=np.uint8)}
    ),
    "gpt-oss of rank 0": changed(
        GPT_OSS, "_blocks", "not whole groups", tensors={"_blocks": ones(dtype=np.uint8)}
    ),
}
FP8_WEIGHTS = {
    "fp8 without scale": changed(FP8, ".weight", NO_SCALE, tensors={".weight_scale_inv": None}),
    "fp8 without scale and config": changed(
        FP8, ".weight", NO_SCALE, tensors={".weight_scale_inv": None}, config={}
    ),
    "fp8 experts without scale": Refused(
        {f"{EXPERTS}.gate_up_proj": np.ones((3, 8, 8), E4M3)},
        f"{EXPERTS}.gate_up_proj",
        (NO_SCALE,),
    ),
    "fp8 e5m2": changed(
        FP8, ".weight", "F8_E5M2", "only F8_E4M3", tensors={".weight": ones(4, 128, dtype=E5M2)}
    ),
    "fp8 e5m2 experts": Refused(
        {f"{EXPERTS}.gate_up_proj": np.ones((3, 8, 8), E5M2)},
        f"{EXPERTS}.gate_up_proj",
        ("only F8_E4M3",),
    ),
    "fp8 per channel": changed(
        FP8, ".weight", "[4, 1]", "128x128", tensors={".weight_scale_inv": ones(4, 1)}
    ),
    "fp8 per channel without blocks": changed(
        block_fp8("_scale"),
        ".weight",
        "[4, 1]",
        "128x128",
        tensors={".weight_scale": ones(4, 1)},
        config=method("modelopt"),
    ),
    "fp8 per tensor": changed(
        block_fp8("_scale"),
        ".weight",
        "[]",
        "128x128",
        tensors={".weight_scale": ones()},
        config=method("compressed-tensors"),
    ),
    "fp8 per tensor [1]": changed(
        block_fp8("_scale"),
        ".weight",
        "[1]",
        "128x128",
        tensors={".weight_scale": ones(1)},
        config={},
    ),
    "fp8 blocks of 64": changed(
        FP8,
        ".weight",
        "64x64",
        tensors={".weight_scale_inv": ones(1, 2)},
        config=method("fp8", weight_block_size=[64, 64]),
    ),
    "fp8 blocks of 1x128": changed(
        FP8, ".weight", "1x128", config=method("fp8", weight_block_size=[1, 128])
    ),
    "fp8 without a block size": changed(FP8, ".weight", "weight_block_size", config=method("fp8")),
    "fp8 with half a block size": changed(
        FP8, ".weight", "weight_block_size", config=method("fp8", weight_block_size=[128])
    ),
    "fp8 with two block sizes": changed(
        FP8,
        ".weight",
        "weight_block_size",
        config=method(
            "compressed-tensors",
            config_groups={
                str(size): {"weights": {"block_structure": [size, size]}} for size in (64, 128)
            },
        ),
    ),
    "fp8 with too many scales": changed(
        FP8, ".weight", "[2, 1]", "[1, 1]", tensors={".weight_scale_inv": ones(2, 1)}
    ),
    "fp8 with scales of powers of two": changed(
        FP8,
        ".weight",
        "weight_scale_inv",
        "F8_E8M0",
        tensors={".weight_scale_inv": ones(1, 1, dtype=E8M0)},
    ),
    "fp8 with scales of bytes": changed(
        block_fp8("_scale"),
        ".weight",
        "weight_scale",
        "U8",
        tensors={".weight_scale": ones(4, 4, dtype=np.uint8)},
    ),
    "fp8 whose scales divide": changed(
        FP8,
        ".weight",
        "weight_scale_semantics",
        config=method("fp8", weight_block_size=[128, 128], weight_scale_semantics="inverse"),
    ),
    "fp8 of rotated weights": changed(
        FP8,
        ".weight",
        "rotation_config",
        config=method("fp8", weight_block_size=[128, 128], rotation_config={"size": 128}),
    ),
    "fp8 vector": changed(
        FP8, ".weight", "not a matrix", tensors={".weight": ones(128, dtype=E4M3)}
    ),
}


def grouped(
    scheme: dict[str, Any] | None = None, weights: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Return the config of NVFP4 by compressed-tensors, with changes at three levels."""
    own = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**own, **(weights or {})}}}
    groups["group_0"] |= scheme or {}
    return method("compressed-tensors", config_groups=groups, **settings)


BY_COMPRESSED_TENSORS = nvfp4(modelopt=False)
CODED_OTHERWISE = {
    "nvfp4 of transformed weights": changed(
        BY_COMPRESSED_TENSORS,
        ".weight_packed",
        "transform_config",
        config=grouped(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
    ),
    "nvfp4 in groups of 32": changed(
        BY_COMPRESSED_TENSORS,
        ".weight_packed",
        "32 values",
        config=grouped(weights={"group_size": 32}),
    ),
    "nvfp4 by ModelOpt in groups of 32": changed(
        nvfp4(modelopt=True),
        ".weight",
        "32 values",
        config=method("modelopt", quant_algo="NVFP4", group_size=32),
    ),
    "nvfp4 with an unknown argument": changed(
        BY_COMPRESSED_TENSORS,
        ".weight_packed",
        "weights: codebook",
        config=grouped(weights={"codebook": "nf4"}),
    ),
    "nvfp4 with an unknown scheme": changed(
        BY_COMPRESSED_TENSORS,
        ".weight_packed",
        "config_groups: order",
        config=grouped({"order": "columns"}),
    ),
    "nvfp4 of permuted columns": changed(
        BY_COMPRESSED_TENSORS,
        ".weight_packed",
        "actorder",
        config=grouped(weights={"actorder": "group"}),
    ),
}
HARMLESS = (
    grouped(),
    grouped(transform_config={}, sparsity_config={}, weights={"actorder": "static"}),
    grouped({"format": "nvfp4-pack-quantized"}, {"observer_kwargs": {"a": 1}, "zp_dtype": None}),
)


@pytest.mark.parametrize("config", HARMLESS)
def test_keys_that_say_nothing_of_codes(config: dict[str, Any], tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "m",
        BY_COMPRESSED_TENSORS.make(UP, (4, 128)).tensors,
        config={**LLAMA_CONFIG, **config},
    )
    assert list(blobstore.plan_import(source).tensors)


OTHERS = {
    "awq": Refused(
        {
            f"{UP}.qweight": PACKED,
            f"{UP}.qzeros": PACKED[:1],
            f"{UP}.scales": normal("s", 1, 8, dtype=np.float16),
        },
        f"{UP}.qweight",
        ("AWQ and GPTQ",),
        method("awq", bits=4),
    ),
    "gptq": Refused(
        {
            f"{UP}.qweight": PACKED,
            f"{UP}.g_idx": PACKED[0],
            f"{UP}.scales": normal("s", 1, 8, dtype=np.float16),
        },
        f"{UP}.qweight",
        ("AWQ and GPTQ",),
    ),
    "bitsandbytes 4 bit": Refused(
        {
            f"{UP}.weight": np.zeros((2048, 1), np.uint8),
            f"{UP}.weight.absmax": np.ones(64, np.uint8),
        },
        f"{UP}.weight",
        ("bitsandbytes",),
    ),
    "bitsandbytes 4 bit kept in bfloat16": Refused(  # bnb_4bit_quant_storage
        {
            f"{UP}.weight": np.zeros((1024, 1), BF16),
            f"{UP}.weight.absmax": np.ones(64, np.float32),
            f"{UP}.weight.quant_map": np.ones(16, np.float32),
            f"{UP}.weight.quant_state.bitsandbytes__nf4": np.ones(82, np.uint8),
        },
        f"{UP}.weight",
        ("bitsandbytes",),
        method("bitsandbytes", bnb_4bit_quant_storage="bfloat16"),
    ),
    "bitsandbytes 4 bit experts kept in float32": Refused(
        {
            f"{EXPERTS}.gate_up_proj": np.zeros((512, 2), np.float32),
            f"{EXPERTS}.gate_up_proj.absmax": ones(64)(None),
        },
        f"{EXPERTS}.gate_up_proj",
        ("bitsandbytes",),
    ),
    "quanto qint8": Refused(
        {
            f"{UP}.weight._data": np.zeros((64, 64), np.int8),
            f"{UP}.weight._scale": normal("s", 64, 1),
        },
        f"{UP}.weight._data",
        ("quanto",),
    ),
    "quanto qfloat8": Refused(
        {f"{UP}.weight._data": np.ones((64, 64), E4M3), f"{UP}.weight._scale": normal("s", 64, 1)},
        f"{UP}.weight._data",
        ("quanto",),
        method("quanto", weights="float8"),
    ),
    "quanto qint4": Refused(
        {
            f"{UP}.weight._data._data": np.zeros((16, 64), np.uint8),
            f"{UP}.weight._scale": normal("s", 32, 1),
            f"{UP}.weight._shift": normal("t", 32, 1),
        },
        f"{UP}.weight._data._data",
        ("quanto",),
    ),
    "torchao float8": Refused(
        {f"{UP}._weight_qdata": np.ones((64, 64), E4M3), f"{UP}._weight_scale": ones(64, 1)(None)},
        f"{UP}._weight_qdata",
        ("torchao",),
        method("torchao"),
    ),
    "torchao int8": Refused(
        {
            f"{UP}._weight_qdata": np.ones((64, 64), np.int8),
            f"{UP}._weight_scale": ones(64, 1)(None),
        },
        f"{UP}._weight_qdata",
        ("torchao",),
    ),
    "float8 of a method that is not known": Refused(
        {f"{UP}.codes": np.ones((64, 64), E4M3)},
        f"{UP}.codes",
        ("another_method",),
        method("another_method"),
    ),
    "exl2 without config": Refused(
        {
            f"{UP}.q_weight": np.zeros((8, 64), np.int32),
            f"{UP}.q_scale": np.zeros((2, 8), np.int32),
            f"{UP}.q_invperm": np.zeros(64, np.int16),
        },
        f"{UP}.q_weight",
        ("EXL2",),
    ),
    "eetq": Refused(
        {
            f"{UP}.weight": np.zeros((64, 64), np.int8),
            f"{UP}.weight_scales": np.ones(64, np.float16),
        },
        f"{UP}.weight",
        ("EETQ",),
    ),
    "bitsandbytes 8 bit": Refused(
        {f"{UP}.weight": np.zeros((64, 64), np.int8), f"{UP}.SCB": np.ones(64, np.float32)},
        f"{UP}.weight",
        ("8-bit integers",),
    ),
    "compressed-tensors int8": Refused(
        {f"{UP}.weight": np.zeros((64, 64), np.int8), f"{UP}.weight_scale": normal("s", 64, 1)},
        f"{UP}.weight",
        ("8-bit integers",),
        method("compressed-tensors", format="int-quantized"),
    ),
    "compressed-tensors pack-quantized": Refused(
        {
            f"{UP}.weight_packed": PACKED,
            f"{UP}.weight_scale": normal("s", 32, 4),
            f"{UP}.weight_shape": np.array([32, 512]),
        },
        f"{UP}.weight_packed",
        ("packed into integers",),
        method("compressed-tensors", format="pack-quantized"),
    ),
    "bitnet": Refused(
        {f"{UP}.weight": np.zeros((16, 64), np.uint8), f"{UP}.weight_scale": np.ones(1, BF16)},
        f"{UP}.weight",
        ("packed weights",),
        method("bitnet"),
    ),
    "a method that nobody knows": Refused(
        {f"{UP}.W_q": np.zeros((32, 64), np.uint8)},
        f"{UP}.W_q",
        ("quantized by", "hqq"),
        method("hqq"),
    ),
}
REFUSED = {**MLX, **NVFP4, **FP8_WEIGHTS, **CODED_OTHERWISE, **OTHERS}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_source_is_refused_and_nothing_is_stored(
    store: Store, tmp_path: Path, refused: Refused
) -> None:
    # Another tensor, so that a source with one tensor less is still a source.
    tensors = {"model.norm.weight": normal("norm", 64), **refused.tensors}
    source = write_checkpoint(tmp_path / "source", tensors, {**LLAMA_CONFIG, **refused.config})
    with pytest.raises(UnsupportedSourceError) as caught:
        blobstore.import_model(source, "m", store=store)
    assert caught.value.tensor == refused.tensor
    assert caught.value.path == str(source / "model.safetensors")
    assert caught.value.hint
    assert [
        word for word in (repr(refused.tensor), *refused.words) if word not in str(caught.value)
    ] == []
    assert not store.root.exists()


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("profile", ["ollama", "default"])
def test_requantizing_does_not_help(tmp_path: Path, refused: Refused, profile: str) -> None:
    source = write_checkpoint(
        tmp_path / "source", refused.tensors, {**LLAMA_CONFIG, **refused.config}
    )
    with pytest.raises(UnsupportedSourceError) as caught:
        blobstore.plan_import(source, quant="int4", requantize=True, profile=profile)
    assert caught.value.tensor == refused.tensor


@pytest.mark.parametrize(
    "name", ["fp8 without a block size", "mlx that a bare config does not explain"]
)
def test_a_bare_file_needs_its_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(REFUSED[name].tensors))
    with pytest.raises(UnsupportedSourceError, match=r"config\.json") as caught:
        blobstore.plan_import(tmp_path / "m.safetensors")
    assert caught.value.hint == "Import the folder with its config.json."


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_bare_file_is_not_guessed(tmp_path: Path, bits: int, group_size: int) -> None:
    tensors = mlx_affine(bits, group_size).make(UP, (4, 256)).tensors
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes(tensors))
    other = {
        (4, 64): "int4/64, int8/32",
        (8, 32): "int4/64, int8/32",
        (4, 128): "int4/128, int8/64",
        (8, 64): "int4/128, int8/64",
    }
    if (bits, group_size) not in other:
        assert blobstore.plan_import(tmp_path / "m.safetensors").config.file_type == f"int{bits}"
        return
    with pytest.raises(UnsupportedSourceError, match=f"fit {other[bits, group_size]}"):
        blobstore.plan_import(tmp_path / "m.safetensors")


@pytest.mark.parametrize("value", [0.0, np.inf, -np.inf, np.nan, 1e-45])
def test_a_global_scale_that_nothing_can_be_divided_by(
    store: Store, tmp_path: Path, value: float
) -> None:
    expect_no_scale(store, tmp_path, CT, f"{UP}.weight_global_scale", value)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_global_scale_that_nothing_can_be_multiplied_by(
    store: Store, tmp_path: Path, value: float
) -> None:
    expect_no_scale(store, tmp_path, MODELOPT, f"{UP}.weight_scale_2", value)


def expect_no_scale(store: Store, folder: Path, kind: Kind, name: str, value: float) -> None:
    """Fail unless a global scale of that value is refused and the store stays empty."""
    tensors = kind.make(UP, (4, 128)).tensors | {name: np.array(value, np.float32)}
    with pytest.raises(UnsupportedSourceError, match=name) as caught:
        blobstore.import_model(write_checkpoint(folder / "source", tensors), "m", store=store)
    assert caught.value.tensor == name
    assert list(store.models()) == []
    assert list((store.root / "blobs").glob("*")) == []


@pytest.mark.parametrize("name", ["mlx 3 bit", "awq", "fp8 per tensor", "mlx without scales"])
def test_the_command_says_so_and_exits_with_1(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = REFUSED[name]
    source = write_checkpoint(
        tmp_path / "source", refused.tensors, {**LLAMA_CONFIG, **refused.config}
    )
    assert run(["import", str(source), "m", "--store", str(tmp_path / "store")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert [word for word in (refused.tensor, *refused.words) if word not in said] == []
    assert not (tmp_path / "store").exists()
