"""The tokenizer of a stored model is the one that mlx-lm loads from the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
import sentencepiece
from support import PYCODE
from support.layouts import TEMPLATE, write

import blobstore
from blobstore.mlx_lm.conversation import load_language_model
from blobstore.store.local.store import Store

MESSAGES = [{"role": "user", "content": "def f(x):\n    return"}]
TEXT = "def f(x): return x\n"


def pycode(folder: Path) -> Path:
    shutil.copytree(PYCODE, folder)
    return folder


def with_template(folder: Path) -> Path:
    return write(pycode(folder), {"chat_template.jinja": TEMPLATE})


def with_templates(folder: Path) -> Path:
    return write(with_template(folder), {"chat_templates/tool_use.jinja": TEMPLATE * 2})


def with_sentencepiece(folder: Path) -> Path:
    source = pycode(folder)
    text = source.parent / "text"
    text.write_text((PYCODE / "README.md").read_text() * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(source / "tokenizer"), vocab_size=120, minloglevel=2
    )
    for name in ("tokenizer.json", "tokenizer.vocab"):
        (source / name).unlink()
    return write(
        source, {"tokenizer_config.json": {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}}
    )


def with_merges(folder: Path) -> Path:
    source = pycode(folder)
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (source / "tokenizer.json").unlink()
    files: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
        "merges.txt": f"#version: 0.2\n{merges}",
    }
    return write(source, {**files, "vocab.json": model["vocab"]})


@pytest.mark.parametrize(
    "layout", [pycode, with_template, with_templates, with_sentencepiece, with_merges]
)
@pytest.mark.parametrize("eos", [None, 5, [5, 9], [], "no JSON"])
def test_the_tokenizer_is_the_folders(
    store: Store, tmp_path: Path, layout: Callable[[Path], Path], eos: Any
) -> None:
    if eos is not None and layout not in (pycode, with_template):
        eos = 3
    source = layout(tmp_path / "m")
    generation = {} if eos is None else {"eos_token_id": eos}
    write(source, {"generation_config.json": eos if isinstance(eos, str) else generation})
    blobstore.import_model(source, "m", store=store)
    theirs, ours = mlx_lm.load(str(source))[1], blobstore.mlx_lm.load("m", store=store)[1]
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.chat_template == theirs.chat_template
    assert type(ours.detokenizer) is type(theirs.detokenizer)
    if ours.chat_template is not None:
        assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(MESSAGES)
    if isinstance(eos, list) and eos:
        assert ours.eos_token_ids >= set(eos)


@pytest.mark.parametrize("place", ["tokenizer.Mine", "someone/else--tokenizer.Mine"])
def test_code_of_a_model_is_never_run(store: Store, tmp_path: Path, place: str) -> None:
    source = pycode(tmp_path / "m")
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [place, None]}}
    code = f"open({str(tmp_path / 'was_run')!r}, 'w')\nMine = None\n"
    blobstore.import_model(
        write(source, {"tokenizer_config.json": config, "tokenizer.py": code}), "m", store=store
    )
    blobstore.mlx_lm.load("m", store=store)
    assert not (tmp_path / "was_run").exists()


def test_a_text_ends_where_generation_config_says(store: Store, tmp_path: Path) -> None:
    source = pycode(tmp_path / "m")
    blobstore.import_model(source, "m", store=store)
    tokens = [
        one.token
        for one in mlx_lm.stream_generate(
            *blobstore.mlx_lm.load("m", store=store), TEXT, max_tokens=8
        )
    ]
    assert len(tokens) == 8
    blobstore.import_model(
        write(source, {"generation_config.json": {"eos_token_id": [tokens[3]]}}), "m", store=store
    )
    model, prompts, _ = load_language_model("m", store=store, given={"max_tokens": 8})
    answer = model.answer(prompts.tokens([{"role": "user", "content": TEXT}]))
    assert "".join(answer) == answer.text
    assert (answer.tokens, answer.finish_reason) == (tokens.index(tokens[3]) + 1, "stop")
