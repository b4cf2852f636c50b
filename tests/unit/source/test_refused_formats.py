"""Quantized sources that are not imported: each is refused with its reason.

A table of what lies in the source (docs/formats.md section 5): formats that are in no row of
producers.py, and those that are, with a part missing, of a wrong shape or dtype, or a config.json
that contradicts them.
"""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, normal, safetensors_bytes, write_checkpoint
from support.producers import block_fp8, gpt_oss, mlx_affine, nvfp4

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.source.producers import TOOLS
from blobstore.store.local.store import Store

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
E4M3, FNUZ, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.bfloat16
UP = "model.layers.0.mlp.up_proj"

INT4 = mlx_affine(4, 64).make(UP, (4, 128)).tensors
FP8 = block_fp8().make(UP, (4, 128)).tensors
CT = nvfp4(modelopt=False).make(UP, (4, 128)).tensors
MODELOPT = nvfp4(modelopt=True).make(UP, (4, 128)).tensors
GPT_OSS = gpt_oss().make(UP, (4, 128)).tensors


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def without(tensors: Tensors, *suffixes: str) -> Tensors:
    return {name: array for name, array in tensors.items() if name.removeprefix(UP) not in suffixes}


def other(tensors: Tensors, **arrays: Array) -> Tensors:
    """Return the tensors with some of their own; ``_x`` is called ``.x`` here."""
    return tensors | {UP + name.replace("_", ".", 1): array for name, array in arrays.items()}


def only(**arrays: Array) -> Tensors:
    return other({}, **arrays)


def mlx(bits: int, group_size: int) -> dict[str, Any]:
    return {"quantization": {"group_size": group_size, "bits": bits, "mode": "affine"}}


def method(name: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **settings}}


