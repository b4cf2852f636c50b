"""``import`` and ``plan``: options, tags, what is left out, sources."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import FIXTURES
from support.checkpoints import LLAMA_CONFIG, normal, safetensors_bytes, write_checkpoint
from support.commands import Cli
from support.layouts import sentence_transformer, write
from support.prequantized_sources import fp8_model

import blobstore
from blobstore.errors import UsageError

UP = "model.layers.0.mlp.up_proj.weight"


def test_a_plan_is_that_of_the_import_and_writes_nothing(cli: Cli, source: Path) -> None:
    plan = cli.json("plan", source, "--quant", "int4")
    assert cli.json("import", source, "--quant", "int4", "--dry-run") == plan
    assert not cli.store.root.exists()
    (blob,) = (blob for blob in plan["blobs"] if blob["name"] == UP)
    assert blob["metadata"] == {"quant_type": "int4", "group_size": "32"}
    (tensor,) = blob["tensors"]
    assert (tensor["dtype"], tensor["shape"], tensor["sources"]) == ("BF16", [128, 64], [UP])
    cli.text("import", source, "--quant", "int4")
    stored = sum(path.stat().st_size for path in (cli.store.root / "blobs").iterdir())
    assert plan["stored_bytes"] == stored


def test_a_replaced_model_is_named(cli: Cli, source: Path) -> None:
    first = cli.json("import", source, "m")
    assert cli.json("import", source, "m")["replaced"] is None  # the same model
    second = cli.json("import", source, "m", "--quant", "int8")
    assert second["replaced"] == first["digest"]
    short = second["digest"][7:19]
    assert f"Replaced {short}, which had this name" in cli.text("import", source, "m")


def test_the_options_of_an_import_reach_the_store(cli: Cli, source: Path, tmp_path: Path) -> None:
    file, vector = tmp_path / "importance.safetensors", np.linspace(0, 2, 64, dtype=np.float32)
    file.write_bytes(safetensors_bytes({UP: vector}))
    words = ("--quant", "nvfp4", "--method", "search", "--importance", file, "--global-scale")
    made = cli.json("import", source, "cli", *words, "--align", 4096, "--dtype", "float16")
    options: Any = {"quant": "nvfp4", "method": "search", "importance": {UP: vector}}
    options |= {"global_scale": True, "alignment": 4096, "dtype": "float16"}
    api = blobstore.import_model(source, "api", store=cli.store, **options)
    assert made["digest"] == str(api.digest)


def test_an_adapter_is_merged(cli: Cli) -> None:
    base, adapter = (FIXTURES / "adapters" / name for name in ("base-llama", "peft-linear"))
    for command in ("plan", "import"):
        said = cli.text(command, base, "--adapter", adapter)
        assert "factors of an adapter that were merged" in said


def test_a_plan_in_a_file_takes_no_options(cli: Cli, source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    cli.text("plan", source, "-o", plan)
    for words in (["--rule", "*=int8"], ["--align", "64"], ["--param", "a=1"]):
        error = cli.refused("import", "--plan", plan, "m", *words)
        assert f"Error: {words[0]} can't be used with --plan" in error
    cli.text("import", "--plan", plan, "m")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in cli.refused("plan", source, "-o", tmp_path / "pipe", code=1)


def test_another_type(cli: Cli, source: Path) -> None:
    for tag, quant, weights in (
        ("INT4", ["--quant", "mxfp8"], "mxfp8"),
        ("q8", ["--quant", "q4"], "int4"),
        ("fp16", [], "BF16"),
    ):
        words = ("import", source, f"x:{tag}", *quant)
        says = f"the tag of x:{tag} says {tag}, but the weights will be {weights}\nHint: "
        for more in ([], ["--dry-run"]):
            assert says in cli.refused(*words, *more)
        cli.text(*words, "--force")


def test_a_type_tag(cli: Cli, source: Path, tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "q4": {"quant": "int4"},
        "fp8": {"quant": "mxfp8"},
        "bf16": {},
        "mxfp4": {"rules": ["*.up_proj.weight=mxfp4"]},
    }
    for tag, given in options.items():
        blobstore.import_model(source, f"x:{tag}", store=cli.store, **given)
        blobstore.export_model(f"x:{tag}", tmp_path / tag, store=cli.store)
        blobstore.import_model(tmp_path / tag, f"y:{tag}", store=cli.store)
        with pytest.raises(UsageError, match="will be"):
            blobstore.import_model(tmp_path / tag, "y:nvfp4", store=cli.store)


@pytest.fixture
def layered(tmp_path: Path) -> Path:
    """A checkpoint of FP8 weights with a longer head, subfolders, and files not kept."""
    names = (UP, "mtp.fc.weight")
    tensors: dict[str, Any] = dict(fp8_model({name: normal(name, 128, 128) for name in names}))
    tensors |= {name.replace(".weight", ".input_scale"): np.ones((), np.float32) for name in names}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = sentence_transformer(tmp_path / "m")
    write_checkpoint(source, tensors, {**LLAMA_CONFIG, "quantization_config": quantization})
    others = {f"{letter}.bin": b"" for letter in "abcdefg"}
    return write(source, {**others, ".cache/x": b"", "x\x1b[31m": b""})


COVERAGE = [
    "4 of 6 tensors and 9 of 17 files stored",
    "2 of the tensors belong to the multi-token prediction heads",
    "Derived: 2 scales and biases that were applied to their weights",
    "Kept as files, not quantized: 2_Dense/model.safetensors",
    "Left out: *.input_scale (2): activation scales, which no stored form uses",
]


def test_an_import_says_what_it_left_out_and_show_says_it_later(cli: Cli, layered: Path) -> None:
    planned = cli.text("plan", layered).splitlines()[-8:]
    assert planned[:-3] == COVERAGE
    assert planned[-3] == "Left out: .cache/: hidden, so not part of the checkpoint"
    assert planned[-2].startswith("Left out: a.bin, b.bin, c.bin, d.bin, e.bin and 2 more: weights")
    assert planned[-1].startswith(r"Left out: x\x1b[31m: its name can't be stored")
    assert cli.text("import", layered, "m").splitlines()[-8:] == planned
    assert cli.text("show", "m", "--coverage").splitlines()[-7:-2] == COVERAGE
    assert "stored" not in cli.text("show", "m")
    imported = cli.json("import", layered, "m")["coverage"]
    assert cli.json("show", "m", "--coverage")["coverage"]["tensors"] == imported["tensors"]


def test_folders_and_files_that_are_no_checkpoints(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for files, hint in {
        ("model.onnx",): "model.onnx is neither safetensors nor GGUF: convert it first.",
        ("training_args.bin", "w.pt"): f"Import the file itself: {tmp_path}/w.pt",
        ("a.gguf", "w.safetensors"): f"Import the file itself: {tmp_path}/w.safetensors",
    }.items():
        for name in (*files, "config.json"):
            (tmp_path / name).write_bytes(b"{}")
        error = cli.refused("import", tmp_path, code=1)
        assert error.startswith(f"Error: no weights in {tmp_path}: no model.safetensors\n")
        assert hint in error
        (tmp_path / files[0]).unlink()
    assert "A checkpoint is" in cli.refused("plan", source / "config.json", code=1)
    blob = (source / "model.safetensors").rename(tmp_path / "sha256-0123")
    assert "Give the model a name" in cli.refused("import", blob)
    blob.rename(source / "model.safetensors")
    (source / "blobstore.json").write_text("{}")
    assert "the name of our own record" in cli.refused("plan", source, code=1)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    assert "missing credentials" in cli.refused("plan", "s3://bucket/models/qwen", code=1)


def test_a_repository_by_its_name_is_offered_as_an_address(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "Hint: A model of the Hugging Face Hub is hf://Qwen/Qwen3-0.6B.\n"
    error = "Error: no file or folder at Qwen/Qwen3-0.6B\n"
    assert cli.refused("import", "Qwen/Qwen3-0.6B", code=1) == error + hint
    assert hint in cli.refused("import", "hf.co/Qwen/Qwen3-0.6B", code=1)
    (tmp_path / "Qwen").mkdir()  # then it is more likely a misspelt path
    assert cli.refused("import", "Qwen/Qwen3-0.6B", code=1) == error
