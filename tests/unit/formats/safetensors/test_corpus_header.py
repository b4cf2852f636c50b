"""Every .safetensors file of the corpus gets its verdict.

What is accepted reads as the reference library reads it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
from support.corpus import Case, accepted, case_id, find, load, refusal, rejected

from blobstore import read_header
from blobstore.errors import BlobStoreError, HeaderError, LimitExceededError
from blobstore.formats.safetensors.header import Header, header_of
from blobstore.io.ranges import BytesReader, OpenReader

# Inputs that break two rules, where the one that is found first is not the one that the corpus
# names.
OTHER_RULE = {
    "st-ws-trailing-nul-then-junk": "F7",
    "st-ws-trailing-vt-nbsp": "F7",
    "st-hdr-90MB-open-brackets": "F10",
}
SMALL = [case for case in load("header") if not case.by_recipe]
LARGE = [case for case in load("header") if case.by_recipe]

MIB = 2**20
# Measured: 290, 30, 313, 202 and 30 MiB; a process that has read nothing has 30.
PEAK = {
    "st-many-1e6-empty": 448 * MIB,
    "st-hdr-100000001-spaces": 64 * MIB,
    "st-hdr-99MB-name": 512 * MIB,
    "st-hdr-90MB-open-brackets": 384 * MIB,
    "st-sparse-1TiB-empty-object": 64 * MIB,
}
CHILD = """
import json, resource, sys
from blobstore import BlobStoreError, read_header
try:
    said = {"tensors": len(read_header(sys.argv[1]).tensors)}
except BlobStoreError as error:
    said = {"error": type(error).__name__, "rule": error.rule}
if sys.platform == "linux":  # ru_maxrss starts there at the peak of the process that was forked
    lines = open("/proc/self/status").readlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({**said, "peak": peak}))
"""


class SparseReader(OpenReader):
    """A reader over bytes followed by a hole; reading into the hole is an error."""

    def __init__(self, head: BytesReader, size: int) -> None:
        self.head = head
        self.size = size
        self.name = "sparse"

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the bytes before the hole."""
        self.head.readinto(offset, buffer)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes from before the hole."""
        return self.head.read(offset, length)


def reader(case: Case) -> OpenReader:
    whole = BytesReader(case.data)
    return whole if case.sparse_size is None else SparseReader(whole, case.sparse_size)


def rule(case: Case) -> str:
    return OTHER_RULE.get(case.id, case.rule)


COMPARED = [
    # A million tensors take 10 s to compare; test_large_files_in_bounded_memory reads them too.
    pytest.param(case, marks=[pytest.mark.long] if case.id == "st-many-1e6-empty" else [])
    for case in accepted("header")
    if case.reference_accepts
]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, which walks a million tensors and finds nothing."""
    gc.disable()
    yield
    gc.enable()


def check_refusal(error: BlobStoreError, case: Case) -> None:
    assert isinstance(error, HeaderError | LimitExceededError)
    assert error.rule == rule(case), error
    assert f"(rule {error.rule})" in str(error) or isinstance(error, LimitExceededError)
    assert len(str(error)) < 2000


@pytest.mark.parametrize("case", [case for case in SMALL if case.accepted], ids=case_id)
def test_files(case: Case, tmp_path: Path) -> None:
    header = read_header(case.write(tmp_path / "model.safetensors"))
    assert_same(header, header_of(reader(case)))
    assert (
        header.data_start + max((entry.end for entry in header.tensors.values()), default=0)
        == case.size
    )


@pytest.mark.parametrize("case", [case for case in SMALL if not case.accepted], ids=case_id)
def test_files_to_refuse(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path / "model.safetensors")
    error = refusal(lambda: read_header(path))
    check_refusal(error, case)
    if isinstance(error, HeaderError):
        assert str(path) in str(error)


@pytest.mark.parametrize("case", LARGE, ids=case_id)
def test_large_files_in_bounded_memory(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path / "model.safetensors")
    assert path.stat().st_size == (case.size or 2**40)
    line = [sys.executable, "-c", CHILD, str(path)]
    child = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    path.unlink()
    assert child.returncode == 0, child.stderr
    said: dict[str, Any] = json.loads(child.stdout)
    assert said.pop("peak") < PEAK[case.id]
    if case.accepted:
        assert said == {"tensors": 10**6 if case.id == "st-many-1e6-empty" else 1}
    else:
        assert said["rule"] == rule(case)


@pytest.mark.parametrize("case", rejected("header"), ids=case_id)
def test_bytes_to_refuse(case: Case) -> None:
    check_refusal(refusal(lambda: header_of(reader(case))), case)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", COMPARED, ids=case_id)
def test_tensors_are_those_of_the_reference(case: Case) -> None:
    data = case.data
    header = header_of(BytesReader(data))
    reference = dict(safetensors.deserialize(data))
    assert len(header.tensors) == len(reference)
    assert [name for name in header.tensors if name not in reference][:3] == []
    different = [
        name
        for name, entry in header.tensors.items()
        for wanted in (reference[name],)
        if (entry.dtype.value, list(entry.shape)) != (wanted["dtype"], wanted["shape"])
        or data[header.data_start + entry.begin : header.data_start + entry.end]
        != bytes(wanted["data"])
    ]
    assert different[:3] == []


@pytest.mark.parametrize(
    "case", [case for case in SMALL if case.accepted and case.reference_accepts], ids=case_id
)
def test_metadata_are_those_of_the_reference(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path / "model.safetensors")
    with safetensors.safe_open(path, "numpy") as reference:
        header = read_header(path)
        assert header.metadata == (reference.metadata() or {})
        assert set(header.tensors) == set(reference.keys())


def test_the_reference_accepts_every_accepted_file() -> None:
    assert [case.id for case in accepted("header") if not case.reference_accepts] == []


def test_the_table_of_other_rules_is_about_refused_files() -> None:
    by_id = {case.id: case for case in rejected("header")}
    assert all(by_id[name].rule != other for name, other in OTHER_RULE.items())


def test_a_git_lfs_pointer_is_called_so() -> None:
    assert "git-lfs pointer" in str(
        refusal(lambda: header_of(reader(find("header", "st-alien-git-lfs-pointer"))))
    )


def test_a_rank_beyond_numpy_can_be_listed() -> None:
    header = header_of(reader(find("header", "st-shape-65-dims")))
    assert [len(entry.shape) for entry in header.tensors.values()] == [65]
    assert isinstance(refusal(lambda: header.check_limits("x")), LimitExceededError)


def assert_same(one: Header, other: Header) -> None:
    assert list(one.tensors.items()) == list(other.tensors.items())
    assert (one.metadata, one.data_start) == (other.metadata, other.data_start)
