"""``report``, ``quality --plot`` and ``plan --html``: files, refusals, what is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.cli.main import run
from blobstore.store.local.store import Store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(store: Store, tmp_path: Path) -> Path:
    """A checkpoint, from which the model ``m`` was imported."""
    folder = write_checkpoint(tmp_path / "tiny")
    blobstore.import_model(folder, "m", store=store, quant="int4")
    return folder


def inlined(page: Path) -> Any:
    return json.loads(page.read_text().split('id="inlined">')[1].split("</script>")[0])


def test_a_page_is_written_once(cli: Run, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    code, out, err = cli("report", "m", "--against", source, "-o", output)
    assert (code, err) == (0, "")
    assert out.startswith(f"{output}: ")
    first = output.read_bytes()
    assert first.startswith(b"<!doctype html>")
    code, _, err = cli("report", "m", "--against", source, "-o", output)
    assert (code, err.splitlines()) == (
        2,
        [f"Error: {output} already exists", "Hint: Use --force to replace it."],
    )
    assert cli("report", "m", "--against", source, "-o", output, "--force")[0] == 0
    assert output.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"]


def test_what_quality_kept_is_shown(cli: Run, source: Path, tmp_path: Path) -> None:
    assert cli("quality", "m", "--against", source)[0] == 0
    assert cli("report", "m", "-o", tmp_path / "kept.html")[0] == 0
    quality = inlined(tmp_path / "kept.html")["answers"]["quality"]
    assert quality["against"] == "tiny"
    assert quality["measured"] is not None


def test_the_other_side_is_a_path_if_there_is_one(
    cli: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("cp", "m", "tiny")[0] == 0
    monkeypatch.chdir(tmp_path)
    assert cli("report", "m", "--against", "tiny", "-o", "a.html")[0] == 0
    assert inlined(Path("a.html"))["answers"]["quality"]["against"] == "tiny"
    assert cli("report", "m", "--against", "tiny:latest", "-o", "b.html")[0] == 0
    assert inlined(Path("b.html"))["diff"]["a"] == "tiny:latest"


def test_refusals(cli: Run, source: Path, tmp_path: Path) -> None:
    for words, code, message in [
        (("report", "m"), 2, "nothing to write"),
        (("report", "gone", "-o", tmp_path / "a"), 1, "gone"),
        (("report", "m", "--against", "gone:x", "-o", tmp_path / "a"), 1, "gone:x"),
        (("report", "m", "-o", "-"), 2, "not written to standard output"),
    ]:
        found, _, err = cli(*words)
        assert (found, message in err) == (code, True), err
        assert not (tmp_path / "a").exists()


def test_a_page_without_a_place_is_refused_before_its_model_is_read(
    cli: Run, source: Path, tmp_path: Path
) -> None:
    for output, reason in [
        (tmp_path / "none" / "a", "no such file or directory"),
        (source / "config.json" / "a", "not a directory"),
        (tmp_path / ("a" * 300), "file name too long"),
    ]:
        code, _, err = cli("report", "missing", "-o", output, "--force")
        assert (code, err) == (1, f"Error: can't write {output}: {reason}\n")
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path, tmp_path / "pipe"):
        code, _, err = cli("report", "missing", "-o", output, "--force")
        assert (code, err) == (1, f"Error: {output} is not a regular file\n")


def test_a_report_as_json(cli: Run, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.html"
    code, out, _ = cli("report", "m", "-o", output, "--json")
    assert code == 0
    assert json.loads(out) == {
        "name": "m:latest",
        "page": str(output),
        "bytes": output.stat().st_size,
        "plots": ["treemap", "distribution-1", "distribution-2", "distribution-3"],
        "pictures": [],
    }


def test_pictures_need_an_extra(
    cli: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, _, err = cli("report", "m", "--png", tmp_path / "p")
    assert code == 2
    assert "pip install 'blobstore[plots]'" in err
    assert not (tmp_path / "p").exists()


def test_a_plot_in_the_terminal(cli: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    _, table, _ = cli("quality", "m", "--against", source)
    _, both, _ = cli("quality", "m", "--against", source, "--plot")
    assert both.startswith(table)
    plot = both.removeprefix(table).splitlines()
    assert plot[1].startswith("Relative rmse")
    assert max(map(len, plot)) <= 50
    assert "\x1b" not in both
    _, as_json, _ = cli("quality", "m", "--against", source, "--plot", "--json")
    assert as_json.startswith("{")


def test_a_plan_as_a_page(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.html"
    words = ["plan", str(source), "--quant", "int4", "--html", str(output)]
    assert run(words) == 0
    first = output.read_bytes()
    assert run(words) == 2
    assert "already exists" in capsys.readouterr().err
    assert run([*words, "--force"]) == 0
    assert output.read_bytes() == first
