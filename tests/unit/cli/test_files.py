"""Archives through a pipe, ``export``, and ``metadata``."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.commands import Cli
from support.stores import commit_model

from blobstore.names import ModelName
from blobstore.store.local.store import open_store

COMMAND = [sys.executable, "-m", "blobstore"]


def test_an_archive_goes_through_a_pipe(cli: Cli, tmp_path: Path) -> None:
    for name in ("m", "n"):
        commit_model(cli.store, name, name.encode(), b"both")
    target = open_store(tmp_path / "target")
    assert "--json" in cli.refused("save", "m", "-o", "-", "--json")
    save = [*COMMAND, "save", "m", "n", "-o", "-", "--compress"]
    load = [*COMMAND, "load", "-", "n", "--store", str(target.root)]
    with subprocess.Popen(save, stdout=subprocess.PIPE) as saving:
        done = subprocess.run(load, stdin=saving.stdout, capture_output=True, check=True)
    assert saving.returncode == 0
    assert done.stdout.startswith(b"Loaded n:latest: ")
    assert target.manifests.names() == [ModelName.parse("n")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"x": np.zeros(9, np.uint8)}, {"format": "pt"}))
    return path


def test_metadata_read_set_removed(cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(action: str, *words: str) -> str:
        return cli.text("metadata", action, file, *words)

    assert run("set", "long key", "two\nlines").startswith(f"Rewrote {file}: 9 B in ")
    assert run("get") == "format     pt\nlong key   two\\nlines\n"
    assert run("get", "long key") == "two\nlines\n"
    assert run("set", '{"k": "ü", "format": "np"}') == f"Edited {file} in place\n"
    assert cli.json("metadata", "get", file) == {"format": "np", "k": "ü", "long key": "two\nlines"}
    run("rm", "k", "format")
    assert cli.json("metadata", "get", file) == {"long key": "two\nlines"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b' {"only": "this"}\n')))
    run("set", "-", "--replace")
    assert run("get") == "only   this\n"
    assert "no metadata 'b'" in cli.refused("metadata", "rm", file, "only", "b", code=1)
    assert "--all" in cli.refused("metadata", "rm", file)
    run("rm", "--all")
    assert run("get") == ""


def test_set_refuses(cli: Cli, file: Path) -> None:
    before = file.read_bytes()
    for words, code, says in (
        (["k"], 2, "the value for 'k' is missing"),
        (['{"k": 1}'], 2, "'k' is not a string"),
        (['{"k": "a", "k": "b"}'], 1, "twice"),
        (["k", "\udc80"], 2, "UTF-8"),
        (["k", "v" * 200, "--in-place"], 2, "no room"),
    ):
        assert says in cli.refused("metadata", "set", file, *words, code=code)
    assert file.read_bytes() == before


def test_hostile_metadata_are_escaped_and_exact_in_json(cli: Cli, file: Path) -> None:
    hostile = "\x1b[31mred\u202eleft\x07\r" + "x" * 100_000
    cli.text("metadata", "set", file, hostile[:20], hostile)
    text = cli.text("metadata", "get", file) + cli.text("metadata", "get", file, hostile[:20])
    assert "\\x1b[31mred\\u202eleft\\x07" in text
    assert text.replace("\n", "").isprintable()
    assert cli.json("metadata", "get", file)[hostile[:20]] == hostile
