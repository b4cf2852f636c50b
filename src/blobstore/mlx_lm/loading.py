"""Loading: `load` returns of a stored model what ``mlx_lm.load`` returns for a folder.

Quantized layers stay as stored. Each layer's type and group size come from its stored arrays, so a
model may mix them (model/network.py).
"""

from __future__ import annotations

import importlib.metadata
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.errors import DocumentError, InvalidNameError, UnsupportedSourceError
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config
from blobstore.formats.documents import OWN_DOCUMENT, Provenance
from blobstore.formats.dtypes import float_dtype
from blobstore.io.durable import make_folder, os_errors
from blobstore.mlx_lm.prompts import generation_config
from blobstore.model import on_mlx_lm
from blobstore.model.facts import Runs, TensorFacts, Verdict
from blobstore.model.loader import Model, open_model
from blobstore.model.network import NetworkPlan, build_network, plan_network, planned_arrays
from blobstore.model.on_mlx_lm import import_mlx_lm, mlx_lm_errors
from blobstore.names import ModelName, relative_path
from blobstore.store.places import StorePlace
from blobstore.store.ports import Readable

if TYPE_CHECKING:  # loading a model does not need the importer
    from blobstore.importer.outputs import ImportPlan

_log = logging.getLogger("blobstore.mlx_lm")

_DRAFT_TENSORS = "draft."
_DRAFT_FILES = "draft/"
_NOT_FOR_TOKENIZERS = (".safetensors", ".py")


def load(name: str | ModelName, *, store: Readable | StorePlace = None) -> tuple[Any, Any]:
    """Return ``(model, tokenizer)`` of a stored model, for ``mlx_lm.generate`` and the like.

    The architecture is the one of the stored config.json, the tokenizer the one of the stored
    files; no code from the model is run. A text ends at the tokens that generation_config.json
    names, as with ``mlx_lm.load``. On a CPU, unquantized experts are converted to float32, because
    MLX multiplies them only in that type there (mlx 0.32.4, ``GatherMM``).

    Raises: as `open_model`; UsageError without the ``lm`` extra; UnsupportedSourceError when mlx-lm
    does not know the architecture, or the stored tensors are not those that it needs.
    """
    with open_model(name, store=store) as model:
        return build(model), tokenizer_of(model)


def load_network(name: str | ModelName, *, store: Readable | StorePlace = None) -> Any:
    """Return mlx-lm's network of a stored model: an ``mlx.nn.Module`` with its weights.

    It is `load` without a tokenizer. Raises: as `load`, but for the tokenizer.
    """
    with open_model(name, store=store) as model:
        return build(model)


def check_plan(plan: ImportPlan) -> Verdict:
    """Return the verdict of the installed mlx-lm on a planned import.

    Its network is built, and every tensor fitted to it; no weight is read. Without a config.json or
    a tokenizer the verdict is that of the plan.

    Raises: UsageError without the ``lm`` extra; DocumentError for a config.json that is not one.
    """
    import_mlx_lm()
    table, version = on_mlx_lm.verdict(plan.facts), importlib.metadata.version("mlx-lm")
    if CONFIG_NAME not in plan.documents or (table.runs is Runs.NO and "tokenizer" in table.reason):
        return table
    try:
        network = planned_network(plan)
        for _ in planned_arrays(network):
            pass  # the arrays themselves are not needed, only the errors
    except UnsupportedSourceError as error:
        return replace(table, version=version, runs=Runs.NO, reason=error.message)
    lost = len(network.dequantized)
    reason = f"checked; {lost} of {len(network.tensors)} tensors dequantized" if lost else "checked"
    return replace(table, version=version, runs=Runs.YES, reason=reason)


def planned_network(plan: ImportPlan) -> NetworkPlan:
    """Return mlx-lm's network of a planned import, which has a config.json.

    Raises: UsageError without the ``lm`` extra; DocumentError for a config.json that is not one;
    UnsupportedSourceError when mlx-lm does not know the architecture, or the planned tensors are
    not those that it needs.
    """
    config = parse_config(plan.documents[CONFIG_NAME])
    names = frozenset(name for file in plan.inventory.files for name in file.tensor_names)
    return plan_network(config, plan.facts.tensors, None, names)


def build(model: Model) -> Any:
    """Return mlx-lm's network of an open model. Raises: as `load_network`."""
    tensors = {
        name: tensor for name, tensor in model.items() if not name.startswith(_DRAFT_TENSORS)
    }
    try:
        config = parse_config(model.document(CONFIG_NAME))
        names = None
        if OWN_DOCUMENT in model.documents():
            names = Provenance.parse(model.document(OWN_DOCUMENT)).tensor_names
    except DocumentError as error:
        raise error.at(f"model {model.name}") from error
    values = float_dtype(config)
    facts = [TensorFacts.of(name, tensor, values) for name, tensor in tensors.items()]
    plan = plan_network(config, facts, str(model.name), names)
    for note in plan.notes:
        _log.warning("%s", note)
    network = build_network(plan, tensors, str(model.name))
    with mlx_lm_errors("load", str(model.name)):
        _make_runnable(network)
    return network


def _make_runnable(network: Any) -> None:
    """Evaluate the weights, converted to float32 where MLX can't multiply unquantized experts."""
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchLinear

    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and any(isinstance(module, SwitchLinear) for module in network.modules()):
        _log.info("unquantized experts: float32, because MLX has no other on a CPU")
        for module in network.modules():
            if not module.children() and not hasattr(module, "bits"):
                module.set_dtype(mx.float32)
    mx.eval(network.parameters())


def tokenizer_of(model: Model) -> Any:
    """Return mlx-lm's tokenizer for the stored files, which it can only read from a folder.

    Raises: UnsupportedSourceError without the files of a tokenizer, and for files that transformers
    can't read.
    """
    if not on_mlx_lm.has_tokenizer(model.files()):  # transformers would make an empty one
        raise UnsupportedSourceError(f"model {model.name} has no tokenizer", model=str(model.name))
    with (
        os_errors("make", "a temporary folder"),
        tempfile.TemporaryDirectory(prefix="blobstore-tokenizer-") as folder,
    ):
        _write_files(model, Path(folder))
        utils, config = import_mlx_lm(), parse_config(model.document(CONFIG_NAME))
        # As mlx_lm/utils.py `load_config` chooses the tokens that end a text (0.32.2).
        own = generation_config(model).get("eos_token_id") or config.get("eos_token_id")
        with mlx_lm_errors("load the tokenizer of", str(model.name)):
            # Without the option, transformers asks at the terminal whether to run a model's code.
            return utils.load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=own)


def _write_files(model: Model, folder: Path) -> None:
    """Write the model's own files into ``folder``, but no code, which transformers might import.

    A tokenizer's files are in one folder, or in folders of it.
    """
    for name in model.files():
        if (
            name.count("/") > 1
            or name.startswith(_DRAFT_FILES)
            or name.endswith(_NOT_FOR_TOKENIZERS)
        ):
            continue
        try:
            path = folder / relative_path(name)
        except InvalidNameError as error:
            raise UnsupportedSourceError(
                f"model {model.name}: {error}", model=str(model.name)
            ) from None
        with os_errors("write", path):
            make_folder(path.parent, durable=False)
            path.write_bytes(model.file(name))
