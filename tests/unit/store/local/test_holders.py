"""Busy: the error names the processes that hold the lock now, sharers included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.stores import HOLD_LOCK, process

from blobstore.errors import BusyError
from blobstore.store.local.locks import StoreLock

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who holds a lock"),
]
FORKED = """
import os, sys
from pathlib import Path
from blobstore.store.local.locks import StoreLock
with StoreLock(Path(sys.argv[1])).shared():
    if os.fork():
        # The child has the lock now, and the kernel's list has the number of a dead process.
        os._exit(0)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the lock of the tests lies."""
    return tmp_path / "lock"


def busy(path: Path) -> BusyError:
    with pytest.raises(BusyError) as caught, StoreLock(path).exclusive(0):
        pass
    return caught.value


def test_who_is_gone_is_not_named(path: Path) -> None:
    with process(HOLD_LOCK, path, "shared") as one, process(HOLD_LOCK, path, "shared") as two:
        one.kill()
        one.wait()
        assert f"process {one.pid}" not in busy(path).message
        assert f"process {two.pid}" in busy(path).message


def test_a_lock_that_a_child_inherited_names_nobody_who_is_gone(path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", FORKED, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.wait()
    assert "another process" in busy(path).message
    child.stdin.close()
    child.stdout.close()
