"""``inspect``, ``diff``, ``quality`` and ``report``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE, PYCODE_MOE
from support.checkpoints import (
    BF16,
    normal,
    raw_safetensors,
    safetensors_bytes,
    small_tensors,
    write_checkpoint,
)
from support.commands import Cli, cells, table
from support.packed import PACKED
from support.sparse import header, write_sparse, write_sparse_folder

import blobstore

UP = "model.layers.0.mlp.up_proj.weight"
HOSTILE = {
    "a\x1b[2J\x07b": "an escape sequence and a bell",
    "right\u202eto\u200fleft": "bidirectional marks",
    "line\nbreak\r\ttab": "a line",
    "n" * 100_000: "a name of 100 KB",
    "\x1b]8;;http://evil\x1b\\x": "\x1b]0;title\x07",
    "[bold]": "[/]",
    "": "no name",
    ".".join("d" * 3000): "3000 dots",
}


# inspect


def test_a_summary(cli: Cli) -> None:
    facts, metadata = cli.text("inspect", PYCODE).split("\n\n")
    assert dict(table(facts)) == {
        "name": str(PYCODE),
        "kind": "folder",
        "files": "1",
        "tensors": "47",
        "parameters": "5.25M (5,245,696)",
        "dtypes": "BF16 5.25M",
        "size": "10.5 MB",
        "bits per weight": "16.00",
    }
    assert table(metadata) == [["METADATA", "VALUE"], ["format", "pt"]]


def test_a_stored_model(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m", "--quant", "int4")
    facts, quantizations = cli.text("inspect", "m").split("\n\n")
    shown = dict(table(facts))
    assert (shown["kind"], shown["dtypes"]) == ("model", "U32 26.6K, BF16 6.21K")
    heading, *rows = table(quantizations)
    assert heading == ["QUANTIZATION", "BITS", "GROUP", "FORMAT", "TENSORS", "PARAMETERS"]
    assert {(row[0], row[3]) for row in rows} == {("int4", "Ollama"), ("int8", "Ollama")}
    document = cli.json("inspect", "m")
    assert document["sharded"] is True
    assert sorted(document["headers"]) == sorted(small_tensors())
    assert document["index"]["weight_map"]["lm_head.weight.scale"] == "lm_head.weight"
    metadata = document["headers"]["lm_head.weight"]["__metadata__"]
    assert metadata == {"group_size": "64", "quant_type": "int8"}


def test_modelspec_large_metadata_and_notes(cli: Cli, tmp_path: Path) -> None:
    metadata = {
        "modelspec.title": "A title",
        "modelspec.thumbnail": "data:image/png;base64," + "A" * 5000,
        "ss_network": "x" * 500,
        **{f"key{number:03}": "v" for number in range(60)},
    }
    path = write_sparse(tmp_path / "m.safetensors", {"x": ("F32", (3,))}, metadata)
    _, modelspec, others = cli.text("inspect", path).split("\n\n")
    assert table(modelspec)[1:] == [["thumbnail", "(5.02 KB)"], ["title", "A title"]]
    rows = {row[0]: row[-1] for row in table(others)}
    assert "and 21 more" in rows
    assert len(rows["ss_network"]) == 120
    (tmp_path / "other\x1b.safetensors").touch()
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "other\x1b.safetensors").touch()
    assert cli.text("inspect", tmp_path / "c").splitlines()[-1] == (
        "Note: not part of the checkpoint, not counted: 'other\\x1b.safetensors'"
    )


@pytest.mark.parametrize(("sort", "first"), [("name", "lm_head"), ("size", "model.layers.0.mlp")])
def test_tensors_are_listed_in_an_order(cli: Cli, source: Path, sort: str, first: str) -> None:
    text = cli.text("inspect", source, "--tensors", "--sort", sort).split("\n\n")[-1]
    heading, *rows = table(text)
    assert heading == ["TENSOR", "TYPE", "SHAPE", "PARAMETERS", "SIZE"]
    assert rows[0][0].startswith(first)
    assert ["lm_head.weight", "BF16", "96x64", "6,144", "12.3 KB"] in rows
    error = cli.refused("inspect", source, "--sort", "colour")
    assert "Hint: Use one of: file, name, size, parameters." in error


def test_packed_tensors_of_shards(cli: Cli, tmp_path: Path) -> None:
    tensors, config, *_ = PACKED["mlx 6 bits"]
    named = {
        f"layers.{number}{suffix}": tensor
        for number in (10, 9)
        for suffix, tensor in tensors.items()
    }
    folder = write_sparse_folder(tmp_path, named, config, shards=2)
    heading, *rows = table(
        cli.text("inspect", folder, "--tensors", "--sort", "name").split("\n\n")[-1]
    )
    assert heading[-1] == "FILE"
    assert [row[:4] for row in rows] == [
        [f"layers.{number}.weight", "int6/64", "96x128", "12,288"] for number in (9, 10)
    ]
    document = cli.json("inspect", folder)
    assert list(document)[:3] == ["sharded", "index", "headers"]
    assert document["index"] == json.loads((folder / "model.safetensors.index.json").read_text())
    assert [one["type"] for one in document["quantization"]] == ["int6"]


def test_a_tree_joins_what_is_alike(cli: Cli) -> None:
    heading, *lines = cli.text("inspect", PYCODE_MOE, "--tree").split("\n\n")[-1].splitlines()
    assert cells(heading) == ["MODULE", "TYPE", "SHAPE", "PARAMETERS", "SIZE"]
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
    assert lines[9].split()[-5:] == ["BF16", "256x128", "786K", "1.57", "MB"]
    short = cli.text("inspect", PYCODE_MOE, "--tree", "--depth", 2)
    assert len(short.split("\n\n")[-1].splitlines()) == 6
    cli.refused("inspect", PYCODE_MOE, "--depth", 0)


def test_a_filter_holds_for_everything(cli: Cli, source: Path) -> None:
    globs = ("--filter", "*.mlp.*", "--filter", "lm_head.*")
    text = cli.text("inspect", source, *globs, "--tensors", "--tree")
    assert "3 of 6" in text
    assert "embed" not in text
    document = cli.json("inspect", source, "--filter", "*.mlp.*")
    assert (len(document["header"]), document["parameters"], document["tensors"]) == (2, 16_384, 2)


def test_the_document_of_a_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    raw = safetensors_bytes(small_tensors(), {"format": "pt"})
    path.write_bytes(raw)
    document = cli.json("inspect", path)
    assert document.pop("header") == json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert document == {
        "sharded": False,
        "parameter_count": {"BF16": 32_832},
        "parameters": 32_832,
        "name": str(path),
        "kind": "file",
        "files": [{"name": "m.safetensors", "bytes": len(raw)}],
        "tensors": 6,
        "bytes": 65_664,
        "bits_per_weight": 16.0,
        "quantization": [],
        "notes": [],
    }


def test_hostile_names_are_escaped_and_cut_and_exact_in_json(cli: Cli, tmp_path: Path) -> None:
    entries, nbytes = header(dict.fromkeys(HOSTILE, ("F32", (2,))), HOSTILE)
    path = tmp_path / "m\x1b.safetensors"
    path.write_bytes(raw_safetensors(json.dumps(entries).encode(), bytes(nbytes)))
    text = cli.text("inspect", path, "--tensors", "--tree", "--sort", "name")
    assert text.replace("\n", "").isprintable()
    assert "a\\x1b[2J\\x07b" in text
    assert "right\\u202eto\\u200fleft" in text
    assert "[bold]" in text
    assert max(map(len, text.splitlines())) < 600
    assert cli.json("inspect", path)["header"] == entries


# diff


def test_diff(cli: Cli, source: Path) -> None:
    for name, kind in (("a", "int4"), ("b", "int8")):
        cli.text("import", source, name, "--quant", kind)
    found = cli.json("diff", "a", "b", "--error")
    changed = {one["name"]: one for one in found["changed"]}
    assert [changed[UP][side]["type"] for side in ("before", "after")] == ["int4/32", "int8/64"]
    assert all(0 < one["error"]["relative_rmse"] < 0.2 for one in changed.values())
    assert found["documents"]["changed"] == ["(config)", "blobstore.json"]
    assert found["shared_bytes"] < min(found["bytes"].values())
    text = cli.text("diff", "a", "b", "--error")
    assert "int4/32 → int8/64" in text
    assert "%" in text
    assert cli.text("diff", "a", "a").startswith("0 tensors added, 0 removed, 0 changed")


# quality

FIGURES = ["weights", "rmse", "relative_rmse", "max_error", "cosine", "saturated"]


def test_quality_as_text(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m", "--quant", "int4")
    headings, *rows, kept = cli.text("quality", "m", "--against", source).splitlines()
    assert cells(headings) == [
        *("TENSOR", "TYPE", "SHAPE", "RMSE", "RELATIVE", "LARGEST", "COSINE", "SATURATED")
    ]
    report = blobstore.measure_quality("m", source, store=cli.store)
    measured = [tensor for tensor in report.tensors if tensor.errors.count]
    assert [cells(row)[0] for row in rows] == [*(tensor.name for tensor in measured), "m:latest"]
    assert cells(rows[0])[1:4] == ["int4", "64x64", f"{measured[0].errors.rmse:.4g}"]
    assert cells(rows[-1])[1:3] == ["4 tensors", "26.6K"]
    assert kept == "2 tensors are stored as they were"


def test_quality_as_a_document(cli: Cli, source: Path) -> None:
    words = ("--quant", "nvfp4", "--global-scale", "--method", "search")
    cli.text("import", source, "m", *words)
    document = cli.json("quality", "m", "--against", source, "--jobs", 1)
    assert document == cli.json("quality", "m", "--against", source)
    assert (document["name"], list(document["model"])) == ("m:latest", FIGURES)
    report = blobstore.measure_quality("m", source, store=cli.store)
    for shown, tensor in zip(document["tensors"], report.tensors, strict=True):
        assert list(shown) == ["name", "quant_type", "dtype", "kept", "shape", *FIGURES]
        kind = (tensor.type_name, None) if tensor.quantized else (None, tensor.type_name)
        assert (shown["name"], (shown["quant_type"], shown["dtype"])) == (tensor.name, kind)
        wanted = [tensor.errors.count, *(getattr(tensor.errors, key) for key in FIGURES[1:])]
        assert [shown[key] for key in FIGURES] == wanted


def test_figures_that_json_does_not_have_are_null(cli: Cli, tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "made", {"x.weight": normal("x", 32, 64)})
    cli.text("import", made, "m", "--quant", "int8")
    zeros = write_checkpoint(tmp_path / "zeros", {"x.weight": np.zeros((32, 64), BF16)})
    (tensor,) = cli.json("quality", "m", "--against", zeros)["tensors"]
    assert tensor["relative_rmse"] is None
    odd = write_checkpoint(tmp_path / "odd", {"n": np.array([np.inf, np.nan], np.float32)})
    cli.text("import", odd, "n", "--dtype", "bfloat16")
    text = cli.text("quality", "n", "--against", odd, "--json")
    assert not {"NaN", "Infinity"} & set(text.replace(",", " ").split())


def test_quality_of_a_model_that_is_not_quantized(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m")
    assert cli.text("quality", "m", "--against", source) == "6 tensors are stored as they were\n"
    none = {"weights": 0, "rmse": 0, "relative_rmse": 0, "max_error": 0, "cosine": 1}
    assert cli.json("quality", "m", "--against", source)["model"] == none | {"saturated": 0}


def test_errors_of_quality(cli: Cli, source: Path, tmp_path: Path) -> None:
    cli.text("import", source, "m", "--quant", "int4")
    wide = write_checkpoint(tmp_path / "wide", small_tensors() | {UP: normal("x", 64, 128)})
    says = f"'{UP}' is int4 [128, 64] in the model"
    assert says in cli.refused("quality", "m", "--against", wide, code=1)
    assert "nowhere" in cli.refused("quality", "m", "--against", "nowhere", code=1)
    assert "--against" in cli.refused("quality", "m")


# report, quality --plot and plan --html


@pytest.fixture
def imported(cli: Cli, source: Path) -> Cli:
    """Commands on a store with the model ``m``, made of ``source``."""
    cli.text("import", source, "m", "--quant", "int4")
    return cli


def inlined(page: Path) -> Any:
    return json.loads(page.read_text().split('id="inlined">')[1].split("</script>")[0])


def test_a_report_is_written_once(imported: Cli, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    words = ("report", "m", "--against", source, "-o", output)
    assert imported.text(*words).startswith(f"{output}: ")
    first = output.read_bytes()
    assert first.startswith(b"<!doctype html>")
    assert imported.refused(*words) == (
        f"Error: {output} already exists\nHint: Use --force to replace it.\n"
    )
    assert imported.json(*words, "--force")["page"] == str(output)
    assert output.read_bytes() == first
    plan = ("plan", source, "--quant", "int4", "--html", tmp_path / "plan.html")
    imported.text(*plan)
    assert "already exists" in imported.refused(*plan)
    imported.text(*plan, "--force")


def test_a_report_shows_what_quality_kept(imported: Cli, source: Path, tmp_path: Path) -> None:
    imported.text("quality", "m", "--against", source)
    imported.text("report", "m", "-o", tmp_path / "kept.html")
    quality = inlined(tmp_path / "kept.html")["answers"]["quality"]
    assert quality["against"] == "tiny"
    assert quality["measured"] is not None


def test_the_other_side_of_a_report_is_a_path_if_there_is_one(
    imported: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported.text("cp", "m", "tiny")
    monkeypatch.chdir(source.parent)
    imported.text("report", "m", "--against", "tiny", "-o", "a.html")
    assert inlined(Path("a.html"))["answers"]["quality"]["against"] == "tiny"
    imported.text("report", "m", "--against", "tiny:latest", "-o", "b.html")
    assert inlined(Path("b.html"))["diff"]["a"] == "tiny:latest"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("m", 2, "nothing to write"),
        ("gone -o a", 1, "gone"),
        ("m --against gone:x -o a", 1, "gone:x"),
        ("m -o -", 2, "not written to standard output"),
        # A page without a place is refused before its model is read.
        ("missing -o none/a --force", 1, "can't write none/a: no such file or directory"),
        ("missing -o tiny --force", 1, "tiny is not a regular file"),
        ("missing -o pipe --force", 1, "pipe is not a regular file"),
    ],
)
def test_refusals_of_report(
    imported: Cli,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(source.parent)
    os.mkfifo("pipe")
    assert says in imported.refused("report", *words.split(), code=code)
    assert not Path("a").exists()


def test_pictures_need_an_extra(
    imported: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    error = imported.refused("report", "m", "--png", tmp_path / "p")
    assert "pip install 'blobstore[plots]'" in error
    assert not (tmp_path / "p").exists()


def test_a_plot_in_the_terminal(
    imported: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    words = ("quality", "m", "--against", source)
    text, both = imported.text(*words), imported.text(*words, "--plot")
    assert both.startswith(text)
    plot = both.removeprefix(text).splitlines()
    assert plot[1].startswith("Relative rmse")
    assert max(map(len, plot)) <= 50
    assert "\x1b" not in both
    assert imported.json(*words, "--plot")["name"] == "m:latest"
