"""``inspect``, ``quality`` and ``report``: hostile names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import raw_safetensors
from support.commands import Cli
from support.sparse import header

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
        ("m -o -", 2, "written to standard output"),
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
