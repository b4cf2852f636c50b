"""Ctrl-C ends a command soon, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import os, signal, time
from blobstore.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" lets it be ignored
main._GRACE_S = 0
main.end_soon_when_interrupted()
{then}
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    pass
time.sleep({sleep})
"""


@pytest.mark.parametrize(
    ("then", "sleep", "code"),
    [("", 600, 130), ("signal.set_wakeup_fd(-1)", 0.2, 0)],
    ids=["command", "conversation"],
)
def test_what_ctrl_c_ends(then: str, sleep: float, code: int) -> None:
    program = _PROGRAM.format(then=then, sleep=sleep)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == code
