"""What the commands print, as text and as one JSON document, and which store they use."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE, PYCODE_MOE
from support.checkpoints import write_checkpoint
from support.stores import commit_model, manifest_path

from blobstore import hashing, kernels
from blobstore.cli.main import run
from blobstore.store.local.store import open_store

Command = Callable[..., subprocess.CompletedProcess[str]]
UP = "model.layers.0.mlp.up_proj.weight"


class Cli:
    """Runs commands in this process, and gives what they print."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Give every command ``--store`` of that folder."""
        self.store = store
        self._capsys = capsys

    def text(self, *arguments: object) -> str:
        """Return the stdout of a command that succeeds.

        It may print on stderr only why a small model is large.
        """
        assert run([*map(str, arguments), "--store", str(self.store)]) == 0
        output = self._capsys.readouterr()
        assert re.fullmatch(r"(Note: [0-9.]+ bits per weight, and .*\n)?", output.err)
        return output.out

    def refused(self, *arguments: object) -> str:
        """Return the stderr of a command that fails."""
        assert run([*map(str, arguments), "--store", str(self.store)]) != 0
        return self._capsys.readouterr().err

    def json(self, *arguments: object) -> Any:
        """Return the document that a command prints with ``--json``."""
        return json.loads(self.text(*arguments, "--json"))


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Commands on an empty store."""
    return Cli(tmp_path / "store", capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint named ``tiny``."""
    return write_checkpoint(tmp_path / "tiny")


