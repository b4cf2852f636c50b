"""Quantized sources that are not imported: each is refused with its reason.

A table of what lies in the source (docs/formats.md section 5): formats that are in no row of
producers.py, and those that are, with a part missing, of a wrong shape or dtype, or a config.json
that contradicts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, normal, safetensors_bytes, write_checkpoint
from support.producers import COPIED, block_fp8, gpt_oss, mlx_affine, nvfp4

import blobstore
from blobstore.cli.main import run
from blobstore.errors import UnsupportedSourceError
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
UP = "model.layers.0.mlp.up_proj"

INT4 = mlx_affine(4, 64).make(UP, (4, 128)).tensors
MXFP4 = COPIED["mlx mxfp4"].make(UP, (4, 128)).tensors
MLX_NVFP4 = COPIED["mlx nvfp4"].make(UP, (4, 128)).tensors
FP8 = block_fp8().make(UP, (4, 128)).tensors
CT = nvfp4(modelopt=False).make(UP, (4, 128)).tensors
MODELOPT = nvfp4(modelopt=True).make(UP, (4, 128)).tensors
GPT_OSS = gpt_oss().make(UP, (4, 128)).tensors


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def without(tensors: Tensors, *suffixes: str) -> Tensors:
    """Return the tensors but some."""
    return {name: array for name, array in tensors.items() if name.removeprefix(UP) not in suffixes}


def other(tensors: Tensors, **arrays: Array) -> Tensors:
    """Return the tensors with some of their own; ``_x`` is called ``.x`` here."""
    return tensors | {UP + name.replace("_", ".", 1): array for name, array in arrays.items()}


def only(**arrays: Array) -> Tensors:
    return other({}, **arrays)


def mlx(bits: int, group_size: int, mode: str = "affine", modules: Any = ()) -> dict[str, Any]:
    """Return MLX's settings in a config.json."""
    return {"quantization": {"group_size": group_size, "bits": bits, "mode": mode} | dict(modules)}


def method(name: str, **settings: Any) -> dict[str, Any]:
    """Return transformers' settings in a config.json."""
    return {"quantization_config": {"quant_method": name, **settings}}


