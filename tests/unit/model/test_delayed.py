"""Delayed packages: modules without the package's own code, which runs when it is needed."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.model.mlx_lm_package import delay_package

_numbers = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that says when its code runs, with a module that does not need it."""
    name = f"delayed_{next(_numbers)}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("from .heavy import weight\nran = [__name__, __path__]\n")
    (folder / "heavy.py").write_text("from . import light\nweight = light.grams * 1000\n")
    (folder / "light.py").write_text("grams = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for one in [one for one in sys.modules if one.split(".")[0] == name]:
        del sys.modules[one]


def test_a_module_does_not_run_its_package(package: str) -> None:
    delay_package(package)
    assert importlib.import_module(f"{package}.light").grams == 3
    assert f"{package}.heavy" not in sys.modules


def test_a_name_of_the_package_runs_it_once(package: str) -> None:
    delay_package(package)
    light = importlib.import_module(f"{package}.light")
    whole = importlib.import_module(package)
    assert whole.weight == 3000
    assert whole.ran[0] == package
    assert whole.light is light
    first = whole.ran
    assert importlib.import_module(package).ran is first
    with pytest.raises(AttributeError, match="nothing"):
        _ = whole.nothing


def test_a_package_that_was_imported_stays_as_it_is(package: str) -> None:
    whole = importlib.import_module(package)
    delay_package(package)
    assert sys.modules[package] is whole


@pytest.mark.parametrize("name", ["delayed_and_missing", "this"])
def test_what_is_missing_or_no_package_is_left_alone(name: str) -> None:
    delay_package(name)
    assert name not in sys.modules
