"""Producers: which programs store quantized weights in which tensors. Tables; nothing is read.

Each way to store them is a row. An import reads the rows in `IMPORTED` and refuses the others
(assembly.py); an inspection counts the weights of all rows (packings.py). Rows are compared by
identity. Two rows may have the same name, because names are only shown.

Sources, by row:

- MLX: mlx 0.32.4 `mx.quantize`; mlx_lm 0.32.2 models/switch_layers.py (a global scale).
- compressed-tensors: vllm-project/compressed-tensors @01dd1a58 compressors/nvfp4/base.py,
  pack_quantized/base.py, @54f44f2b pack_quantized/helpers.py `pack_to_int32`, @7e71d9e6
  int4_quantized/base.py, @a118207b naive_quantized/fp8_block.py, @22f1b0f3
  quantization/lifecycle/forward_helpers.py `_dequantize` (scales are divided by the global one).
- ModelOpt: NVIDIA/TensorRT-Model-Optimizer @87f791d6 modelopt/torch/export/unified_export_hf.py
  `_export_quantized_weight`, @f5a1489c modelopt/torch/export/quant_utils.py.
- gpt-oss: huggingface/transformers @0189b1d0 integrations/mxfp4.py `convert_moe_packed_tensors`.
- FP8, FP4 experts: huggingface/transformers @0095b976 and 5.23.0 integrations/finegrained_fp8.py
  `FP8Linear`, `_unpack_fp4`; those of DeepSeek-V4: ModelCloud/GPTQModel@f4c327a1
  utils/model_dequant.py `dequantize_deepseek_v4_fp4_expert` (``X.scale``).
- AWQ: casper-hansen/AutoAWQ @030fe2a1 awq/modules/linear/gemm.py. GPTQ: AutoGPTQ/AutoGPTQ @058fd80a
  auto_gptq/nn_modules/qlinear/qlinear_cuda.py `QuantLinear`.
- blobstore: an exported folder has the names of a store's blobs (docs/formats.md section 3).
- bitsandbytes: bitsandbytes-foundation/bitsandbytes @005a63c2 nn/modules.py
  `Linear4bit._save_to_state_dict`, `Linear8bitLt._save_to_state_dict`.
- EETQ, BitNet: huggingface/transformers 5.23.0 integrations/eetq.py, bitnet.py. EXL2: exllamav2
  conversion/adaptivegptq.py `pack` (neggles/exllamav2 @0c2100bd). EXL3: turboderp-org/exllamav3
  @0c647502 modules/quant/exl3.py `LinearEXL3`.

Sources of the signatures without a row: quanto, huggingface/optimum-quanto @3dd9e9df
optimum/quanto/tensor/qtensor.py `save_to_state_dict`, @1a707590 tensor/weights/qbits.py (``_data``,
``_scale``, ``_shift``; packed codes are ``_data._data``); torchao, pytorch/ao @19264180
torchao/prototype/safetensors/safetensors_support.py `flatten_tensor_state_dict`
(``X._weight_qdata``, ``X._weight_scale``); bitsandbytes as above, whose codes have the dtype of
``bnb_4bit_quant_storage``; AQLM, VPTQ, SpQR, HIGGS, SINQ, FPQuant, huggingface/transformers 5.24.0
integrations/; QuIP#, Cornell-RelaxML/quip-sharp lib/linear/quantized_linear.py.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from blobstore.formats.checkpoint import ModuleQuantization, SourceConfig
from blobstore.formats.dtypes import FLOATS, FP8, DType
from blobstore.formats.safetensors.header import TensorEntry
from blobstore.source.folders import SourceTensor

TensorLike: TypeAlias = SourceTensor | TensorEntry
_T = TypeVar("_T", SourceTensor, TensorEntry)


@dataclass(frozen=True, slots=True, eq=False)
class Producer:
    """How one program stores a quantized weight ``X``: suffixes and dtypes of its tensors.

    ``companions``: suffix in the source → suffix of the array that it becomes, or itself; all but
    ``optional`` ones must be present. ``dropped``: scales of activations, which no weight needs.
    ``joined``: codes lie in blocks, which have their own dimension.
    """

    name: str
    weight: str
    weight_dtypes: frozenset[DType]
    scale_dtypes: frozenset[DType]
    companions: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()
    inverse_scale: bool = False
    joined: bool = False

    @property
    def scale(self) -> str:
        return next(suffix for suffix, stored in self.companions.items() if stored == ".scale")

    def stores(self, name: str, tensors: Mapping[str, TensorLike]) -> bool:
        """Return True when the tensor is a weight of this row: its companions are present too."""
        if tensors[name].dtype not in self.weight_dtypes or not name.endswith(self.weight):
            return False
        base = name.removesuffix(self.weight)
        needed = self.companions.keys() - self.optional
        return (
            all(base + suffix in tensors for suffix in needed)
            and tensors[base + self.scale].dtype in self.scale_dtypes
        )


_FLOATS = frozenset(FLOATS)
_DECODED_FP8 = frozenset(FP8)
ANY_FP8 = _DECODED_FP8 | {DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ}
_E4M3 = frozenset({DType.F8_E4M3})
_U8 = frozenset({DType.U8})
_I8 = frozenset({DType.I8})
_I32 = frozenset({DType.I32})
_U32 = frozenset({DType.U32})
_BYTES = _U8 | _I8
_EXPONENTS = frozenset({DType.U8, DType.F8_E8M0})
_SCALES = _FLOATS | ANY_FP8 | _U8 | _I32 | {DType.F8_E8M0}
_ACTIVATION_SCALES = (
    *(".input_scale", ".input_global_scale", ".input_scale_ub", ".input_zero_point"),
    *(".output_scale", ".output_zero_point", ".activation_scale", "_activation_scale"),
)

MLX = Producer(
    name="MLX",
    weight=".weight",
    weight_dtypes=_U32,
    scale_dtypes=_FLOATS | _U8,
    companions={".scales": ".scale", ".biases": ".bias"},
    optional=frozenset({".biases"}),
)
CHANGED_BY = {
    ".weight_zero_point": "its codes have zero points",
    ".weight_g_idx": "its columns are permuted",
    ".pre_quant_scale": "its inputs are scaled (AWQ)",
}
"""Suffixes of a module's tensors that change what its codes mean, unless its row names them.

