"""Modelfiles: any bytes are a Modelfile or one of our errors; a text that is quoted comes back."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings, strategies as st

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
# What Ollama leaves out can't come back, and a line that ends with the quotes closes them.
texts = st.text(max_size=60).filter(lambda text: text.isprintable()) | st.text(
    "ab \t\r\n'#<", max_size=60
)


@given(st.binary(max_size=60) | scripts.map(lambda text: f"FROM x\n{text}".encode()))
def test_any_bytes_are_a_modelfile_or_one_of_our_errors(raw: bytes) -> None:
    with contextlib.suppress(BlobStoreError):
        Modelfile.parse(raw).layers()


@settings(max_examples=50)
@given(
    texts.filter(lambda text: '"""' not in text and not text.endswith('"')),
    st.lists(texts.filter(lambda text: '"' not in text)),
)
def test_a_quoted_text_comes_back(system: str, stops: list[str]) -> None:
    lines = [f'PARAMETER stop "{text}"' for text in stops]
    modelfile = Modelfile.parse("\n".join(["FROM x", f'SYSTEM """{system}"""', *lines]).encode())
    assert modelfile.system == system
    assert modelfile.parameters.get("stop", ()) == tuple(stops)
