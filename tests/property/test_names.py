"""Names and paths: what parses prints and parses again.

Nothing that parses can leave its folder.
"""

from __future__ import annotations

import os.path
import string

import pytest
from hypothesis import given, strategies as st

from blobstore.errors import InvalidDigestError, InvalidNameError
from blobstore.names import Digest, ModelName, relative_path

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
def test_no_name_leaves_its_folder(text: str) -> None:
    try:
        name = ModelName.parse(text)
    except InvalidNameError:
        return
    assert len(name.path_parts) == 4
    assert all(
        part not in ("", ".", "..") and "/" not in part and "\0" not in part
        for part in name.path_parts
    )


@given(hostile | st.text(max_size=10))
def test_no_relative_path_leaves_its_folder(text: str) -> None:
    try:
        path = relative_path(text)
    except InvalidNameError:
        return
    assert os.path.normpath(os.path.join("/base", path)).startswith("/base/")  # noqa: PTH118  # text, not a path
    assert "\0" not in path


@given(st.binary(max_size=50))
def test_a_digest_survives_being_written(data: bytes) -> None:
    digest = Digest.of(data)
    assert Digest.parse(str(digest)) == digest
    assert Digest.from_file_name(digest.file_name) == digest


@given(st.text(max_size=80))
def test_other_texts_are_no_digests(text: str) -> None:
    with pytest.raises(InvalidDigestError) as caught:
        Digest.parse(text)
    assert caught.value.rule == "D1"
