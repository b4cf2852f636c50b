"""``blobstore inspect`` as a person uses it: summary, tables, tree, JSON.

Names and texts of files are made harmless.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE, PYCODE_MOE
from support.checkpoints import raw_safetensors, safetensors_bytes, small_tensors, write_checkpoint
from support.packed import PACKED
from support.sparse import header, write_sparse, write_sparse_folder

import blobstore
from blobstore.cli.main import run
from blobstore.store.local.store import Store

Command = Callable[..., subprocess.CompletedProcess[str]]
HOSTILE = {
    "a\x1b[2J\x07b": "an escape sequence and a bell",
    "right\u202eto\u200fleft": "bidirectional marks",
    "line\nbreak\r\ttab": "a line",
    "n" * 100_000: "a name of 100 KB",
    "\x1b]8;;http://evil\x1b\\x": "\x1b]0;title\x07",
    "[bold]": "[/]",
    "": "no name",
    ".".join("d" * 3000): "3000 dots",
    "\u00e9\U0001f600": "é😀",
}


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs ``inspect ARGUMENTS…`` here and returns what it prints."""

    def call(*arguments: object) -> str:
        assert run(["inspect", *map(str, arguments)]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        return output.out

    return call


def rows(text: str) -> list[list[str]]:
    """Return a table's cells."""
    return [re.split(r" {3,}", line.strip()) for line in text.splitlines()]


def test_summary(show: Callable[..., str]) -> None:
    facts, metadata = show(PYCODE).split("\n\n")
    assert dict(rows(facts)) == {
        "name": str(PYCODE),
        "kind": "folder",
        "files": "1",
        "tensors": "47",
        "parameters": "5.25M (5,245,696)",
        "dtypes": "BF16 5.25M",
        "size": "10.5 MB",
        "bits per weight": "16.00",
    }
    assert rows(metadata) == [["METADATA", "VALUE"], ["format", "pt"]]


def test_summary_of_a_quantized_model(show: Callable[..., str], store: Store) -> None:
    blobstore.import_model(PYCODE, "p", store=store, quant="int4")
    facts, quantizations, _ = show("p", "--store", store.root).split("\n\n")
    shown = dict(rows(facts))
    assert (shown["kind"], shown["tensors"], shown["parameters"]) == (
        "model",
        "47",
        "5.25M (5,245,696)",
    )
    assert shown["dtypes"] == "U32 4.19M, BF16 1.05M"
    assert shown["types"] == "int4/32 2.1M, int8/64 2.1M, BF16 1.05M"
    heading, *found = rows(quantizations)
    assert heading == ["QUANTIZATION", "BITS", "GROUP", "FORMAT", "TENSORS", "PARAMETERS"]
    assert {row[0] for row in found} == {"int4", "int8"}
    assert {row[3] for row in found} == {"Ollama"}


def test_modelspec_and_large_metadata(show: Callable[..., str], tmp_path: Path) -> None:
    metadata = {
        "modelspec.title": "A title",
        "modelspec.thumbnail": "data:image/png;base64," + "A" * 5000,
        "ss_network": "x" * 500,
        "format": "pt",
        **{f"key{number:03}": "v" for number in range(60)},
    }
    _, modelspec, others = show(
        write_sparse(tmp_path / "m.safetensors", {"x": ("F32", (3,))}, metadata)
    ).split("\n\n")
    assert rows(modelspec) == [
        ["MODELSPEC", "VALUE"],
        ["thumbnail", "(5.02 KB)"],
        ["title", "A title"],
    ]
    table = dict(row if len(row) == 2 else [row[0], ""] for row in rows(others))
    assert table["format"] == "pt"
    assert table["and 22 more"] == ""
    assert len(table["ss_network"]) == 120
    assert "…" in table["ss_network"]


def test_notes(show: Callable[..., str], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "other\x1b.safetensors").touch()
    assert show(folder).splitlines()[-1] == (
        "Note: not counted, for they are not among the checkpoint's files: 'other\\x1b.safetensors'"
    )


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        (
            "file",
            [
                "lm_head.weight",
                "model.embed_tokens.weight",
                "model.layers.0.input_layernorm.weight",
            ],
        ),
        (
            "name",
            [
                "lm_head.weight",
                "model.embed_tokens.weight",
                "model.layers.0.input_layernorm.weight",
            ],
        ),
        (
            "size",
            [
                "model.layers.0.mlp.down_proj.weight",
                "model.layers.0.mlp.up_proj.weight",
                "lm_head.weight",
            ],
        ),
        (
            "parameters",
            [
                "model.layers.0.mlp.down_proj.weight",
                "model.layers.0.mlp.up_proj.weight",
                "lm_head.weight",
            ],
        ),
    ],
)
def test_tensors(show: Callable[..., str], tmp_path: Path, sort: str, first: list[str]) -> None:
    table = show(write_checkpoint(tmp_path), "--tensors", "--sort", sort).split("\n\n")[-1]
    heading, *found = rows(table)
    assert heading == ["TENSOR", "TYPE", "SHAPE", "PARAMETERS", "SIZE"]
    assert [row[0] for row in found[:3]] == first
    assert ["lm_head.weight", "BF16", "96x64", "6,144", "12.3 KB"] in found


