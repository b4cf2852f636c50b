"""A model as a ModelPack artifact: each file of an export is a layer, byte for byte."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TypeVar

from blobstore.artifacts.layers import ArtifactForm, Layer
from blobstore.export.exported_arrays import CONVERTED
from blobstore.export.planned_files import ExportPlan
from blobstore.export.streamed_files import PlannedFile, digest_of, open_file
from blobstore.formats.dtypes import DType
from blobstore.formats.modelpackconfig import (
    MODELPACK_ARTIFACT_TYPE,
    MODELPACK_CONFIG_MEDIA_TYPE,
    PATH_ANNOTATIONS,
    ModelPackConfig,
    layer_media_type,
)
from blobstore.store.stored import StoredTensor
from blobstore.store.stored_model import StoredModel

_T = TypeVar("_T")


def modelpack_of(
    name: str, model: StoredModel, plan: ExportPlan, dequantize: DType | None
) -> ArtifactForm:
    """Return a model as a ModelPack artifact of the files in ``plan``; ``name`` is for its config.

    Shards come first, in their order: a runtime that loads the first file of weights gets those of
    the model, not of its draft. Raises: as `StoredModel.source_config` and `StoredModel.opened`.
    """
    files = (*plan.shards, *sorted(plan.documents, key=lambda file: file.path))
    config = _config_of(name, model, dequantize)
    return ArtifactForm(
        tuple(map(_layer, files)),
        MODELPACK_CONFIG_MEDIA_TYPE,
        config.encode,
        MODELPACK_ARTIFACT_TYPE,
    )


def _layer(file: PlannedFile) -> Layer:
    return Layer(
        file.path,
        layer_media_type(file.path),
        file.size,
        partial(open_file, file),
        partial(digest_of, file),
        dict.fromkeys(PATH_ANNOTATIONS, file.path),
    )


def _config_of(name: str, model: StoredModel, dequantize: DType | None) -> ModelPackConfig:
    dtypes, types, parameters = Counter[DType](), Counter[str](), 0
    for tensors in model.tensors_of_each(model.weight_layers):
        for tensor in tensors:
            parameters += tensor.parameters
            if (dtype := _exported_dtype(tensor, dequantize)) is not None:
                dtypes[dtype] += tensor.parameters
            if dequantize is None and tensor.quant_type is not None:
                types[tensor.quant_type.value] += tensor.parameters
    said = model.source_config or {}
    architectures, family = said.get("architectures"), said.get("model_type")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return ModelPackConfig(
        name=name,
        architecture=first if isinstance(first, str) else None,
        family=family if isinstance(family, str) else None,
        parameters=parameters,
        dtypes=_by_count(dtypes),
        quantization=_by_count(types),
    )


def _exported_dtype(tensor: StoredTensor, dequantize: DType | None) -> DType | None:
    """Return the dtype of a tensor's values in the export; None if its arrays do not say it."""
    if dequantize is not None and (tensor.quantization is not None or tensor.dtype in CONVERTED):
        return dequantize
    return tensor.value_dtype


def _by_count(counted: Counter[_T]) -> list[_T]:
    """Return what was counted, the most frequent first; ties in the order of their names."""
    return sorted(counted, key=lambda one: (-counted[one], str(one)))
