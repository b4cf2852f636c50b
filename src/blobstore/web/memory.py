"""Memory: what a large answer took goes back to the system.

glibc keeps freed memory for later, in an arena of each thread, and a server may then hold hundreds
of megabytes after one large answer.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


@functools.cache
def _trim() -> Callable[[int], Any]:
    """Return glibc's ``malloc_trim``; where it is missing, a function that does nothing."""
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return lambda _: 0
    return trim


def memory_given_back(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function; when it is done, freed memory goes back to the system."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        finally:
            _trim()(0)

    return wrapped
