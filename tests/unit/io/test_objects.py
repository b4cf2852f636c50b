"""Buckets over obstore: in memory, and settings of services; moto's S3 is in tests/integration."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import pytest
from support.servers import Asked, reply, server

from blobstore.errors import (
    AccessError,
    BlobStoreError,
    CorruptDataError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    ShortReadError,
    UsageError,
)
from blobstore.io import objects
from blobstore.io.objects import Bucket, ObjectVersion, object_error, open_bucket

SECRET = "sig=abcdef"  # noqa: S105  # not one
_E = TypeVar("_E", bound=BlobStoreError)


def error_of(kind: type[_E], act: Callable[[], object]) -> _E:
    with pytest.raises(kind) as caught:
        act()
    return caught.value


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Bucket:
    return open_bucket(f"memory://{request.node.name.translate(str.maketrans('[]/:', '....'))}/p")


def test_ranges_are_of_one_version(bucket: Bucket) -> None:
    version = bucket.put("f", b"0123456789")
    buffer = bytearray(4)
    pieces: list[bytes] = []
    bucket.get_into("f", 3, memoryview(buffer), version, check=lambda: pieces.append(bytes(buffer)))
    assert pieces == [b"3456"]
    error_of(ShortReadError, lambda: bucket.get_into("f", 8, memoryview(buffer), version))
    error_of(ShortReadError, lambda: bucket.get_into("f", 80, memoryview(buffer), version))
    bucket.put("f", b"another")
    error = error_of(CorruptDataError, lambda: bucket.get_into("f", 0, memoryview(buffer), version))
    assert "changed while it was read" in error.message
    error_of(CorruptDataError, lambda: bucket.get("f", ObjectVersion('"x"')))
    error_of(LimitExceededError, lambda: bucket.get("f", limit=3))


def test_keys_addresses_and_settings_are_checked(bucket: Bucket) -> None:
    for key in ("", "../x", "a//b", "/a", "a/./b"):
        error_of(UsageError, partial(bucket.get, key))
    for address in ("s3://", "s3:///x", "s3://a/../b", "ftp://x/y", "az://?x", "s3://u@b"):
        error_of(UsageError, partial(open_bucket, address))
    assert "bogus" in error_of(UsageError, lambda: open_bucket("s3://b", {"bogus": "1"})).message
    assert "Account" in error_of(UsageError, lambda: open_bucket("az://b")).message
    keys = {"access_key_id": "k", "secret_access_key": SECRET}
    far = open_bucket("s3://b", keys | {"endpoint": "http://192.0.2.1:9"})
    assert "http" in error_of(UsageError, lambda: far.get("x")).message


REQUEST = "Generic S3 error: Error performing GET https://h/b/k?" + SECRET + " in 1ms"
ANSWER = f"{REQUEST} - Server returned non-2xx status code: "


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (f"{ANSWER}403 Forbidden: <Error><Code>AccessDenied</Code>", AccessError, "AccessDenied"),
        (f"{ANSWER}404 Not Found: <Code>NoSuchBucket</Code>", NotFoundError, "bucket"),
        (f"{ANSWER}416 Range Not Satisfiable: ", ShortReadError, "ends"),
        (f"{ANSWER}503 Slow Down: <Code>SlowDown</Code>", RemoteError, "503: SlowDown"),
        (f"{REQUEST} HttpError {{ kind: Connect, source", RemoteError, "connect"),
        ("PUT http://169.254.169.254/latest/api/token failed", AccessError, "credentials"),
        (f"{ANSWER}301 Moved: redirect without LOCATION", RemoteError, "301"),
    ],
)
def test_messages_have_the_kind_and_no_secret(text: str, kind: type, says: str) -> None:
    from obstore.exceptions import GenericError

    error = object_error(GenericError(text), "read", "s3://b/k")
    assert type(error) is kind
    assert says in error.message
    assert SECRET not in f"{error!r} {error.hint}"
    if isinstance(error, RemoteError):
        assert error.temporary == (error.status in (503, None))


def test_a_connection_that_was_idle_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may close it, and a write with a condition is not repeated."""
    monkeypatch.setattr(objects, "IDLE", timedelta(0))
    used: list[int] = []

    def answer(asked: Asked) -> list[bytes]:
        used.append(asked.connection)
        return reply(200, f'ETag: "{len(used)}"')

    keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    with server() as running:
        running.play(answer)
        bucket = open_bucket("s3://b/p", keys | {"endpoint": running.at("").rstrip("/")})
        for _ in range(30):  # a few meet the connection just when it becomes free
            bucket.put("k", b"1", if_absent=True)
    assert len(set(used)) > 10
