"""An import that is killed, or whose system calls fail, leaves the whole model or none, and never says that it succeeded.

The calls are counted in an undisturbed run; then each is made to kill the process or to fail, through strace.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import PYCODE
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.faults import CLEANING, MUTATING, READING, STRACE, calls, run, sample, strace
from support.stores import commit_model, wrong_digests

import blobstore
from blobstore.documents import Manifest
from blobstore.names import ModelName
from blobstore.store import Store, open_store

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(sys.platform != "linux", reason="strace is a tool of Linux")]
FORMS = pytest.mark.parametrize("count", [6, pytest.param(10_000, marks=pytest.mark.long)], ids=["short", "long"])
CALLS = (*MUTATING, *CLEANING)
OLD, NEW = ModelName.parse("old"), ModelName.parse("new")


class Case:
    """A source, and the store that it is imported into: empty, or with an older model."""

    def __init__(self, folder: Path, *, fresh: bool) -> None:
        """Write the source to ``folder``, and the older model unless the store is to be ``fresh``."""
        self.folder = folder
        if fresh:
            self.source = folder / "new.safetensors"
            self.source.write_bytes(safetensors_bytes({"only.weight": normal("only", 1024, 512)}))
        else:
            self.source = write_checkpoint(folder / "new", {**small_tensors(), "more": normal("more", 9)})
        self.base = open_store(folder / "base")
        if not fresh:
            blobstore.import_model(write_checkpoint(folder / "old"), store=self.base, quant="int4", name=OLD)
        self._number = 0

    def store(self) -> Store:
        """Return a new copy of the store."""
        self._number += 1
        copy = self.folder / f"store{self._number}"
        if self.base.root.exists():
            shutil.copytree(self.base.root, copy)
        return open_store(copy)

    def run(self, store: Store, *rules: str) -> subprocess.CompletedProcess[str]:
        """Import into ``store`` under strace, with faults by ``rules``."""
        prefix = strace(self.folder / "log", *rules)
        return run("import", self.source, "new", "--quant", "int4", "--store", store.root, "--jobs", 1, prefix=prefix)

    def points(self) -> list[tuple[str, int]]:
        """Return every call of an undisturbed run up to the moment when the success is said, in the order of `CALLS`."""
        store = self.store()
        done = self.run(store)
        assert (done.returncode, done.stderr) == (0, "")
        self.digest = store.manifest(NEW).digest
        counts = calls(self.folder / "log")
        return [(name, number) for name in CALLS for number in range(1, counts.get(name, 0) + 1)]

    def failing_points(self) -> list[tuple[str, int]]:
        """Return the calls that can be made to fail: not the first two writes, which are the error message's too."""
        return [point for point in self.points() if point[0] not in CLEANING and point not in (("write", 1), ("write", 2))]

    def check(self, store: Store) -> bool:
        """Assert that the store is sound; return whether it has the new model."""
        assert wrong_digests(store) == []
        found = dict(store.models())
        assert all(isinstance(manifest, Manifest) for manifest in found.values())
        for name in found:
            blobstore.open_model(name, store=store, verify=True).close()
        assert (OLD in found) == self.base.root.exists()
        assert NEW not in found or store.manifest(NEW).digest == self.digest
        return NEW in found

    def check_again(self, store: Store) -> None:
        """Assert that the import succeeds when it is tried again."""
        assert blobstore.import_model(self.source, NEW, store=store, quant="int4").digest == self.digest
        assert self.check(store)