def test_tensors_of_shards_and_packed_ones(show: Callable[..., str], tmp_path: Path) -> None:
    tensors, config, *_ = PACKED["mlx 6 bits"]
    named = {
        f"layers.{number}{suffix}": tensor
        for number in (10, 9)
        for suffix, tensor in tensors.items()
    }
    table = show(
        write_sparse_folder(tmp_path, named, config, shards=2), "--tensors", "--sort", "name"
    ).split("\n\n")[-1]
    heading, *found = rows(table)
    assert heading[-1] == "FILE"
    assert [row[:4] for row in found] == [
        [f"layers.{number}.weight", "int6/64", "96x128", "12,288"] for number in (9, 10)
    ]


def test_tree(show: Callable[..., str]) -> None:
    heading, *lines = show(PYCODE_MOE, "--tree").split("\n\n")[-1].splitlines()
    assert heading.split() == ["MODULE", "TYPE", "SHAPE", "PARAMETERS", "SIZE"]
    assert [line[: heading.index("TYPE")].rstrip() for line in lines[:10]] == [
        "lm_head.weight",
        "model",
        "  embed_tokens.weight",
        "  layers",
        "    0-2 (3 alike)",
        "      input_layernorm.weight",
        "      mlp",
        "        experts",
        "          0-7 (8 alike)",
        "            down_proj.weight",
    ]
    assert lines[4].split()[-4:] == ["BF16", "2.96M", "5.91", "MB"]
    assert lines[9].split()[-5:] == ["BF16", "256x128", "786K", "1.57", "MB"]
    assert len(show(PYCODE_MOE, "--tree", "--depth", 2).split("\n\n")[-1].splitlines()) == 6


