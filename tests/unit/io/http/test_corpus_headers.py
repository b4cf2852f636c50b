"""A remote file gets the verdict of the same local file, for the same reason."""

from __future__ import annotations

import pytest
from support.corpus import Case, case_id, load
from support.servers import Asked, Server, part, reply

from blobstore.errors import BlobStoreError
from blobstore.formats.safetensors.header import Header, header_of
from blobstore.io.http.remote_files import Remote
from blobstore.io.ranges import BytesReader, OpenReader

from .conftest import KIB

CASES = {
    (case.rule, case.accepted): case for case in load("header") if (case.size or 0) < 1_000_000
}
"""One file that breaks each rule, and one that keeps it."""


class Hole(BytesReader):
    """A file's bytes, and after them a hole that is not read."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.data, "file")
        self.size = case.sparse_size or self.size


def verdict(reader: OpenReader) -> object:
    """Return the header, or kind, rule, tensor and message of the error that is raised."""
    try:
        return header_of(reader)
    except BlobStoreError as error:
        message = error.message.partition(f"{error.path}: ")[2]
        return type(error), error.rule, error.tensor, message


@pytest.mark.parametrize("case", CASES.values(), ids=case_id)
def test_a_remote_file_gets_the_verdict_of_the_local_one(
    case: Case, server: Server, remote: Remote
) -> None:
    data, size = case.data, case.sparse_size

    def answer(asked: Asked) -> list[bytes]:
        if size is None:
            return part(asked, data)
        return reply(206, f"Content-Range: bytes 0-{len(data) - 1}/{size}", body=data)

    script = server.play(answer)
    local = verdict(Hole(case))
    assert isinstance(local, Header) == case.accepted
    assert verdict(remote.open(server.url)) == local
    end = 8 + int.from_bytes(data[:8], "little")
    assert len(script.asked) == (2 if 64 * KIB < end <= len(data) else 1)
