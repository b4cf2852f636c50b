"""``save``, ``load``, ``export`` and ``metadata``."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE
from support.archives import index_of, tar_of
from support.checkpoints import LLAMA_CONFIG, safetensors_bytes, write_checkpoint
from support.commands import Cli
from support.stores import commit_model

import blobstore
from blobstore.names import Digest, ModelName
from blobstore.store.local.store import open_store

COMMAND = [sys.executable, "-m", "blobstore"]
M, N = ModelName.parse("m"), ModelName.parse("n")


# save and load


@pytest.fixture
def two(cli: Cli) -> Cli:
    """Commands on a store with the models ``m`` and ``n``."""
    commit_model(cli.store, "m", b"one" * 1000, b"both")
    commit_model(cli.store, "n", b"two", b"both")
    return cli


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_models_go_to_a_file_and_back(two: Cli, tmp_path: Path, suffix: str) -> None:
    path, target = tmp_path / f"a{suffix}", open_store(tmp_path / "target")
    out = two.text("save", "m", "n", "-o", path)
    assert out.startswith(f"Saved m:latest, n:latest to {path}: ")
    out = two.text("load", path, "--store", target.root)
    assert [line.split(":")[0] for line in out.splitlines()] == ["Loaded m", "Loaded n"]
    for name in (M, N):
        assert target.manifests.text(name) == two.store.manifests.text(name)
    two.text("cp", "n", "m", "--force", "--store", target.root)
    assert two.json("load", path, "m", "--store", target.root)[0]["replaced"]


def test_documents_of_save_and_load(two: Cli, tmp_path: Path) -> None:
    path, manifest = tmp_path / "a.tar", two.store.manifests.read(M)
    assert two.json("save", "m", "-o", path) == {
        "file": str(path),
        "bytes": path.stat().st_size,
        "models": ["m:latest"],
        "blobs": 2,
        "blob_bytes": manifest.size,
    }
    two.text("save", "n", "m", "-o", path, "--force")
    (one,) = two.json("load", path, "m", "--store", tmp_path / "target")
    assert (one["source"], one["name"], one["there"]["blobs"]) == ("m:latest", "m:latest", 0)
    assert one["copied"]["bytes"] == manifest.size
    error = two.refused("load", path, "missing", "--store", tmp_path / "target", code=1)
    assert "has no model 'missing:latest'" in error
    assert "m:latest, n:latest" in error


def test_the_models_of_an_archive_are_listed(two: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    two.text("save", "n", "m", "-o", path)
    lines = two.text("load", "--list", path).splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "n:latest", "m:latest"]
    first, second = two.json("load", "--list", path)
    manifest = two.store.manifests.read(N)
    assert (first["id"], first["size"]) == (str(manifest.digest), manifest.size)
    assert two.json("load", "--list", path, "M") == [second]


def test_save_replaces_a_file_only_by_force(two: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"mine")
    assert "--force" in two.refused("save", "m", "-o", path)
    assert path.read_bytes() == b"mine"
    two.text("save", "m", "-o", path, "--force")
    assert path.stat().st_size > 3000


def test_an_archive_goes_through_a_pipe(two: Cli, tmp_path: Path) -> None:
    target = open_store(tmp_path / "target")
    assert "--json" in two.refused("save", "m", "-o", "-", "--json")
    save = [*COMMAND, "save", "m", "n", "-o", "-", "--compress"]
    load = [*COMMAND, "load", "-", "n", "--store", str(target.root)]
    with subprocess.Popen(save, stdout=subprocess.PIPE) as saving:
        done = subprocess.run(load, stdin=saving.stdout, capture_output=True, check=True)
    assert saving.returncode == 0
    assert done.stdout.startswith(b"Loaded n:latest: ")
    assert target.manifests.names() == [N]


def test_an_archive_is_neither_written_to_a_terminal_nor_read_from_one(two: Cli) -> None:
    ours, theirs = os.openpty()
    for words in (("save", "m", "-o", "-"), ("load", "-")):
        done = subprocess.run(
            [*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, check=False
        )
        assert done.returncode == 2
        assert b"terminal" in done.stderr
    os.close(ours)
    os.close(theirs)


def test_a_model_without_a_name_is_given_one(two: Cli, tmp_path: Path) -> None:
    path, raw = tmp_path / "a.tar", two.store.manifests.text(M)
    two.text("save", "m", "-o", path)
    media_type = "application/vnd.oci.image.manifest.v1+json"
    entry = {"mediaType": media_type, "digest": str(Digest.of(raw)), "size": len(raw)}
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]
    path.write_bytes(tar_of((files | {"index.json": index_of(entry)}).items()))
    target = ("--store", tmp_path / "target")
    assert "--as NAME" in two.refused("load", path, *target)
    two.text("load", "--list", path)
    assert "1 model without a name" in two.err
    two.text("load", path, "--as", "other:tag", *target)
    assert open_store(tmp_path / "target").manifests.text(ModelName.parse("other:tag")) == raw


def test_files_that_are_no_archives(two: Cli, tmp_path: Path) -> None:
    path, target = tmp_path / "a.tar", open_store(tmp_path / "target")
    two.text("save", "m", "-o", path)
    path.write_bytes(path.read_bytes()[:-1024])
    for words in (("load", path, "--store", target.root), ("load", "--list", path)):
        error = two.refused(*words, code=1)
        assert "it ends early (rule A1)" in error
    assert target.blobs.digests() == set()
    path.write_bytes(b"\x10\0\0\0\0\0\0\0" + b'{"a": 1}' * 200)
    assert "it is not a tar" in two.refused("load", path, "--store", target.root, code=1)


# export


def test_an_export_says_how_fast_it_was_and_what_loads_it(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    cli.text("import", source, "m")
    words = ("export", "m", tmp_path / "out", "--max-shard-size", "20KB", "--jobs", 1)
    first, rate, programs = cli.text(*words).splitlines()
    assert first == f"m:latest in {tmp_path / 'out'}: 7 files"
    assert re.fullmatch(r"\d\d\.\d KB in \d+\.\d\d s, [0-9.]+ [KMG]?B/s", rate)
    assert programs == "Loads in transformers, mlx-lm, blobstore"


@pytest.mark.parametrize(
    ("options", "programs"),
    [
        ([], ["blobstore"]),
        (["--format", "mlx"], ["mlx-lm", "blobstore"]),
        (["--dequantize", "bfloat16"], ["transformers", "mlx-lm", "blobstore"]),
    ],
)
def test_programs_that_load_a_quantized_export(
    cli: Cli, tmp_path: Path, options: list[str], programs: list[str]
) -> None:
    cli.text("import", PYCODE, "m", "--quant", "int4")
    assert cli.json("export", "m", tmp_path / "out", *options)["loads_in"] == programs


def test_the_document_and_the_notes_of_an_export(cli: Cli, tmp_path: Path) -> None:
    config = {**LLAMA_CONFIG, "quantization_config": {"\u202e": 1}}
    cli.text("import", write_checkpoint(tmp_path / "in", config=config), "m", "--quant", "int4")
    document = cli.json("export", "m", tmp_path / "out", "--dequantize", "bf16", "--verify")
    keys = ["name", "folder", "files", "bytes", "notes", "seconds", "loads_in"]
    assert list(document) == keys
    assert [file["name"] for file in document["files"]] == ["config.json", "model.safetensors"]
    assert sum(file["size"] for file in document["files"]) == document["bytes"]
    assert document["notes"] == ["config.json: quantization_config of the source left out"]
    assert cli.err == f"Note: {document['notes'][0]}\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--format gguf", "unknown format 'gguf'"),
        ("--dequantize int4", "unknown dtype 'int4'"),
        ("--max-shard-size bananas", "invalid size"),
        ("--max-shard-size 0", "invalid shard size"),
        ("--jobs 0", "at least one thread"),
    ],
)
def test_wrong_options_of_export(
    cli: Cli, source: Path, tmp_path: Path, options: str, says: str
) -> None:
    blobstore.import_model(source, "m", store=cli.store)
    assert says in cli.refused("export", "m", tmp_path / "out", *options.split())
    assert not (tmp_path / "out").exists()


def test_an_export_to_a_folder_with_something_in_it(cli: Cli, source: Path) -> None:
    cli.text("import", source, "m")
    error = cli.refused("export", "m", source, code=1)
    assert f"{source} already exists and is not an empty folder\nHint: Name a" in error


# metadata


class Metadata:
    """Runs ``metadata`` commands on one file."""

    def __init__(self, cli: Cli, file: Path) -> None:
        self.file, self._cli = file, cli

    def __call__(self, action: str, *words: str) -> str:
        return self._cli.text("metadata", action, self.file, *words)

    def json(self, action: str = "get", *words: str) -> Any:
        return self._cli.json("metadata", action, self.file, *words)

    def refused(self, action: str, *words: str, code: int) -> str:
        return self._cli.refused("metadata", action, self.file, *words, code=code)


@pytest.fixture
def metadata(cli: Cli, tmp_path: Path) -> Metadata:
    """Commands on a file with one key."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({"x": np.zeros(9, np.uint8)}, {"format": "pt"}))
    return Metadata(cli, path)


