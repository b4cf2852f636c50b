"""skopeo reads archives of ours, and we read those of skopeo."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support import PYCODE

import blobstore
from blobstore.names import ModelName
from blobstore.store.archive.archive import open_archive
from blobstore.store.archive.saving import save_models
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer

pytestmark = pytest.mark.lab
TINY, OTHER = ModelName.parse("tiny:int4"), ModelName.parse("ns/other:bf16")


def skopeo(*words: str) -> bytes:
    if shutil.which("skopeo") is None:
        pytest.skip("NOT SHOWN: skopeo is not installed")
    done = subprocess.run(["skopeo", *words], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    store = MemoryStore()
    blobstore.import_model(PYCODE, str(TINY), store=store, quant="int4")
    blobstore.import_model(PYCODE, str(OTHER), store=store)
    return store


@pytest.fixture
def archive(tmp_path: Path, store: MemoryStore) -> Path:
    path = tmp_path / "ours.tar"
    save_models([TINY, OTHER], path, store=store)
    return path


@pytest.mark.parametrize("name", [TINY, OTHER])
def test_skopeo_finds_a_model_by_its_name(
    archive: Path, store: MemoryStore, name: ModelName
) -> None:
    raw = skopeo("inspect", "--raw", f"oci-archive:{archive}:{name}")
    assert raw == store.manifests.text(name)


@pytest.mark.parametrize("name", [TINY, OTHER])
def test_what_skopeo_copies_loads_again(
    tmp_path: Path, archive: Path, store: MemoryStore, name: ModelName
) -> None:
    theirs, target = tmp_path / "theirs.tar", MemoryStore()
    skopeo("copy", f"oci-archive:{archive}:{name}", f"oci-archive:{theirs}:{name}")
    packed = tmp_path / "theirs.tar.gz"
    packed.write_bytes(gzip.compress(theirs.read_bytes(), 1))
    for path in (theirs, packed):
        with open_archive(path) as opened:
            assert opened.manifests.names() == [name]
            transfer([name], opened, target)
    assert target.manifests.text(name) == store.manifests.text(name)
    assert target.blobs.digests() <= store.blobs.digests()


def test_what_skopeo_copies_without_a_name(
    tmp_path: Path, archive: Path, store: MemoryStore
) -> None:
    theirs = tmp_path / "theirs.tar"
    skopeo("copy", f"oci-archive:{archive}:{TINY}", f"oci-archive:{theirs}")
    with open_archive(theirs) as opened:
        assert opened.manifests.names() == []
    with open_archive(theirs, name="given") as opened:
        assert opened.manifests.text(opened.find("given")) == store.manifests.text(TINY)


def test_skopeo_reads_every_blob(tmp_path: Path, archive: Path, store: MemoryStore) -> None:
    folder = tmp_path / "folder"
    skopeo("copy", f"oci-archive:{archive}:{TINY}", f"dir:{folder}")
    manifest = store.manifests.read(TINY)
    assert json.loads((folder / "manifest.json").read_bytes()) == json.loads(manifest.raw)
    for blob in manifest.descriptors:
        assert (folder / blob.digest.hex).stat().st_size == blob.size
