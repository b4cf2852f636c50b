"""Names on the command line: another case finds the model, and what a newer Ollama has is said."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.newer import linked, manifest_of

import blobstore
from blobstore.cli.main import run
from blobstore.store.local.store import Store

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def model(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of the environment, with a model ``Qwen:Int4``."""
    monkeypatch.setenv("OLLAMA_MODELS", str(store.root))
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "Qwen:Int4", store=store, quant="int4")
    return store


def test_each_command_says_how_the_store_spells_a_name(
    model: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, name, source in (
        (["import", str(tmp_path / "s"), "QWEN:INT4", "--quant", "int4"], "Qwen:Int4", None),
        (["show", "qwen:int4"], "Qwen:Int4", None),
        (["cp", "qwen:int4", "qwen:Other"], "Qwen:Other", "Qwen:Int4"),
        (["mv", "qwen:other", "QWEN:new"], "Qwen:new", "Qwen:Other"),
    ):
        assert run([*line, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["name"], printed.get("source")) == (name, source)
    assert run(["rm", "qwen:int4", "QWEN:INT4", "qwen:NEW", "--json"]) == 0
    assert [removal["name"] for removal in json.loads(capsys.readouterr().out)] == [
        "Qwen:Int4",
        "Qwen:new",
    ]
    assert list(model.models()) == []


def test_mv_to_another_case_is_wrong_use(model: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mv", "Qwen:Int4", "Qwen:int4"]) == 2
    assert "Qwen:int4 is Qwen:Int4" in capsys.readouterr().err
    assert [str(name) for name, _ in model.models()] == ["Qwen:Int4"]


def test_what_a_newer_ollama_has_is_said(model: Store, capsys: pytest.CaptureFixture[str]) -> None:
    linked(model, manifest_of(model, b"one"), "ollama.com/library/qwen/int4")
    assert run(["list", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [item["name"] for item in json.loads(out)] == ["Qwen:Int4"]
    assert err == "Note: a newer Ollama has 1 model in manifests-v2/, not listed here: qwen:int4\n"
    assert run(["show", "qwen:int4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["name"] == "Qwen:Int4"
    assert err == (
        "Note: a newer Ollama has its own Qwen:Int4, in manifests-v2/: it does not read this one\n"
    )
    linked(model, manifest_of(model, b"one"), "ollama.com/library/only/there")
    assert run(["show", "only:there"]) == 1
    assert "Hint: A newer Ollama has it, in manifests-v2/" in capsys.readouterr().err


def test_an_import_that_a_newer_ollama_will_not_see_warns(
    model: Store, tmp_path: Path, command: Command
) -> None:
    linked(model, manifest_of(model, b"one"))
    done = command(
        "import", tmp_path / "s", "New", env={**os.environ, "OLLAMA_MODELS": str(model.root)}
    )
    assert done.returncode == 0
    assert (
        done.stderr
        == "a newer Ollama has its own New:latest, in manifests-v2/, and will not read this one\n"
    )
    assert done.stdout.startswith("New:latest")


def test_models_are_shown_where_those_of_newer_ollamas_can_not_be_read(
    model: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (model.root / "manifests-v2").symlink_to("nothing")
    for line in (["list"], ["show", "qwen:int4"]):
        assert run(line) == 0
        out, err = capsys.readouterr()
        assert "Qwen:Int4" in out
        assert err.startswith(
            f"Note: the models of newer Ollamas are unknown: {model.root}/manifests-v2 is a "
            "symbolic link"
        )
    assert run(["prune"]) == 1
