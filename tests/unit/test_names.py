"""Names and digests that differ from right ones in one character."""

from __future__ import annotations

import pytest

from blobstore.errors import InvalidDigestError, InvalidNameError
from blobstore.names import Digest, ModelName, relative_path

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "digits", [f"{HEX}\n", f"{HEX}0", HEX[1:], f"{HEX[1:]}\n", f"{HEX[1:]}A", ""]
)
def test_a_digest_is_64_digits_and_no_more(digits: str) -> None:
    assert Digest(HEX).hex == HEX
    with pytest.raises(InvalidDigestError):
        Digest(digits)


@pytest.mark.parametrize("namespace", ["name.space", ".name", "-name", "name\n", "näme", ""])
def test_a_namespace_has_no_dots(namespace: str) -> None:
    assert ModelName(namespace="name-space_1", model="m").namespace == "name-space_1"
    with pytest.raises(InvalidNameError):
        ModelName(namespace=namespace, model="m")


@pytest.mark.parametrize("path", [".git/config", ".GIT/config", "a/.Git", "a/.git/b"])
def test_a_path_has_no_git_folder_however_it_is_spelled(path: str) -> None:
    assert relative_path("a/.gitattributes") == "a/.gitattributes"
    with pytest.raises(InvalidNameError):
        relative_path(path)
