"""skopeo reads archives of ours, and we read those of skopeo."""

import gzip
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.registries import skopeo

import blobstore
from blobstore.names import ModelName
from blobstore.store.archive.archive import open_archive
from blobstore.store.archive.saving import save_models
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import commit

pytestmark = pytest.mark.lab


def test_what_skopeo_copies_loads_again(tmp_path: Path) -> None:
    name, store = ModelName.parse("tiny:int4"), MemoryStore()
    source = write_checkpoint(tmp_path / "source")
    blobstore.import_model(source, str(name), store=store, quant="int4")
    commit(store, "other", b"another model")
    save_models([name, "other"], tmp_path / "ours.tar", store=store)
    ours, theirs = (f"oci-archive:{tmp_path / file}" for file in ("ours.tar", "theirs.tar"))
    raw = skopeo("inspect", "--raw", f"{ours}:{name}")
    assert raw.encode() == store.manifests.text(name)
    skopeo("copy", f"{ours}:{name}", f"{theirs}:{name}")
    compressed = tmp_path / "theirs.tar.gz"
    compressed.write_bytes(gzip.compress((tmp_path / "theirs.tar").read_bytes(), 1))
    for path in (tmp_path / "theirs.tar", compressed):
        target = MemoryStore()
        with open_archive(path) as opened:
            assert opened.manifests.names() == [name]
            transfer([name], opened, target)
        assert target.manifests.text(name) == store.manifests.text(name)
    skopeo("copy", f"{ours}:{name}", f"oci-archive:{tmp_path / 'unnamed.tar'}")
    with open_archive(tmp_path / "unnamed.tar", name="given") as opened:
        assert opened.manifests.text(opened.find("given")) == store.manifests.text(name)
