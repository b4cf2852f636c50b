"""Modelfiles: any bytes are a Modelfile or one of our errors."""

import contextlib

from hypothesis import given, strategies as st

from blobstore.errors import BlobStoreError
from blobstore.formats.modelfile import Modelfile

WORDS = [
    "FROM",
    "system ",
    "PARAMETER ",
    "stop ",
    "MESSAGE ",
    "user ",
    '"',
    '"""',
    "#",
    "\n",
    "\r\n",
]
words = st.sampled_from([*WORDS, " ", "\0", "é"])
scripts = st.lists(words | st.text(max_size=5), max_size=20).map("".join)


@given(st.binary(max_size=60) | scripts.map(lambda text: f"FROM x\n{text}".encode()))
def test_any_bytes_are_a_modelfile_or_one_of_our_errors(raw: bytes) -> None:
    with contextlib.suppress(BlobStoreError):
        Modelfile.parse(raw).layers()
