"""Flags of an import's options: each option has one, and hints of the library show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from support.checkpoints import write_checkpoint

from blobstore.cli.main import run
from blobstore.cli.output import flag_of, with_flags
from blobstore.importer.arguments import ImportArguments, Option

HINTS: dict[str, Any] = get_type_hints(ImportArguments, include_extras=True)


@pytest.mark.parametrize("word", ["import", "plan"])
def test_every_option_of_the_table_is_in_the_help(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([word, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, hint in HINTS.items():
        _, option = get_args(hint)
        assert isinstance(option, Option)
        assert flag_of(name) in text
        assert option.help.split()[0] in text


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        (
            'Add quant="int4", for example; GLOB=int4/64.',
            "Add --quant int4, for example; GLOB=int4/64.",
        ),
        ("or add requantize=True.", "or add --requantize."),
        ("Add draft=DIR.", "Add --draft DIR."),
        ('Only profile="default" can.', "Only --profile default can."),
        ('with target_size=SIZE and rules=["x"]', 'with --target-size SIZE and rules=["x"]'),
        ("Read /data/x=Y/model instead.", "Read /data/x=Y/model instead."),
        ("Write bytes.", "Write bytes."),
    ],
)
def test_hints_show_flags(hint: str, shown: str) -> None:
    assert with_flags(hint) == shown


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (["--rule", "*=int8"], "--rule"),
        (["--align", "64"], "--align"),
        (["--requantize"], "--requantize"),
    ],
)
def test_a_plan_takes_no_options(
    given: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plan = write_checkpoint(tmp_path / "m"), tmp_path / "plan.json"
    assert run(["plan", str(source), "-o", str(plan)]) == 0
    assert json.loads(plan.read_bytes())["version"] == 2
    assert run(["import", "--plan", str(plan), "m", *given, "--store", str(tmp_path / "s")]) == 2
    assert f"Error: {flag} can't be used with --plan" in capsys.readouterr().err
