"""The services that stand for clouds are faithful: versions, ranges, and conditional writes.

Marked `lab`: they need moto's server and azurite.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, NotModifiedError, PreconditionError
from obstore.store import ObjectStore
from support.cloud_services import SERVICES

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", params=SERVICES)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectStore]:
    """An empty bucket, through its service's client."""
    with SERVICES[request.param](tmp_path_factory.mktemp(request.param)) as bucket:
        yield bucket.store()


def test_ranges_and_versions(store: ObjectStore, tmp_path: Path) -> None:
    first = obstore.put(store, "a/file", b"0123456789")["e_tag"]
    assert bytes(obstore.get_range(store, "a/file", start=2, end=5)) == b"234"
    assert obstore.head(store, "a/file")["e_tag"] == first
    second = obstore.put(store, "a/file", b"9876543210")["e_tag"]
    assert second != first
    with pytest.raises(PreconditionError):
        obstore.get(store, "a/file", options={"if_match": first})
    with pytest.raises(NotModifiedError):
        obstore.get(store, "a/file", options={"if_none_match": second})


def test_a_write_may_be_of_a_new_object_only(store: ObjectStore) -> None:
    obstore.put(store, "tag", b"one", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "tag", b"two", mode="create")
    assert bytes(obstore.get(store, "tag").bytes()) == b"one"


def test_a_write_may_replace_one_version_only(store: ObjectStore) -> None:
    first = obstore.put(store, "moved", b"one")
    second = obstore.put(store, "moved", b"two", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(store, "moved", b"three", mode={"e_tag": first["e_tag"]})
    assert bytes(obstore.get(store, "moved").bytes()) == b"two"
    assert obstore.head(store, "moved")["e_tag"] == second["e_tag"]
