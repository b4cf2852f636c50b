"""Perplexity of a model that other libraries quantized, as they read it and as blobstore does.

``PYTHONPATH=LIBRARIES python tests/bench/perplexity.py [WORD…]``, where fixtures/producers/make.py
runs: the cases with a word in their names, or all. ``--gguf DIR``: the GGUF files of pycode-5m in a
folder instead, with the values of the gguf package. Each library quantizes the linear layers of
fixtures/pycode-5m. A row has the perplexity of 8 held-out texts of 256 tokens with the library's
dequantized values, with those that blobstore stores, and with those after ``--quant int4`` and
``--quant int8``. All is computed in float32 by transformers, so only stored values differ.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.torch import load_file, save_file
from tables import show, table

from blobstore import Store, import_model, open_model

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "fixtures" / "pycode-5m"
Tensors = dict[str, Any]
Quantized = tuple[Tensors, Any, dict[str, Any]]
"""A module's tensors, the library's values of its weight, and settings in config.json."""


def libraries() -> Any:
    """Return make.py of the fixtures, which imports the libraries."""
    sys.path.insert(0, str(ROOT / "fixtures" / "producers"))
    return importlib.import_module("make")


def mlx(make: Any, bits: int, weight: Any) -> Quantized:
    given = mx.array(weight.float().numpy()).astype(mx.bfloat16)
    codes, *others = mx.quantize(given, group_size=64, bits=bits)
    scales, biases = (one.astype(mx.float32) for one in others)
    values = mx.dequantize(codes, scales, biases, group_size=64, bits=bits)
    tensor = make.torch.from_numpy
    stored = {"scales": scales, "biases": biases}
    stored = {name: tensor(np.array(one)).bfloat16() for name, one in stored.items()}
    stored["weight"] = tensor(np.array(codes))
    return stored, tensor(np.array(values)), {"group_size": 64, "bits": bits}


def cases(make: Any) -> Iterator[tuple[str, Callable[[Any], Quantized]]]:
    for name in (
        *("int4-g128", "int4-g32-zeros", "int8-g128", "int8-bytes-rows"),
        *("fp8-matrix", "fp8-rows", "fp8-blocks"),
    ):
        kind, given = make.COMPRESSED[name]
        how = partial(make.compressed_tensors, kind=kind, given=given)
        yield f"compressed-tensors {name}", how
    zeros: dict[str, Any] = {"symmetric": False}
    yield "AWQ int4-g128", partial(make.awq, size=128, **zeros)
    for form, bits, permuted in (
        *(("gptq", 4, False), ("gptq_v2", 4, False), ("gptq", 3, False), ("gptq", 8, False)),
        ("gptq", 4, True),
    ):
        how = partial(make.gptq, form=form, bits=bits, size=64, permuted=permuted, **zeros)
        yield f"{form} {bits} bits" + ", desc_act" * permuted, how
    for form in ("auto_round", "auto_round:auto_gptq"):
        how = partial(make.auto_round, form=form, bits=4, size=128, **zeros)
        yield f"AutoRound 4 bits, {form}", how
    for kind in ("nf4", "fp4"):
        more = {"kind": kind, "size": 64, "storage": make.torch.uint8, "nested": True}
        yield f"bitsandbytes {kind}", partial(make.bitsandbytes_4bit, **more)
    yield "bitsandbytes int8", make.bitsandbytes_int8
    for bits in (3, 6):
        yield f"MLX {bits} bits", partial(mlx, make, bits)


def write(folder: Path, quantize: Callable[[Any], Quantized]) -> dict[str, Any]:
    """Write the quantized model; return the library's values of all weights, in float32."""
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, weight in load_file(SOURCE / "model.safetensors").items():
        if ".layers." not in name or weight.ndim == 1:
            tensors[name], values[name] = weight, weight.float().numpy()
            continue
        stored, read, settings = quantize(weight)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{suffix}": part.contiguous() for suffix, part in stored.items()}
        values[name] = read.float().numpy()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((SOURCE / "config.json").read_text())
    key = "quantization_config" if "quant_method" in settings else "quantization"
    (folder / "config.json").write_text(json.dumps({**config, key: settings}, default=str))
    return values


def texts() -> Any:
    """Return token ids [8, 256]; the first of each text is context only."""
    return np.load(SOURCE / "heldout_ids.npy").reshape(-1, 256)[:8].astype(np.int32)


def perplexity(network: Any, values: dict[str, Any]) -> float:
    """Return the perplexity of transformers' model with these weights, in float32."""
    torch = sys.modules["torch"]
    state = {name: torch.from_numpy(np.array(one, np.float32)) for name, one in values.items()}
    network.load_state_dict(state, strict=True)
    tokens = torch.from_numpy(texts().astype(np.int64))
    with torch.no_grad():
        logits = network(tokens[:, :-1]).logits.float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return float(losses.exp())


def gguf_values(path: Path) -> dict[str, Any]:
    """Return the gguf package's values of all weights by their names in transformers' model."""
    library = importlib.import_module("gguf")
    names = library.get_tensor_name_map(library.MODEL_ARCH.QWEN3, 99)
    wanted = load_file(SOURCE / "model.safetensors")
    tensors = {one.name: one for one in library.GGUFReader(path).tensors}
    read = {name: tensors[names.get_name(name, try_suffixes=(".weight",))] for name in wanted}
    return {name: library.dequantize(one.data, one.tensor_type) for name, one in read.items()}


def rows(make: Any, work: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield each case's name, what to import, and the library's values."""
    if sys.argv[1:2] == ["--gguf"]:
        for path in sorted(Path(sys.argv[2]).glob("pycode-5m-*.gguf")):
            yield path.stem.replace("pycode-5m-", "GGUF "), path, gguf_values(path)
        return
    for name, quantize in cases(make):
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            folder = work / name.replace(" ", "-")
            yield name, folder, write(folder, quantize)


def main() -> None:
    torch = importlib.import_module("torch")
    make = None if "--gguf" in sys.argv else libraries()
    torch.manual_seed(0)
    network = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
        SOURCE, dtype=torch.float32
    )
    table("producer", "library", "blobstore", "difference", "types", "int4/32", "int8/32")
    with tempfile.TemporaryDirectory() as work:
        store = Store(Path(work) / "store")
        for name, source, values in rows(make, Path(work)):
            wanted = perplexity(network, values)
            got: list[float] = []
            types: set[str] = set()
            for options in ({}, {"quant": "int4"}, {"quant": "int8"}):
                more: dict[str, Any] = {**options, "requantize": True} if options else {}
                import_model(source, "m", store=store, force=True, **more)
                with open_model("m", store=store) as model:
                    got.append(perplexity(network, {one: model[one].dequantize() for one in model}))
                    if not options:
                        types = {one.type_text for key, one in model.items() if ".mlp." in key}
            change = f"{100 * (got[0] / wanted - 1):+.3f} %"
            figures = (f"{number:.3f}" for number in got[1:])
            show(
                (name, f"{wanted:.3f}", f"{got[0]:.3f}", change, "/".join(sorted(types)), *figures)
            )


if __name__ == "__main__":
    main()
