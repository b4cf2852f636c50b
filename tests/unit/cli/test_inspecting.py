"""``inspect`` of hostile names, and ``report``."""

import json
from pathlib import Path
from typing import Any

from support.checkpoints import normal, raw_safetensors, write_checkpoint
from support.commands import Cli, table
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


def test_tensors_are_in_number_order_and_alike_modules_together(cli: Cli, tmp_path: Path) -> None:
    shapes = {f"h.{layer}.w.weight": (64, 64) for layer in (10, 9, 11)}
    source = write_checkpoint(tmp_path / "m", {n: normal(n, *shapes[n]) for n in shapes})
    cli.text("import", source, "m", "--quant", "int4")
    names = [f"h.{layer}.w.weight" for layer in (9, 10, 11)]
    quality = ("quality", "m", "--against", source)
    every = ("show", "m"), ("plan", source, "--quant", "int4"), quality, ("inspect", source)
    for command in every:
        rows = [row[0] for row in table(cli.text(*command, "--tensors")) if row[0] in names]
        assert rows == names
    for command in every[1:3]:
        assert "9-11.w.weight (3 alike)" in cli.text(*command)
    (first, *_) = cli.json(*quality)["tensors"]
    assert [r[0] for r in table(cli.text(*quality, "--top", 1)) if r[0] in names] == [first["name"]]
    assert cli.json("show", "m")["bits_per_weight"] == cli.json("list")[0]["bits_per_weight"] == 5.0


def inlined(page: Path) -> Any:
    return json.loads(page.read_text().split('id="inlined">')[1].split("</script>")[0])


def test_a_report_is_written_once(cli: Cli, source: Path, tmp_path: Path) -> None:
    cli.text("import", source, "m", "--quant", "int4")
    output = tmp_path / "report.html"
    cli.text("quality", "m", "--against", source)
    words = ("report", "m", "-o", output)
    assert cli.text(*words).startswith(f"{output}: ")
    quality = inlined(output)["answers"]["quality"]  # what `quality` kept
    assert (quality["against"], quality["measured"] is None) == ("tiny", False)
    assert "--force" in cli.refused(*words)
    assert cli.json(*words, "--force")["page"] == str(output)
    plan = ("plan", source, "--quant", "int4", "--html", tmp_path / "plan.html")
    cli.text(*plan)
    assert "already exists" in cli.refused(*plan)
