"""Names and paths: nothing that parses can leave its folder."""

import os.path
from contextlib import suppress

from hypothesis import given, strategies as st

from blobstore.errors import InvalidNameError
from blobstore.names import ModelName, relative_path

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
