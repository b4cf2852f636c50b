"""The order of an import's system calls: what a power cut may undo is never what others can already see.

Bytes before names, blobs before the manifest, and everything before the success is said (design.md, invariants 1 and 2).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.faults import run, strace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux")

_CALL = re.compile(r"\d+ +(?P<name>\w+)\((?P<rest>.*)", re.ASCII)
_PATH = re.compile(r'[<"](?P<path>/[^">]*)[>"]')


class Trace:
    """The mutating calls of a run, in order: a name and the paths that it names, those of open files among them."""

    def __init__(self, log: Path, root: Path, kind: str) -> None:
        """Read what strace wrote to ``log``; paths are relative to the store's ``root``. ``kind`` is the fixture's."""
        self.blobs = {"import": 10, "import again": 3, "cp": 0}[kind]  # the tensors' are not made again
        self.folders = {"import": 5, "import again": 0, "cp": 1}[kind]
        self.calls: list[tuple[str, list[str]]] = []
        for line in log.read_text().splitlines():
            if match := _CALL.match(line):
                paths = [found["path"] for found in _PATH.finditer(match["rest"])]
                self.calls.append((match["name"], [path.removeprefix(f"{root}/") for path in paths] or [match["rest"][:1]]))

    def find(self, name: str, pattern: str) -> list[int]:
        """Return where the calls are whose name and last path match."""
        return [
            index
            for index, (call, paths) in enumerate(self.calls)
            if re.fullmatch(name, call) and re.fullmatch(pattern, paths[-1], re.ASCII)
        ]


@pytest.fixture(scope="module", params=["import", "import again", "cp"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The calls of a command that writes a manifest: into a new store, over the same model, and without any blob."""
    tmp_path = tmp_path_factory.mktemp("trace")
    source, root = write_checkpoint(tmp_path / "m", {**small_tensors(), "large": normal("x", 512, 512)}), tmp_path / "store"
    arguments = ["import", source, "m", "--quant", "int4", "--jobs", 1, "--store", root]
    if request.param != "import":
        assert run(*arguments).returncode == 0
    if request.param == "cp":
        arguments = ["cp", "m", "n", "--store", root]
    done = run(*arguments, prefix=[*strace(tmp_path / "log"), "-y"])
    assert (done.returncode, done.stderr) == (0, "")
    return Trace(tmp_path / "log", root, request.param)


MANIFEST = r"manifests/.+/(m|n)/latest"


def test_blobs_are_durable_before_they_are_visible_and_visible_before_the_manifest(trace: Trace) -> None:
    written = trace.find("pwrite64", r"\.blobstore/tmp/[^/]+/(sha256-[0-9a-f]{64}|[0-9]+)")
    renamed = trace.find("rename.*", "blobs/sha256-[0-9a-f]{64}")
    (manifest,) = trace.find("rename.*", MANIFEST)
    assert len(renamed) == trace.blobs
    for name in renamed:
        blob = re.escape(trace.calls[name][1][0])
        # A large blob, and one that is made in parts, gets its name when its bytes are there.
        half = next((re.escape(trace.calls[named][1][0]) for named in trace.find("rename.*", blob)), blob)
        syncs = trace.find("syncfs", ".*") + trace.find("fsync", half)
        assert any(max(trace.find("pwrite64", half)) < sync < name for sync in syncs)
    if renamed:
        assert max(written) < min(renamed)
        assert any(max(renamed) < sync < manifest for sync in trace.find("fsync", "blobs"))


def test_the_manifest_is_durable_before_it_is_visible_and_before_success_is_said(trace: Trace) -> None:
    (renamed,) = trace.find("rename.*", MANIFEST)
    temporary, target = trace.calls[renamed][1]
    assert max(trace.find("pwrite64", re.escape(temporary))) < max(trace.find("fsync", re.escape(temporary))) < renamed
    named = max(trace.find("fsync", re.escape(str(Path(target).parent))))
    said = min(index for index, (name, paths) in enumerate(trace.calls) if name == "write" and not paths[0].startswith("."))
    assert renamed < named < said


def test_the_names_of_new_folders_are_durable_before_the_manifest(trace: Trace) -> None:
    (manifest,) = trace.find("rename.*", MANIFEST)
    folders = trace.find("mkdir.*", r"(blobs|manifests)(/.*)?")
    assert len(folders) == trace.folders
    for made in folders:
        parent = Path(trace.calls[made][1][-1]).parent
        pattern = re.escape(str(parent)) if parent.parts else "/.*/store"
        assert any(made < sync < manifest for sync in trace.find("fsync", pattern))
