"""Commands on a store, called in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.cli.main import run
from blobstore.store.local.store import Store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(store: Store, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command on the store and returns its exit code, output and errors."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = run([*map(str, words), "--store", str(store.root)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
