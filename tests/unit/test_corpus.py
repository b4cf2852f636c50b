"""Every name, digest and file name of the corpus gets its verdict, and the corpus is all there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.corpus import Case, accepted, case_id, load, refusal, rejected

from blobstore.errors import (
    DocumentError,
    InvalidDigestError,
    InvalidNameError,
    UsageError,
)
from blobstore.names import (
    DEFAULT_HOST,
    DEFAULT_NAMESPACE,
    DEFAULT_TAG,
    Digest,
    ModelName,
    file_name,
    relative_path,
)
from blobstore.source.files import ShardIndex

COUNTS = {
    "header": (184, 55),
    "name": (57, 11),
    "digest": (34, 2),
    "path": (22, 5),
    "manifest": (48, 10),
    "index": (14, 2),
    "range": (49, 11),
    "store": (38, 19),
    "registry": (45, 10),
}

NAME_PARTS = {
    "name-short": (DEFAULT_HOST, DEFAULT_NAMESPACE, "llama3", DEFAULT_TAG),
    "name-tagged": (DEFAULT_HOST, DEFAULT_NAMESPACE, "llama3", "8b"),
    "name-full": (DEFAULT_HOST, DEFAULT_NAMESPACE, "llama3", "8b-q4_K_M"),
    "name-scheme": ("localhost:5000", "me", "m", "t"),
    "name-underscore-start": (DEFAULT_HOST, "_a", "_b", "_c"),
    "name-80": (DEFAULT_HOST, DEFAULT_NAMESPACE, "m" * 80, DEFAULT_TAG),
    "name-tag-80": (DEFAULT_HOST, DEFAULT_NAMESPACE, "m", "t" * 80),
    "name-hf-prefix": ("hf.co", "user", "repo", "Q4_K_M"),
    "name-con": (DEFAULT_HOST, "con", "nul", "aux"),
    "name-tmp-suffix": (DEFAULT_HOST, DEFAULT_NAMESPACE, "m", "x.tmp"),
    "name-tag-digest-like": (DEFAULT_HOST, DEFAULT_NAMESPACE, "m", "sha256-" + "a3f5" * 16),
}
# N2 and N3 of the corpus are the places where Ollama's grammar is too wide; ours are one rule.
NAME_RULE = "N1"


def text(case: Case) -> str:
    return case.data.decode("utf-8", "surrogatepass")


@pytest.mark.parametrize("kind", COUNTS)
def test_the_corpus_is_complete(kind: str) -> None:
    cases = load(kind)
    assert (len(cases), len(accepted(kind))) == COUNTS[kind]
    assert len({case.id for case in cases}) == len(cases)


def test_sizes_are_those_of_the_corpus() -> None:
    cases = [case for kind in COUNTS for case in load(kind) if not case.by_recipe]
    assert {case.id: len(case.data) for case in cases} == {case.id: case.size for case in cases}


@pytest.mark.parametrize("case", accepted("name"), ids=case_id)
def test_names(case: Case) -> None:
    name = ModelName.parse(text(case))
    assert name.path_parts == NAME_PARTS[case.id]
    assert ModelName.parse(str(name)).path_parts == name.path_parts
    assert name.scheme == ("http" if case.id == "name-scheme" else "https")


@pytest.mark.parametrize("case", rejected("name"), ids=case_id)
def test_names_to_refuse(case: Case) -> None:
    error = refusal(lambda: ModelName.parse(text(case)))
    assert isinstance(error, InvalidNameError)
    assert isinstance(error, UsageError)
    assert error.rule == NAME_RULE
    assert len(str(error)) < 2000


@pytest.mark.parametrize(
    "case", [case for case in rejected("name") if not set("/:") & set(text(case))], ids=case_id
)
def test_no_name_part_takes_what_no_name_may_hold(case: Case) -> None:
    part = text(case)
    for make in (
        lambda: ModelName(model=part),
        lambda: ModelName(model="m", tag=part),
        lambda: ModelName(model="m", namespace=part),
    ):
        assert refusal(make).rule == NAME_RULE


def digest_value(case: Case) -> object:
    return json.loads(case.data)["digest"] if case.id.startswith("digest-json-") else text(case)


@pytest.mark.parametrize("case", accepted("digest"), ids=case_id)
def test_digests(case: Case) -> None:
    digest = Digest.parse(digest_value(case))
    assert str(digest) == text(case)
    assert Digest.from_file_name(digest.file_name) == digest


@pytest.mark.parametrize("case", rejected("digest"), ids=case_id)
def test_digests_to_refuse(case: Case) -> None:
    error = refusal(lambda: Digest.parse(digest_value(case)))
    assert isinstance(error, InvalidDigestError)
    assert error.rule == case.rule
    assert len(str(error)) < 500


@pytest.mark.parametrize("case", rejected("digest"), ids=case_id)
def test_no_file_of_blobs_is_named_so(case: Case) -> None:
    value = digest_value(case)
    if isinstance(value, str):
        found = Digest.from_file_name(value.replace(":", "-", 1))
        assert (found is not None) == (case.id == "digest-file-form")


@pytest.mark.parametrize("case", accepted("path"), ids=case_id)
def test_paths(case: Case) -> None:
    path = text(case)
    assert relative_path(path) == path
    assert Path("/folder", path).is_relative_to("/folder")


@pytest.mark.parametrize("case", rejected("path"), ids=case_id)
def test_paths_to_refuse(case: Case) -> None:
    parsers: tuple[Callable[[str], object], ...] = (relative_path, file_name)
    for parse in parsers:
        error = refusal(partial(parse, text(case)))
        assert isinstance(error, InvalidNameError)
        assert error.rule == case.rule


@pytest.mark.parametrize("case", load("path"), ids=case_id)
def test_a_shard_is_a_plain_file_name(case: Case) -> None:
    raw = json.dumps({"weight_map": {"a": text(case)}}).encode()
    if case.id == "path-ok":
        assert ShardIndex.parse(raw).weight_map == {"a": text(case)}
    else:
        error = refusal(lambda: ShardIndex.parse(raw))
        assert isinstance(error, DocumentError)
        assert error.rule == "I1"
