"""The public API: its names resolve when they are used, and its functions have types.

Its signatures are described in docs/reference/api.md, and compared by test_reference.py.
"""

from __future__ import annotations

import inspect
from importlib.resources import files

import pytest

import blobstore

NAMES = set(blobstore.__all__)


def test_public_names_are_sorted_and_resolve() -> None:
    assert dir(blobstore) == list(blobstore.__all__) == sorted(NAMES)
    assert [name for name in NAMES if getattr(blobstore, name) is None] == []
    with pytest.raises(AttributeError, match="'nonsense'"):
        blobstore.nonsense  # noqa: B018


def test_public_functions_have_types() -> None:
    assert files("blobstore").joinpath("py.typed").is_file()
    functions = [getattr(blobstore, name) for name in NAMES]
    signatures = {one: inspect.signature(one) for one in functions if inspect.isfunction(one)}
    assert len(signatures) > 25
    for function, signature in signatures.items():
        for parameter in signature.parameters.values():
            assert parameter.annotation is not parameter.empty, (function, parameter)