Sources: compressed-tensors 0.12.2 quantization/lifecycle/initialize.py; ModelOpt's NVFP4_AWQ, whose
weights were divided by a scale that no layernorm took up (unified_export_hf.py).
"""
COMPRESSED_NVFP4 = Producer(
    name="compressed-tensors NVFP4",
    weight=".weight_packed",
    weight_dtypes=_U8,
    scale_dtypes=_E4M3,
    companions={".weight_scale": ".scale", ".weight_global_scale": ".global_scale"},
    dropped=_ACTIVATION_SCALES,
    inverse_scale=True,
)
MODELOPT_NVFP4 = Producer(
    name="ModelOpt NVFP4",
    weight=".weight",
    weight_dtypes=_U8,
    scale_dtypes=_E4M3,
    companions={".weight_scale": ".scale", ".weight_scale_2": ".global_scale"},
    dropped=_ACTIVATION_SCALES,
)
GPT_OSS = Producer(
    name="gpt-oss MXFP4",
    weight="_blocks",
    weight_dtypes=_U8,
    scale_dtypes=_U8,
    companions={"_scales": ".scale"},
    joined=True,
)
COMPRESSED_MXFP4 = Producer(
    name="compressed-tensors MXFP4",
    weight=".weight_packed",
    weight_dtypes=_U8,
    scale_dtypes=_EXPONENTS,
    companions={".weight_scale": ".scale"},
    dropped=_ACTIVATION_SCALES,
)
COMPRESSED_INTEGERS = tuple(
    Producer(
        name="compressed-tensors",
        weight=weight,
        weight_dtypes=dtypes,
        scale_dtypes=_FLOATS,
        companions={
            ".weight_scale": ".scale",
            ".weight_zero_point": ".zero",
            ".weight_shape": ".shape",
            ".weight_g_idx": ".order",
        },
        optional=frozenset({".weight_zero_point", ".weight_shape", ".weight_g_idx"}),
        dropped=_ACTIVATION_SCALES,
    )
    for weight, dtypes in ((".weight_packed", _I32), (".weight", _I8))
)
GPTQ = Producer(
    name="GPTQ",
    weight=".qweight",
    weight_dtypes=_I32,
    scale_dtypes=_FLOATS,
    companions={".scales": ".scale", ".qzeros": ".zero", ".g_idx": ".order"},
    optional=frozenset({".qzeros", ".g_idx"}),
)
BLOCK_FP8 = tuple(
    Producer(
        name="FP8",
        weight="",
        weight_dtypes=_DECODED_FP8,
        scale_dtypes=_FLOATS | _EXPONENTS,
        companions={suffix: ".scale"},
        dropped=_ACTIVATION_SCALES,
    )
    for suffix in ("_scale_inv", "_scale")  # both stand for what codes are multiplied by
)
DEEPSEEK_FP8, DEEPSEEK_FP4 = (
    Producer(
        name=name,
        weight=".weight",
        weight_dtypes=dtypes,
        scale_dtypes=scales,
        companions={".scale": ".scale"},
    )
    for name, dtypes, scales in (
        ("FP8", _DECODED_FP8, _FLOATS | _EXPONENTS),
        ("FP4", _I8, _EXPONENTS),
    )
)
QUANT_STATE = ".weight.quant_state.bitsandbytes__"
BITSANDBYTES = {
    kind: Producer(
        name="bitsandbytes",
        weight=".weight",
        weight_dtypes=_FLOATS | _U8,  # what codes are kept in is an option, quant_storage
        scale_dtypes=frozenset({DType.F32, DType.U8}),
        companions={
            ".weight.absmax": ".scale",
            ".weight.quant_map": ".quant_map",
            ".weight.nested_absmax": ".nested_absmax",
            ".weight.nested_quant_map": ".nested_quant_map",
            QUANT_STATE + kind: ".quant_state",
        },
        optional=frozenset({".weight.nested_absmax", ".weight.nested_quant_map"}),
    )
    for kind in ("nf4", "fp4")
}
BITSANDBYTES_INT8 = Producer(
    name="bitsandbytes int8",
    weight=".weight",
    weight_dtypes=_I8,
    scale_dtypes=frozenset({DType.F32}),
    companions={".SCB": ".scale", ".weight_format": ".weight_format"},
    optional=frozenset({".weight_format"}),
)
STATED = tuple(QUANT_STATE + kind for kind in BITSANDBYTES)
"""Suffixes of small tensors whose bytes say how a weight is stored: these are read first."""
OWN = Producer(
    name="blobstore",
    weight="",
    weight_dtypes=_U32,
    scale_dtypes=_FLOATS | _U8,
    companions={suffix: suffix for suffix in (".scale", ".bias", ".global_scale")},
    optional=frozenset({".bias", ".global_scale"}),
)


def _uncounted_row(
    name: str,
    weight: str,
    weight_dtypes: Iterable[DType],
    scale: str,
    *others: str,
    optional: Iterable[str] = (),
) -> Producer:
    companions = {scale: ".scale", **{suffix: suffix for suffix in (*others, *optional)}}
    return Producer(
        name,
        weight,
        frozenset(weight_dtypes),
        _SCALES,
        companions,
        optional=frozenset(optional),
    )


COMPRESSED = _uncounted_row(
    "compressed-tensors",
    ".weight_packed",
    _BYTES | _I32,
    ".weight_scale",
    optional=(".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
)
SCALED_BYTES = _uncounted_row(
    "8-bit integers with scales",
    ".weight",
    _BYTES,
    ".weight_scale",
    optional=(".weight_scale_2", ".weight_zero_point", ".weight_shape"),
)
STACKED_NVFP4 = _uncounted_row(
    "ModelOpt NVFP4", "", _U8, "_weight_scale", optional=("_weight_scale_2",)
)
QWEIGHT = _uncounted_row("GPTQ", ".qweight", _I32, ".scales", optional=(".qzeros", ".g_idx"))
EXL2 = _uncounted_row(
    "EXL2",
    ".q_weight",
    _I32,
    ".q_scale",
    ".q_invperm",
    optional=(".q_scale_max", ".q_groups", ".q_perm"),
)
EXL3 = _uncounted_row(
    "EXL3", ".trellis", {DType.I16}, ".suh", ".svh", optional=(".mcg", ".mul1", ".su", ".sv")
)
FP4_EXPERTS = (
    _uncounted_row("FP4", ".weight", _I8, ".scale"),
    _uncounted_row("FP4", "", _I8, "_scale_inv"),
)
PLAIN_BYTES = (
    BITSANDBYTES_INT8,
    _uncounted_row("EETQ", ".weight", _I8, ".weight_scales"),
)
SCALED_FP8 = (
    _uncounted_row("FP8", "", ANY_FP8, "_scale_inv"),
    _uncounted_row("FP8", "", ANY_FP8, "_scale"),
    _uncounted_row("FP8", ".weight", ANY_FP8, ".scale"),
    _uncounted_row("FP8", ".weight", ANY_FP8, ".scale_weight"),
)

_OF_OTHERS = (MLX, COMPRESSED_NVFP4, MODELOPT_NVFP4, GPT_OSS, *BLOCK_FP8)
IMPORTED = (
    *_OF_OTHERS,
    COMPRESSED_MXFP4,
    *COMPRESSED_INTEGERS,
    GPTQ,
    DEEPSEEK_FP8,
    DEEPSEEK_FP4,
    *BITSANDBYTES.values(),
    BITSANDBYTES_INT8,
    OWN,
)
"""The rows that are imported, the most specific first."""
COUNTED = (
    *_OF_OTHERS,
    COMPRESSED,
    *BITSANDBYTES.values(),
    *PLAIN_BYTES,
    SCALED_BYTES,
    STACKED_NVFP4,
    QWEIGHT,
    EXL2,
    EXL3,
    *FP4_EXPERTS,
    *SCALED_FP8,
)
"""The rows that an inspection counts; our own form is read from metadata (stored.py)."""

KV_CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    *(".k_zero_point", ".v_zero_point", ".q_zero_point"),
)
"""Suffixes of the scales of a cache of keys and values, which no weight needs."""
ASIDE = (
    *_ACTIVATION_SCALES,
    ".pre_quant_scale",
    ".global_scale",
)
"""Suffixes of a quantized module's tensors other than its weight."""


