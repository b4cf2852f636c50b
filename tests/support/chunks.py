"""Small chunks: an import cut into many runs, though its tensors are small."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from blobstore.importer import making, schedule, writing

LEAST = 1024
"""The smallest chunk that holds whole groups of the widest values."""


@contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    """Let runs have so many bytes at most, as long as the block lasts."""
    with ExitStack() as stack:
        for module in (making, writing):
            stack.enter_context(mock.patch.object(module, "CHUNK", nbytes))
        for module in (making, schedule, writing):
            stack.enter_context(mock.patch.object(module, "RUN", nbytes))
        for module in (schedule, writing):
            stack.enter_context(mock.patch.object(module, "SMALL", min(nbytes, 2**16)))
        yield
