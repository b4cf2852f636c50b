"""Names, digests and paths: the verdicts of the corpus, and what is wrong in one character."""

import json
from collections.abc import Callable

import pytest
from support.corpus import Case, accepted, refusal, rejected

from blobstore import names
from blobstore.errors import InvalidDigestError, InvalidNameError, UsageError

HEX = "0123456789abcdef" * 4
OURS = (names.DEFAULT_HOST, names.DEFAULT_NAMESPACE)
NAME_PARTS = {
    "name-short": (*OURS, "llama3", names.DEFAULT_TAG),
    "name-tagged": (*OURS, "llama3", "8b"),
    "name-full": (*OURS, "llama3", "8b-q4_K_M"),
    "name-scheme": ("localhost:5000", "me", "m", "t"),
    "name-underscore-start": (names.DEFAULT_HOST, "_a", "_b", "_c"),
    "name-80": (*OURS, "m" * 80, names.DEFAULT_TAG),
    "name-tag-80": (*OURS, "m", "t" * 80),
    "name-hf-prefix": ("hf.co", "user", "repo", "Q4_K_M"),
    "name-con": (names.DEFAULT_HOST, "con", "nul", "aux"),
    "name-tmp-suffix": (*OURS, "m", "x.tmp"),
    "name-tag-digest-like": (*OURS, "m", "sha256-" + "a3f5" * 16),
}


def text(case: Case) -> str:
    return case.data.decode("utf-8", "surrogatepass")


def digest_value(case: Case) -> object:
    return json.loads(case.data)["digest"] if case.id.startswith("digest-json-") else text(case)


def test_names() -> None:
    found = {case.id: names.ModelName.parse(text(case)) for case in accepted("name")}
    assert {case: name.path_parts for case, name in found.items()} == NAME_PARTS
    for name in found.values():
        assert names.ModelName.parse(str(name)).path_parts == name.path_parts
    assert [case for case, name in found.items() if name.scheme == "http"] == ["name-scheme"]


def test_names_to_refuse() -> None:
    for case in rejected("name"):
        error = refusal(lambda case=case: names.ModelName.parse(text(case)))  # type: ignore[misc]
        assert isinstance(error, InvalidNameError), case.id
        assert isinstance(error, UsageError)
        assert error.rule == "N1"  # N2 and N3: where Ollama's grammar is too wide
        assert len(str(error)) < 2000


def test_parts_of_names_to_refuse() -> None:
    for case in rejected("name"):
        if not set("/:") & set(text(case)):
            for part in ("model", "tag", "namespace"):
                values = {"model": "m", part: text(case)}
                assert refusal(lambda values=values: names.ModelName(**values)).rule == "N1"  # type: ignore[misc]


def test_digests() -> None:
    for case in accepted("digest"):
        digest = names.Digest.parse(digest_value(case))
        assert str(digest) == text(case)
        assert names.Digest.from_file_name(digest.file_name) == digest


def test_digests_to_refuse() -> None:
    for case in rejected("digest"):
        value = digest_value(case)
        error = refusal(lambda value=value: names.Digest.parse(value))  # type: ignore[misc]
        assert isinstance(error, InvalidDigestError), case.id
        assert error.rule == case.rule
        assert len(str(error)) < 500
        if isinstance(value, str):
            found = names.Digest.from_file_name(value.replace(":", "-", 1))
            assert (found is not None) == (case.id == "digest-file-form"), case.id


@pytest.mark.parametrize("digits", [f"{HEX}\n", HEX[1:], f"{HEX[1:]}\n", f"{HEX[1:]}A"])
def test_a_digest_is_64_digits_and_no_more(digits: str) -> None:
    assert names.Digest(HEX).hex == HEX
    with pytest.raises(InvalidDigestError):
        names.Digest(digits)


def test_paths() -> None:
    for case in accepted("path"):
        assert names.relative_path(text(case)) == text(case)  # none leaves its folder: property/


@pytest.mark.parametrize("parse", [names.relative_path, names.file_name])
def test_paths_to_refuse(parse: Callable[[str], str]) -> None:
    for case in rejected("path"):
        error = refusal(lambda case=case: parse(text(case)))  # type: ignore[misc]
        assert isinstance(error, InvalidNameError), case.id
        assert error.rule == case.rule


@pytest.mark.parametrize("path", [".GIT/config", "a/.Git"])
def test_a_path_has_no_git_folder_however_it_is_spelled(path: str) -> None:
    assert names.relative_path("a/.gitattributes") == "a/.gitattributes"
    with pytest.raises(InvalidNameError):
        names.relative_path(path)
