"""Models for mlx-lm equal those that mlx-lm builds: quantized layers, experts in both forms."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx import core as mx, nn
from mlx_lm import generate, utils
from support import PYCODE, PYCODE_MOE, QUANT_TYPES, ROOT
from support.checkpoints import write_checkpoint
from support.stores import blob_path, manifest_path

import blobstore
from blobstore.cli.main import run
from blobstore.errors import DocumentError, NotFoundError, UnsupportedSourceError
from blobstore.kernels.arrays import QuantizedArray
from blobstore.store.local.store import Store

sys.path.append(str(ROOT / "tests" / "bench"))
from perplexity import perplexity  # a program, not a package

TOKENS = mx.array(np.load(PYCODE / "heldout_ids.npy")[:24].astype(np.int32)[None])


def stored(source: Path, store: Store, **options: Any) -> Any:
    blobstore.import_model(source, "m", store=store, **options)
    return blobstore.mlx_lm.load("m", store=store)[0]


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(TOKENS).astype(mx.float32))


def quantized_by_mlx(source: Path, store: Store, *, in_float32: bool) -> Any:
    """Return mlx-lm's own model of the source, quantized by MLX as the stored model's plan says."""
    model, _ = utils.load_model(source, lazy=True)
    summary = blobstore.open_model("m", store=store)
    kinds = {
        name.removesuffix(".weight"): tensor
        for name, tensor in summary.items()
        if tensor.quant_type
    }

    def settings(path: str, _: Any) -> Any:
        tensor = kinds.get(path) or kinds.get(path.replace("switch_mlp", "experts.0"))
        if tensor is None or tensor.quant_type is None:
            return False
        return {
            "group_size": tensor.group_size,
            "bits": tensor.quant_type.bits,
            "mode": tensor.quant_type.mode,
        }

    if in_float32:
        model.set_dtype(mx.float32)
    nn.quantize(model, class_predicate=settings)
    return model


def test_perplexity_of_the_unquantized_fixture(store: Store) -> None:
    # Of the first 2 sequences; of the first 20 it is 24.345.
    assert perplexity(stored(PYCODE, store), PYCODE, 2) == pytest.approx(47.713, abs=0.02)


def test_perplexity_of_the_unquantized_mixture(store: Store) -> None:
    # Of the first 2 sequences; of the first 20 it is 30.195.
    assert perplexity(stored(PYCODE_MOE, store), PYCODE_MOE, 2) == pytest.approx(53.632, abs=0.02)


@pytest.mark.parametrize("quant", ["int4", "int8"])
@pytest.mark.parametrize("source", [PYCODE, PYCODE_MOE], ids=["dense", "mixture"])
def test_affine_models_compute_what_mlx_lm_computes(source: Path, quant: str, store: Store) -> None:
    ours = logits(stored(source, store, quant=quant))
    np.testing.assert_array_equal(ours, logits(quantized_by_mlx(source, store, in_float32=False)))


@pytest.mark.parametrize("quant", [None, *QUANT_TYPES])
def test_packed_and_stacked_experts_compute_the_same(quant: str | None, tmp_path: Path) -> None:
    # Experts are promoted one by one in the stacked form, so only types without promotion store the
    # same weights.
    forms = {}
    for form in ("packed", "stacked"):
        store = blobstore.open_store(tmp_path / form)
        forms[form] = logits(stored(PYCODE_MOE, store, quant=quant, experts=form))
    if quant == "int4":
        assert np.abs(forms["packed"] - forms["stacked"]).max() < 4
    else:
        np.testing.assert_array_equal(forms["packed"], forms["stacked"])


@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_quantized_layers_are_as_stored(quant: str, store: Store) -> None:
    model = stored(PYCODE, store, quant=quant)
    layers = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    with blobstore.open_model("m", store=store) as opened:
        kinds = {
            name.removesuffix(".weight"): tensor
            for name, tensor in opened.items()
            if tensor.quant_type
        }
        assert layers.keys() == kinds.keys()
        for path, tensor in kinds.items():
            layer = layers[path]
            assert tensor.quant_type is not None
            assert (layer.bits, layer.group_size, layer.mode) == (
                tensor.quant_type.bits,
                tensor.group_size,
                tensor.quant_type.mode,
            )
            codes = tensor.numpy()
            assert isinstance(codes, QuantizedArray)
            np.testing.assert_array_equal(np.array(layer.weight), codes.weight)


def test_run_prints_what_mlx_lm_generates(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    prompt = "def read_file(path):"
    model, tokenizer = blobstore.mlx_lm.load("m", store=store)
    expected = generate(model, tokenizer, prompt, max_tokens=12)
    line = ["run", "m", prompt, "--max-tokens", "12", "--store", str(store.root)]
    assert run(line) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert run([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["tokens"]) == (expected, 12)
    assert (document["prompt_tokens"], document["finish_reason"]) == (7, "length")


def test_a_bare_file_has_no_config_to_run(store: Store) -> None:
    blobstore.import_model(PYCODE / "model.safetensors", "m", store=store)
    with pytest.raises(NotFoundError, match=r"config\.json"):
        blobstore.mlx_lm.load("m", store=store)


def test_an_unknown_architecture_is_named(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(
        tmp_path / "source", config={"architectures": ["Nope"], "model_type": "nope"}
    )
    blobstore.import_model(source, "m", store=store)
    with pytest.raises(UnsupportedSourceError, match="nope"):
        blobstore.mlx_lm.load("m", store=store)


def test_missing_tensors_are_named(tmp_path: Path, store: Store) -> None:
    config = json.loads((PYCODE / "config.json").read_text())
    blobstore.import_model(write_checkpoint(tmp_path / "source", config=config), "m", store=store)
    with pytest.raises(UnsupportedSourceError, match="m:latest"):
        blobstore.mlx_lm.load("m", store=store)


@pytest.mark.parametrize("document", ["config.json", "blobstore.json"])
def test_a_damaged_document_is_told_with_its_model(document: str, store: Store) -> None:
    blobstore.import_model(PYCODE, "m", store=store)
    path = manifest_path(store, "m")
    manifest = json.loads(path.read_text())
    layer = next(one for one in manifest["layers"] if one.get("name") == document)
    damaged = b"[]"
    layer |= {"digest": f"sha256:{hashlib.sha256(damaged).hexdigest()}", "size": len(damaged)}
    blob_path(store, damaged).write_bytes(damaged)
    path.write_text(json.dumps(manifest))
    with pytest.raises(DocumentError, match=rf"^model m:latest: {document} is not a JSON object"):
        blobstore.mlx_lm.load_network("m", store=store)
