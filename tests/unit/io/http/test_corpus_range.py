"""Every reply of the corpus, sent as it stands by a server of plain sockets, gets its verdict."""

from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from support.corpus import Case, case_id, find, load, refusal
from support.servers import KEEP_ALIVE, Asked, Server, part

from blobstore.errors import BlobStoreError, HeaderError, RemoteError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.http.remote_files import Remote
from blobstore.io.ranges import UNKNOWN_SIZE, SourceReader

from .conftest import KIB, RETRY_POLICY

WHOLE = find("range", "range-ok-206").data
FILE = WHOLE[WHOLE.index(b"\r\n\r\n") + 4 :]
SHORT = [find("range", "range-206-shorter-than-asked").data, KEEP_ALIVE]
HEADER_END = 62

# What follows a reply that the corpus gives only the beginning of.
ENDLESS = {
    "range-200-huge": bytes(65536),
    "range-200-endless-chunked": b"10000\r\n" + bytes(65536) + b"\r\n",
}
SIZE_UNKNOWN = {"range-200-huge", "range-200-endless-chunked", "range-206-total-star"}
ASKED_TWICE = {"range-206-shorter-than-asked": (10, 62), "range-206-body-short": (20, 62)}

# The error of each refused case, and its rule; all others break rule R1.
OTHER_ERRORS: dict[str, tuple[type[BlobStoreError], str | None]] = {
    **dict.fromkeys(
        (*("range-401", "range-403-html", "range-204", "range-304"), "range-429-retry-after-1e9"),
        (RemoteError, None),
    ),
    "range-416": (HeaderError, "F1"),
    "range-header-n-huge": (HeaderError, "F2"),
    "range-header-n-beyond-total": (HeaderError, "F3"),
    "range-redirect-bad-location": (RemoteError, "R2"),
}


@pytest.mark.parametrize(
    "case", [case for case in load("range") if not case.by_recipe], ids=case_id
)
def test_replies(case: Case, server: Server, remote: Remote) -> None:
    """Headers are read as users do, within 128 KiB more than the header."""

    def answer(asked: Asked) -> Iterator[bytes]:
        if case.id == "range-206-shorter-than-asked":
            return iter(SHORT if asked.number == 0 else part(asked, FILE))
        return chain([case.data], repeat(ENDLESS[case.id]) if case.id in ENDLESS else [])

    script = server.play(answer)
    limits = remote.limits(0)

    def read() -> SourceReader:
        with remote.open(server.url, limits) as reader:
            assert list(header_of(reader).tensors) == ["a"]
            return reader

    if case.accepted:
        assert read().size == (UNKNOWN_SIZE if case.id in SIZE_UNKNOWN else len(FILE))
    else:
        error = refusal(read)
        assert (type(error), error.rule) == OTHER_ERRORS.get(case.id, (RemoteError, "R1")), error
        assert server.url in str(error)
    assert limits.taken <= HEADER_END + 128 * KIB
    tries = RETRY_POLICY.attempts if case.id == "range-http09" else 1  # a head without its end
    again = ASKED_TWICE.get(case.id)
    assert script.ranges == [(0, 65536)] * tries + ([again] if again else [])
