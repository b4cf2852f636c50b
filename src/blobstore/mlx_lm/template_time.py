"""A limit of time for chat templates, which are untrusted programs.

Jinja's sandbox keeps a template from Python's objects and bounds ``range``, but loops in loops
compute for years. Templates are rendered inside mlx-lm and transformers, in a thread that can't be
ended from outside. So the thread is traced (`sys.settrace`): every line of a template, and of
Jinja's own code, first checks the thread's clock. That is processor time: a machine that is busy,
or was stopped for a while, makes no template an error. One step of a template may still take long:
a power of large numbers, or the making of a huge text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

TEMPLATE_S = 10.0
"""Seconds of processor time for a template. The prompt of a megabyte of messages takes 0.1 s."""
_TEMPLATE = "<template>"
"""The file name of templates that are compiled from a text (jinja2 3.1 `Environment._generate`)."""


@contextmanager
def limited_time(seconds: float | None = None) -> Iterator[None]:
    """Let templates that the block renders compute for ``seconds`` (None: `TEMPLATE_S`).

    Raises: TimeoutError, inside of the template.
    """
    allowed = TEMPLATE_S if seconds is None else seconds
    before = sys.gettrace()
    sys.settrace(_tracer(time.thread_time() + allowed, allowed))
    try:
        yield
    finally:
        sys.settrace(before)


def _tracer(end: float, seconds: float) -> Callable[[FrameType, str, Any], Any]:
    import jinja2

    own = str(Path(jinja2.__file__).parent)

    def trace(frame: FrameType, _event: str, _value: Any) -> Any:
        name = frame.f_code.co_filename
        if name != _TEMPLATE and not name.startswith(own):
            return None  # the lines of a tokenizer are not traced: that would slow it down
        if time.thread_time() >= end:
            raise TimeoutError(f"it computes for over {seconds:g} s")
        return trace

    return trace
