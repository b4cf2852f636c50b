"""Ctrl-C ends a command soon, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import os, signal, time
from blobstore.cli import stores
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
stores._GRACE_S = 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" lets it be ignored
{before}
stores.end_soon_when_interrupted()
{after}
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    pass
time.sleep({sleep})
"""
COMMAND = "stores.is_one_command.set()"


@pytest.mark.parametrize(
    ("before", "after", "sleep", "code"),
    [
        (COMMAND, "", 600, 130),
        ("", "", 0.2, 0),
        (COMMAND, "stores.is_one_command.clear()", 0.2, 0),
    ],
    ids=["command", "library", "conversation"],
)
def test_what_ctrl_c_ends(before: str, after: str, sleep: float, code: int) -> None:
    program = _PROGRAM.format(before=before, after=after, sleep=sleep)
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == code
