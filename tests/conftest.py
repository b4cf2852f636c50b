"""Fixtures of all tests."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from blobstore.store.local.store import Store, open_store

# The machine may be small and busy: no deadlines. The same examples every time, so that a run says
# something of a change; HYPOTHESIS_PROFILE=random looks at others, and `deep` at many, for a night.
settings.register_profile(
    "random", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.register_profile("deep", settings.get_profile("random"), max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_TESTS = Path(__file__).parent
_NOT_QUICK = frozenset(
    {
        *(
            "cli/test_completion.py",
            "cli/test_corpus.py",
            "cli/test_processes.py",
            "formats/safetensors/test_corpus_header.py",
        ),
        *(
            "formats/test_corpus_documents.py",
            "importer/test_planfile.py",
            "importer/test_import.py",
        ),
        *(
            "importer/test_import_sources.py",
            "importer/test_reuse.py",
            "importer/test_target.py",
            "importer/test_transposed.py",
        ),
        *(
            "inspection/test_quality.py",
            "inspection/test_web.py",
            "io/test_hostile_amounts.py",
            "kernels/test_decode_blocks.py",
        ),
        *(
            "kernels/test_kernel_refusals.py",
            "kernels/test_search.py",
            "kernels/test_targets.py",
        ),
        *(
            "store/local/test_lock.py",
            "store/local/test_nested_store.py",
            "store/local/test_races.py",
            "test_readme.py",
        ),
    }
)
"""Files of tests/unit that take more than 2.5 s of processor time each (docs/development.md)."""
_PRODUCT = 3
"""Marks of one test, from which on only pairs of their values are run."""
Snapshot = dict[str, str]
_HINTS = (".blobstore/lock", ".blobstore/names", ".blobstore/hints/")


def _is_quick(path: Path) -> bool:
    """Return True for tests of single files that take little time.

    ``-m quick`` runs these, and collects no others.
    """
    if not path.is_relative_to(_TESTS / "unit"):
        return (_TESTS / "unit").is_relative_to(path)
    return str(path.relative_to(_TESTS / "unit")) not in _NOT_QUICK


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.markexpr == "quick" and not _is_quick(collection_path) else None


def _case(item: pytest.Item) -> str:
    """Return the name of a test's parameters, the text in its brackets."""
    return item.name.partition("[")[2].removesuffix("]")


def _stay(cases: set[str], kept: int | list[str] | dict[str, list[str]]) -> set[str]:
    """Return the cases that the default suite keeps (tests/lab.toml).

    All, if none of the listed cases is there: a test that is run by its identifier runs.
    """
    if isinstance(kept, list):
        return cases & set(kept) or cases
    if isinstance(kept, dict):
        return cases - set(kept["moved"]) or cases
    return set(sorted(cases, key=lambda case: hashlib.sha256(case.encode()).digest())[:kept])


def _leave_to_the_laboratory(items: list[pytest.Item]) -> None:
    """Mark the cases ``lab`` that tests/lab.toml does not keep in the default suite."""
    rows = {
        f"{file}::{function}": kept
        for file, functions in tomllib.loads((_TESTS / "lab.toml").read_text()).items()
        for function, kept in functions.items()
    }
    found = defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0].removeprefix("tests/")
        if test in rows:
            found[test].append(item)
    for test, its_items in found.items():
        stay = _stay({_case(item) for item in its_items}, rows[test])
        for item in its_items:
            if _case(item) not in stay:
                item.add_marker("lab")


def _values(item: pytest.Function) -> list[tuple[object, ...]]:
    """Return the values that a case has of each ``parametrize`` mark, as names and identities."""
    names = (mark.args[0] for mark in item.iter_markers("parametrize"))
    lists = (each.replace(" ", "").split(",") if isinstance(each, str) else each for each in names)
    return [(*each, *(id(item.callspec.params[name]) for name in each)) for each in lists]


def _pairwise(items: list[pytest.Function]) -> set[pytest.Function]:
    """Return cases of one test in which each value meets each value of every other mark."""
    pairs = {item: set(combinations(_values(item), 2)) for item in items}
    chosen, left = set(), set[Any]().union(*pairs.values())
    while left:
        best = max(items, key=lambda item: len(pairs[item] & left))
        left -= pairs[best]
        chosen.add(best)
    return chosen


def _deselect_products(items: list[pytest.Item], config: pytest.Config) -> None:
    """Keep the pairs of tests that three or more marks would make a product of."""
    tests = defaultdict(list)
    for item in items:
        marks = list(item.iter_markers("parametrize"))
        if isinstance(item, pytest.Function) and len(marks) >= _PRODUCT:
            tests[item.nodeid.partition("[")[0]].append(item)
    kept = {item for cases in tests.values() for item in _pairwise(cases)}
    dropped = {item for cases in tests.values() for item in cases} - kept
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    _deselect_products(items, config)
    _leave_to_the_laboratory(items)
    for item in items:
        if _is_quick(item.path) and not {"long", "lab"} & {
            mark.name for mark in item.iter_markers()
        }:
            item.add_marker("quick")


# A shell lets jobs in the background ignore Ctrl-C, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until the tests are collected: thousands of objects are made, and all stay


def pytest_collection_finish() -> None:
    """Freeze thousands of tests, so that the garbage collector does not walk them repeatedly."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are mapped too, as large ones are."""
    monkeypatch.setattr("blobstore.io.ranges._MAPPED_FROM", 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return open_store(tmp_path / "store")


@pytest.fixture
def snapshot() -> Callable[[Store], Snapshot]:
    """A function that returns the hash of every file of a store by path.

    The lock and the journal are left out: they hold nothing that can be seen.
    """

    def take(store: Store) -> Snapshot:
        found = {
            path.relative_to(store.root).as_posix(): path
            for path in sorted(store.root.rglob("*"))
            if path.is_file()
        }
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in found.items()
            if not name.startswith(_HINTS)
        }

    return take


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that blobstore has logged in this test.

    Pytest's own plugin costs every test time, and is off.
    """
    handler, logger = _Messages(), logging.getLogger("blobstore")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield handler.messages
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs ``blobstore ARGUMENTS…`` in a process of its own."""

    def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "blobstore", *map(str, arguments)]
        return subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=300, **options
        )

    return run
