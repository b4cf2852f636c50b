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


def compressed(make: Any, kind: str, given: dict[str, Any], weight: Any) -> Quantized:
    arguments = make.QuantizationArgs(**given)
    scheme = make.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = make.BaseCompressor.get_value_from_registry(kind)
    scale, zero = make.calculate_qparams(*make.ranges(weight.float(), arguments), arguments)
    state = {"weight": weight, "weight_scale": scale.bfloat16()}
    if zero is not None:
        state["weight_zero_point"] = zero.to(make.torch.int8) if arguments.type == "int" else zero
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"]
    settings = make.QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status="compressed"
    )
    return stored, values, settings.to_dict()


def linear(make: Any, weight: Any) -> Any:
    layer = make.torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.half()
    return layer


def awq(make: Any, size: int, weight: Any) -> Quantized:
    layer = linear(make, weight)
    scales, zeros = make.parameters(layer.weight.data.float(), 4, size, symmetric=False)
    parts = {"scales": scales.T.contiguous(), "zeros": zeros.T.contiguous()}
    packed = make.WQLinear_GEMM.from_linear(layer, 4, size, **parts)
    values = make.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, size).T
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return tensors, values, settings | {"zero_point": True}


def gptq(make: Any, form: str, bits: int, permuted: bool, weight: Any) -> Quantized:
    torch, size, layer = make.torch, 64, linear(make, weight)
    cols = weight.shape[1]
    order = torch.randperm(cols) if permuted else torch.arange(cols)
    group = torch.empty(cols, dtype=torch.int32)
    group[order] = (torch.arange(cols) // size).int()
    ordered = layer.weight.data.float()[:, order]
    scales, zeros = make.parameters(ordered, bits, size, symmetric=False)
    packed = make.TorchLinear(
        bits=bits,
        group_size=size,
        sym=False,
        desc_act=permuted,
        in_features=cols,
        out_features=len(weight),
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
    )
    packed.pack_block(layer, scales, zeros, group)
    values = packed.dequantize_weight().T
    if form == "gptq":
        numbers = make.types.SimpleNamespace(bits=bits, pack_dtype=torch.int32, runtime_bits=bits)
        make.convert_gptq_v2_to_v1_format_module(packed, quantize_config=numbers)
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False}
    return tensors, values, settings | {"desc_act": permuted, "checkpoint_format": form}


def auto_round(make: Any, form: str, weight: Any) -> Quantized:
    layer, bits, size, (rows, cols) = linear(make, weight), 4, 128, weight.shape
    scales, zeros = make.parameters(layer.weight.data.float(), bits, size, symmetric=False)
    kind = make.LessOne if form.endswith("auto_gptq") else make.QuantLinear
    packed = kind(bits, size, cols, rows, bias=False, g_idx=form.endswith("gptqmodel"))
    packed.device = "cpu"
    packed.pack(layer, scales.float(), zeros, None, device="cpu")
    values = packed(make.torch.eye(cols)).T.half()
    settings = {"quant_method": "auto-round", "packing_format": form, "bits": bits}
    return dict(packed.named_buffers()), values, settings | {"group_size": size, "sym": False}


def bitsandbytes(make: Any, kind: str, weight: Any) -> Quantized:
    library, shape = make.bitsandbytes, weight.shape
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8"}
    settings["load_in_8bit"] = kind == "int8"
    if kind == "int8":
        layer = library.nn.Linear8bitLt(*reversed(shape), bias=False, has_fp16_weights=False)
        layer.weight.data = weight.float()
        layer.to("cpu")
        values = library.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        return dict(layer.state_dict()), values.bfloat16(), settings
    layer = library.nn.Linear4bit(*reversed(shape), bias=False)
    layer.weight = library.nn.Params4bit(
        weight, compress_statistics=True, quant_type=kind, module=layer
    )
    layer.to("cpu")
    values = library.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
    settings |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": True}
    return dict(layer.state_dict()), values, settings


def mlx(make: Any, bits: int, weight: Any) -> Quantized:
    given = mx.array(weight.float().numpy()).astype(mx.bfloat16)
    parts = mx.quantize(given, group_size=64, bits=bits)
    codes, scales, biases = parts
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(codes, scales, biases, group_size=64, bits=bits)
    tensors = {
        name: make.torch.from_numpy(
            np.array(part if part.dtype == mx.uint32 else part.astype(mx.float32))
        )
        for name, part in zip(("weight", "scales", "biases"), parts, strict=True)
    }
    tensors = {name: one if name == "weight" else one.bfloat16() for name, one in tensors.items()}
    return tensors, make.torch.from_numpy(np.array(values)), {"group_size": 64, "bits": bits}


def cases(make: Any) -> Iterator[tuple[str, Callable[[Any], Quantized]]]:
    for name in (
        *("int4-g128", "int4-g32-zeros", "int8-g128", "int8-bytes-rows"),
        *("fp8-matrix", "fp8-rows", "fp8-blocks"),
    ):
        yield f"compressed-tensors {name}", partial(compressed, make, *make.COMPRESSED[name])
    yield "AWQ int4-g128", partial(awq, make, 128)
    for form, bits, permuted in (
        ("gptq", 4, False),
        ("gptq_v2", 4, False),
        ("gptq", 3, False),
        ("gptq", 8, False),
        ("gptq", 4, True),
    ):
        yield (
            f"{form} {bits} bits" + ", desc_act" * permuted,
            partial(gptq, make, form, bits, permuted),
        )
    for form in ("auto_round", "auto_round:auto_gptq"):
        yield f"AutoRound 4 bits, {form}", partial(auto_round, make, form)
    for kind in ("nf4", "fp4", "int8"):
        yield f"bitsandbytes {kind}", partial(bitsandbytes, make, kind)
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
