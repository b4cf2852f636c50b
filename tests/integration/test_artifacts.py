"""Artifacts in docker-registry: what tools for containers make of them."""

import filecmp
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE
from support.commands import Cli
from support.registries import Registry, cannot_run, registry, skopeo

import blobstore
from blobstore import open_artifact, push
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry without logins; each test has a repository of its own."""
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def coded(store: Store) -> Store:
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    return store


def pushed(coded: Store, kind: str, server: Registry, **words: Any) -> str:
    """Push an artifact twice, and return its name; the second push sends no blob."""
    name = f"{server.host}/library/{kind}:v1"
    with open_artifact("m", coded, kind, **words) as artifact:
        push("m", artifact, to=name, neighbours=coded)
        again = push("m", artifact, to=name, neighbours=coded)
    assert not again.moved
    assert server.incomplete() == []
    return name


def copied(name: str, folder: Path) -> dict[str, Any]:
    """Copy an artifact by skopeo to a layout, unchanged, and return its manifest."""
    words = ("copy", "--preserve-digests", "--src-tls-verify=false")
    skopeo(*words, f"docker://{name}", f"oci:{folder}:m")
    (entry,) = json.loads((folder / "index.json").read_bytes())["manifests"]
    found: dict[str, Any] = json.loads(blob(folder, entry["digest"]).read_bytes())
    return found


def blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / digest.replace(":", "/")


def test_umoci_unpacks_an_image(plain: Registry, coded: Store, tmp_path: Path) -> None:
    words: dict[str, Any] = {"format": "mlx", "max_shard_size": 2_500_000}
    name = pushed(coded, "image", plain, **words)
    shown = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{name}"))
    assert (shown["Architecture"], shown["Os"], shown["Created"]) == ("amd64", "linux", None)
    manifest = copied(name, tmp_path / "layout")
    assert shown["Layers"] == [layer["digest"] for layer in manifest["layers"]]
    if shutil.which("umoci") is None:
        cannot_run("umoci is not installed")
    line = ["umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'layout'}:m"]
    subprocess.run([*line, tmp_path / "bundle"], check=True)
    out, unpacked = tmp_path / "out", tmp_path / "bundle" / "rootfs" / "models"
    blobstore.export_model("m", out, store=coded, **words)
    names = {path.name for path in out.iterdir()}
    assert {path.name for path in unpacked.iterdir()} == names
    assert not filecmp.cmpfiles(unpacked, out, names, shallow=False)[1]


def test_a_pushed_model_is_seen_without_pulling_it(
    plain: Registry, coded: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tag for Ollama, another with OCI's manifest for tools for containers."""
    name, cli = f"{plain.host}/team/seen:int4", Cli(coded, capsys)
    store = ("--store", coded.root)
    pushed = cli.text("push", "m", name, "--oci", *store)
    assert pushed.endswith(f"OCI manifest: {name}-oci\n")
    own = cli.json("show", "m", *store)
    shown = cli.json("show", name, *store)
    assert cli.err == f"Note: {name} is not in the store: asking the registry\n"
    assert shown["id"] == own["id"]
    assert shown["tensors"] == own["tensors"]
    rows = cli.json("list", f"{plain.host}/team/seen", "--sort", "name")
    assert [row["name"] for row in rows] == [name, f"{name}-oci"]
    assert {(row["quant_type"], row["parameters"]) for row in rows} == {("int4", 5_245_696)}
    assert name in {row["name"] for row in cli.json("list", plain.host)}
    pinned = f"{plain.host}/team/seen@{own['id']}"
    assert cli.json("inspect", pinned)["parameters"] == 5_245_696
    error = cli(*("show", f"{plain.host}/team/seen:typo"), *store)[2]
    assert error.endswith(f"blobstore list {plain.host}/team/seen lists its tags.\n")
    assert "no models at" in cli.refused("list", f"{plain.host}/team/none", code=1)
    for tag, code in (("int4", 1), ("int4-oci", 0)):
        place = f"docker://{plain.host}/team/seen:{tag}"
        line = ["skopeo", "inspect", "--tls-verify=false", place]
        assert subprocess.run(line, check=False, capture_output=True).returncode == code
