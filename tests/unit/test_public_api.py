"""The public API: its names resolve when they are used.

Its signatures are described in docs/reference/api.md, and compared by test_reference.py.
"""

from __future__ import annotations

from importlib.resources import files

import pytest

import blobstore

NAMES = set(blobstore.__all__)


def test_public_names_are_sorted_and_resolve() -> None:
    assert files("blobstore").joinpath("py.typed").is_file()
    assert dir(blobstore) == list(blobstore.__all__) == sorted(NAMES)
    assert [name for name in NAMES if getattr(blobstore, name) is None] == []
    with pytest.raises(AttributeError, match="'nonsense'"):
        blobstore.nonsense  # noqa: B018
