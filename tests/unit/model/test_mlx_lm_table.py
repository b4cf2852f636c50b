"""The table of mlx-lm's models equals the installed mlx-lm, read from its files."""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import models, utils

from blobstore.errors import UsageError
from blobstore.model import on_mlx_lm as mlx_lm


def test_modules() -> None:
    assert importlib.metadata.version("mlx-lm") == mlx_lm.VERSION, "renew the table"
    has_model = set()
    for file in Path(models.__path__[0]).glob("*.py"):
        text = file.read_text()
        names = set(re.findall(r"^class (\w+)", text, re.MULTILINE))
        for imported in re.findall(r"^from \S+ import (.*)", text, re.MULTILINE):
            names |= set(re.findall(r"\w+", imported))
        if {"Model", "ModelArgs"} <= names:
            has_model.add(file.stem)
    assert has_model == mlx_lm.MODULES, " ".join(sorted(has_model))


def test_remapped_types() -> None:
    assert mlx_lm.REMAPPED == utils.MODEL_REMAPPING
    assert mlx_lm.REMAPPED_ARCHITECTURES == utils.MODEL_ARCHITECTURE_REMAPPING
    remapped = {*mlx_lm.REMAPPED.values(), *mlx_lm.REMAPPED_ARCHITECTURES.values()}
    assert remapped <= mlx_lm.MODULES


CONFIGS: list[dict[str, Any]] = [
    *({"model_type": name} for name in ("mistral", "bailing_hybrid")),
    {"model_type": "bailing_hybrid", "architectures": ["Other", "BailingMoeV3ForCausalLM"]},
    {"model_type": "bailing_hybrid", "architectures": "BailingMoeV3ForCausalLM"},
]


@pytest.mark.parametrize("version", [mlx_lm.VERSION, "0.0.0"])
def test_classes_are_those_of_mlx_lm(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Both by our table, and by its own when it has another version than the table."""
    monkeypatch.setattr(mlx_lm, "VERSION", version)
    for config in CONFIGS:
        assert mlx_lm.network_classes(config) == utils._get_classes(config)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    for function in (mlx_lm.import_mlx_lm, mlx_lm.require_mlx_lm):
        with pytest.raises(UsageError, match="mlx-lm is not installed"):
            function()