_ANY = frozenset(DType)
_INTEGERS = frozenset({DType.I32, DType.U32, DType.I64})


@dataclass(frozen=True, slots=True)
class RefusedFormat:
    """How a format is recognised: by a tensor with ``suffix`` and one of ``dtypes``.

    A second tensor has ``companion`` instead of the suffix; ``reason`` names it as ``{companion}``.
    Without a suffix, weights and experts are meant.
    """

    suffix: str
    dtypes: frozenset[DType]
    reason: str
    companion: str = ""


_NO_MODELOPT_SCALE = "packed weights need X.weight_scale (F8_E4M3) and X.weight_scale_2"
_STACKED = "packed experts that are stacked, with {companion}, are not imported"
_FP8_SCALE = "its scale {companion} lacks the dtype or shape of FP8 block scales (BF16, F16 or F32)"
_PARTS = (
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_shape"),
    *(".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".qweight", ".qzeros"),
    *(".g_idx", ".scales", ".biases", ".absmax"),
)
REFUSED_FORMATS = (
    RefusedFormat("", ANY_FP8 - _DECODED_FP8, "only F8_E4M3 and F8_E5M2 weights are decoded"),
    *(
        RefusedFormat(suffix, frozenset({DType.F8_E8M0}), "exponents are scales")
        for suffix in (".weight", ".scale")
    ),
    RefusedFormat("", _DECODED_FP8, _FP8_SCALE, "_scale_inv"),
    RefusedFormat("", _DECODED_FP8, _FP8_SCALE, "_scale"),
    RefusedFormat(
        "",
        _DECODED_FP8,
        "an FP8 weight without a scale for each of its blocks (X.weight_scale_inv)",
    ),
    RefusedFormat(
        ".weight_packed",
        _U8,
        "packed weights need X.weight_scale (F8_E4M3) and X.weight_global_scale",
    ),
    RefusedFormat(".weight_packed", _INTEGERS, "packed integers need X.weight_scale, of floats"),
    RefusedFormat(".qweight", _INTEGERS, "AWQ and GPTQ weights need X.scales, of floats"),
    RefusedFormat("", _ANY, "bitsandbytes weights need X.quant_map and a quant state", ".absmax"),
    *(
        RefusedFormat(
            suffix, _ANY, "bitsandbytes weights need X.weight, its absmax and quant state, or SCB"
        )
        for suffix in (
            *(*BITSANDBYTES["nf4"].companions, *BITSANDBYTES_INT8.companions),
            *STATED,
        )
    ),
    RefusedFormat(".W_q", _ANY, "weights of HQQ or SINQ are not imported"),
    RefusedFormat(".codes", _ANY, "AQLM weights are not imported", ".codebooks"),
    RefusedFormat(".indices", _ANY, "VPTQ weights are not imported", ".centroids.weight"),
    RefusedFormat(".dense_weights", _ANY, "SpQR weights are not imported", ".row_offsets"),
    RefusedFormat(".Qidxs", _ANY, "QuIP# weights are not imported", ".SU"),
    RefusedFormat(".trellis", _ANY, "QTIP weights are not imported", ".SU"),
    RefusedFormat(".weight", _ANY, "HIGGS weights are not imported", ".tables"),
    RefusedFormat(".qweight", _U8, "FPQuant weights are not imported", ".scales"),
    RefusedFormat("._data", _ANY, "quanto weights are not imported", "._scale"),
    RefusedFormat("._data._data", _ANY, "quanto weights are not imported", "._scale"),
    RefusedFormat("_qdata", _ANY, "torchao weights are not imported", "_scale"),
    RefusedFormat(".weight", _U8, _NO_MODELOPT_SCALE, ".weight_scale"),
    RefusedFormat(".weight", _U8, _NO_MODELOPT_SCALE, ".weight_scale_2"),
    RefusedFormat("", _U8, _STACKED, "_weight_scale"),
    RefusedFormat("", _BYTES | _I32, _STACKED, "_scale"),
    RefusedFormat("_packed", _BYTES | _I32, _STACKED, "_scale"),
    RefusedFormat(
        ".weight",
        _I8,
        "8-bit integers with X.weight_scale are imported only from compressed-tensors",
        ".weight_scale",
    ),
    RefusedFormat(".SCB", _ANY, "scales of LLM.int8 are F32, beside X.weight (I8)"),
    RefusedFormat(".weight", _U32, "{companion} do not fit weights that MLX packed", ".scales"),
    RefusedFormat(".weight", _U32, "its scales are missing, but it has {companion}", ".biases"),
    RefusedFormat("_blocks", _U8, "{companion} do not fit blocks of gpt-oss", "_scales"),
    RefusedFormat(".compressed", _ANY, "sparse weights are not imported", ".bitmask"),
    *(RefusedFormat(suffix, _ANY, "no quantized weight has such a tensor") for suffix in _PARTS),
)
"""Formats that are refused by name, the most specific first, for tensors that match no row."""

REFUSED_METHODS = {
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fouroversix": "Four Over Six",
    "fp_quant": "FPQuant",
    "gemma": "Gemma's quantization",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "metal": "transformers' Metal",
    "quanto": "quanto",
    "quark": "Quark",
    "quip": "QuIP#",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Programs whose integers are not imported, by their ``quant_method`` in config.json."""
TOOLS = {
    "AQLM": "aqlm (aqlm.utils)",
    "BitNet": "transformers (integrations.bitnet.unpack_weights)",
    "EETQ": "EETQ",
    "EXL2": "exllamav2 (ExLlamaV2Linear.get_weight_tensor_dq)",
    "EXL3": "exllamav3 (LinearEXL3.get_weight_tensor)",
    "Four Over Six": "fouroversix",
    "FPQuant": "fp_quant",
    "Gemma": "transformers (integrations.gemma_quant)",
    "HIGGS": "transformers (model.dequantize)",
    "HQQ": "hqq (HQQLinear.dequantize)",
    "Metal": "transformers (MetalConfig(dequantize=True))",
    "QTIP": "qtip",
    "QuIP#": "quip-sharp",
    "Quark": "amd-quark (quark.torch.import_model_from_safetensors)",
    "SINQ": "sinq",
    "SpQR": "spqr_quant",
    "VPTQ": "vptq (VQuantLinear.dequant)",
    "quanto": "optimum-quanto (QTensor.dequantize)",
    "torchao": "torchao (tensor.dequantize)",
}
"""What dequantizes the weights of each."""


@dataclass(frozen=True, slots=True)
class Found(Generic[_T]):
    """A quantized weight and its row. ``read_config`` returns None if config.json is missing.

    ``states``: the bytes of `STATED` tensors by their names.
    """

    row: Producer
    name: str
    tensors: Mapping[str, _T]
    read_config: Callable[[], SourceConfig | None]
    states: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def weight_name(self) -> str:
        return self.name if self.row.weight in ("", ".weight") else f"{self.base}.weight"

    @property
    def base(self) -> str:
        return self.name.removesuffix(self.row.weight)

    @property
    def tensor(self) -> _T:
        return self.tensors[self.name]

    @property
    def scale(self) -> _T:
        return self.tensors[self.base + self.row.scale]

    def companion(self, suffix: str) -> _T | None:
        return self.tensors.get(self.base + suffix)

    @property
    def config(self) -> SourceConfig:
        return self.read_config() or SourceConfig()

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.config.quantization_config or {}

    @property
    def mlx(self) -> ModuleQuantization | None:
        settings = self.config.mlx_quantization
        return settings.of(self.base) if settings is not None else None


def row_of(
    name: str, tensors: Mapping[str, TensorLike], rows: Iterable[Producer] = COUNTED
) -> Producer | None:
    """Return the row that a tensor is a weight of, or None for any other tensor."""
    return next((row for row in rows if row.stores(name, tensors)), None)
