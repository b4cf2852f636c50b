"""Names and paths: what parses prints and parses again.

Nothing that parses can leave its folder.
"""

from __future__ import annotations

import os.path
import string
from contextlib import suppress

from hypothesis import given, strategies as st

from blobstore.errors import InvalidNameError
from blobstore.names import ModelName, relative_path

FIRST = string.ascii_letters + string.digits + "_"
parts = st.builds(str.__add__, st.sampled_from(FIRST), st.text(FIRST + "-.", max_size=10))
namespaces = st.builds(str.__add__, st.sampled_from(FIRST), st.text(FIRST + "-", max_size=10))
hosts = st.builds(lambda host, port: host + port, parts, st.sampled_from(["", ":1", ":65535"]))
model_names = st.builds(ModelName, host=hosts, namespace=namespaces, model=parts, tag=parts)
hostile = st.text("./\\:~%@ \0\nab-_", max_size=14)


@given(model_names)
def test_a_name_survives_being_written(name: ModelName) -> None:
    assert ModelName.parse(str(name)) == name
    assert ModelName.parse(f"{name.host}/{name.namespace}/{name.model}:{name.tag}") == name


@given(hostile | st.text(max_size=10))
def test_no_name_and_no_path_leaves_its_folder(text: str) -> None:
    with suppress(InvalidNameError):
        parts = ModelName.parse(text).path_parts
        assert len(parts) == 4
        assert not any(part in ("", ".", "..") or {"/", "\0"} & {*part} for part in parts)
    with suppress(InvalidNameError):
        path = relative_path(text)
        assert os.path.normpath(os.path.join("/base", path)).startswith("/base/")  # noqa: PTH118  # text, not a path
        assert "\0" not in path
