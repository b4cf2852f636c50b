"""The command line on odd input: only our errors, and no raw byte on the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import PYCODE
from support.checkpoints import safetensors_bytes, write_checkpoint
from support.stores import manifest_path

import blobstore
from blobstore.cli.main import run
from blobstore.cli.output import printable, progress_bar
from blobstore.errors import UsageError
from blobstore.io.workers import begun
from blobstore.store.local.store import Store

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_a_tensor_name_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar() as progress:
        assert progress is not None
        begun(progress, 10)
        for name in ("\\[/foo]", "[bold]", "[/]", "\x1b[2J"):
            progress(2, name)


def test_a_narrow_encoding_is_no_reason_to_fail(tmp_path: Path, command: Command) -> None:
    source = tmp_path / "uni.safetensors"
    source.write_bytes(safetensors_bytes({"é😀": np.ones(1, np.uint8)}))
    done = command("plan", source, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "\\xe9\\U0001f600" in done.stdout


def test_an_empty_store_option_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--store", ""]) == 2
    assert "--store is empty" in capsys.readouterr().err


def test_rm_removes_all_or_none(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store)
    assert run(["rm", "m", "missing", "--store", str(store.root)]) == 1
    assert "'missing:latest' not found" in capsys.readouterr().err
    assert len(list(store.models())) == 1


def test_rm_of_a_model_twice(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store)
    assert run(["rm", "m", "m:latest", "--json", "--store", str(store.root)]) == 0
    assert [removal["name"] for removal in json.loads(capsys.readouterr().out)] == ["m:latest"]


def test_a_manifest_from_another_age_is_listed(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store)
    try:
        os.utime(manifest_path(store, "m"), (10**14, 10**14))
    except (OSError, OverflowError):
        os.utime(manifest_path(store, "m"), (2**33, 2**33))
    assert run(["list", "--store", str(store.root)]) == 0
    assert "m:latest" in capsys.readouterr().out


def test_a_name_that_can_not_be_made_from_the_source_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "my model")
    assert run(["import", str(source), "--store", str(tmp_path / "store")]) == 2
    assert "Hint: Give the model a name" in capsys.readouterr().err


def test_a_very_long_error_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(tmp_path), "x" * 5000]) == 2
    assert run(["import", str(tmp_path / ("y" * 3000))]) == 1
    assert all(len(line) < 1100 for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_a_prompt_that_is_no_text(
    prompt: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    blobstore.import_model(PYCODE, "m", store=store)
    assert run(["run", "m", prompt, "--store", str(store.root)]) == 2
    assert "prompt" in capsys.readouterr().err


def test_what_a_terminal_would_act_on_is_escaped() -> None:
    assert printable("a\x1b[2J\u202eb\n\ud800") == "a\\x1b[2J\\u202eb\\n\\ud800"
    assert printable("a\n\tb\x07", keep="\n\t") == "a\n\tb\\x07"


def test_parts_that_do_not_fit_are_not_dequantized() -> None:
    quantized = blobstore.quantize(np.ones((2, 64), np.float16), "int4")
    assert quantized.bias is not None
    for scale, bias in (
        (quantized.scale[:1], quantized.bias),
        (quantized.scale, quantized.bias.astype(np.float32)),
    ):
        wrong = blobstore.QuantizedArray(
            quantized.weight, scale, bias, None, quantized.quantization
        )
        with pytest.raises(UsageError, match="do not fit"):
            blobstore.dequantize(wrong)
    with pytest.raises(UsageError, match="only BF16"):
        blobstore.quantize([[1.0] * 32] * 2, "int4")  # type: ignore[arg-type]  # lists are float64