@pytest.fixture(params=[True, False], ids=["fresh", "beside"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """An import of one large tensor into an empty store, and one of seven small ones beside an older model."""
    assert Path(STRACE).exists(), "these tests need strace: apt-get install strace"
    return Case(tmp_path, fresh=request.param)


@FORMS
def test_killed_at_a_system_call(case: Case, count: int) -> None:
    seen = set()
    for name, number in sample(case.points(), count):
        store = case.store()
        done = case.run(store, f"{name}:signal=SIGKILL:when={number}")
        assert done.returncode == -9, (name, number, done.stderr)
        seen.add(case.check(store))
        case.check_again(store)
    assert seen == {False, True}


@FORMS
def test_a_failing_system_call_is_an_error_and_no_model(case: Case, count: int) -> None:
    points = case.failing_points()
    points.remove(max(point for point in points if point[0] == "fsync"))  # see the next test
    for name, number in sample(points, count):
        full = name in ("write", "pwrite64", "ftruncate", "mkdir", "mkdirat")
        errno, says = ("ENOSPC", "no space left on device") if full else ("EIO", "input/output error")
        store = case.store()
        done = case.run(store, f"{name}:error={errno}:when={number}")
        assert_one_error(done, says, (name, number))
        assert not case.check(store), (name, number)
        assert not list(store.root.glob(".blobstore/tmp/*")), (name, number)
        case.check_again(store)


def assert_one_error(done: subprocess.CompletedProcess[str], says: str, point: object = None) -> None:
    assert (done.returncode, done.stdout) == (1, ""), (point, done.stderr)
    assert done.stderr.startswith("Error: "), point
    assert done.stderr.count("\n") == 1, (point, done.stderr)
    assert says in done.stderr, (point, done.stderr)


def test_an_older_model_of_the_name_stays_when_the_last_sync_fails(case: Case) -> None:
    """The manifest is in its place by then, but its name may not be on the disk: that is no success."""
    commit_model(case.base, "new", safetensors_bytes({"older": normal("older", 3)}))
    assert case.run(case.store()).returncode == 0
    last = calls(case.folder / "log")["fsync"]
    store = case.store()
    assert_one_error(case.run(store, f"fsync:error=EIO:when={last}"), "input/output error")
    assert store.manifest(NEW).raw == case.base.manifest(NEW).raw


@pytest.mark.parametrize(
    ("errno", "says"),
    [
        ("ENOSPC", "no space left"),
        ("EDQUOT", "disk quota exceeded"),
        ("EROFS", "read-only file system"),
        ("EIO", "input/output"),
    ],
)
def test_other_reasons_why_a_write_fails(tmp_path: Path, errno: str, says: str) -> None:
    case = Case(tmp_path, fresh=True)
    store = case.store()
    assert_one_error(case.run(store, f"pwrite64:error={errno}:when=1"), says)
    assert list(store.models()) == []


@pytest.mark.parametrize("when", ["1", "2", "1+"])
def test_a_source_that_can_not_be_read_is_an_error_that_names_it(tmp_path: Path, when: str) -> None:
    case = Case(tmp_path, fresh=True)
    done = case.run(case.store(), *(f"?{name}:error=EIO:when={when}" for name in READING))
    assert_one_error(done, "input/output error")
    assert str(case.source) in done.stderr


def test_interrupted_calls_go_on(tmp_path: Path) -> None:
    case = Case(tmp_path, fresh=True)
    case.points()
    store = case.store()
    done = case.run(store, "write,pwrite64,?preadv,?preadv2:error=EINTR:when=1+2")
    assert (done.returncode, done.stderr) == (0, "")
    assert case.check(store)


def test_a_model_that_can_not_be_cleaned_up_after_is_still_a_success(tmp_path: Path) -> None:
    case = Case(tmp_path, fresh=True)
    case.points()
    store = case.store()
    done = case.run(store, "unlinkat:error=EIO")
    assert (done.returncode, done.stderr) == (0, "")
    assert case.check(store)


def test_too_many_open_files_are_an_error(tmp_path: Path) -> None:
    for number in range(1, 31):
        data = safetensors_bytes({f"t{number}": normal(str(number), 3)})
        (tmp_path / f"model-{number:05}-of-00030.safetensors").write_bytes(data)
    prefix = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash"]
    done = run("import", tmp_path, "new", "--store", tmp_path / "store", prefix=prefix)
    assert_one_error(done, "too many open files")
    assert list(open_store(tmp_path / "store").models()) == []


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.long)], ids=["short", "long"])
def test_killed_at_any_moment(tmp_path: Path, rounds: int) -> None:
    moments = random.Random(20_260_801)
    store = open_store(tmp_path / "store")
    blobstore.import_model(write_checkpoint(tmp_path / "old"), store=store, name=OLD)
    wanted = blobstore.import_model(PYCODE, NEW, store=open_store(tmp_path / "other"), quant="int4").digest
    line = [sys.executable, "-m", "blobstore", "import", str(PYCODE), "new", "--quant", "int4", "--store", str(store.root)]
    for _ in range(rounds):
        before = private_folders(store)
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            while private_folders(store) <= before and child.poll() is None:
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.1))
            child.kill()
        assert len(half_written(store)) <= 1  # the next import removes what a killed one did not finish
        assert wrong_digests(store) == []
        blobstore.open_model(OLD, store=store, verify=True).close()
        if NEW in dict(store.models()):
            with blobstore.open_model(NEW, store=store, verify=True) as model:
                assert model.manifest.digest == wanted
            store.remove(NEW)
    assert blobstore.import_model(PYCODE, NEW, store=store, quant="int4").digest == wanted
    assert wrong_digests(store) == []
    assert half_written(store) == set()


def half_written(store: Store) -> set[str]:
    """Return the private folders that hold anything else than finished blobs."""
    return {path.parent.name for path in store.root.glob(".blobstore/tmp/*/*") if not path.name.startswith("sha256-")}


def private_folders(store: Store) -> set[str]:
    """Return the private folders of imports, of those that were killed too."""
    return {path.name for path in store.root.glob(".blobstore/tmp/*")}
