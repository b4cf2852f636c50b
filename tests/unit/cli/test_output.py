"""What is printed: no control characters, one line an error, a bar, any folder."""

import codecs
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.commands import Cli
from support.stores import unprivileged

import blobstore
from blobstore.cli.main import run
from blobstore.cli.output import printable, progress_bar
from blobstore.io.workers import start_progress

EVIL = "evil\x1b]0;owned\x07\x1b[31m\u202e\n\x9b"


def test_characters_that_a_terminal_acts_on_are_escaped() -> None:
    assert printable("a\x1b[2J\u202eb\n\ud800") == "a\\x1b[2J\\u202eb\\n\\ud800"
    assert printable("a\n\tb\x07", keep="\n\t") == "a\n\tb\\x07"


def test_names_of_files_and_tensors_are_printed_escaped(cli: Cli, tmp_path: Path) -> None:
    tensors = {**small_tensors(), EVIL: normal("e", 3)}
    source = write_checkpoint(tmp_path / "m", tensors, {"architectures": [EVIL]})
    (source / f"{EVIL}.safetensors").write_bytes(b"")
    texts = [cli.text("plan", source), cli.text("import", source, "m")]
    texts += [cli.text("show", "m", "--tensors"), cli.text("show", "m", "--json")]
    texts += [cli.refused("plan", tmp_path / EVIL, code=1), cli.refused("show", EVIL)]
    for text in texts:
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
    assert "evil" in texts[0]


def test_a_tensor_name_is_no_markup_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar() as progress:
        assert progress is not None
        start_progress(progress, 10)
        for name in ("\\[/foo]", "[bold]", "[/]", "\x1b[2J"):
            progress(2, name)


# Paths in a folder that may not be searched

COMMANDS = [
    "import {closed}/source m --store {new}",
    "import {open} m --store {closed}/store",
    "plan {open} --policy {closed}/policy.toml",
    "plan --modelfile {from}",
    "plan {closed}/models--org--name",
    "inspect {closed}/source/model.safetensors",
    "export m {closed}/out --store {store}",
    *(f"{words} --store {{closed}}/store" for words in ("list", "rm m", "cp m n", "prune --undo")),
]


@pytest.fixture
def places() -> Iterator[dict[str, Path]]:
    """Folders that other users may enter, and one that they may only list, with the same in it."""
    codecs.lookup("utf-8-sig")  # of a Modelfile: the other user may not read this Python's files
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        tensors = {"w.weight": np.zeros((64, 64), np.float32)}
        source, closed = write_checkpoint(root / "open", tensors), root / "closed"
        write_checkpoint(closed / "source", tensors)
        (closed / "models--org--name" / "snapshots").mkdir(parents=True)
        (closed / "policy.toml").write_text('quant = "int4"')
        (closed / "Modelfile").write_text(f"FROM {source}")
        (root / "from").write_text(f"FROM {closed / 'source'}")
        (root / "new").mkdir(mode=0o777)
        for place in (root, closed):
            blobstore.import_model(source, "m", store=blobstore.open_store(place / "store"))
        closed.chmod(0o444)
        yield {name: root / name for name in ("open", "closed", "new", "store", "from")}
        closed.chmod(0o755)


def test_a_folder_that_may_not_be_searched_is_one_sentence(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in COMMANDS:
        with unprivileged():
            code = run(words.format(**places).split())
        err = capsys.readouterr().err
        assert code in (1, 2), words
        assert err.startswith("Error: "), words
        assert err.count("\n") == 1 + err.count("\nHint: "), words
