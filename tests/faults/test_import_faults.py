"""What an import says when its calls fail: why, and of what (through strace.

Every call and error: errors.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import normal, safetensors_bytes
from support.faults import READING, run, strace

import blobstore
from blobstore.store.local.store import Store, open_store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of one tensor, of a megabyte."""
    path = tmp_path / "new.safetensors"
    path.write_bytes(safetensors_bytes({"only.weight": normal("only", 1024, 512)}))
    return path


def import_with(source: Path, store: Store, *rules: str) -> subprocess.CompletedProcess[str]:
    """Import under strace, with faults by ``rules``."""
    prefix = strace(store.root.with_name("log"), *rules)
    return run(
        "import",
        source,
        "new",
        "--quant",
        "int4",
        "--store",
        store.root,
        "--jobs",
        1,
        prefix=prefix,
    )


def assert_one_error(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr, done.stderr


def assert_done(done: subprocess.CompletedProcess[str], store: Store) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    blobstore.open_model("new", store=store, verify=True).close()


@pytest.mark.parametrize(
    ("errno", "says"), [("EDQUOT", "disk quota exceeded"), ("EROFS", "read-only file system")]
)
def test_a_write_that_fails_says_why(source: Path, store: Store, errno: str, says: str) -> None:
    assert_one_error(import_with(source, store, f"pwrite64:error={errno}:when=1"), says)
    assert list(store.models()) == []


def test_a_source_that_can_not_be_read_is_an_error_that_names_it(
    source: Path, store: Store
) -> None:
    done = import_with(
        source, store, *(f"?{name}:error=EIO" for name in READING)
    )  # the header is read by pread
    assert_one_error(done, "input/output error")
    assert str(source) in done.stderr


def test_interrupted_calls_go_on(source: Path, store: Store) -> None:
    assert_done(
        import_with(source, store, "write,pwrite64,?preadv,?preadv2:error=EINTR:when=1+2"), store
    )


def test_a_model_that_can_not_be_cleaned_up_after_is_still_a_success(
    source: Path, store: Store
) -> None:
    assert_done(import_with(source, store, "unlinkat:error=EIO"), store)


def test_too_many_open_files_are_an_error(tmp_path: Path) -> None:
    for number in range(1, 31):
        data = safetensors_bytes({f"t{number}": normal(str(number), 3)})
        (tmp_path / f"model-{number:05}-of-00030.safetensors").write_bytes(data)
    prefix = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash"]
    done = run("import", tmp_path, "new", "--store", tmp_path / "store", prefix=prefix)
    assert_one_error(done, "too many open files")
    assert list(open_store(tmp_path / "store").models()) == []