def lines(text: str) -> list[list[str]]:
    """Return a table's cells."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


def test_import_text(cli: Cli, source: Path) -> None:
    first, sizes, blobs, rate, runs_in, coverage = cli.text(
        "import", source, "--quant", "int4"
    ).splitlines()
    identity = (
        open_store(cli.store).manifest(next(iter(open_store(cli.store).models()))[0]).digest.short
    )
    assert first == f"tiny:int4   {identity}"
    assert re.fullmatch(r"65\.7 KB in, [0-9.]+ KB stored, 8\.61 bits per weight", sizes)
    assert re.fullmatch(r"9 blobs: 9 new \([0-9.]+ KB\), 0 were there", blobs)
    assert re.fullmatch(r"[0-9.]+ s, [0-9.]+ [KMGT]?B/s", rate)
    assert runs_in == (
        "Does not run in mlx-lm 0.32.2: there is no tokenizer; does not run in Ollama "
        "0.33.0-rc2: there is no tokenizer.json"
    )
    assert coverage == "6 of 6 tensors and 2 of 2 files stored"


def test_import_json(cli: Cli, source: Path) -> None:
    document = cli.json("import", source, "mine:x", "--quant", "q8", "--jobs", 2)
    assert list(document) == [
        *(
            "name",
            "digest",
            "blobs",
            "created",
            "reused",
            "recalled",
            "source_bytes",
            "stored_bytes",
            "new_bytes",
            "saved_bytes",
            "bits_per_weight",
            "seconds",
            "runs_in",
            "coverage",
            "replaced",
        ),
    ]
    assert (document["name"], document["blobs"], document["created"], document["reused"]) == (
        "mine:x",
        9,
        9,
        0,
    )
    assert re.fullmatch("sha256:[0-9a-f]{64}", document["digest"])
    assert document["source_bytes"] == 65_664
    again = cli.json("import", source, "mine:x", "--quant", "int8")
    assert (again["created"], again["reused"], again["new_bytes"], again["digest"]) == (
        0,
        9,
        0,
        document["digest"],
    )
    assert (document["recalled"], again["recalled"]) == (0, 6)
    assert (document["saved_bytes"], again["saved_bytes"]) == (0, again["stored_bytes"])


def test_import_takes_all_options_of_a_plan(cli: Cli, source: Path) -> None:
    options = [
        "--quant",
        "int4",
        "--group-size",
        64,
        "--dtype",
        "float16",
        "--profile",
        "ollama",
        "--experts",
        "stacked",
    ]
    plan = cli_plan(cli, source, *options, "--align", 4096, "--method", "minmax")
    cli.text("import", source, *options, "--align", 4096, "--method", "minmax")
    shown = {tensor["name"]: tensor for tensor in cli.json("show", "tiny:int4")["tensors"]}
    assert (shown[UP]["quant_type"], shown[UP]["group_size"]) == ("int4", 64)
    assert all(blob["size"] >= 4096 for blob in plan["blobs"])


def cli_plan(cli: Cli, *arguments: object) -> Any:
    assert run(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(cli._capsys.readouterr().out)


def test_dry_run_prints_the_plan_and_writes_nothing(cli: Cli, source: Path) -> None:
    assert cli.json("import", source, "--quant", "int4", "--dry-run") == cli_plan(
        cli, source, "--quant", "int4"
    )
    assert not cli.store.exists()


def test_plan_text(cli: Cli, source: Path) -> None:
    assert run(["plan", str(source), "--quant", "int4"]) == 0
    *table, total, ours, theirs, coverage = cli._capsys.readouterr().out.splitlines()
    rows = lines("\n".join(table))
    assert rows[0] == ["TENSOR", "TYPE", "SHAPE", "SIZE"]
    assert rows[1] == ["lm_head.weight", "int8/64", "96x64", "6.53 KB"]
    assert rows[3] == ["model.layers.0.input_layernorm.weight", "BF16", "64", "128 B"]
    assert [row[1] for row in rows[4:]] == ["int8/64", "int4/32", "int4/32"]
    assert re.fullmatch(r"6 blobs, 32\.8K parameters, [0-9.]+ KB, 8\.61 bits per weight", total)
    assert ours == "Does not run in mlx-lm 0.32.2: there is no tokenizer"
    assert theirs == "Does not run in Ollama 0.33.0-rc2: there is no tokenizer.json"
    assert coverage == "6 of 6 tensors and 2 of 2 files stored"


def test_plan_json(cli: Cli, source: Path) -> None:
    plan = cli_plan(cli, source, "--quant", "int4")
    assert list(plan) == ["blobs", "stored_bytes", "bits_per_weight", "coverage", "runs_in"]
    assert all(list(blob) == ["name", "size", "metadata", "tensors"] for blob in plan["blobs"])
    assert next(blob for blob in plan["blobs"] if blob["name"] == UP) == {
        "name": UP,
        "size": 5480,
        "metadata": {"quant_type": "int4", "group_size": "32"},
        "tensors": [
            {
                "name": UP,
                "dtype": "BF16",
                "shape": [128, 64],
                "quant_type": "int4",
                "group_size": 32,
                "transposed": False,
                "kept": None,
                "sources": [UP],
            },
        ],
    }
    cli.text("import", source, "--quant", "int4")
    assert plan["stored_bytes"] == sum(
        path.stat().st_size for path in (cli.store / "blobs").iterdir()
    )


@pytest.mark.parametrize("word", ["list", "ls"])
def test_list_text(cli: Cli, source: Path, word: str) -> None:
    digest = cli.json("import", source, "--quant", "int4")["digest"]
    cli.text("import", source, "team/other")
    rows = lines(cli.text(word, "--sort", "size"))
    assert rows == [
        ["NAME", "ID", "SIZE", "TYPE", "PARAMETERS", "MODIFIED"],
        ["team/other:latest", rows[1][1], "67.2 KB", "BF16", "32.8K", "just now"],
        ["tiny:int4", digest[7:19], "37.9 KB", "int4", "32.8K", "just now"],
    ]


def test_list_json(cli: Cli, source: Path) -> None:
    made = cli.json("import", source, "--quant", "int4")
    (item,) = cli.json("list")
    assert list(item) == ["name", "id", "size", "modified", "quant_type", "parameters"]
    assert (item["name"], item["id"], item["size"]) == (
        "tiny:int4",
        made["digest"],
        made["stored_bytes"],
    )
    assert (item["quant_type"], item["parameters"]) == ("int4", 32_832)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", item["modified"])


def test_a_broken_model_is_listed_beside_the_others(cli: Cli, source: Path) -> None:
    cli.text("import", source, "a")
    cli.text("import", source, "b")
    store = open_store(cli.store)
    manifest_path(store, "a").write_bytes(b"{")
    commit_model(store, "c", b"no safetensors file")
    rows = lines(cli.text("list", "--sort", "name"))
    assert [row[0] for row in rows[1:]] == ["a:latest", "b:latest", "c:latest"]
    assert [rows[1][1], rows[3][1]] == ["broken", "broken"]
    assert rows[1][2].startswith("the manifest: not valid JSON: ")
    items = cli.json("list", "--sort", "name")
    assert [item["quant_type"] for item in items] == [None, "BF16", None]
    assert list(items[0]) == [*items[1], "error"]
    assert (
        items[0]["id"] is items[0]["size"] is items[0]["modified"] is items[0]["parameters"] is None
    )


def test_show_text(cli: Cli, source: Path) -> None:
    digest = cli.json("import", source, "--quant", "int4")["digest"]
    facts = dict(lines(cli.text("show", "tiny:int4")))
    assert facts == {
        "name": "tiny:int4",
        "id": digest,
        "architecture": "LlamaForCausalLM",
        "parameters": "32.8K (32,832)",
        "type": "int4",
        "weights": "int8 14.3K, int4 12.3K, BF16 6.21K",
        "embedding length": "64",
        "capabilities": "completion",
        "size": "37.9 KB",
        "layers": "8",
        "tensors": "6",
        "runs in mlx-lm": "no: there is no tokenizer (0.32.2)",
        "runs in Ollama": "no: there is no tokenizer.json (0.33.0-rc2)",
    }


def test_show_tensors(cli: Cli, source: Path) -> None:
    cli.text("import", source, "--quant", "int4")
    table = cli.text("show", "tiny:int4", "--tensors").split("\n\n")[1]
    rows = lines(table)
    assert rows[0] == ["TENSOR", "TYPE", "SHAPE", "SIZE"]
    assert rows[-2] == [UP, "int4/32", "128x64", "5.12 KB"]
    assert len(rows) == 7


def test_all_say_the_same_of_where_a_model_runs(cli: Cli) -> None:
    options = ["--quant", "nvfp4", "--experts", "stacked"]
    planned = cli_plan(cli, PYCODE_MOE, *options)["runs_in"]
    imported = cli.json("import", PYCODE_MOE, *options)["runs_in"]
    assert planned == imported == cli.json("show", "pycode-moe-5m:nvfp4")["runs_in"]
    assert [(one["runs"], one["reason"]) for one in planned] == [
        ("yes", "qwen3_moe, nvfp4, mxfp8"),
        ("no", "its runner has no Qwen3MoeForCausalLM"),
    ]


def test_a_target_shows_the_plan_and_once_where_it_runs(cli: Cli, source: Path) -> None:
    text = cli.text("import", source, "--target-bpw", 8)
    assert text.count("mlx-lm") == 1


def test_show_json(cli: Cli) -> None:
    made = cli.json("import", PYCODE, "--quant", "int4")
    document = cli.json("show", "pycode-5m:int4")
    tensors = document.pop("tensors")
    assert document == {
        "name": "pycode-5m:int4",
        "id": made["digest"],
        "architecture": "Qwen3ForCausalLM",
        "parameters": 5_245_696,
        "quant_type": "int4",
        "context_length": 1024,
        "embedding_length": 256,
        "capabilities": ["completion"],
        "size": made["stored_bytes"],
        "layers": 54,
        "runs_in": made["runs_in"],
    }
    assert made["runs_in"] == [
        {"runtime": "mlx-lm", "version": "0.32.2", "runs": "yes", "reason": "qwen3, int4, int8"},
        {
            "runtime": "Ollama",
            "version": "0.33.0-rc2",
            "runs": "unknown",
            "reason": "the tokenizer has no Split step, so answers may be wrong where white space"
            " has line breaks",
        },
    ]
    assert len(tensors) == 47
    assert next(tensor for tensor in tensors if tensor["name"] == UP) == {
        "name": UP,
        "dtype": "U32",
        "shape": [768, 256],
        "quant_type": "int4",
        "group_size": 32,
        "size": 768 * 256 // 2 + 2 * 2 * 768 * 8,
    }


def test_a_bare_file_has_no_architecture(cli: Cli, source: Path) -> None:
    cli.text("import", source / "model.safetensors", "bare")
    document = cli.json("show", "bare")
    absent = ("architecture", "context_length", "embedding_length")
    assert [document[key] for key in absent] == [None] * 3
    assert document["capabilities"] == []
    assert "architecture" not in cli.text("show", "bare")


def test_what_is_replaced_is_said(cli: Cli, source: Path, tmp_path: Path) -> None:
    first = cli.json("import", source, "m")
    assert first["replaced"] is None
    assert cli.json("import", source, "m")["replaced"] is None  # the same model
    second = cli.json("import", source, "m", "--quant", "int8")
    assert second["replaced"] == first["digest"]
    short = second["digest"][7:19]
    assert f"Replaced {short}, which had this name" in cli.text("import", source, "m")
    archive = tmp_path / "m.tar"
    cli.text("save", "m", "-o", archive)
    cli.text("import", source, "m", "--quant", "int8")
    assert cli.json("load", archive)[0]["replaced"] == second["digest"]
    assert "Replaced" not in cli.text("load", archive)


def test_cp_asks_before_it_replaces(cli: Cli, source: Path, tmp_path: Path) -> None:
    cli.text("import", source, "m")
    cli.text("import", source, "n", "--quant", "int8")
    other = ("--to", tmp_path / "other")
    cli.text("cp", "n", "m", *other)
    for where in ((), other):
        refused = cli.refused("cp", "m", "m" if where else "n", *where)
        assert "already exists" in refused
        assert "--force" in refused
        cli.text("cp", "m", "m" if where else "n", *where, "--force")
        cli.text("cp", "m", "m" if where else "n", *where)  # the same model


def test_cp(cli: Cli, source: Path) -> None:
    cli.text("import", source)
    assert cli.text("cp", "tiny", "copy:v2") == "Copied tiny:latest to copy:v2\n"
    assert cli.json("cp", "tiny", "a/b") == {"source": "tiny:latest", "name": "a/b:latest"}
    assert [item["name"] for item in cli.json("list", "--sort", "name")] == [
        "a/b:latest",
        "copy:v2",
        "tiny:latest",
    ]
    assert len({item["id"] for item in cli.json("list")}) == 1


def test_rm(cli: Cli, source: Path) -> None:
    made = cli.json("import", source)
    cli.text("cp", "tiny", "copy")
    assert cli.text("rm", "tiny") == "Removed tiny:latest: 0 blobs, 0 B\n"
    assert cli.json("rm", "copy") == [
        {
            "name": "copy:latest",
            "removed": 9,
            "bytes": made["stored_bytes"],
            "kept": 0,
            "reason": None,
        }
    ]
    assert cli.json("list") == []
    assert list((cli.store / "blobs").iterdir()) == []


def test_rm_of_several_and_of_what_must_be_kept(cli: Cli, source: Path) -> None:
    for name in ("a", "b", "c"):
        cli.text("import", source, name)
    manifest_path(open_store(cli.store), "c").write_bytes(b"{")
    assert [item["name"] for item in cli.json("rm", "a")] == ["a:latest"]
    removed, kept = cli.text("rm", "b").splitlines()
    assert removed == "Removed b:latest: 0 blobs, 0 B"
    assert kept == "Kept 9 blobs (67.2 KB): the manifest of c:latest can't be read"


def test_the_store_of_the_environment(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    assert run(["import", str(source), "a"]) == 0
    assert run(["import", str(source), "b", "--store", str(tmp_path / "option")]) == 0
    monkeypatch.setenv("OLLAMA_MODELS", "")
    assert run(["import", str(source), "c"]) == 0
    assert capsys.readouterr().err == ""
    for folder, name in (("ollama", "a"), ("option", "b"), ("home/.ollama/models", "c")):
        assert [str(found) for found, _ in open_store(tmp_path / folder).models()] == [
            f"{name}:latest"
        ]


def test_run_continues_a_text(cli: Cli) -> None:
    cli.text("import", PYCODE, "m", "--quant", "int8")
    arguments = ["run", "m", "def f(", "--max-tokens", "4"]
    text, document = cli.text(*arguments), cli.json(*arguments)
    assert (text, document["tokens"]) == (f"{document['text']}\n", 4)


def test_version_and_help(cli: Cli) -> None:
    assert run(["--version"]) == 0
    best = kernels.KERNELS["native"].name
    assert re.fullmatch(
        rf"blobstore \d+\.\d+\.\d+ \(kernels: {best}; SHA-256: {hashing.in_use()}\)\n",
        cli._capsys.readouterr().out,
    )
    for arguments in (
        ["--help"],
        ["-h"],
        ["import", "--help"],
        ["rm", "-h"],
        ["quality", "--help"],
    ):
        assert run(arguments) == 0
        output = cli._capsys.readouterr()
        assert (output.out[:6], output.err) == ("Usage:", "")


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_the_kernels_can_be_chosen(command: Command, name: str) -> None:
    done = command("--version", env={**os.environ, "BLOBSTORE_KERNELS": name})
    assert f"kernels: {kernels.KERNELS[name].name};" in done.stdout


@pytest.mark.parametrize("name", ["plain", "openssl"])
def test_the_way_to_hash_can_be_chosen(command: Command, name: str) -> None:
    done = command("--version", env={**os.environ, "BLOBSTORE_SHA256": name})
    assert f"SHA-256: {name})" in done.stdout


def test_the_help_of_import_lists_what_a_search_takes(cli: Cli) -> None:
    for word in ("import", "plan"):
        assert run([word, "--help"]) == 0
        text = cli._capsys.readouterr().out
        assert all(
            part in text for part in ("--method", "search", "--importance", "--global-scale")
        )