def test_get_and_set(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata("set", "long key", "two\nlines")
    assert metadata("get") == "format     pt\nlong key   two\\nlines\n"
    assert metadata("get", "long key") == "two\nlines\n"
    assert metadata.json("get", "long key") == "two\nlines"
    both = metadata.json("set", '{"k": "ü", "format": "np"}')
    assert both == metadata.json() == {"format": "np", "k": "ü", "long key": "two\nlines"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b' {"only": "this"}\n')))
    metadata("set", "-", "--replace")
    assert metadata.json() == {"only": "this"}
    metadata("set", "-", "a key of one dash")
    assert metadata("get", "-") == "a key of one dash\n"
    error = metadata.refused("get", "nope", code=1)
    assert error == f"Error: {metadata.file} has no metadata 'nope'\n"


def test_set_says_what_it_did(metadata: Metadata) -> None:
    assert metadata("set", "k", "v" * 90).startswith(f"Rewrote {metadata.file}: 9 B in ")
    assert metadata("set", "k", "w") == f"Edited {metadata.file} in place\n"
    assert metadata("set", "k", "w") == f"{metadata.file} has these metadata already\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["k"], 2, "the value for 'k' is missing"),
        (['{"k": 1}'], 2, "the value of 'k' is not a string"),
        (['{"k": "a", "k": "b"}'], 1, "twice"),
        (['{"k": "\\ud800"}'], 1, "surrogate"),
        (['{"k"'], 1, "not valid JSON"),
        (["k", "\udc80"], 2, "UTF-8"),
        (["k", "v" * 200, "--in-place"], 2, "no room"),
    ],
)
def test_set_refuses(metadata: Metadata, words: list[str], code: int, says: str) -> None:
    before = metadata.file.read_bytes()
    assert says in metadata.refused("set", *words, code=code)
    assert metadata.file.read_bytes() == before


