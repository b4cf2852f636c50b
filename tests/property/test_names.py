"""Names, paths, Modelfiles: any text parses, or is one of our errors; none leaves its folder."""

import os.path
from contextlib import suppress

from hypothesis import given, strategies as st

from blobstore.errors import BlobStoreError, InvalidNameError
from blobstore.formats.modelfile import Modelfile
from blobstore.names import ModelName, relative_path

COMMANDS = ("FROM", "system ", "PARAMETER ", "stop ", "MESSAGE ", "user ")
words = st.sampled_from([*COMMANDS, '"', '"""', "#", "\n", "\r\n", " ", "\0", "é"])
scripts = st.lists(words | st.text(max_size=5), max_size=20).map("".join)
hostile = st.text("./\\:~%@ \0\nab-_", max_size=14)


@given(hostile | st.text(max_size=10))
def test_no_name_and_no_path_leaves_its_folder(text: str) -> None:
    with suppress(InvalidNameError):
        name = ModelName.parse(text)
        assert ModelName.parse(str(name)) == name
        assert len(name.path_parts) == 4
        assert not any(one in ("", ".", "..") or {"/", "\0"} & {*one} for one in name.path_parts)
    with suppress(InvalidNameError):
        path = relative_path(text)
        assert os.path.normpath(os.path.join("/base", path)).startswith("/base/")  # noqa: PTH118  # text, not a path
        assert "\0" not in path


@given(st.binary(max_size=60) | scripts.map(lambda text: f"FROM x\n{text}".encode()))
def test_any_bytes_are_a_modelfile_or_one_of_our_errors(raw: bytes) -> None:
    with suppress(BlobStoreError):
        Modelfile.parse(raw).layers()
