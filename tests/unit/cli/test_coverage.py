"""``import``, ``plan`` and ``show --coverage``: what is stored, what is left out, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import LLAMA_CONFIG, normal, write_checkpoint
from support.layouts import sentence_transformer, write
from support.prequantized_sources import fp8_model

from blobstore.cli.main import run
from blobstore.store.local.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of FP8 weights with a longer head, subfolders, and files not kept."""
    names = ("model.layers.0.mlp.up_proj.weight", "mtp.fc.weight")
    tensors: dict[str, Any] = dict(fp8_model({name: normal(name, 128, 128) for name in names}))
    tensors |= {name.replace(".weight", ".input_scale"): np.ones((), np.float32) for name in names}
    config = {
        **LLAMA_CONFIG,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    source = sentence_transformer(tmp_path / "m")
    write_checkpoint(source, tensors, config)
    return write(
        source,
        {**{f"{letter}.bin": b"" for letter in "abcdefg"}, ".cache/x": b"", "x\x1b[31m": b""},
    )


LINES = [
    "4 of 6 tensors and 9 of 17 files stored",
    "2 of the tensors belong to the multi-token prediction heads",
    "Derived: 2 scales and biases that were applied to their weights",
    "Kept as files, not quantized: 2_Dense/model.safetensors",
    "Left out: *.input_scale (2): activation scales, which no stored form uses",
]


def test_an_import_says_what_it_left_out(
    source: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ["--store", str(store.root)]
    assert run(["plan", str(source)]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert run(["import", str(source), "m", *option]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert planned[-8:] == printed[-8:]
    assert printed[-8:-3] == LINES
    assert printed[-3] == "Left out: .cache/: hidden, so not part of the checkpoint"
    assert printed[-2] == (
        "Left out: a.bin, b.bin, c.bin, d.bin, e.bin and 2 more: weights in a format that is "
        "not read"
    )
    assert printed[-1].startswith(r"Left out: x\x1b[31m: its name can't be stored")


def test_show_says_it_later(source: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    option = ["--store", str(store.root)]
    assert run(["import", str(source), "m", "--json", *option]) == 0
    imported = json.loads(capsys.readouterr().out)["coverage"]
    assert run(["show", "m", "--coverage", "--json", *option]) == 0
    shown = json.loads(capsys.readouterr().out)["coverage"]
    hidden = [one for one in imported["files"]["left_out"] if one["name"] == ".cache/"]
    assert [one for one in imported["files"]["left_out"] if one not in hidden] == shown[
        "files"
    ].pop("left_out")
    del imported["files"]["left_out"]
    assert shown == imported
    assert run(["show", "m", "--coverage", *option]) == 0
    assert capsys.readouterr().out.splitlines()[-7:-2] == LINES
    assert run(["show", "m", *option]) == 0
    assert "stored" not in capsys.readouterr().out


def test_one_line_when_nothing_is_left_out(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    source, option = write_checkpoint(tmp_path / "m"), ["--store", str(store.root)]
    assert run(["import", str(source), "m", *option]) == 0
    assert capsys.readouterr().out.splitlines()[5:] == ["6 of 6 tensors and 2 of 2 files stored"]


def test_of_ollamas_models_it_says_what_is_known(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    source, option = write_checkpoint(tmp_path / "m"), ["--store", str(store.root)]
    assert run(["import", str(source), "m", "--profile", "ollama", *option]) == 0
    capsys.readouterr()
    assert run(["show", "m", "--coverage", *option]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "6 tensors and 1 file stored",
        "The source is not known: the model was not imported by blobstore in its default profile",
    ]
