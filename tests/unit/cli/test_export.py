"""``export`` as a person uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import PYCODE
from support.checkpoints import LLAMA_CONFIG, write_checkpoint

import blobstore
from blobstore.cli.main import run
from blobstore.store.local.store import Store


def exported(
    store: Store, capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0
) -> tuple[str, str]:
    """Return what ``export`` prints on stdout and on stderr."""
    assert run(["export", *map(str, arguments), "--store", str(store.root)]) == code
    out, err = capsys.readouterr()
    return out, err


def test_the_rate_is_said(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "in"), "m", store=store)
    text, errors = exported(
        store, capsys, "m", tmp_path / "out", "--max-shard-size", "20KB", "--jobs", 1
    )
    first, rate, programs = text.splitlines()
    assert first == f"m:latest in {tmp_path / 'out'}: 7 files"
    assert re.fullmatch(r"\d\d\.\d KB in \d+\.\d\d s, [0-9.]+ [KMG]?B/s", rate)
    assert programs == "Loads in transformers, mlx-lm, blobstore"
    assert errors == ""


@pytest.mark.parametrize(
    ("options", "programs"),
    [
        ([], ["blobstore"]),
        (["--format", "mlx"], ["mlx-lm", "blobstore"]),
        (["--dequantize", "bfloat16"], ["transformers", "mlx-lm", "blobstore"]),
    ],
)
def test_programs_that_load_a_quantized_export(
    options: list[str],
    programs: list[str],
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    text, _ = exported(store, capsys, "m", tmp_path / "out", "--json", *options)
    assert json.loads(text)["loads_in"] == programs


def test_json_and_notes(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_CONFIG, "quantization_config": {"\u202e": 1}}
    blobstore.import_model(
        write_checkpoint(tmp_path / "in", config=config), "m", store=store, quant="int4"
    )
    text, errors = exported(
        store, capsys, "m", tmp_path / "out", "--dequantize", "bf16", "--json", "--verify"
    )
    document = json.loads(text)
    assert list(document) == ["name", "folder", "files", "bytes", "notes", "seconds", "loads_in"]
    assert [file["name"] for file in document["files"]] == ["config.json", "model.safetensors"]
    assert sum(file["size"] for file in document["files"]) == document["bytes"]
    assert document["notes"] == ["config.json: quantization_config of the source left out"]
    assert errors == "Note: config.json: quantization_config of the source left out\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--format", "gguf"], 2, "unknown format 'gguf'"),
        (["--dequantize", "int4"], 2, "unknown dtype 'int4'"),
        (["--max-shard-size", "5 bananas"], 2, "invalid size"),
        (["--max-shard-size", "0"], 2, "invalid shard size"),
        (["--jobs", "0"], 2, "at least one thread"),
    ],
)
def test_wrong_use(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "in"), "m", store=store)
    text, errors = exported(store, capsys, "m", tmp_path / "out", *arguments, code=code)
    assert text == ""
    assert errors.startswith("Error: ")
    assert says in errors
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "in"), "m", store=store)
    _, errors = exported(store, capsys, "m", tmp_path / "in", code=1)
    assert errors == (
        f"Error: {tmp_path / 'in'} already exists and is not an empty folder\nHint: "
        f"{errors[errors.index('Name a') :]}"
    )
