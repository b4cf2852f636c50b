"""The command line among processes: pipes, terminals, Ctrl-C, encodings, few imports."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import PYCODE, PYCODE_MOE
from support.checkpoints import raw_safetensors, safetensors_bytes, write_checkpoint

import blobstore
from blobstore.store.local.store import Store, open_store

Snapshot = Callable[[Store], dict[str, str]]
HEAVY = {"mlx", "torch", "mlx_lm", "transformers", "numpy", "ml_dtypes"}


def line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "blobstore", *map(str, arguments)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["list", "--json"],
        ["show", "m"],
        ["cp", "m", "n"],
        ["rm", "m"],
        ["export", "m", "out"],
    ],
)
def test_what_the_light_commands_do_not_load(tmp_path: Path, arguments: list[str]) -> None:
    blobstore.import_model(
        write_checkpoint(tmp_path / "m"),
        store=open_store(tmp_path / "store"),
        quant="int4",
        name="m",
    )
    store = [] if arguments == ["--help"] else ["--store", str(tmp_path / "store")]
    assert loaded(tmp_path, *arguments, *store) & HEAVY == set()


def loaded(folder: Path, *arguments: str) -> set[str]:
    """Return the packages that a successful command loads; its current folder is ``folder``."""
    code = """
import json, sys
from blobstore.cli.main import run
code = run(sys.argv[1:])
print(json.dumps([code, *sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    status, *modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0
    return {name.split(".")[0] for name in modules}


def test_an_export_for_mlx_lm_loads_its_networks_only(tmp_path: Path) -> None:
    blobstore.import_model(PYCODE, "m", store=open_store(tmp_path / "store"), quant="int4")
    modules = loaded(tmp_path, "export", "m", "out", "--format", "mlx", "--store", "store")
    assert modules & HEAVY == {"mlx", "mlx_lm", "numpy", "ml_dtypes"}


@pytest.mark.parametrize("lines_read", [0, 1, 5])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, lines_read: int) -> None:
    """The plan exceeds a pipe's 64 KiB, so writing it can't end before the reader goes."""
    source = tmp_path / "many.safetensors"
    source.write_bytes(
        safetensors_bytes({f"{number:064}": np.ones(1, np.uint8) for number in range(2000)})
    )
    with subprocess.Popen(
        line("plan", source), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for _ in range(lines_read):
            child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait() == 0


def test_the_exit_code_of_a_command_before_head(tmp_path: Path) -> None:
    script = f"{' '.join(line('list', '--store', tmp_path))} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_command_does_and_found_does_not_depend_on_its_reader(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    for name in ("m", "n"):
        blobstore.import_model(write_checkpoint(tmp_path / name), name, store=store)
    max(store.blobs.path.iterdir(), key=lambda path: path.stat().st_size).write_bytes(b"damaged")
    for words, code in ((["verify"], 3), (["rm", "m", "n"], 0)):
        with subprocess.Popen(
            line(*words, "--store", store.root), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.close()
            assert (child.stderr.read(), child.wait()) == (b"", code)
    assert store.manifests.names() == []


def test_closed_standard_streams(tmp_path: Path) -> None:
    """Python gives a closed stream no object at all, and prints to stdout what was for it."""
    script = (
        f"{' '.join(line('verify', '--store', tmp_path))} 2>&-; "
        f"{' '.join(line('show', 'm', '--store', tmp_path))} 2>&-"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}; {script} >&- <&-"], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["Checked 0 blobs, hashed 0 B: all sound"] * 2
    assert done.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")
@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["plan", PYCODE_MOE]])
def test_output_that_can_not_be_written_is_an_error(tmp_path: Path, arguments: list[str]) -> None:
    store = ["--store", tmp_path] if arguments[0] == "list" else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            line(*arguments, *store), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "no space left" in done.stderr.lower()
    assert done.stderr.count("\n") == 1


def test_output_in_a_narrow_encoding(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    source = write_checkpoint(tmp_path / "m")
    for arguments in (["plan", source], ["plan", tmp_path / "é"]):
        done = subprocess.run(
            line(*arguments), capture_output=True, text=True, check=False, env=environment
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == (0 if arguments[1] == source else 1), done.stderr[-300:]


def test_no_progress_where_stderr_is_no_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        line("import", PYCODE_MOE, "--store", tmp_path / "store"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def in_terminal(arguments: list[str], **environment: str) -> str:
    """Return what a command prints to stderr when that is a terminal; stdout is none."""
    main, other = pty.openpty()
    merged = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=other, env=merged) as child:
        os.close(other)
        text = b""
        try:
            while part := os.read(main, 65536):
                text += part
        except OSError:
            pass  # Linux's way to say that the last writer has gone
        assert child.stdout is not None
        assert b"\x1b" not in child.stdout.read()
        assert child.wait() == 0
    os.close(main)
    return text.decode()


def test_one_progress_bar_in_a_terminal(tmp_path: Path) -> None:
    text = in_terminal(
        line("import", PYCODE_MOE, "--store", tmp_path / "store", "--quant", "int4"), NO_COLOR=""
    )
    assert "10.1/10.1 MB" in text
    assert "━" in text
    assert text.count("\n") <= 2


def test_no_color_is_honoured(tmp_path: Path) -> None:
    text = in_terminal(line("import", PYCODE_MOE, "--store", tmp_path / "store"), NO_COLOR="1")
    assert "MB" in text
    assert "\x1b[3" not in text
    assert "\x1b[9" not in text


INTERRUPTED = """
import itertools, os, signal, threading
from blobstore.importer import writing
from blobstore.io import workers
from blobstore.cli.main import main
seen, ended, numbers = threading.Event(), threading.Event(), itertools.count(1)
def interrupt(*_):
    seen.set()
    raise KeyboardInterrupt
def make(*arguments):
    number = next(numbers)
    if number == 3:
        os.kill(os.getpid(), signal.SIGINT)
    if number >= 3:
        ended.wait()
    return real(*arguments)
def end(stop, started):
    stop.set()  # as it does itself; from now on no other part is begun
    if seen.is_set():
        ended.set()
    real_end(stop, started)
signal.signal(signal.SIGINT, interrupt)
writing.RunMaker.make, real = make, writing.RunMaker.make
workers._end, real_end = end, workers._end
main()
"""
"""A command line to which Ctrl-C comes when a part of its import is written.

The parts that are begun then end when the main thread has heard of it.
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_ends_an_import_and_leaves_the_store(
    tmp_path: Path, snapshot: Snapshot, jobs: int
) -> None:
    store = open_store(tmp_path / "store")
    blobstore.import_model(write_checkpoint(tmp_path / "old"), store=store)
    before = snapshot(store)
    nbytes = 2**30
    source = tmp_path / "big.safetensors"
    source.write_bytes(
        raw_safetensors(
            {"x.weight": {"dtype": "F32", "shape": [2**18, 1024], "data_offsets": [0, nbytes]}}
        )
    )
    os.truncate(source, source.stat().st_size + nbytes)
    arguments = [
        "import",
        str(source),
        "--quant",
        "int4",
        "--store",
        str(store.root),
        "--jobs",
        str(jobs),
    ]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert snapshot(store) == before
    assert list((store.root / ".blobstore/tmp").iterdir()) == []
    assert done.stderr.strip() == "Error: interrupted"
