"""Commands among processes: pipes, terminals, Ctrl-C, encodings, closed streams."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support import PYCODE_MOE
from support.checkpoints import safetensors_bytes, write_checkpoint

import blobstore
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]


def line(*words: object) -> list[str]:
    return [sys.executable, "-m", "blobstore", *map(str, words)]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """The list exceeds a pipe's 64 KiB, so writing it can't end before the reader goes."""
    source = tmp_path / "many.safetensors"
    names = (f"{number:064}" for number in range(2000))
    source.write_bytes(safetensors_bytes(dict.fromkeys(names, np.ones(1, np.uint8))))
    words = line("inspect", source, "--tensors")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == (b"", 0)


def test_closed_standard_streams_and_a_narrow_encoding(tmp_path: Path) -> None:
    """Python gives a closed stream no object at all, and prints to stdout what was for it."""
    source = tmp_path / "uni.safetensors"
    source.write_bytes(safetensors_bytes({"é😀": np.ones(1, np.uint8)}))
    inspect, show = (" ".join(line(*words)) for words in (["inspect", source, "--tree"], ["show"]))
    script = f"PYTHONIOENCODING=ascii {inspect} 2>&-; {show} m 2>&-; {show} m 2>&- >&- <&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "\\xe9\\U0001f600" in done.stdout
    assert "Error" not in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")
def test_output_that_can_not_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        words = line("completion", "bash")
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "no space left" in done.stderr.lower()
    assert done.stderr.count("\n") == 1


def test_a_terminal_gets_one_progress_bar(tmp_path: Path) -> None:
    """Only stderr is a terminal here."""
    main, other = pty.openpty()
    terminal = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": ""}
    words = line("import", PYCODE_MOE, "--store", tmp_path / "store")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=other, env=terminal) as child:
        os.close(other)
        raw = b""
        with suppress(OSError):  # Linux's way to say that the last writer has gone
            while part := os.read(main, 65536):
                raw += part
        assert child.stdout is not None
        assert b"\x1b" not in child.stdout.read()
        assert child.wait() == 0
    os.close(main)
    text = raw.decode()
    for shown in ("10.1/10.1 MB", "━", "\x1b[3"):
        assert shown in text
    assert text.count("\n") <= 2


INTERRUPTED = """
import os, signal, threading
from blobstore.importer import writing
from blobstore.cli.main import main

heard = threading.Event()

def interrupt(*_):
    heard.set()
    raise KeyboardInterrupt

def make(*arguments):
    if not heard.is_set():
        os.kill(os.getpid(), signal.SIGINT)
    heard.wait()
    return real(*arguments)

signal.signal(signal.SIGINT, interrupt)
writing.RunMaker.make, real = make, writing.RunMaker.make
main()
"""


def test_ctrl_c_leaves_the_store_as_it_was(
    store: Store, tmp_path: Path, snapshot: Snapshot
) -> None:
    """Ctrl-C comes when the first part of the import is written."""
    source = write_checkpoint(tmp_path / "tiny")
    blobstore.import_model(source, store=store)
    before = snapshot(store)
    words = [*line("import", source, "--quant", "int4", "--store", store.root, "--jobs", 2)]
    words[1:3] = ["-c", INTERRUPTED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    error = "Error: interrupted; the same command continues"
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", error)
    after = {name: digest for name, digest in snapshot(store).items() if "/left/" not in name}
    assert after == before  # but for whole blobs, which the next import takes
    assert list((store.root / ".blobstore/tmp").iterdir()) == []
