"""``blobstore quality``: its table, its one JSON document, its errors.

And that a plan's document has not changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import BF16, normal, safetensors_bytes, small_tensors, write_checkpoint
from support.stores import commit_model

import blobstore
from blobstore.cli.main import run
from blobstore.store.local.store import Store

FIGURES = ["weights", "rmse", "relative_rmse", "max_error", "cosine", "saturated"]
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EVIL = "evil\x1b[31m\u202e.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint named ``tiny``."""
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def quality(store: Store, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that returns what ``quality m --against SOURCE …`` prints."""

    def text(source: Path, *options: object) -> str:
        arguments = ["quality", "m", "--against", source, "--store", store.root, *options]
        assert run([*map(str, arguments)]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        assert "\x1b" not in output.out
        return output.out

    return text


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line)


def test_text(store: Store, source: Path, quality: Callable[..., str]) -> None:
    blobstore.import_model(source, "m", store=store, quant="int4")
    headings, *rows, kept = quality(source).splitlines()
    assert cells(headings) == [
        "TENSOR",
        "TYPE",
        "SHAPE",
        "RMSE",
        "RELATIVE",
        "LARGEST",
        "COSINE",
        "SATURATED",
    ]
    report = blobstore.measure_quality("m", source, store=store)
    measured = [tensor for tensor in report.tensors if tensor.errors.count]
    assert [cells(row)[0] for row in rows] == [*(tensor.name for tensor in measured), "m:latest"]
    first, total = cells(rows[0]), cells(rows[-1])
    assert first[:4] == [
        "model.layers.0.self_attn.q_proj.weight",
        "int4",
        "64x64",
        f"{measured[0].errors.rmse:.4g}",
    ]
    assert float(first[4].rstrip("%")) == pytest.approx(
        100 * (measured[0].errors.relative_rmse or 0), abs=6e-4
    )
    assert total[1:3] == ["4 tensors", "26.6K"]
    assert all(re.fullmatch(r"\d+\.\d{3}%", row[-1]) for row in map(cells, rows))
    assert kept == "2 tensors are stored as they were"


def test_json(store: Store, source: Path, quality: Callable[..., str]) -> None:
    blobstore.import_model(
        source, "m", store=store, quant="nvfp4", global_scale=True, method="search"
    )
    document = json.loads(quality(source, "--json", "--jobs", 1))
    assert document == json.loads(quality(source, "--json"))
    assert list(document) == ["name", "tensors", "model"]
    assert document["name"] == "m:latest"
    assert list(document["model"]) == FIGURES
    assert all(
        list(tensor) == ["name", "quant_type", "dtype", "kept", "shape", *FIGURES]
        for tensor in document["tensors"]
    )
    assert {tensor["name"] for tensor in document["tensors"]} == set(small_tensors())
    report = blobstore.measure_quality("m", source, store=store)
    for shown, tensor in zip(document["tensors"], report.tensors, strict=True):
        kind = (tensor.type_name, None) if tensor.quantized else (None, tensor.type_name)
        assert (shown["name"], (shown["quant_type"], shown["dtype"])) == (tensor.name, kind)
        assert shown["shape"] == list(tensor.shape)
        wanted = [tensor.errors.count, *(getattr(tensor.errors, key) for key in FIGURES[1:])]
        assert [shown[key] for key in FIGURES] == wanted
    assert document["model"]["weights"] == sum(tensor["weights"] for tensor in document["tensors"])


def test_a_model_without_quantized_tensors(
    store: Store, source: Path, quality: Callable[..., str]
) -> None:
    blobstore.import_model(source, "m", store=store)
    assert quality(source) == "6 tensors are stored as they were\n"
    document = json.loads(quality(source, "--json"))
    none = {
        "weights": 0,
        "rmse": 0,
        "relative_rmse": 0,
        "max_error": 0,
        "cosine": 1,
        "saturated": 0,
    }
    assert document["model"] == none
    assert all(none.items() <= tensor.items() for tensor in document["tensors"])


def test_a_source_of_zeros_has_no_relative_error(
    store: Store, tmp_path: Path, quality: Callable[..., str]
) -> None:
    made = write_checkpoint(tmp_path / "made", {"x.weight": normal("x", 32, 64)})
    blobstore.import_model(made, "m", store=store, quant="int8")
    zeros = write_checkpoint(tmp_path / "zeros", {"x.weight": np.zeros((32, 64), BF16)})
    (tensor,) = json.loads(quality(zeros, "--json"))["tensors"]
    assert tensor["relative_rmse"] is None
    assert "%" not in quality(zeros).splitlines()[1].partition("0.000%")[0]


def test_control_characters_of_names_are_escaped(
    store: Store, tmp_path: Path, quality: Callable[..., str]
) -> None:
    source = write_checkpoint(tmp_path / "m", {EVIL: normal("x", 32, 64)})
    blobstore.import_model(source, "m", store=store, quant="int4")
    text = quality(source)
    assert "evil\\x1b[31m\\u202e.weight" in text
    assert not {"\x1b", "\u202e"} & set(text)
    assert json.loads(quality(source, "--json"))["tensors"][0]["name"] == EVIL


def test_a_source_that_is_not_finite_is_valid_json(
    store: Store, tmp_path: Path, quality: Callable[..., str]
) -> None:
    source = write_checkpoint(tmp_path / "m", {"n": np.array([np.inf, np.nan, 1.0], np.float32)})
    blobstore.import_model(source, "m", store=store, dtype="bfloat16")

    def no_json(word: str) -> Any:
        raise AssertionError(word)

    json.loads(quality(source, "--json"), parse_constant=no_json)


CASES = {
    "model": (["ghost", "--against", "tiny"], 1, "'ghost:latest' not found"),
    "name": (["../x", "--against", "tiny"], 2, "not a model name"),
    "source": (["m", "--against", "nowhere"], 1, "nowhere"),
    "no source": (["m"], 2, "--against"),
    "kind": (["gguf", "--against", "tiny"], 1, "GGUF"),
    "tensor": (["m", "--against", "few"], 1, "has no tensor 'lm_head.weight'"),
    "shape": (["m", "--against", "wide"], 1, f"'{UP}' is int4 [128, 64] in the model"),
    "bytes": (
        ["m", "--against", "other"],
        1,
        f"'{NORM}' is stored unquantized, and its bytes are not the source's",
    ),
    "cut": (["m", "--against", "cut"], 1, "model.safetensors"),
    "threads": (["m", "--against", "tiny", "--jobs", "many"], 2, "--jobs"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_errors_are_one_line(
    store: Store,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    as_json: bool,
) -> None:
    blobstore.import_model(source, "m", store=store, quant="int4")
    commit_model(store, "gguf")
    write_checkpoint(tmp_path / "few", {UP: normal("x", 128, 64)})
    write_checkpoint(tmp_path / "wide", small_tensors() | {UP: normal("x", 64, 128)})
    write_checkpoint(tmp_path / "other", small_tensors() | {NORM: normal("other", 64)})
    cut = write_checkpoint(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    arguments, code, says = CASES[case]
    places = {
        name: str(tmp_path / name) for name in ("tiny", "nowhere", "few", "wide", "other", "cut")
    }
    line = ["quality", "--store", str(store.root), *(places.get(word, word) for word in arguments)]
    assert run([*line, *(["--json"] if as_json else [])]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Error: ")
    assert says in output.err
    assert output.err.count("\n") == 1 + output.err.count("\nHint: ")


@pytest.mark.parametrize("options", [["--method", "search"], ["--global-scale"]])
def test_a_plan_has_the_keys_that_it_had(
    source: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert run(["plan", str(source), "--quant", "nvfp4", "--json", *options]) == 0
    document: Any = json.loads(capsys.readouterr().out)
    assert list(document) == ["blobs", "stored_bytes", "bits_per_weight", "coverage", "runs_in"]
    tensor = next(blob for blob in document["blobs"] if blob["name"] == UP)["tensors"]
    wanted = {
        "name": UP,
        "dtype": "BF16",
        "shape": [128, 64],
        "quant_type": "nvfp4",
        "group_size": 16,
    }
    assert tensor == [wanted | {"transposed": False, "kept": None, "sources": [UP]}]


def test_the_options_of_an_import_reach_the_store(
    store: Store, source: Path, tmp_path: Path
) -> None:
    file = tmp_path / "importance.safetensors"
    vector = np.linspace(0, 2, 64, dtype=np.float32)
    file.write_bytes(safetensors_bytes({UP: vector}))
    options = ["--quant", "nvfp4", "--method", "search", "--importance", file, "--global-scale"]
    assert run([*map(str, ["import", source, "cli", *options, "--store", store.root])]) == 0
    made = blobstore.import_model(
        source,
        "api",
        store=store,
        quant="nvfp4",
        method="search",
        importance={UP: vector},
        global_scale=True,
    )
    assert (
        store.manifest(made.name).digest == blobstore.open_model("cli", store=store).manifest.digest
    )