def grouped(weights: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the config of NVFP4 by compressed-tensors, with changes."""
    own = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    group = {"targets": ["Linear"], "weights": own | weights}
    return method("compressed-tensors", config_groups={"group_0": group}, **settings)


THREE_BITS = {"_weight": np.zeros((4, 12), np.uint32), "_scales": ones(4, 2), "_biases": ones(4, 2)}
STACKED = np.zeros((4, 64, 32), np.uint8)
BYTES, WORDS = np.zeros((64, 64), np.int8), np.zeros((32, 64), np.int32)
COMPRESSED = "compressed-tensors"
NF4_OF_BF16 = {f"{UP}.weight": np.zeros((1024, 1), BF16), f"{UP}.weight.absmax": ones(64)}
TORCHAO = {f"{UP}._weight_qdata": ones(64, 64, dtype=E4M3), f"{UP}._weight_scale": ones(64, 1)}
ODD_SCALES = method("fp8", weight_block_size=[128, 128], weight_scale_semantics="other")
INTEGERS, PACKED = (method(COMPRESSED, format=f"{kind}-quantized") for kind in ("int", "pack"))

# What lies in the source, its config.json, and a word of the reason.
REFUSED: list[tuple[Tensors, dict[str, Any], str]] = [
    # MLX
    (only(**THREE_BITS), mlx(5, 64), "5 bits"),
    (other(INT4, _biases=ones(4, 2, dtype=np.float16)), mlx(4, 64), "F16 [4, 2]"),
    (without(INT4, ".scales"), mlx(4, 64), "scales are missing"),
    (INT4, {"a": 1}, "int4/64, int8/32"),
    # NVFP4 and MXFP4
    (without(CT, ".weight_global_scale"), {}, "X.weight_scale"),
    (CT, method(COMPRESSED, format="mixfp4-pack-quantized"), "mixfp4-pack-quantized"),
    (CT, grouped({"codebook": "nf4"}), "codebook"),
    (other(CT, _weight_global_scale=ones(4)), {}, "F32 [4]"),
    ({UP: STACKED, f"{UP}_weight_scale": ones(4, 64, 4, dtype=E4M3)}, {}, "ModelOpt NVFP4"),
    (without(GPT_OSS, "_scales"), method("mxfp4"), "_scales are missing"),
    # FP8
    (without(FP8, ".weight_scale_inv"), {}, "without a scale"),
    (other(FP8, _weight=ones(4, 128, dtype=FNUZ)), {}, "only F8_E4M3 and F8_E5M2"),
    (FP8, method("fp8", weight_block_size=[64, 64]), "64x64"),
    (FP8, ODD_SCALES, "weight_scale_semantics"),
    # Others
    (only(_qweight=WORDS, _qzeros=WORDS[:1], _scales=ones(1, 8)), {}, "how it was quantized"),
    (NF4_OF_BF16, method("bitsandbytes", bnb_4bit_quant_storage="bfloat16"), "bitsandbytes"),
    ({f"{UP}.weight._data": BYTES, f"{UP}.weight._scale": ones(64, 1)}, {}, "quanto"),
    (TORCHAO, method("torchao"), "torchao"),
    (only(_weight=BYTES, _weight_scale=normal("s", 64, 1)), INTEGERS, "how it was quantized"),
    (only(_weight_packed=WORDS, _weight_scale=normal("s", 32, 4)), PACKED, "how it was quantized"),
    (only(_weight=BYTES, _weight_scales=np.ones(64, np.float16)), {}, "EETQ"),
    ({f"{UP}_packed": WORDS, f"{UP}_scale": ones(32, 4)}, method(COMPRESSED), "stacked"),
    (only(_compressed=ones(64, 32), _bitmask=STACKED), method(COMPRESSED), "sparse"),
    (only(_a=WORDS), method("other"), "'other'"),
    # By their methods or their tensors: names of the programs
    (only(_W_q=BYTES), method("hqq"), "HQQ"),
    (only(_W_q=BYTES), method("sinq"), "SINQ"),
    (only(_W_q=BYTES), {}, "HQQ or SINQ"),
    (only(_codes=BYTES, _codebooks=ones(1, 256, 1, 8)), method("aqlm"), "AQLM"),
    (only(_codes=BYTES, _codebooks=ones(1, 256, 1, 8)), {}, "AQLM"),
    ({f"{UP}.indices": ones(64, 64), f"{UP}.centroids.weight": ones(1, 64)}, {}, "VPTQ"),
    ({f"{UP}.indices": WORDS, f"{UP}.centroids.weight": ones(1, 64)}, method("vptq"), "VPTQ"),
    ({f"{UP}.dense_weights": WORDS, f"{UP}.row_offsets": WORDS[:1]}, {}, "SpQR"),
    ({f"{UP}.dense_weights": WORDS}, method("spqr"), "SpQR"),
    (only(_Qidxs=WORDS, _SU=ones(64), _SV=ones(64)), {}, "QuIP#"),
    (only(_trellis=WORDS, _SU=ones(64), _SV=ones(64)), {}, "QTIP"),
    (only(_trellis=WORDS.astype(np.int16), _suh=ones(64), _svh=ones(64)), method("exl3"), "EXL3"),
    (only(_trellis=WORDS.astype(np.int16), _suh=ones(64), _svh=ones(64)), {}, "EXL3"),
    ({f"{UP}.{one}": WORDS for one in ("q_weight", "q_scale", "q_invperm")}, {}, "EXL2"),
    (only(_weight=WORDS, _scales=ones(64, 4), _tables=ones(16)), method("higgs"), "HIGGS"),
    (only(_weight=WORDS, _scales=ones(64, 4), _tables=ones(16)), {}, "HIGGS"),
    (only(_qweight=STACKED, _scales=STACKED), {}, "FPQuant"),
    (only(_qweight=STACKED, _scales=STACKED), method("fp_quant"), "FPQuant"),
    (only(_weight=BYTES, _weight_scales=ones(64)), method("eetq"), "EETQ"),
    (only(_weight=STACKED, _weight_scale=ones(1)), method("bitnet"), "BitNet"),
    (only(_weight=BYTES, _weight_scale=ones(64, 1)), method("quark"), "Quark"),
    (only(_weight=WORDS, _weight_scale=ones(4, 64)), method("quark"), "Quark"),
    (only(_weight=STACKED, _weight_scale=ones(64, 1)), method("gemma"), "Gemma"),
    ({f"{UP}.weight._data": BYTES, f"{UP}.weight._scale": ones(64, 1)}, method("quanto"), "quanto"),
    (only(_weight=WORDS.view(np.uint32), _qbiases=ones(32, 8)), method("metal"), "Metal"),
    (only(_weight=STACKED), method("fouroversix"), "Four Over Six"),
    (only(_q=WORDS), method("quip"), "QuIP#"),
]


def test_a_source_is_refused_by_name_and_reason_whatever_is_asked_for(tmp_path: Path) -> None:
    for number, (tensors, config, reason) in enumerate(REFUSED):
        # Another tensor, so that a source with one tensor less is still a source.
        all_tensors = {"model.norm.weight": normal("norm", 64), **tensors}
        source = write_checkpoint(tmp_path / str(number), all_tensors, LLAMA_CONFIG | config)
        with pytest.raises(UnsupportedSourceError) as caught:
            blobstore.plan_import(source, quant="int4", requantize=True)
        error = caught.value
        assert (error.tensor or "").startswith(UP), (reason, str(error))
        assert reason in str(error)
        assert error.path == str(source / "model.safetensors")
        assert ("Dequantize it with" in (error.hint or "")) is any(
            re.search(rf"\b{re.escape(name)}(?!\w)", reason) for name in TOOLS
        ), (reason, error.hint)


def test_keys_that_say_nothing_of_codes(tmp_path: Path) -> None:
    weights = {"observer_kwargs": {"a": 1}, "zp_dtype": None, "actorder": "static"}
    config = grouped(weights, transform_config={}, sparsity_config={})
    source = write_checkpoint(tmp_path / "m", CT, LLAMA_CONFIG | config)
    assert list(blobstore.plan_import(source).tensors)


def test_a_bare_file_is_refused_if_its_shapes_have_several_meanings(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    for tensors in (INT4, FP8):
        file.write_bytes(safetensors_bytes(tensors))
        with pytest.raises(UnsupportedSourceError, match=r"no config\.json"):
            blobstore.plan_import(file)


@pytest.mark.parametrize(
    ("tensors", "suffix", "value"),
    [(CT, ".weight_global_scale", 1e-45), (MODELOPT, ".weight_scale_2", np.inf)],
)
def test_a_global_scale_that_is_not_a_factor(
    store: Store, tmp_path: Path, tensors: Tensors, suffix: str, value: float
) -> None:
    tensors = tensors | {UP + suffix: np.array(value, np.float32)}
    source = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(UnsupportedSourceError) as caught:
        blobstore.import_model(source, "m", store=store)
    assert caught.value.tensor == UP + suffix
    assert list(store.models()) == []
