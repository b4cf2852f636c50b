"""Names of imported models: the default one, and tags that say another type than the model gets."""

from __future__ import annotations

from blobstore.errors import InvalidNameError, UsageError
from blobstore.formats.dtypes import FLOAT_NAMES, DType
from blobstore.formats.quant import QuantType
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.names import ModelName

_SAID: dict[str, frozenset[str]] = {
    **{kind.value: frozenset({kind.value}) for kind in QuantType},
    "q4": frozenset({"int4"}),
    "q8": frozenset({"int8"}),
    # As options these two mean int4 and int8, as in Ollama; as tags people write them for the float
    # types too.
    "fp4": frozenset({"int4", "nvfp4", "mxfp4"}),
    "fp8": frozenset({"int8", "mxfp8"}),
    **{name: frozenset({dtype.value}) for name, dtype in FLOAT_NAMES.items()},
    "fp16": frozenset({DType.F16.value}),
    "fp32": frozenset({DType.F32.value}),
}


def check_tag(plan: ImportPlan, name: ModelName) -> None:
    """Raise UsageError when a tag says another type than the plan makes: ``x:int4``, but int8."""
    said, made = _SAID.get(name.tag.lower()), _types_of(plan)
    if said is None or said & made:
        return
    what = ", ".join(sorted(made))
    raise UsageError(
        f"the tag of {name} says {name.tag}, but the weights will be {what}",
        model=str(name),
        hint="Choose another tag, or keep this one with force=True.",
    )


def _types_of(plan: ImportPlan) -> set[str]:
    """Return the type of the whole model, else the types of quantized tensors, else the dtypes."""
    if plan.config.file_type:
        return {plan.config.file_type}
    quantized = {
        tensor.quantization.quant_type.value
        for tensor in plan.tensors
        if tensor.quantization is not None
    }
    return quantized or {tensor.dtype.value for tensor in plan.tensors}


def default_name(plan: ImportPlan) -> ModelName:
    """Return the source's stem, with the type (or ``latest``) as tag.

    The stem of ORG/NAME in the Hugging Face cache is NAME.

    Raises: InvalidNameError when the stem is not a model name.
    """
    stem, quant_type = plan.inventory.folder.stem, plan.options.quant_type
    try:
        return ModelName(model=stem, tag=quant_type.value if quant_type is not None else "latest")
    except InvalidNameError as error:
        hint = "Give the model a name: blobstore import SOURCE NAME."
        raise error.about(hint=hint) from None
