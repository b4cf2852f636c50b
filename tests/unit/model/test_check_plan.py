"""A plan is checked by the installed mlx-lm, before a weight is read."""

import json
import shutil
from pathlib import Path

import mlx_lm
from support import PYCODE, PYCODE_MOE
from support.checkpoints import write_checkpoint

import blobstore
from blobstore.mlx_lm import check_plan
from blobstore.model.facts import Runs


def test_what_fits_runs() -> None:
    verdict = check_plan(blobstore.plan_import(PYCODE_MOE, quant="int4", experts="stacked"))
    assert (verdict.runs, verdict.version, verdict.reason) == (
        Runs.YES,
        mlx_lm.__version__,
        "checked",
    )


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "in", config=json.loads((PYCODE / "config.json").read_text())
    )
    shutil.copy(PYCODE / "tokenizer.json", folder)
    verdict = check_plan(blobstore.plan_import(folder))
    assert verdict.runs is Runs.NO
    assert verdict.reason.startswith("mlx-lm's network needs 'model.layers.0.")


def test_without_a_tokenizer_it_is_the_tables_word(tmp_path: Path) -> None:
    plan = blobstore.plan_import(write_checkpoint(tmp_path / "in"))
    assert [check_plan(plan)] == [one for one in plan.runs_in if one.runtime == "mlx-lm"]
