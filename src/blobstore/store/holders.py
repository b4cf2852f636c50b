"""Which part of a home has a model: the home itself, or its packed models."""

from __future__ import annotations

from contextlib import suppress

from blobstore.errors import ModelNotFoundError
from blobstore.names import ModelName
from blobstore.store.ports import Readable


def holder_of(name: str | ModelName, home: Readable) -> Readable:
    """Return the store that has a model: ``home``, or its packed models.

    Raises: as `Readable.find`.
    """
    try:
        home.find(name)
    except ModelNotFoundError:
        if home.packed is not None:
            with suppress(ModelNotFoundError):
                home.packed.find(name)
                return home.packed
        raise
    return home
