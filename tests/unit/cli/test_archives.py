"""``save`` and ``load``: their output, JSON and exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.archives import index_of, tar_of
from support.checkpoints import small_tensors, write_checkpoint

import blobstore
from blobstore.cli.main import run
from blobstore.formats.oci import blob_path
from blobstore.names import Digest, ModelName
from blobstore.store.local.store import Store, open_store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command and returns its exit code, output and errors."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = run(list(map(str, words)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def full(store: Store, tmp_path: Path) -> Store:
    source = write_checkpoint(tmp_path / "source", small_tensors())
    for name, options in (("m", {}), ("n", {"quant": "int4"})):
        blobstore.import_model(source, name, store=store, jobs=1, **options)  # type: ignore[arg-type]
    return store


def document(done: tuple[int, str, str]) -> Any:
    assert (done[0], done[2]) == (0, "")
    return json.loads(done[1])


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_models_go_to_a_file_and_back(cli: Run, full: Store, tmp_path: Path, suffix: str) -> None:
    path, target = tmp_path / f"a{suffix}", open_store(tmp_path / "target")
    code, out, err = cli("save", "m", "n", "-o", path, "--store", full.root)
    assert (code, err) == (0, "")
    assert out.startswith(f"Saved m:latest, n:latest to {path}: ")
    code, out, err = cli("load", path, "--store", target.root)
    assert (code, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()] == ["Loaded m", "Loaded n"]
    for name in map(ModelName.parse, ("m", "n")):
        assert target.manifests.text(name) == full.manifests.text(name)
    assert cli("verify", "--store", target.root)[0] == 0


def test_what_an_archive_has(cli: Run, full: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    assert cli("save", "n", "m", "-o", path, "--store", full.root)[0] == 0
    code, out, _ = cli("load", "--list", path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "n:latest", "m:latest"]
    found = document(cli("load", "--list", "--json", path))
    assert [one["name"] for one in found] == ["n:latest", "m:latest"]
    manifest = full.manifests.read(ModelName.parse("n"))
    assert (found[0]["id"], found[0]["size"]) == (str(manifest.digest), manifest.size)
    (one,) = document(cli("load", "--list", "--json", path, "M"))
    assert one["name"] == "m:latest"


def test_some_of_the_models(cli: Run, full: Store, tmp_path: Path) -> None:
    path, target = tmp_path / "a.tar", tmp_path / "target"
    assert cli("save", "n", "m", "-o", path, "--store", full.root)[0] == 0
    (one,) = document(cli("load", path, "m", "--store", target, "--json"))
    assert (one["source"], one["name"], one["there"]["blobs"]) == ("m:latest", "m:latest", 0)
    assert one["copied"]["bytes"] == full.manifests.read(ModelName.parse("m")).size
    code, _, err = cli("load", path, "missing", "--store", target)
    assert code == 1
    assert "has no model 'missing:latest'" in err
    assert "m:latest, n:latest" in err


def test_json_of_save(cli: Run, full: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    found = document(cli("save", "m", "-o", path, "--store", full.root, "--json"))
    manifest = full.manifests.read(ModelName.parse("m"))
    assert found == {
        "file": str(path),
        "bytes": path.stat().st_size,
        "models": ["m:latest"],
        "blobs": len({blob.digest for blob in manifest.descriptors}),
        "blob_bytes": manifest.size,
    }


def test_a_file_that_exists(cli: Run, full: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"mine")
    code, _, err = cli("save", "m", "-o", path, "--store", full.root)
    assert (code, path.read_bytes()) == (2, b"mine")
    assert "--force" in err
    assert cli("save", "m", "-o", path, "--force", "--store", full.root)[0] == 0
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("compress", ["--compress", "--no-compress"])
def test_a_pipe(full: Store, tmp_path: Path, compress: str) -> None:
    target = open_store(tmp_path / "target")
    command = [sys.executable, "-m", "blobstore"]
    words = ["save", "m", "n", "-o", "-", compress, "--store", str(full.root)]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE) as saving:
        words = ["load", "-", "n", "--store", str(target.root)]
        done = subprocess.run(
            [*command, *words], stdin=saving.stdout, capture_output=True, check=True
        )
    assert saving.returncode == 0
    assert done.stdout.startswith(b"Loaded n:latest: ")
    assert target.manifests.names() == [ModelName.parse("n")]


def test_a_pipe_has_no_json(cli: Run, full: Store) -> None:
    code, out, err = cli("save", "m", "-o", "-", "--json", "--store", full.root)
    assert (code, out) == (2, "")
    assert "--json" in err


def test_terminals(full: Store) -> None:
    """An archive is neither written to a terminal nor read from one."""
    ours, theirs = os.openpty()
    try:
        for words in (("save", "m", "-o", "-", "--store", str(full.root)), ("load", "-")):
            done = subprocess.run(
                [sys.executable, "-m", "blobstore", *words],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
                check=False,
            )
            assert done.returncode == 2
            assert b"terminal" in done.stderr
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_model_without_a_name(cli: Run, full: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    assert cli("save", "m", "-o", path, "--store", full.root)[0] == 0
    raw = full.manifests.text(ModelName.parse("m"))
    media_type = "application/vnd.oci.image.manifest.v1+json"
    entry = {"mediaType": media_type, "digest": str(Digest.of(raw)), "size": len(raw)}
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]
    assert blob_path(Digest.of(raw)) in files
    path.write_bytes(tar_of((files | {"index.json": index_of(entry)}).items()))
    target = tmp_path / "target"
    code, _, err = cli("load", path, "--store", target)
    assert code == 2
    assert "--as NAME" in err
    assert "1 model without a name" in cli("load", "--list", path)[2]
    assert cli("load", path, "--as", "other:tag", "--store", target)[0] == 0
    assert open_store(target).manifests.text(ModelName.parse("other:tag")) == raw


def test_a_pipe_that_is_listed_is_read_to_its_end(cli: Run, full: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    assert cli("save", "m", "-o", path, "--store", full.root)[0] == 0
    whole = path.read_bytes()
    for data, code in ((whole, 0), (whole[:-1024], 1)):
        command = [sys.executable, "-m", "blobstore", "load", "--list", "-"]
        done = subprocess.run(command, input=data, capture_output=True, check=False)
        assert (done.returncode, b"m:latest" in done.stdout) == (code, code == 0)
    assert b"it ends early" in done.stderr


def test_a_file_that_is_no_archive(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0" + b'{"a": 1}' * 200)
    code, out, err = cli("load", path, "--store", tmp_path / "target")
    assert (code, out, "it is not a tar" in err) == (1, "", True)


def test_an_archive_that_is_cut(cli: Run, full: Store, tmp_path: Path) -> None:
    path, target = tmp_path / "a.tar", open_store(tmp_path / "target")
    assert cli("save", "m", "-o", path, "--store", full.root)[0] == 0
    path.write_bytes(path.read_bytes()[:-1024])
    code, out, err = cli("load", path, "--store", target.root)
    assert (code, out) == (1, "")
    assert "it ends early (rule A1)" in err
    assert target.blobs.digests() == set()
    assert target.manifests.names() == []
