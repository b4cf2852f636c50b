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


COMMANDS = [
    "import {closed}/source m --store {root}/new",
    "import {root}/open m --store {closed}/store",
    "plan {root}/open --policy {closed}/policy.toml",
    "plan --modelfile {root}/from",
    "plan {closed}/models--org--name",
    "inspect {closed}/source/model.safetensors",
    "export m {closed}/out --store {root}/store",
    *(f"{words} --store {{closed}}/store" for words in ("list", "rm m", "cp m n", "prune --undo")),
]


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that other users may enter, with ``closed``, which they may only list."""
    codecs.lookup("utf-8-sig")  # of a Modelfile: the other user may not read this Python's files
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        closed = root / "closed"
        for source in (root / "open", closed / "source"):
            write_checkpoint(source, {"w.weight": np.zeros((64, 64), np.float32)})
        (closed / "models--org--name" / "snapshots").mkdir(parents=True)
        (closed / "policy.toml").write_text('quant = "int4"')
        (root / "from").write_text(f"FROM {closed / 'source'}")
        (root / "new").mkdir(mode=0o777)
        for place in (root, closed):
            blobstore.import_model(root / "open", "m", store=place / "store")
        closed.chmod(0o444)
        yield root
        closed.chmod(0o755)


def test_a_folder_that_may_not_be_searched_is_one_sentence(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in COMMANDS:
        with unprivileged():
            code = run(words.format(root=root, closed=root / "closed").split())
        err = capsys.readouterr().err
        assert code in (1, 2), words
        assert err.startswith("Error: "), words
        assert err.count("\n") == 1 + err.count("\nHint: "), words
