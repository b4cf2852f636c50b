"""Every .safetensors file of the corpus gets the same verdict and reason when remote."""

from __future__ import annotations

import pytest
from support.corpus import Case, case_id, load, refusal
from support.remotes import Remote
from support.servers import Asked, Server, part, reply

from blobstore.errors import BlobStoreError
from blobstore.formats.safetensors.header import Header, header_of as read_header
from blobstore.io.budget import MAX_HEADER
from blobstore.io.ranges import BytesReader, OpenReader

KIB = 2**10
# Their headers take seconds to send and to parse.
SLOW = {"st-many-1e6-empty", "st-hdr-99MB-name", "st-hdr-90MB-open-brackets"}
CASES = [
    pytest.param(case, marks=[pytest.mark.long] if case.id in SLOW else [])
    for case in load("header")
]


def verdict(reader: OpenReader) -> Header | BlobStoreError:
    """Return the header, or the error that was raised instead."""
    try:
        return read_header(reader)
    except BlobStoreError as error:
        return error


def same(one: Header | BlobStoreError, other: Header | BlobStoreError) -> bool:
    """Compare headers with the order of their tensors; errors by kind, rule and tensor."""
    if isinstance(one, Header) and isinstance(other, Header):
        return list(one.tensors.items()) == list(other.tensors.items()) and one == other
    if isinstance(one, BlobStoreError) and isinstance(other, BlobStoreError):
        return facts(one) == facts(other)
    return False


def facts(error: BlobStoreError) -> tuple[object, ...]:
    """Return what an error says, but for the name of the file before it."""
    return (type(error), error.rule, error.tensor, error.message.partition(f"{error.path}: ")[2])


class Hole(BytesReader):
    """Bytes, and behind them a hole that nobody reads."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.data, "file")
        self.size = case.sparse_size or self.size


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_files(case: Case, server: Server, remote: Remote) -> None:
    data, size = case.data, case.sparse_size

    def answer(asked: Asked) -> list[bytes]:
        if size is None:
            return part(asked, data)
        return reply(206, f"Content-Range: bytes 0-{len(data) - 1}/{size}", body=data)

    script = server.play(answer)
    local = verdict(Hole(case))
    assert isinstance(local, Header) == case.accepted
    if isinstance(local, Header):
        assert same(verdict(remote.open(server.url)), local)
    else:
        error = refusal(lambda: read_header(remote.open(server.url)))
        assert same(error, local)
        assert server.url in str(error)
    end = 8 + int.from_bytes(data[:8], "little")
    assert len(script.asked) == (2 if 64 * KIB < end <= min(len(data), 8 + MAX_HEADER) else 1)
