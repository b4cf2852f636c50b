"""The order of a command's system calls: a power cut never undoes what others have seen.

Bytes before names, blobs before the manifest, and everything before the success is said (design.md,
invariants 1 and 2). Removals go the other way.
"""

import re
import sys
from pathlib import Path

import pytest
from faults.lab.command import run
from faults.lab.commands import same_calls
from faults.lab.stops import OUTPUT
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.stores import commit_model, layer_by_hand

from blobstore.store.local.store import Store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="calls are stopped at on Linux"),
]


class Trace:
    """The calls of a run that change the disk, in order: a name and its paths."""

    def __init__(self, root: Path, *arguments: object) -> None:
        """Run a command on the store ``root``; paths are relative to it."""
        done = run(*arguments, "--store", root, within=[root], before=same_calls)
        assert (done.code, done.err) == (0, "")
        self.calls = [
            (call.name, [path.removeprefix(f"{root}/") for path in call.paths])
            for call in done.calls
            if not call.reads
        ]
        self.root = str(root)

    def find(self, name: str, pattern: str) -> list[int]:
        return [
            index
            for index, (call, paths) in enumerate(self.calls)
            if re.fullmatch(name, call) and re.fullmatch(pattern, paths[-1], re.ASCII)
        ]

    def said(self) -> int:
        """Return where the first text is printed."""
        return self.find("write", re.escape(OUTPUT))[0]


@pytest.fixture(scope="module", params=["import", "import again", "cp"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Manifest-writing commands' calls: into a new store, over the same model, without a blob."""
    folder = tmp_path_factory.mktemp("trace")
    tensors = {**small_tensors(), "large.weight": normal("x", 512, 512)}
    source, root = write_checkpoint(folder / "m", tensors), folder / "store"
    line = ["import", source, "m", "--quant", "int4", "--jobs", 1]
    if request.param != "import":
        assert run(*line, "--store", root).code == 0
    return Trace(root, *(["cp", "m", "n"] if request.param == "cp" else line))


MANIFEST = r"manifests/.+/(m|n)/latest"


def test_blobs_are_durable_then_visible_then_in_a_manifest(trace: Trace) -> None:
    written = trace.find("pwrite64", r"\.blobstore/tmp/[^/]+/(sha256-[0-9a-f]{64}|[0-9]+)")
    renamed = trace.find("rename.*", "blobs/sha256-[0-9a-f]{64}")
    (manifest,) = trace.find("rename.*", MANIFEST)
    for name in renamed:
        blob = re.escape(trace.calls[name][1][0])
        # A large blob, and one that is made in parts, gets its name when its bytes are there.
        half = next(
            (re.escape(trace.calls[named][1][0]) for named in trace.find("rename.*", blob)), blob
        )
        syncs = trace.find("syncfs", ".*") + trace.find("fsync", half)
        assert any(max(trace.find("pwrite64", half)) < sync < name for sync in syncs)
    assert len(renamed) in (10, 3, 0)  # of tensors none is made again
    if renamed:
        assert max(written) < min(renamed)
        assert any(max(renamed) < sync < manifest for sync in trace.find("fsync", "blobs"))


def test_the_manifest_is_durable_before_it_is_visible_and_said(trace: Trace) -> None:
    (renamed,) = trace.find("rename.*", MANIFEST)
    temporary, target = trace.calls[renamed][1]
    written = max(trace.find("pwrite64", re.escape(temporary)))
    assert written < max(trace.find("fsync", re.escape(temporary))) < renamed
    named = max(trace.find("fsync", re.escape(str(Path(target).parent))))
    assert renamed < named < trace.said()


def test_the_names_of_new_folders_are_durable_before_the_manifest(trace: Trace) -> None:
    (manifest,) = trace.find("rename.*", MANIFEST)
    folders = trace.find("mkdir.*", r"(blobs|manifests)(/.*)?")
    assert len(folders) in (5, 0, 1)
    for made in folders:
        parent = Path(trace.calls[made][1][-1]).parent
        pattern = re.escape(str(parent) if parent.parts else trace.root)
        assert any(made < sync < manifest for sync in trace.find("fsync", pattern))


def test_a_removed_manifest_is_gone_for_good_before_its_blobs_go(store: Store) -> None:
    commit_model(store, "m", b"one", b"two")
    trace = Trace(store.root, "rm", "m")
    (manifest,) = trace.find("unlink.*", MANIFEST)
    blobs = trace.find("unlink.*", "blobs/sha256-[0-9a-f]{64}")
    assert len(blobs) == 2
    assert any(manifest < sync < min(blobs) for sync in trace.find("fsync", "manifests/.+/m"))


def test_what_prune_takes_and_gives_back_is_durable_when_that_is_said(store: Store) -> None:
    commit_model(store, "m", b"one")
    layer_by_hand(store, "", b"orphan")
    blob, trash = r"sha256-[0-9a-f]{64}", r"\.blobstore/trash/[^/]+"
    for options, target, synced in (
        (("--grace", "0", "--sole-owner"), f"{trash}/{blob}-6", (trash, "blobs")),
        (("--undo",), f"blobs/{blob}", ("blobs",)),
    ):
        trace = Trace(store.root, "prune", *options)
        (renamed,) = trace.find("rename.*", target)
        for folder in synced:
            syncs = trace.find("fsync", folder)
            assert any(renamed < sync < trace.said() for sync in syncs), folder
