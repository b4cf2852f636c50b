"""``inspect``, ``diff``, ``quality`` and ``report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE_MOE
from support.checkpoints import (
    raw_safetensors,
)
from support.commands import Cli, cells, table
from support.sparse import header

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


def test_a_stored_model(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m", "--quant", "int4")
    facts, quantizations = cli.text("inspect", "m").split("\n\n")
    assert ["kind", "model"] in table(facts)
    heading, *rows = table(quantizations)
    assert heading == ["QUANTIZATION", "BITS", "GROUP", "FORMAT", "TENSORS", "PARAMETERS"]
    assert {(row[0], row[3]) for row in rows} == {("int4", "Ollama"), ("int8", "Ollama")}
    document = cli.json("inspect", "m")
    assert document["index"]["weight_map"]["lm_head.weight.scale"] == "lm_head.weight"
    metadata = document["headers"]["lm_head.weight"]["__metadata__"]
    assert metadata == {"group_size": "64", "quant_type": "int8"}
    for sort, name in (("name", "lm_head"), ("size", "model.layers.0.mlp")):
        text = cli.text("inspect", source, "--tensors", "--sort", sort).split("\n\n")[-1]
        heading, first, *_ = table(text)
        assert heading == ["TENSOR", "TYPE", "SHAPE", "PARAMETERS", "SIZE"]
        assert first[0].startswith(name)
    assert "Use one of: file, name" in cli.refused("inspect", source, "--sort", "colour")
    (source / "other\x1b.safetensors").touch()
    assert "not counted: 'other\\x1b.safetensors'" in cli.text("inspect", source)


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
    assert cli.text("diff", "a", "a").startswith("0 tensors added, 0 removed, 0 changed")


# quality


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
    imported.text("quality", "m", "--against", source)
    words = ("report", "m", "-o", output)
    assert imported.text(*words).startswith(f"{output}: ")
    quality = inlined(output)["answers"]["quality"]  # what `quality` kept
    assert (quality["against"], quality["measured"] is None) == ("tiny", False)
    assert "--force" in imported.refused(*words)
    assert imported.json(*words, "--force")["page"] == str(output)
    plan = ("plan", source, "--quant", "int4", "--html", tmp_path / "plan.html")
    imported.text(*plan)
    assert "already exists" in imported.refused(*plan)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("m", 2, "nothing to write"),
        ("m --against gone:x -o a", 1, "gone:x"),
        ("m -o -", 2, "not written to standard output"),
        # A page without a place is refused before its model is read.
        ("missing -o tiny --force", 1, "tiny is not a regular file"),
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
    assert says in imported.refused("report", *words.split(), code=code)
    assert not Path("a").exists()


def test_a_plot_in_the_terminal(
    imported: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    words = ("quality", "m", "--against", source)
    text, both = imported.text(*words), imported.text(*words, "--plot")
    assert both.startswith(text)
    assert text.endswith("2 tensors are stored as they were\n")
    plot = both.removeprefix(text).splitlines()
    assert plot[1].startswith("Relative rmse")
    assert max(map(len, plot)) <= 50
    assert "\x1b" not in both
