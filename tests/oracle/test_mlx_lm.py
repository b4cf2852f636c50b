"""Models for mlx-lm equal those that mlx-lm builds: layers, experts, scales, tokenizers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
import sentencepiece
from mlx import core as mx, nn
from mlx_lm import generate, utils
from support import PYCODE, PYCODE_MOE
from support.checkpoints import write_checkpoint
from support.layouts import TEMPLATE, write

import blobstore
from blobstore.cli.main import run
from blobstore.errors import NotFoundError, UnsupportedSourceError
from blobstore.mlx_lm.conversation import load_language_model
from blobstore.store.local.store import Store

TOKENS = mx.array(np.load(PYCODE / "heldout_ids.npy")[:3].astype(np.int32)[None])


def stored(source: Path, store: Store, **options: Any) -> Any:
    """Import a source as model ``m`` and return mlx-lm's model of it."""
    blobstore.import_model(source, "m", store=store, **options)
    return blobstore.mlx_lm.load("m", store=store)[0]


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(TOKENS).astype(mx.float32))


def test_affine_models_compute_what_mlx_lm_computes(store: Store) -> None:
    """mlx-lm's own model of the source is quantized by MLX as the stored one is."""
    ours = stored(PYCODE_MOE, store, quant="int4")
    theirs, _ = utils.load_model(PYCODE_MOE, lazy=True)
    with blobstore.open_model("m", store=store) as model:
        none: Any = (False, None)
        kinds: dict[str, Any] = {
            name.removesuffix(".weight"): (one.quant_type or False, one)
            for name, one in model.items()
        }

    def settings(path: str, _: Any) -> Any:
        kind, one = kinds.get(path) or kinds.get(path.replace("switch_mlp", "experts.0")) or none
        return kind and {"group_size": one.group_size, "bits": kind.bits, "mode": kind.mode}

    nn.quantize(theirs, class_predicate=settings)
    np.testing.assert_array_equal(logits(ours), logits(theirs))


def test_logits_with_global_scales_are_those_of_the_dequantized_weights(store: Store) -> None:
    """mlx-lm's own model of the source gets the stored model's values in float32."""
    model = stored(PYCODE_MOE, store, quant="nvfp4", global_scale=True, experts="stacked")
    scaled = [module for _, module in model.named_modules() if "global_scale" in module]
    assert len(scaled) > 10
    assert any(float(mx.min(module.global_scale)) < 1 for module in scaled)
    network, _ = utils.load_model(PYCODE_MOE, lazy=True)
    network.set_dtype(mx.float32)
    with blobstore.open_model("m", store=store) as read:
        values = {name: mx.array(tensor.dequantize()) for name, tensor in read.items()}
    renamed = [(name.replace(".experts.", ".switch_mlp."), one) for name, one in values.items()]
    network.load_weights(renamed, strict=True)
    ours, wanted = logits(model), logits(network)
    # It computes in bfloat16 between its layers.
    assert np.linalg.norm(ours - wanted) < 0.02 * np.linalg.norm(wanted)


def test_run_prints_what_mlx_lm_generates(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "def read_file(path):"
    blobstore.import_model(PYCODE, "m", store=store)
    expected = generate(*blobstore.mlx_lm.load("m", store=store), prompt, max_tokens=4)
    line = ["run", "m", prompt, "--max-tokens", "4", "--store", str(store.root), "--json"]
    assert run(line) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["tokens"]) == (expected, 4)
    assert (document["prompt_tokens"], document["finish_reason"]) == (7, "length")


def test_models_that_mlx_lm_can_not_run(tmp_path: Path, store: Store) -> None:
    blobstore.import_model(PYCODE / "model.safetensors", "bare", store=store)
    with pytest.raises(NotFoundError, match=r"config\.json"):
        blobstore.mlx_lm.load("bare", store=store)
    unknown = {"architectures": ["Nope"], "model_type": "nope"}
    known = json.loads((PYCODE / "config.json").read_text())
    for config, says in ((unknown, "nope"), (known, "m:latest")):  # the second lacks tensors
        source = write_checkpoint(tmp_path / says, config=config)
        blobstore.import_model(source, "m", store=store)
        with pytest.raises(UnsupportedSourceError, match=says):
            blobstore.mlx_lm.load("m", store=store)


TEXT = "def f(x): return x\n"


def pycode(folder: Path) -> Path:
    shutil.copytree(PYCODE, folder)
    return folder


def with_templates(folder: Path) -> Path:
    templates = {"chat_template.jinja": TEMPLATE, "chat_templates/tool_use.jinja": TEMPLATE * 2}
    return write(pycode(folder), templates)


def with_sentencepiece(folder: Path) -> Path:
    source = pycode(folder)
    text = source.parent / "text"
    text.write_text((PYCODE / "README.md").read_text() * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(source / "tokenizer"), vocab_size=120, minloglevel=2
    )
    for name in ("tokenizer.json", "tokenizer.vocab"):
        (source / name).unlink()
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
    return write(source, {"tokenizer_config.json": config})


@pytest.mark.parametrize(
    ("layout", "eos"), [(with_templates, [5, 9]), (with_sentencepiece, 3), (pycode, "no JSON")]
)
def test_the_tokenizer_is_the_folders(
    store: Store, tmp_path: Path, layout: Callable[[Path], Path], eos: Any
) -> None:
    source = layout(tmp_path / "m")
    generation = eos if isinstance(eos, str) else {"eos_token_id": eos}
    write(source, {"generation_config.json": generation})
    blobstore.import_model(source, "m", store=store)
    theirs, ours = mlx_lm.load(str(source))[1], blobstore.mlx_lm.load("m", store=store)[1]
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.chat_template == theirs.chat_template
    assert type(ours.detokenizer) is type(theirs.detokenizer)
    if ours.chat_template is not None:
        messages = [{"role": "user", "content": TEXT}]
        assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


@pytest.mark.parametrize("place", ["tokenizer.Mine", "someone/else--tokenizer.Mine"])
def test_code_of_a_model_is_never_run(store: Store, tmp_path: Path, place: str) -> None:
    source = pycode(tmp_path / "m")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [place, None]}}
    code = f"open({str(tmp_path / 'was_run')!r}, 'w')\nMine = None\n"
    write(source, {"tokenizer_config.json": config, "tokenizer.py": code})
    blobstore.import_model(source, "m", store=store)
    blobstore.mlx_lm.load("m", store=store)
    assert not (tmp_path / "was_run").exists()


def test_a_text_ends_where_generation_config_says(store: Store, tmp_path: Path) -> None:
    source = pycode(tmp_path / "m")
    blobstore.import_model(source, "m", store=store)
    loaded = blobstore.mlx_lm.load("m", store=store)
    tokens = [one.token for one in mlx_lm.stream_generate(*loaded, TEXT, max_tokens=4)]
    write(source, {"generation_config.json": {"eos_token_id": [tokens[2]]}})
    blobstore.import_model(source, "m", store=store)
    model, _ = load_language_model("m", store=store, given={"max_tokens": 4})
    answer = model.answer(model.prompts.tokens([{"role": "user", "content": TEXT}]))
    assert "".join(answer) == answer.text
    assert (answer.tokens, answer.finish_reason) == (tokens.index(tokens[2]) + 1, "stop")
