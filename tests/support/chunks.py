"""Small chunks: an import cut into many runs, though its tensors are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from blobstore.importer import making, making as runs, writing as write

LEAST = 1024
"""The smallest chunk that holds whole groups of the widest values."""


@contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    """Let runs have so many bytes at most, as long as the block lasts."""
    with ExitStack() as stack:
        for module in (making, runs, write):
            stack.enter_context(mock.patch.object(module, "CHUNK", nbytes))
        yield
