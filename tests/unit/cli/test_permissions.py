"""Every command with a path in an unsearchable folder: one sentence for an ordinary user."""

from __future__ import annotations

import codecs
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_checkpoint
from support.stores import unprivileged

import blobstore
from blobstore.cli.main import run

COMMANDS = {
    "import": ("import", "{closed}/source", "m", "--store", "{new}"),
    "import a file": ("import", "{closed}/source/model.safetensors", "m", "--store", "{new}"),
    "import a relative draft": (
        "import",
        "{open}",
        "m",
        "--store",
        "{new}",
        "--draft",
        "{closed}/source",
    ),
    "policy": ("plan", "{open}", "--policy", "{closed}/policy.toml"),
    "modelfile": ("plan", "--modelfile", "{closed}/Modelfile"),
    "from": ("plan", "--modelfile", "{from}"),
    "importance": (
        "plan",
        "{open}",
        "--quant",
        "int4",
        "--method",
        "search",
        "--importance",
        "{closed}/i.safetensors",
    ),
    "plan": ("plan", "{closed}/source"),
    "plan a repository of the cache": ("plan", "{closed}/models--org--name"),
    "inspect": ("inspect", "{closed}/source"),
    "inspect a file": ("inspect", "{closed}/source/model.safetensors"),
    "metadata get": ("metadata", "get", "{closed}/source/model.safetensors"),
    "metadata set": ("metadata", "set", "{closed}/source/model.safetensors", "k", "v"),
    "metadata rm": ("metadata", "rm", "{closed}/source/model.safetensors", "k"),
    "export": ("export", "m", "{closed}/out", "--store", "{store}"),
    "quality": ("quality", "m", "--against", "{closed}/source", "--store", "{store}"),
    "repair": ("repair", "m", "--from", "{closed}/source", "--store", "{store}"),
    **{
        name: (*name.split(), "--store", "{closed}/store")
        for name in (
            "list",
            "show m",
            "rm m",
            "cp m n",
            "mv m n",
            "verify",
            "prune",
            "prune --undo",
            "du",
            "diff m m",
        )
    },
    "import into": ("import", "{open}", "m", "--store", "{closed}/store"),
}


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Path]]:
    """Folders that other users may enter, and one that they may not, with the same in it."""
    codecs.lookup(
        "utf-8-sig"
    )  # of a Modelfile; the other user may not read this Python's own files
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        source = write_checkpoint(root / "open", {"w.weight": np.zeros((64, 64), np.float32)})
        closed = root / "closed"
        write_checkpoint(closed / "source", {"w.weight": np.zeros((64, 64), np.float32)})
        (closed / "models--org--name" / "snapshots").mkdir(parents=True)
        (closed / "policy.toml").write_text('quant = "int4"')
        (closed / "Modelfile").write_text(f"FROM {source}")
        (root / "from").write_text(f"FROM {closed / 'source'}")
        (root / "new").mkdir(mode=0o777)
        for place in (root, closed):
            blobstore.import_model(source, "m", store=blobstore.open_store(place / "store"))
        yield {
            "open": source,
            "closed": closed,
            "new": root / "new",
            "store": root / "store",
            "from": root / "from",
        }


@pytest.mark.parametrize("mode", [0o000, 0o444], ids=["no right", "only to list"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_may_not_be_searched(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str], command: str, mode: int
) -> None:
    places["closed"].chmod(mode)
    try:
        with unprivileged():
            code = run([argument.format(**places) for argument in COMMANDS[command]])
    finally:
        places["closed"].chmod(0o755)
    output = capsys.readouterr()
    assert code in (1, 2), output
    assert output.err.startswith("Error: ")
    assert output.err.count("\n") == 1 + output.err.count("\nHint: ")


def test_the_standard_input_that_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "m") / "model.safetensors"
    with (tmp_path / "write-only").open("w") as stream:

        class Unreadable:
            buffer = open(stream.fileno(), "rb", closefd=False)  # noqa: SIM115  # closed with the file

        monkeypatch.setattr("sys.stdin", Unreadable)
        assert run(["metadata", "set", str(path), "-"]) == 1