def grouped(weights: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return the config of NVFP4 by compressed-tensors, with changes."""
    own = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    group = {"targets": ["Linear"], "weights": own | (weights or {})}
    return method("compressed-tensors", config_groups={"group_0": group}, **settings)


MLX_REFUSALS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "3 bits": (
        only(_weight=np.zeros((4, 12), np.uint32), _scales=ones(4, 2), _biases=ones(4, 2)),
        mlx(3, 64),
        "3 bits in groups of 64 (affine) have no type",
    ),
    "6 bits in one module": (
        INT4,
        mlx(4, 64, modules={UP: {"group_size": 64, "bits": 6}}),
        "6 bits in groups of 64",
    ),
    "groups of 64 called 32": (INT4, mlx(4, 32), "BF16 [4, 2], not BF16 [4, 4]"),
    "mxfp4 called affine": (MXFP4, mlx(4, 32), "is U8, and those of int4/32 are floats"),
    "mxfp4 with biases": (
        other(MXFP4, _biases=ones(4, 4, dtype=BF16)),
        mlx(4, 32, "mxfp4"),
        "it has biases",
    ),
    "biases of another dtype": (
        other(INT4, _biases=ones(4, 2, dtype=np.float16)),
        mlx(4, 64),
        "F16 [4, 2], not BF16 [4, 2]",
    ),
    "no biases": (without(INT4, ".biases"), mlx(4, 64), "its bias is missing"),
    "no scales": (without(INT4, ".scales"), mlx(4, 64), "its scales are missing"),
    "scales of F64": (
        other(INT4, _scales=ones(4, 2, dtype=np.float64)),
        mlx(4, 64),
        "(F64 [4, 2])",
    ),
    "rows that are not whole groups": (
        other(INT4, _weight=ones(4, 15, dtype=np.uint32)),
        mlx(4, 64),
        "[4, 15] are not whole groups",
    ),
    "rank 0": (other(INT4, _weight=ones(dtype=np.uint32)), mlx(4, 64), "[] are not whole groups"),
    "a global scale": (
        other(MLX_NVFP4, _global_scale=ones()),
        mlx(4, 16, "nvfp4"),
        ".global_scale",
    ),
    "a config without settings": (INT4, {"a": 1}, "shapes fit int4/64, int8/32"),
    "shapes that fit nothing": (
        other(INT4, _scales=ones(4, 3, dtype=BF16), _biases=ones(4, 3, dtype=BF16)),
        {"a": 1},
        "shapes fit none",
    ),
}
NVFP4_REFUSALS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "no global scale": (without(CT, ".weight_global_scale"), {}, "need X.weight_scale (F8_E4M3)"),
    "another format of compressed-tensors": (
        CT,
        method("compressed-tensors", format="mixfp4-pack-quantized"),
        "mixfp4-pack-quantized",
    ),
    "transformed weights": (CT, grouped(transform_config={"a": {"b": 1}}), "transform_config"),
    "groups of 32 in the config": (CT, grouped({"group_size": 32}), "have 32 values"),
    "an unknown argument": (CT, grouped({"codebook": "nf4"}), "weights: codebook"),
    "permuted columns": (CT, grouped({"actorder": "group"}), "actorder"),
    "groups of 32": (
        other(CT, _weight_scale=ones(4, 4, dtype=E4M3)),
        {},
        "F8_E4M3 [4, 4], not U8 [4, 8]",
    ),
    "a global scale per row": (
        other(CT, _weight_global_scale=ones(4)),
        {},
        "F32 [4], and not one F32",
    ),
    "modelopt without a global scale": (
        without(MODELOPT, ".weight_scale_2"),
        {},
        "and X.weight_scale_2",
    ),
    "modelopt awq": (
        other(MODELOPT, _pre_quant_scale=ones(128, dtype=BF16)),
        {},
        "pre_quant_scale",
    ),
    "modelopt stacked": (
        {
            f"{UP}": np.zeros((4, 64, 32), np.uint8),
            f"{UP}_weight_scale": ones(4, 64, 4, dtype=E4M3),
        },
        {},
        "ModelOpt NVFP4 weights are not imported",
    ),
    "gpt-oss without scales": (without(GPT_OSS, "_scales"), method("mxfp4"), "_scales are missing"),
    "gpt-oss with scales of floats": (GPT_OSS | {f"{UP}_scales": ones(4, 4)}, {}, "(F32 [4, 4])"),
}
FP8_REFUSALS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "no scale": (without(FP8, ".weight_scale_inv"), {}, "an FP8 weight without a scale"),
    "e5m2": (other(FP8, _weight=ones(4, 128, dtype=E5M2)), {}, "only F8_E4M3 weights"),
    "a scale per channel": (
        other(FP8, _weight_scale_inv=ones(4, 1)),
        {},
        "128x128 blocks need [1, 1]",
    ),
    "blocks of 64": (FP8, method("fp8", weight_block_size=[64, 64]), "blocks are 64x64"),
    "no block size": (FP8, method("fp8"), "does not say which weights share a scale"),
    "scales of bytes": (
        other(FP8, _weight_scale_inv=ones(1, 1, dtype=np.uint8)),
        {},
        "is of another dtype or shape",
    ),
    "scales that divide": (
        FP8,
        method("fp8", weight_block_size=[128, 128], weight_scale_semantics="inverse"),
        "weight_scale_semantics",
    ),
    "a vector": (
        other(FP8, _weight=ones(128, dtype=E4M3)),
        method("fp8", weight_block_size=[128, 128]),
        "[128] is not a matrix",
    ),
}
WORDS = np.zeros((32, 64), np.int32)
OTHERS: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "awq": (only(_qweight=WORDS, _qzeros=WORDS[:1], _scales=ones(1, 8)), {}, "AWQ and GPTQ"),
    "bitsandbytes": (
        {f"{UP}.weight": np.zeros((1024, 1), BF16), f"{UP}.weight.absmax": ones(64)},
        method("bitsandbytes", bnb_4bit_quant_storage="bfloat16"),
        "bitsandbytes",
    ),
    "quanto": (
        {f"{UP}.weight._data": np.zeros((64, 64), np.int8), f"{UP}.weight._scale": ones(64, 1)},
        {},
        "quanto",
    ),
    "torchao": (
        {f"{UP}._weight_qdata": ones(64, 64, dtype=E4M3), f"{UP}._weight_scale": ones(64, 1)},
        method("torchao"),
        "torchao",
    ),
    "int8": (
        only(_weight=np.zeros((64, 64), np.int8), _weight_scale=normal("s", 64, 1)),
        method("compressed-tensors", format="int-quantized"),
        "8-bit integers",
    ),
    "integers of compressed-tensors": (
        only(_weight_packed=WORDS, _weight_scale=normal("s", 32, 4)),
        method("compressed-tensors", format="pack-quantized"),
        "packed into integers",
    ),
    "eetq": (
        only(_weight=np.zeros((64, 64), np.int8), _weight_scales=np.ones(64, np.float16)),
        {},
        "EETQ",
    ),
    "an unknown method": (only(_W_q=np.zeros((32, 64), np.uint8)), method("hqq"), "'hqq'"),
}


@pytest.mark.parametrize("refusals", [MLX_REFUSALS, NVFP4_REFUSALS, FP8_REFUSALS, OTHERS])
def test_a_source_is_refused_by_name_and_reason_whatever_is_asked_for(
    tmp_path: Path, refusals: dict[str, tuple[Tensors, dict[str, Any], str]]
) -> None:
    for name, (tensors, config, reason) in refusals.items():
        # Another tensor, so that a source with one tensor less is still a source.
        all_tensors = {"model.norm.weight": normal("norm", 64), **tensors}
        source = write_checkpoint(tmp_path / name, all_tensors, LLAMA_CONFIG | config)
        for quant in (None, "int4"):
            with pytest.raises(UnsupportedSourceError) as caught:
                blobstore.plan_import(source, quant=quant, requantize=quant is not None)
            error = caught.value
            assert (error.tensor or "").startswith(UP), (name, str(error))
            assert reason in str(error), (name, str(error))
            assert error.path == str(source / "model.safetensors")
            assert error.hint


@pytest.mark.parametrize(
    "config",
    [
        grouped(transform_config={}, sparsity_config={}, weights={"actorder": "static"}),
        grouped({"observer_kwargs": {"a": 1}, "zp_dtype": None}),
    ],
)
def test_keys_that_say_nothing_of_codes(config: dict[str, Any], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", CT, LLAMA_CONFIG | config)
    assert list(blobstore.plan_import(source).tensors)


def test_a_bare_file_is_imported_if_its_shapes_have_one_meaning(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(safetensors_bytes(mlx_affine(4, 32).make(UP, (4, 256)).tensors))
    assert blobstore.plan_import(file).config.file_type == "int4"
    for tensors in (INT4, FP8):
        file.write_bytes(safetensors_bytes(tensors))
        with pytest.raises(UnsupportedSourceError, match=r"no config\.json says") as caught:
            blobstore.plan_import(file)
        assert caught.value.hint == "Import the folder with its config.json."


@pytest.mark.parametrize(
    ("tensors", "suffix", "value"),
    [
        (CT, ".weight_global_scale", 0.0),
        (CT, ".weight_global_scale", 1e-45),
        (CT, ".weight_global_scale", np.nan),
        (MODELOPT, ".weight_scale_2", np.inf),
    ],
)
def test_a_global_scale_that_is_not_a_factor(
    store: Store, tmp_path: Path, tensors: Tensors, suffix: str, value: float
) -> None:
    tensors = tensors | {UP + suffix: np.array(value, np.float32)}
    source = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(UnsupportedSourceError, match="no weight can be scaled") as caught:
        blobstore.import_model(source, "m", store=store)
    assert caught.value.tensor == UP + suffix
    assert list(store.models()) == []


def test_the_command_exits_with_1_and_stores_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "source", OTHERS["awq"][0])
    assert run(["import", str(source), "m", "--store", str(tmp_path / "store")]) == 1
    assert "AWQ and GPTQ" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "store").exists()
