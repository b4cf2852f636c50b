"""Commands on a store in a bucket: their output, JSON and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from support import PYCODE

from blobstore.cli.main import run
from blobstore.cli.stores import places_of
from blobstore.io.objects import open_bucket
from blobstore.names import Digest
from blobstore.store.bucket.objects import blob_key

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def address() -> str:
    return f"memory://{uuid4().hex}/team"


@pytest.fixture
def cli(
    address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """A function that runs a command on the bucket and returns its exit code, output and errors."""
    monkeypatch.setenv("BLOBSTORE_STORE", address)
    monkeypatch.setenv("BLOBSTORE_CACHE", str(tmp_path / "cache"))

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = run([*map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def out_of(done: tuple[int, str, str]) -> str:
    assert (done[0], done[2]) == (0, "")
    return done[1]


def test_a_model_comes_and_goes(cli: Run, address: str, tmp_path: Path) -> None:
    assert out_of(cli("list")) == (
        f"No models in {address} yet. Import one: blobstore import FOLDER\n"
    )
    assert "55 blobs: 55 new" in out_of(cli("import", PYCODE, "tiny", "--quant", "int4"))
    (row,) = json.loads(out_of(cli("list", "--json")))
    assert (row["name"], row["quant_type"], row["parameters"]) == ("tiny:latest", "int4", 5_245_696)
    assert "runs in mlx-lm" in out_of(cli("show", "tiny"))
    assert "all sound" in out_of(cli("verify"))
    assert "Copied tiny:latest to n:latest" in out_of(cli("cp", "tiny", "n"))
    assert "Moved n:latest to o:latest" in out_of(cli("mv", "n", "o"))
    assert "0 B needed by no model" in out_of(cli("du"))
    folder = tmp_path / "store"
    assert "55 copied" in out_of(cli("cp", "tiny", "--to", folder))
    assert "55 there" in out_of(cli("cp", "tiny", "p", "--store", folder, "--to", address))
    removed = out_of(cli("rm", "o", "p", "tiny"))
    assert "Kept 55 blobs (5.98 MB): prune removes them, if no other model needs them" in removed
    code, _, errors = cli("prune", "--grace", "0", "--sole-owner")
    assert code == 1
    assert f"{address}: no model has a manifest, and 55 blobs would be removed" in errors
    assert "--forget" in errors
    pruned = out_of(cli("prune", "--grace", "0", "--sole-owner", "--forget"))
    assert pruned.splitlines()[-1] == "Removed 55 blobs (5.98 MB)"
    assert json.loads(out_of(cli("du", "--json")))["blobs"] == 0


def test_weights_through_the_cache(cli: Run, address: str, tmp_path: Path) -> None:
    out_of(cli("import", PYCODE, "tiny", "--quant", "int4"))
    out_of(cli("export", "tiny", tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 5_000_000
    blobs = list((tmp_path / "cache" / "blobs").iterdir())
    assert len(blobs) == 55
    assert "int4" in out_of(cli("quality", "tiny", "--against", PYCODE))
    small = ("--cache", tmp_path / "small", "--cache-size", "1MB")
    code, _, errors = cli("export", "tiny", tmp_path / "other", *small)
    assert code == 1
    assert "Hint: Give it more: --cache-size." in errors
    code, _, errors = cli("export", "tiny", tmp_path / "other", "--cache", PYCODE)
    assert (code, "is not a cache" in errors) == (2, True)
    folder = tmp_path / "folder"
    (folder / "blobs").mkdir(parents=True)
    for option in ("--cache", "--cache-size"):
        code, _, errors = cli("run", "tiny", "a", "--store", folder, option, "1MB")
        assert (code, "a cache is for a store in a bucket" in errors) == (2, True)
    lower = tmp_path / "upper"
    exported = out_of(
        cli("export", "tiny", tmp_path / "third", "--store", lower, "--lower", address)
    )
    assert "7 files" in exported


def test_damage_is_shown(cli: Run, address: str) -> None:
    out_of(cli("import", PYCODE, "tiny"))
    bucket = open_bucket(address)
    key = max((state.key for state in bucket.objects("blobs/")), key=lambda k: bucket.head(k).size)
    bucket.put(key, bytes(bucket.head(key).size))
    bucket.put(blob_key(Digest.of(b"x")), b"y")
    code, out, _ = cli("verify")
    assert code == 3
    assert "its bytes do not match its digest" in out
    assert out.splitlines()[-1].endswith("2 damaged")


@pytest.mark.parametrize(
    "words",
    [("pack", "m"), ("unpack", "m"), ("repair", "m"), ("prune", "--undo")],
    ids=lambda words: words[0],
)
def test_commands_for_folders(cli: Run, address: str, words: tuple[str, ...]) -> None:
    code, _, errors = cli(*words)
    assert code == 2
    assert errors.startswith(
        f"Error: {' '.join(words).removesuffix(' m')} is for a store in a folder, and {address} is"
        " a bucket"
    )


def test_a_grace_time_that_is_too_short(cli: Run) -> None:
    code, _, errors = cli("prune", "--grace", "5m")
    assert code == 2
    assert "Hint: If no worker is between its work and a commit, say so: --sole-owner." in errors


def test_another_address_is_not_a_store(cli: Run) -> None:
    code, _, errors = cli("list", "--store", "https://example.com/models")
    assert (code, "not a bucket" in errors) == (2, True)


def test_a_list_of_places_may_have_addresses() -> None:
    assert places_of("/a:s3://b/c:d::gs://e") == ["/a", "s3://b/c", "d", "", "gs://e"]
