"""Which part of a home has a model: the home itself, or its packed models."""

from __future__ import annotations

from blobstore.errors import ModelNotFoundError
from blobstore.names import ModelName
from blobstore.store.ports import Readable


def holder_of(name: str | ModelName, home: Readable) -> Readable:
    """Return the store that has a model: ``home``, or its packed models.

    Raises: as `Home.find`.
    """
    try:
        home.find(name)
    except ModelNotFoundError:
        packed: Readable | None = getattr(home, "packed", None)
        if packed is None:
            raise
        try:
            packed.find(name)
        except ModelNotFoundError:
            pass
        else:
            return packed
        raise
    return home
