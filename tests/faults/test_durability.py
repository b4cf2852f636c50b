"""The order of a command's system calls: a power cut never undoes what others have seen.

Bytes before names, blobs before the manifest, and everything before the success is said (design.md,
invariants 1 and 2). Removals go the other way.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.checkpoints import normal, small_tensors, write_checkpoint
from support.faults import run, strace
from support.stores import commit_model, layer_by_hand

from blobstore.store.local.store import Store

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux"),
]

_CALL = re.compile(r"\d+ +(?P<name>\w+)\((?P<rest>.*)", re.ASCII)
_PATH = re.compile(r'[<"](?P<path>/[^">]*)[>"]')


class Trace:
    """The mutating calls of a run, in order: a name and its paths, open files included."""

    def __init__(self, folder: Path, root: Path, *arguments: object) -> None:
        """Run a command on the store ``root``, and read its calls.

        Paths are relative to the store's.
        """
        log = folder / "log"
        done = run(*arguments, "--store", root, prefix=[*strace(log), "-y"])
        assert (done.returncode, done.stderr) == (0, "")
        self.blobs = self.folders = 0  # how many it has to make
        self.calls: list[tuple[str, list[str]]] = []
        for line in log.read_text().splitlines():
            if match := _CALL.match(line):
                paths = [found["path"] for found in _PATH.finditer(match["rest"])]
                self.calls.append(
                    (
                        match["name"],
                        [path.removeprefix(f"{root}/") for path in paths] or [match["rest"][:1]],
                    )
                )

    def find(self, name: str, pattern: str) -> list[int]:
        """Return where the calls are whose name and last path match."""
        return [
            index
            for index, (call, paths) in enumerate(self.calls)
            if re.fullmatch(name, call) and re.fullmatch(pattern, paths[-1], re.ASCII)
        ]

    def said(self) -> int:
        """Return where the first text is printed."""
        return min(
            index
            for index, (name, paths) in enumerate(self.calls)
            if name == "write" and not paths[0].startswith(".")
        )


@pytest.fixture(scope="module", params=["import", "import again", "cp"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The calls of a command that writes a manifest.

    Into a new store, over the same model, and without any blob.
    """
    tmp_path = tmp_path_factory.mktemp("trace")
    source, root = (
        write_checkpoint(
            tmp_path / "m", {**small_tensors(), "large.weight": normal("x", 512, 512)}
        ),
        tmp_path / "store",
    )
    arguments = ["import", source, "m", "--quant", "int4", "--jobs", 1]
    if request.param != "import":
        assert run(*arguments, "--store", root).returncode == 0
    trace = Trace(tmp_path, root, *(["cp", "m", "n"] if request.param == "cp" else arguments))
    trace.blobs = {"import": 10, "import again": 3, "cp": 0}[
        request.param
    ]  # the tensors' are not made again
    trace.folders = {"import": 5, "import again": 0, "cp": 1}[request.param]
    return trace


MANIFEST = r"manifests/.+/(m|n)/latest"


def test_blobs_are_durable_before_they_are_visible_and_visible_before_the_manifest(
    trace: Trace,
) -> None:
    written = trace.find("pwrite64", r"\.blobstore/tmp/[^/]+/(sha256-[0-9a-f]{64}|[0-9]+)")
    renamed = trace.find("rename.*", "blobs/sha256-[0-9a-f]{64}")
    (manifest,) = trace.find("rename.*", MANIFEST)
    assert len(renamed) == trace.blobs
    for name in renamed:
        blob = re.escape(trace.calls[name][1][0])
        # A large blob, and one that is made in parts, gets its name when its bytes are there.
        half = next(
            (re.escape(trace.calls[named][1][0]) for named in trace.find("rename.*", blob)), blob
        )
        syncs = trace.find("syncfs", ".*") + trace.find("fsync", half)
        assert any(max(trace.find("pwrite64", half)) < sync < name for sync in syncs)
    if renamed:
        assert max(written) < min(renamed)
        assert any(max(renamed) < sync < manifest for sync in trace.find("fsync", "blobs"))


def test_the_manifest_is_durable_before_it_is_visible_and_before_success_is_said(
    trace: Trace,
) -> None:
    (renamed,) = trace.find("rename.*", MANIFEST)
    temporary, target = trace.calls[renamed][1]
    assert (
        max(trace.find("pwrite64", re.escape(temporary)))
        < max(trace.find("fsync", re.escape(temporary)))
        < renamed
    )
    named = max(trace.find("fsync", re.escape(str(Path(target).parent))))
    assert renamed < named < trace.said()


def test_the_names_of_new_folders_are_durable_before_the_manifest(trace: Trace) -> None:
    (manifest,) = trace.find("rename.*", MANIFEST)
    folders = trace.find("mkdir.*", r"(blobs|manifests)(/.*)?")
    assert len(folders) == trace.folders
    for made in folders:
        parent = Path(trace.calls[made][1][-1]).parent
        pattern = re.escape(str(parent)) if parent.parts else "/.*/store"
        assert any(made < sync < manifest for sync in trace.find("fsync", pattern))


def test_a_removed_manifest_is_gone_for_good_before_its_blobs_go(
    tmp_path: Path, store: Store
) -> None:
    commit_model(store, "m", b"one", b"two")
    trace = Trace(tmp_path, store.root, "rm", "m")
    (manifest,) = trace.find("unlink.*", MANIFEST)
    blobs = trace.find("unlink.*", "blobs/sha256-[0-9a-f]{64}")
    assert len(blobs) == 2
    assert any(manifest < sync < min(blobs) for sync in trace.find("fsync", "manifests/.+/m"))


def test_what_prune_takes_and_gives_back_is_durable_when_that_is_said(
    tmp_path: Path, store: Store
) -> None:
    commit_model(store, "m", b"one")
    layer_by_hand(store, "", b"orphan")
    blob, trash = r"sha256-[0-9a-f]{64}", r"\.blobstore/trash/[^/]+"
    for options, target, synced in (
        (("--grace", "0", "--sole-owner"), f"{trash}/{blob}-6", (trash, "blobs")),
        (("--undo",), f"blobs/{blob}", ("blobs",)),
    ):
        trace = Trace(tmp_path, store.root, "prune", *options)
        (renamed,) = trace.find("rename.*", target)
        for folder in synced:
            assert any(renamed < sync < trace.said() for sync in trace.find("fsync", folder)), (
                folder
            )


@pytest.mark.parametrize("call", ["fsync", "syncfs"])
def test_no_success_is_said_after_a_sync_that_failed(
    tmp_path: Path, store: Store, call: str
) -> None:
    commit_model(store, "m", b"one")
    log = tmp_path / "log"
    done = run(
        "cp", "m", "n", "--store", store.root, prefix=strace(log, f"{call}:error=EIO:when=1")
    )
    if "(INJECTED)" not in log.read_text():
        assert call == "syncfs"  # where it is not trusted every file has an fsync of its own
        return
    assert (done.returncode, done.stdout) == (1, "")
    assert "input/output error" in done.stderr.lower()
    assert [str(name) for name, _ in store.models()] == ["m:latest"]
