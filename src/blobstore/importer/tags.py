"""Tags: what the tag of a model says of its type, and whether a plan keeps to it."""

from __future__ import annotations

from blobstore.dtypes import DType
from blobstore.errors import UsageError
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.names import ModelName
from blobstore.quant import QuantType

_SAID: dict[str, frozenset[str]] = {
    **{kind.value: frozenset({kind.value}) for kind in QuantType},
    "q4": frozenset({"int4"}),
    "q8": frozenset({"int8"}),
    # As options these two mean int4 and int8, as in Ollama; as tags people write them for the float types too.
    "fp4": frozenset({"int4", "nvfp4", "mxfp4"}),
    "fp8": frozenset({"int8", "mxfp8"}),
    **dict.fromkeys(("bf16", "bfloat16"), frozenset({DType.BF16.value})),
    **dict.fromkeys(("f16", "fp16", "float16"), frozenset({DType.F16.value})),
    **dict.fromkeys(("f32", "fp32", "float32"), frozenset({DType.F32.value})),
}


def check_tag(plan: ImportPlan, name: ModelName) -> None:
    """Raise UsageError when the tag of ``name`` says a type, and the plan makes another one: ``x:int4`` of int8 weights."""
    said, made = _SAID.get(name.tag.lower()), _types_of(plan)
    if said is None or said & made:
        return
    what = ", ".join(sorted(made))
    raise UsageError(
        f"the tag of {name} says {name.tag}, but the weights will be {what}",
        model=str(name),
        hint="Choose another tag, or keep this one with --force.",
    )


def _types_of(plan: ImportPlan) -> set[str]:
    """Return the type that was asked for or that the source has, else the types of quantized tensors, else the dtypes."""
    if plan.config.file_type:
        return {plan.config.file_type}
    quantized = {tensor.quantization.quant_type.value for tensor in plan.tensors if tensor.quantization is not None}
    return quantized or {tensor.dtype.value for tensor in plan.tensors}
