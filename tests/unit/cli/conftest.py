"""Commands on a store that the environment names, called in this process."""

from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.commands import Cli

from blobstore.store.local.store import Store


@pytest.fixture
def cli(store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("OLLAMA_MODELS", str(store.root))
    return Cli(store, capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint, ``tiny``."""
    return write_checkpoint(tmp_path / "tiny")
