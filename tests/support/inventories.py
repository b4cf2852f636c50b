"""Inventories made by hand: what an importer knows of a checkpoint, without a file."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.dtypes import DType
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.plan import make_plan
from blobstore.io.ranges import FileIdentity
from blobstore.source.folders import LocalFolder, SourceFile, SourceTensor
from blobstore.source.inventory import Inventory

_FOLDER = LocalFolder(Path("/models/tiny"))
_FILE = SourceFile(
    _FOLDER,
    "model.safetensors",
    "/models/tiny/model.safetensors",
    FileIdentity(Path(__file__).stat()),
    4096,
    (),
    {},
)


def source_tensor(name: str, *shape: int, dtype: DType = DType.BF16) -> SourceTensor:
    """Return a tensor of a file that is not there."""
    return SourceTensor(name, _FILE, dtype, shape, 0, dtype.nbytes(shape))


def inventory(
    tensors: Iterable[SourceTensor],
    *,
    folder: str = "/models/tiny",
    architecture: str | None = "LlamaForCausalLM",
    **config_items: Any,
) -> Inventory:
    """Return a checkpoint of one file; without config.json when ``architecture`` is None."""
    members = list(tensors)
    names = tuple(tensor.name for tensor in members)
    file = replace(
        _FILE, path=f"{folder}/model.safetensors", tensor_names=names, metadata={"format": "pt"}
    )
    by_name = {
        tensor.name: replace(tensor, file=file)
        for tensor in sorted(members, key=lambda tensor: tensor.name)
    }
    config = (
        None
        if architecture is None
        else json.dumps({"architectures": [architecture], **config_items}).encode()
    )
    documents = {"config.json": config} if config is not None else {}
    return Inventory(
        folder,
        LocalFolder(Path(folder)),
        (file,),
        by_name,
        documents,
        SourceConfig.parse(config) if config is not None else None,
    )


def expert_tensors(
    count: int = 2, up: tuple[int, int] = (64, 64), down: tuple[int, int] = (64, 64), layer: int = 0
) -> list[SourceTensor]:
    """Return the projections of a layer's experts, by number and name."""
    shapes = {"down_proj": down, "gate_proj": up, "up_proj": up}
    return [
        source_tensor(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", *shape)
        for expert in range(count)
        for name, shape in shapes.items()
    ]


def plan_of(tensors: Iterable[SourceTensor], config: Any = None, **options: Any) -> ImportPlan:
    """Return the plan of a checkpoint of these tensors; ``config`` as `inventory`."""
    return make_plan(inventory(tensors, **config or {}), ImportOptions.parse(**options))


def types_of(plan: ImportPlan) -> dict[str, str]:
    """Return each tensor's type and group size, as in "int4/32"; "none" if it has none."""
    return {tensor.name: str(tensor.quantization or "none") for tensor in plan.tensors}
