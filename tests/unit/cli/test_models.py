"""``list``, ``rm``, blocked commands, and names as a store or a newer Ollama spells them."""

import json
import os
from pathlib import Path
from shutil import rmtree

import pytest
from support.checkpoints import normal, safetensors_bytes
from support.commands import Cli, table
from support.newer import linked, manifest_of
from support.stores import HOLD, commit_model, manifest_path, process

UP = "model.layers.0.mlp.up_proj.weight"


def names(cli: Cli, *options: str) -> list[str]:
    return [item["name"] for item in cli.json("list", *options)]


def test_a_list_is_sorted_by_time_name_or_size(cli: Cli) -> None:
    for name, rows, moment in (("b", 512, 12), ("a", 64, 10), ("c", 64, 14)):
        blob = safetensors_bytes({"x.weight": normal(name, rows, 64)})
        commit_model(cli.store, name, blob)
        os.utime(manifest_path(cli.store, name), (moment * 10**8, moment * 10**8))
    manifest_path(cli.store, "broken").parent.mkdir()
    manifest_path(cli.store, "broken").write_bytes(b"{")
    assert cli.text("ls") == cli.text("list")
    for options, expected in {
        (): ["c", "b", "a", "broken"],
        ("--sort", "name"): ["a", "b", "broken", "c"],
        ("--sort", "size"): ["b", "a", "c", "broken"],
    }.items():
        assert names(cli, *options) == [f"{name}:latest" for name in expected]
    assert "Use one of: name, time, size." in cli.refused("list", "--sort", "age")
    (row,) = (row for row in table(cli.text("list")) if row[0] == "broken:latest")
    assert row[1] == "broken"
    assert row[2].startswith("the manifest: not valid JSON: ")


def test_show_prints_what_a_model_holds(cli: Cli, source: Path) -> None:
    template, made = "{{ .Prompt }}", json.dumps({"chat_template": "{{ messages }}"})
    files = {"LICENSE": "MIT", "tokenizer_config.json": made, "generation_config.json": "{}"}
    for name, text in files.items():
        (source / name).write_text(text)
    cli.text("import", source, "hub")
    words = ("--template", template, "--license", "A", "--license", "B", "--param", "stop=x")
    cli.text("import", source, "ollama", *words, "--param", "stop=y")
    for name, part, text in (
        ("hub", "--template", "{{ messages }}"),
        ("hub", "--license", "MIT"),
        ("hub", "--params", "{}"),
        ("hub", "--modelfile", "FROM hub:latest\n"),
        ("hub", "--file=tokenizer_config.json", made),
        ("ollama", "--template", template),
        ("ollama", "--license", "A\nB"),
        ("ollama", "--parameters", "stop x\nstop y\n"),
    ):
        assert cli.text("show", name, part) == text
    assert "template, license, params, config" in cli.refused("show", "ollama", "--system", code=1)
    assert "has no file 'README.md'" in cli.refused("show", "hub", "--file", "README.md", code=1)
    assert "one text at a time" in cli.refused("show", "hub", "--license", "--system")


def test_rm(cli: Cli) -> None:
    commit_model(cli.store, "m", b"one", b"both")
    commit_model(cli.store, "n", b"both")
    error = cli.refused("rm", "m", "missing", code=1)  # all or none
    assert "'missing:latest' not found" in error
    assert cli.text("rm", "m") == "Removed m:latest: 1 blob, 3 B\n"
    assert cli.json("rm", "n", "n:latest") == [
        {"name": "n:latest", "removed": 1, "bytes": 4, "kept": 0, "reason": None}
    ]
    assert list((cli.store.root / "blobs").iterdir()) == []
    for name in ("b", "c"):
        commit_model(cli.store, name, b"blob")
    manifest_path(cli.store, "c").write_bytes(b"{")
    kept = cli.text("rm", "b").splitlines()[1]
    assert kept == "Kept 1 blob (4 B): the manifest of c:latest can't be read"


def test_a_blocked_command_names_the_process_that_it_waits_for(cli: Cli) -> None:
    commit_model(cli.store, "m", b"one")
    with process(HOLD, cli.store.root, "alone") as child:
        for words in ("rm m", "cp m n", "mv m n", "prune", "prune --undo"):
            error = cli.refused(*words.split(), "--wait", "0", code=1)
            assert f"process {child.pid} " in error
            assert "Hint: " in error
    cli.refused("rm", "m", "--wait", "-1")


@pytest.fixture
def qwen(cli: Cli) -> Cli:
    """Commands on a store with a model ``Qwen:Int4``."""
    commit_model(cli.store, "Qwen:Int4", b"blob")
    return cli


def test_each_command_says_how_the_store_spells_a_name(qwen: Cli, source: Path) -> None:
    assert qwen.json("import", source, "QWEN:INT4", "--quant", "int4")["name"] == "Qwen:Int4"
    assert qwen.json("show", "qwen:int4")["name"] == "Qwen:Int4"
    copied = qwen.json("cp", "qwen:int4", "qwen:Other")
    assert copied == {"source": "Qwen:Int4", "name": "Qwen:Other"}
    assert "Qwen:int4 is Qwen:Int4" in qwen.refused("mv", "Qwen:Int4", "Qwen:int4")
    removed = qwen.json("rm", "qwen:int4", "QWEN:INT4", "qwen:OTHER")
    assert [removal["name"] for removal in removed] == ["Qwen:Int4", "Qwen:Other"]


def test_models_of_a_newer_ollama_are_noted(qwen: Cli, source: Path) -> None:
    qwen.text("import", source, "Qwen:Int4", "--quant", "int4")
    linked(qwen.store, manifest_of(qwen.store, b"one"), "ollama.com/library/qwen/int4")
    assert names(qwen) == ["Qwen:Int4"]
    listed = "Note: a newer Ollama has 1 model in manifests-v2/, not listed here: qwen:int4\n"
    assert qwen.err == listed
    assert qwen.json("show", "qwen:int4")["name"] == "Qwen:Int4"
    assert qwen.err == (
        "Note: a newer Ollama has its own Qwen:Int4, in manifests-v2/: it does not read this one\n"
    )
    linked(qwen.store, manifest_of(qwen.store, b"one"), "ollama.com/library/only/there")
    error = qwen.refused("show", "only:there", code=1)
    assert "Hint: A newer Ollama has it, in manifests-v2/" in error
    rmtree(qwen.store.root / "manifests-v2")
    (qwen.store.root / "manifests-v2").symlink_to("nothing")
    assert "Qwen:Int4" in qwen.text("list")
    assert qwen.err.startswith("Note: the models of newer Ollama versions can't be listed: ")
    qwen.refused("prune", code=1)