def test_an_unreadable_standard_input(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    with (metadata.file.parent / "write-only").open("w") as stream:

        class Unreadable:
            buffer = open(stream.fileno(), "rb", closefd=False)  # noqa: SIM115  # closed with the file

        monkeypatch.setattr("sys.stdin", Unreadable)
        metadata.refused("set", "-", code=1)


def test_remove(metadata: Metadata) -> None:
    metadata("set", '{"a": "1", "b": "2", "c": "3"}')
    metadata("rm", "b", "format")
    assert metadata.json() == {"a": "1", "c": "3"}
    assert "no metadata 'b'" in metadata.refused("rm", "a", "b", code=1)
    assert "--all" in metadata.refused("rm", code=2)
    assert "--all" in metadata.refused("rm", "a", "--all", code=2)
    assert metadata.json("rm", "--all") == {}
    assert metadata("get") == ""


def test_hostile_metadata_are_escaped_and_exact_in_json(metadata: Metadata) -> None:
    hostile = "\x1b[31mred\u202eleft\x07\r" + "x" * 100_000
    metadata("set", hostile[:20], hostile)
    text = metadata("get") + metadata("get", hostile[:20])
    assert "\\x1b[31mred\\u202eleft\\x07" in text
    assert text.replace("\n", "").isprintable()
    assert metadata.json()[hostile[:20]] == hostile
