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
    found = verdict.runs, verdict.version, verdict.reason
    assert found == (Runs.YES, mlx_lm.__version__, "checked")


def test_what_does_not_fit_is_told_and_without_a_tokenizer_the_tables_word(tmp_path: Path) -> None:
    config = json.loads((PYCODE / "config.json").read_text())
    folder = write_checkpoint(tmp_path / "in", config=config)
    plan = blobstore.plan_import(folder)
    assert [check_plan(plan)] == [one for one in plan.runs_in if one.runtime == "mlx-lm"]
    shutil.copy(PYCODE / "tokenizer.json", folder)
    verdict = check_plan(blobstore.plan_import(folder))
    assert verdict.runs is Runs.NO
    assert verdict.reason.startswith("mlx-lm's network needs 'model.layers.0.")
