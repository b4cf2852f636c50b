"""mlx-lm: which models it loads, from tables; and the package itself, where it is needed.

``import mlx_lm`` imports transformers, and PyTorch where that is installed: 1.9 seconds of a
processor and 150 MB of memory. Its networks are modules without either (mlx_lm/models), but Python
runs the code of a package before any module of it, unless that is prevented
(`without_package_code`).

Source: mlx-lm 0.32.2. `MODULES` are the modules of mlx_lm/models that have a ``Model`` and its
``ModelArgs``; `REMAPPED` and `REMAPPED_ARCHITECTURES` are ``MODEL_REMAPPING`` and
``MODEL_ARCHITECTURE_REMAPPING`` of mlx_lm/utils.py. tests/unit/model/test_mlx_lm_table.py compares
them with the installed mlx-lm, and prints them anew where they differ.
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError, install_hint
from blobstore.model.facts import Config, Layout, ModelFacts, Runs, Verdict

NAME = "mlx-lm"
VERSION = "0.32.2"

MODULES = frozenset(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear
    bailing_moe_v3 bitnet cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v41 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2
    gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
    gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
    hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl
    laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash
    longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax
    minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark nanbeige nanochat
    nemotron nemotron-nas nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phi3small
    phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7
    seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
    """.split()  # noqa: SIM905  # as a list it would be as long as the rest of the file
)
REMAPPED = {
    "deepseek_v41_text": "deepseek_v41",
    "falcon_mamba": "mamba",
    "gemma4_unified": "gemma4",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "qwen2_5_vl": "qwen2_vl",
    "xverse": "llama",
}
REMAPPED_ARCHITECTURES = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}

# What a module imports that mlx-lm does not bring along (mlx_lm 0.32.2 models/olmo.py).
_PACKAGES = {"olmo": "ai2-olmo"}


_PACKAGE = "mlx_lm"
# Characters of an error of mlx-lm's in a message.
_LONGEST = 300


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return True if files of those names have a tokenizer among them."""
    return any(name.startswith(("tokenizer", "vocab")) for name in names)


def module_for(config: Config) -> str | None:
    """Return the module of mlx_lm/models with the network of a config.json; None if unknown.

    Source: mlx_lm/utils.py `_get_classes` at version 0.32.2.
    """
    model_type, named = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str):
        return None
    architectures = named if isinstance(named, list) else [named]
    own = (
        REMAPPED_ARCHITECTURES.get((model_type, architecture))
        for architecture in architectures
        if isinstance(architecture, str)
    )
    module = next(filter(None, own), None) or REMAPPED.get(model_type, model_type)
    return module if module in MODULES else None


def verdict(model: ModelFacts) -> Verdict:
    """Return the verdict of mlx-lm, if `blobstore.mlx_lm.load` loads the model."""
    module = module_for(model.config or {})
    if reason := next(_obstacles(model, module), None):
        return Verdict(NAME, VERSION, Runs.NO, reason)
    model_type = (model.config or {})["model_type"]
    if module in _PACKAGES:
        return Verdict(
            NAME, VERSION, Runs.UNKNOWN, f"{model_type} needs the package {_PACKAGES[module]}"
        )
    words = [model_type if model_type == module else f"{model_type} as {module}", model.types]
    if model.has_other_senses:
        words.append("text only")
    if model.draft is not None:
        words.append("without its draft")
    if any(tensor.double_scaled for tensor in model.tensors):
        words.append("not from an exported folder, because of its global scales")
    return Verdict(NAME, VERSION, Runs.YES, ", ".join(words))


def _why_unknown(model: ModelFacts) -> str:
    if model.config is None:
        return "config.json is missing"
    model_type = model.config.get("model_type")
    is_named = isinstance(model_type, str)
    return f"it has no model type {model_type}" if is_named else "config.json has no model_type"


def _obstacles(model: ModelFacts, module: str | None) -> Iterator[str]:
    if module is None:
        yield _why_unknown(model)
    if not has_tokenizer(model.documents):
        yield "the tokenizer is missing"
    for tensor in model.tensors:
        if not tensor.fits_mlx:
            yield f"MLX has no {tensor.dtype} arrays like {tensor.name}"
    # Checkpoints of other programs. Sources: `sanitize` of mlx_lm 0.32.2 models/gpt_oss.py, which
    # names experts ``.weight`` only where they are quantized; models/bitlinear_layers.py.
    fused = [group for group in model.experts if group.layout is Layout.FUSED]
    for group in fused if module == "gpt_oss" else ():
        plain = next((tensor.name for tensor in group.tensors if tensor.quantization is None), None)
        if plain is not None:
            yield (
                "it reads experts of gate and up in one tensor only when they are quantized, and"
                f" {plain} is not"
            )
        hidden = (model.config or {}).get("hidden_size")
        tensor = group.projections["gate_up_proj"][0]
        if type(hidden) is int and tensor.shape[-1] != hidden:
            yield f"{tensor.name} is quantized along its outputs, as Ollama's importer does"
    if module == "bitnet" and not any(
        tensor.name.endswith(".weight_scale") for tensor in model.tensors
    ):
        yield "it reads BitNet's weights only when they are packed, with a weight_scale each"


def import_mlx_lm() -> Any:
    """Return mlx-lm's ``utils``. Raises: UsageError without the ``lm`` extra."""
    require_mlx_lm()
    from mlx_lm import utils

    return utils


def require_mlx_lm() -> None:
    """Raise UsageError without the ``lm`` extra. Nothing is imported."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise UsageError("mlx-lm is not installed", hint=install_hint("lm"))


def network_classes(config: Config) -> tuple[Any, Any]:
    """Return mlx-lm's classes of a config.json: that of the network, and that of its settings.

    Raises: UsageError without the ``lm`` extra; what mlx-lm raises, ValueError among it for an
    unknown type.
    """
    from importlib import metadata  # which imports sockets

    # Where its version is not that of our table, its own is asked.
    name = module_for(config) if metadata.version("mlx-lm") == VERSION else None
    if name is not None:
        module = importlib.import_module(f"{_PACKAGE}.models.{name}")
        return module.Model, module.ModelArgs
    # load_model itself insists on files in a folder; its default is the table of architectures.
    options = inspect.signature(import_mlx_lm().load_model).parameters
    model_class, args_class = options["get_model_classes"].default(config)
    return model_class, args_class


def without_package_code() -> None:
    """Let mlx-lm's modules be imported without the code of the package itself.

    Nothing happens if it is imported already, or missing. Only for a process of our own, before it
    has threads; names that the package's code defines are missing then.
    """
    spec = importlib.util.find_spec(_PACKAGE) if _PACKAGE not in sys.modules else None
    if spec is not None:
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)


@contextmanager
def mlx_lm_errors(doing: str, model: str | None) -> Iterator[None]:
    """Raise UnsupportedSourceError, naming ``model``, for any error of mlx-lm.

    SystemExit too: OLMo's module ends the process where the package ``ai2-olmo`` is missing
    (mlx_lm/models/olmo.py, 0.32.2).
    """
    try:
        yield
    except BlobStoreError as error:
        if model is None:
            raise
        raise error.at(f"model {model}", model=model) from error
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        what = "it" if model is None else f"model {model}"
        raise UnsupportedSourceError(
            f"mlx-lm can't {doing} {what}: {in_one_line(reason)}", model=model
        ) from error


def in_one_line(text: str) -> str:
    """Return an error's text for a message.

    It may repeat values of a hostile config.json, or list a function's forms.
    """
    line = " ".join(text.split())
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line[:_LONGEST])
    return shown if len(line) <= _LONGEST else f"{shown}…"
