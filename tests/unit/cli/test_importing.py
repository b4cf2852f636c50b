"""``import`` and ``plan``: their texts and documents, options, tags, what is left out, sources."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from support import PYCODE_MOE
from support.checkpoints import (
    LLAMA_CONFIG,
    normal,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)
from support.commands import Cli, table
from support.layouts import sentence_transformer, write
from support.newer import linked, manifest_of
from support.prequantized_sources import fp8_model

import blobstore
from blobstore.cli.output import flag_of
from blobstore.errors import UsageError
from blobstore.importer.arguments import ImportArguments, Option
from blobstore.source.inventory import read_inventory

Command = Callable[..., subprocess.CompletedProcess[str]]
UP = "model.layers.0.mlp.up_proj.weight"


def test_an_import_says_what_it_made(cli: Cli, source: Path) -> None:
    first, sizes, blobs, rate, runs_in, coverage = cli.text(
        "import", source, "--quant", "int4"
    ).splitlines()
    assert first == f"tiny:int4   {cli.store.manifest('tiny:int4').digest.short}"
    assert re.fullmatch(r"65\.7 KB in, [0-9.]+ KB stored, 8\.61 bits per weight", sizes)
    assert re.fullmatch(r"9 blobs: 9 new \([0-9.]+ KB\), 0 reused", blobs)
    assert re.fullmatch(r"[0-9.]+ s, [0-9.]+ [KMGT]?B/s", rate)
    assert runs_in.startswith("Does not run in mlx-lm 0.32.2: the tokenizer is missing; ")
    assert coverage == "6 of 6 tensors and 2 of 2 files stored"


def test_the_document_of_an_import_counts_what_was_there(cli: Cli, source: Path) -> None:
    first = cli.json("import", source, "mine:x", "--quant", "q8", "--jobs", 2)
    again = cli.json("import", source, "mine:x", "--quant", "int8")
    assert [first[key] for key in ("name", "blobs", "created", "recalled")] == ["mine:x", 9, 9, 0]
    assert [again[key] for key in ("created", "reused", "recalled", "new_bytes")] == [0, 9, 6, 0]
    assert again["digest"] == first["digest"]
    assert again["saved_bytes"] == again["stored_bytes"] < again["source_bytes"] == 65_664


def test_a_plan_is_that_of_the_import_and_writes_nothing(cli: Cli, source: Path) -> None:
    plan = cli.json("plan", source, "--quant", "int4")
    assert cli.json("import", source, "--quant", "int4", "--dry-run") == plan
    assert not cli.store.root.exists()
    assert list(plan) == ["blobs", "stored_bytes", "bits_per_weight", "coverage", "runs_in"]
    (blob,) = (blob for blob in plan["blobs"] if blob["name"] == UP)
    assert blob["metadata"] == {"quant_type": "int4", "group_size": "32"}
    assert blob["tensors"] == [
        {
            "name": UP,
            "dtype": "BF16",
            "shape": [128, 64],
            "quant_type": "int4",
            "group_size": 32,
            "transposed": False,
            "kept": None,
            "sources": [UP],
        }
    ]
    cli.text("import", source, "--quant", "int4")
    stored = sum(path.stat().st_size for path in (cli.store.root / "blobs").iterdir())
    assert plan["stored_bytes"] == stored


def test_a_plan_as_text(cli: Cli, source: Path) -> None:
    *rows, total, ours, theirs, coverage = cli.text("plan", source, "--quant", "int4").splitlines()
    found = table("\n".join(rows))
    assert found[:2] == [
        ["TENSOR", "TYPE", "SHAPE", "SIZE"],
        ["lm_head.weight", "int8/64", "96x64", "6.53 KB"],
    ]
    assert [row[1] for row in found[4:]] == ["int8/64", "int4/32", "int4/32"]
    assert re.fullmatch(r"6 blobs, 32\.8K parameters, [0-9.]+ KB, 8\.61 bits per weight", total)
    assert (ours[:13], theirs[:13]) == ("Does not run ", "Does not run ")
    assert coverage == "6 of 6 tensors and 2 of 2 files stored"
    text = cli.text("import", source, "--target-bpw", 8)
    assert text.count("mlx-lm") == 1  # where it runs is said once


def test_plan_import_and_show_say_the_same_of_where_a_model_runs(cli: Cli) -> None:
    options = ("--quant", "nvfp4", "--experts", "stacked")
    planned = cli.json("plan", PYCODE_MOE, *options)["runs_in"]
    imported = cli.json("import", PYCODE_MOE, *options)["runs_in"]
    assert planned == imported == cli.json("show", "pycode-moe-5m:nvfp4")["runs_in"]
    assert [(one["runs"], one["reason"]) for one in planned] == [
        ("yes", "qwen3_moe, nvfp4, mxfp8"),
        ("no", "its runner has no Qwen3MoeForCausalLM"),
    ]


def test_a_replaced_model_is_named(cli: Cli, source: Path) -> None:
    first = cli.json("import", source, "m")
    assert cli.json("import", source, "m")["replaced"] is None  # the same model
    second = cli.json("import", source, "m", "--quant", "int8")
    assert second["replaced"] == first["digest"]
    short = second["digest"][7:19]
    assert f"Replaced {short}, which had this name" in cli.text("import", source, "m")


# Options


def test_every_option_of_the_table_is_in_the_help(cli: Cli) -> None:
    hints: dict[str, Any] = get_type_hints(ImportArguments, include_extras=True)
    for word in ("import", "plan"):
        text = " ".join(cli.text(word, "--help").split())
        for name, hint in hints.items():
            option = get_args(hint)[1]
            assert isinstance(option, Option)
            assert flag_of(name) in text
            assert option.help.split()[0] in text


def test_the_options_of_an_import_reach_the_store(cli: Cli, source: Path, tmp_path: Path) -> None:
    file, vector = tmp_path / "importance.safetensors", np.linspace(0, 2, 64, dtype=np.float32)
    file.write_bytes(safetensors_bytes({UP: vector}))
    words = ("--quant", "nvfp4", "--method", "search", "--importance", file, "--global-scale")
    made = cli.json("import", source, "cli", *words, "--align", 4096, "--dtype", "float16")
    api = blobstore.import_model(
        source,
        "api",
        store=cli.store,
        quant="nvfp4",
        method="search",
        importance={UP: vector},
        global_scale=True,
        alignment=4096,
        dtype="float16",
    )
    assert made["digest"] == str(api.digest)


@pytest.mark.parametrize(
    ("options", "says", "hint"),
    [
        ("--quant int3", "unknown quantization type 'int3'", "int4, int8, nvfp4, mxfp4, mxfp8"),
        ("--quant int4 --group-size 48", "int4 has no groups of 48", "32, 64, 128"),
        ("--group-size 32", "a group size needs a quantization type", "--quant"),
        ("--method magic", "unknown quantization method 'magic'", "minmax"),
        ("--dtype int8", "unknown dtype 'int8'", "bfloat16, float16, float32"),
        ("--profile mine", "unknown profile 'mine'", "default, ollama"),
        ("--experts loose", "unknown form of experts 'loose'", "packed, stacked"),
        ("--align 12", "an alignment of 12", ""),
        ("--jobs 0", "at least one thread is needed, not 0", ""),
    ],
)
def test_wrong_options(cli: Cli, source: Path, options: str, says: str, hint: str) -> None:
    error, _, after = cli.refused("import", source, *options.split()).partition("\n")
    assert says in error
    assert hint in after


def test_an_import_needs_a_source_or_a_modelfile_that_names_one(cli: Cli) -> None:
    for word in ("import", "plan"):
        assert cli.refused(word) == (
            "Error: the source to import is missing\n"
            "Hint: Name a checkpoint, or a Modelfile with --modelfile FILE.\n"
        )


def test_a_plan_in_a_file_takes_no_options(cli: Cli, source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    cli.text("plan", source, "-o", plan)
    for words in (["--rule", "*=int8"], ["--align", "64"], ["--param", "a=1"]):
        error = cli.refused("import", "--plan", plan, "m", *words)
        assert f"Error: {words[0]} can't be used with --plan" in error
    cli.text("import", "--plan", plan, "m")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in cli.refused("plan", source, "-o", tmp_path / "pipe", code=1)


def test_groups_that_divide_no_matrix(cli: Cli, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "odd", {"x.weight": normal("x", 64, 100)})
    error = cli.refused("plan", source, "--quant", "int4")
    assert "nothing can be quantized to int4" in error
    assert "'x.weight' [64, 100]" in error


def test_a_weight_that_is_not_finite_is_a_failure(cli: Cli, tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["lm_head.weight"][2, 3] = np.nan
    bad = write_checkpoint(tmp_path / "bad", tensors)
    error = cli.refused("import", bad, "--quant", "int8", code=1)
    assert "'lm_head.weight': the weight at [2, 3] is nan" in error


# Names and tags that say a type


def test_a_name_that_can_not_be_made_from_the_source(cli: Cli, tmp_path: Path) -> None:
    error = cli.refused("import", write_checkpoint(tmp_path / "my model"))
    assert "'my model'" in error
    assert "Hint: Give the model a name" in error
    assert not cli.store.root.exists()


@pytest.mark.parametrize(
    ("tag", "quant", "weights"),
    [
        ("INT4", "mxfp8", "mxfp8"),
        ("q8", "q4", "int4"),
        ("fp8", "nvfp4", "nvfp4"),
        ("fp16", None, "BF16"),
        ("bf16", "int4", "int4"),
    ],
)
def test_a_tag_that_says_another_type(
    cli: Cli, source: Path, tag: str, quant: str | None, weights: str
) -> None:
    words = ("import", source, f"x:{tag}", *(("--quant", quant) if quant else ()))
    for more in ([], ["--dry-run"]):
        assert cli.refused(*words, *more) == (
            f"Error: the tag of x:{tag} says {tag}, but the weights will be {weights}\n"
            "Hint: Choose another tag, or keep this one with --force.\n"
        )
    assert not cli.store.root.exists()
    cli.text(*words, "--force")


@pytest.mark.parametrize(
    ("tag", "quant"),
    [("q4", "int4"), ("fp8", "int8"), ("fp8", "mxfp8"), ("fp4", "nvfp4"), ("bf16", None)],
)
def test_a_tag_that_says_the_type(cli: Cli, source: Path, tag: str, quant: str | None) -> None:
    blobstore.import_model(source, f"x:{tag}", store=cli.store, quant=quant)


def test_a_tag_beside_rules_or_a_quantized_source(cli: Cli, source: Path, tmp_path: Path) -> None:
    rules = ["*.up_proj.weight=mxfp4"]
    blobstore.import_model(source, "x:mxfp4", store=cli.store, rules=rules)
    with pytest.raises(UsageError, match="will be mxfp4"):
        blobstore.import_model(source, "x:int4", store=cli.store, rules=rules)
    blobstore.import_model(source, "x:int4", store=cli.store, quant="int4")
    blobstore.export_model("x:int4", tmp_path / "out", store=cli.store)
    blobstore.import_model(tmp_path / "out", "y:int4", store=cli.store)
    with pytest.raises(UsageError, match="will be int4"):
        blobstore.import_model(tmp_path / "out", "y:mxfp4", store=cli.store)


def test_an_import_that_a_newer_ollama_will_not_see_warns(
    cli: Cli, source: Path, command: Command
) -> None:
    linked(cli.store, manifest_of(cli.store, b"one"))
    done = command("import", source, "New")
    assert done.stdout.startswith("New:latest")
    assert done.stderr == (
        "a newer Ollama has its own New:latest, in manifests-v2/, and will not read this one\n"
    )


# Coverage: what is stored, what is left out, and why


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
    hidden = {"name": ".cache/", "count": 1}
    kept = [one for one in imported["files"]["left_out"] if not hidden.items() <= one.items()]
    imported["files"]["left_out"] = kept
    assert cli.json("show", "m", "--coverage")["coverage"] == imported


def test_of_ollamas_models_show_says_what_is_known(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m", "--profile", "ollama")
    assert cli.text("show", "m", "--coverage").splitlines()[-2:] == [
        "6 tensors and 1 file stored",
        "The source is not known: the model was not imported by blobstore in its default profile",
    ]


# Sources


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ([], ""),
        (["model-q4.gguf"], "model-q4.gguf is not safetensors: convert it first."),
        (["a.gguf", "weights.safetensors"], "Import the file itself: {folder}/weights.safetensors"),
    ],
)
def test_a_folder_without_weights(cli: Cli, tmp_path: Path, files: list[str], hint: str) -> None:
    for name in (*files, "config.json"):
        (tmp_path / name).write_bytes(b"{}")
    error = cli.refused("import", tmp_path, code=1)
    assert error.startswith(f"Error: no weights in {tmp_path}: no model.safetensors\n")
    assert hint.format(folder=tmp_path) in error


def test_sources_that_are_no_checkpoints(
    cli: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = cli.refused("plan", source / "config.json", code=1)
    assert "Hint: A checkpoint is a .safetensors file, or a folder with such files" in error
    assert cli.refused("plan", source / "no", code=1) == (
        f"Error: no file or folder at {source / 'no'}\n"
    )
    monkeypatch.chdir(source)
    assert cli.refused("plan", "") == "Error: the source is empty\nHint: Is a variable unset?\n"
    (source / "blobstore.json").write_text("{}")
    assert "the name of our own record\nHint: Rename" in cli.refused("plan", source, code=1)


@pytest.mark.parametrize(
    ("address", "says", "hint"),
    [
        ("ftp://host/m", "can't read 'ftp://host/m'", "Download it to a folder first"),
        ("file:///tmp/m", "can't read 'file:///tmp/m'", "Give the path: /tmp/m"),
        ("hf://", "not a repository's name: ''", ""),
        ("hf://a/b/../c", "'../c' has the segment", ""),
        ("hf://datasets/a/b", "is not a model of the Hub", ""),
        ("https://[x/m", "not a web address", ""),
    ],
)
def test_addresses_that_are_refused(cli: Cli, address: str, says: str, hint: str) -> None:
    error, _, after = cli.refused("plan", address).partition("\n")
    assert says in error
    assert hint in after
    with pytest.raises(UsageError):
        read_inventory(address)


def test_a_bucket_needs_credentials(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    error = cli.refused("plan", "s3://bucket/models/qwen", code=1)
    assert error.startswith("Error: missing credentials for s3://bucket/models/qwen\nHint: Set")


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