def test_a_filter_holds_for_everything(show: Callable[..., str], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    text = show(folder, "--filter", "*.mlp.*", "--filter", "lm_head.*", "--tensors", "--tree")
    assert "3 of 6" in text
    assert "embed" not in text
    document = json.loads(show(folder, "--filter", "*.mlp.*", "--json"))
    assert (len(document["header"]), document["parameters"], document["tensors"]) == (2, 16_384, 2)


def test_json_of_a_file(show: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(small_tensors(), {"format": "pt"}))
    document = json.loads(show(path, "--json"))
    text = path.read_bytes()
    assert document.pop("header") == json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert document == {
        "sharded": False,
        "parameter_count": {"BF16": 32_832},
        "parameters": 32_832,
        "name": str(path),
        "kind": "file",
        "files": [{"name": "m.safetensors", "bytes": len(text)}],
        "tensors": 6,
        "bytes": 65_664,
        "bits_per_weight": 16.0,
        "quantization": [],
        "notes": [],
    }


def test_json_of_shards(show: Callable[..., str], tmp_path: Path) -> None:
    tensors, config, *_ = PACKED["awq"]
    named = {f"{name}{suffix}": tensor for name in "abc" for suffix, tensor in tensors.items()}
    folder = write_sparse_folder(tmp_path, named, config, shards=2)
    document = json.loads(show(folder, "--json"))
    assert list(document)[:3] == ["sharded", "index", "headers"]
    assert document["index"] == json.loads((folder / "model.safetensors.index.json").read_text())
    assert document["headers"] == {
        file.name: json.loads(
            file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")]
        )
        for file in sorted(folder.glob("*.safetensors"))
    }
    assert document["parameter_count"] == {"I32": 3 * 96 * 128}
    assert document["quantization"] == [
        {
            "type": "int4",
            "bits": 4,
            "group_size": 32,
            "format": "AWQ",
            "tensors": 3,
            "parameters": 3 * 96 * 128,
        }
    ]


def test_json_of_a_stored_model(show: Callable[..., str], store: Store, tmp_path: Path) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "m"), "m", store=store, quant="int4")
    document = json.loads(show("m", "--store", store.root, "--json"))
    assert document["sharded"] is True
    assert sorted(document["headers"]) == sorted(small_tensors())
    weights = document["index"]["weight_map"]
    assert weights["lm_head.weight.scale"] == "lm_head.weight"
    assert document["parameter_count"] == {"BF16": 6208, "U32": 26_624}
    assert document["headers"]["lm_head.weight"]["__metadata__"] == {
        "group_size": "64",
        "quant_type": "int8",
    }


def hostile_file(path: Path) -> tuple[Path, dict[str, Any]]:
    entries, nbytes = header(dict.fromkeys(HOSTILE, ("F32", (2,))), HOSTILE)
    path.write_bytes(raw_safetensors(json.dumps(entries).encode(), bytes(nbytes)))
    return path, entries


def test_hostile_names_are_shown_escaped_and_cut(show: Callable[..., str], tmp_path: Path) -> None:
    path, _ = hostile_file(tmp_path / "m\x1b.safetensors")
    text = show(path, "--tensors", "--tree", "--sort", "name")
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "a\\x1b[2J\\x07b" in text
    assert "right\\u202eto\\u200fleft" in text
    assert "line\\nbreak\\r\\ttab" in text
    assert "[bold]" in text
    assert max(map(len, text.splitlines())) < 600


def test_hostile_names_are_exact_in_json(show: Callable[..., str], tmp_path: Path) -> None:
    path, entries = hostile_file(tmp_path / "m.safetensors")
    text = show(path, "--json")
    assert text.isascii()
    assert json.loads(text)["header"] == entries


def test_the_process_writes_the_same(command: Command, tmp_path: Path) -> None:
    """Through a real pipe, and in an encoding that has no such letters."""
    path, entries = hostile_file(tmp_path / "m.safetensors")
    done = command("inspect", path, "--json", "--tensors")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["header"] == entries
    done = command("inspect", path, "--tree", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--sort", "colour"], 2, "Hint: Use one of: file, name, size, parameters."),
        (["--depth", "0"], 2, "Error"),
        ([], 1, "no file or folder"),
    ],
)
def test_wrong_use(
    arguments: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(tmp_path / "missing"), *arguments]) == code
    assert says in capsys.readouterr().err


def test_inspecting_loads_neither_numpy_nor_a_web_client(tmp_path: Path) -> None:
    code = """
import sys
from blobstore.cli.main import run
assert run(["inspect", sys.argv[1], "--tensors", "--tree"]) == 0
heavy = {"numpy", "mlx", "torch", "http.client", "pydantic", "blobstore.kernels"}
assert not heavy & set(sys.modules)
"""
    folder = write_sparse_folder(
        tmp_path / "m", {f"{n}.weight": ("BF16", (8, n)) for n in range(9)}, {}, shards=3
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True, stdout=subprocess.DEVNULL)
