"""A stored model as an artifact: what it holds, its bytes, and that it is not taken for a model."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE
from support.checkpoints import safetensors_bytes
from support.layouts import files_of
from support.servers import server
from support.small_registry import SmallRegistry
from support.stores import commit_model

import blobstore
from blobstore import open_artifact, pull, push, transfer
from blobstore.cli.main import run
from blobstore.errors import DigestMismatchError, NotFoundError, UnsupportedSourceError
from blobstore.formats.documents import Manifest
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore

OCI = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def host() -> Iterator[str]:
    with server() as running:
        running.play(SmallRegistry())
        yield f"{running.host}:{running.port}"


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = blobstore.open_store(tmp_path_factory.mktemp("coded") / "store")
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    return store


def sent(store: Store, kind: str, **words: Any) -> tuple[MemoryStore, Manifest]:
    home = MemoryStore()
    with open_artifact("m", store, kind, **words) as artifact:
        transfer("m", artifact, home)
    return home, home.manifests.read(home.find("m"))


def files_of_layers(home: MemoryStore, manifest: Manifest) -> dict[str, bytes]:
    found = {}
    for layer in manifest.layers:
        with tarfile.open(fileobj=io.BytesIO(home.blobs.all[layer.digest])) as tar:
            for member in tar:
                assert (member.uid, member.gid, member.mtime) == (0, 0, 0)
                assert member.mode == (0o755 if member.isdir() else 0o644)
                if member.isfile():
                    file = tar.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    return found


def exported(store: Store, folder: Path, **words: Any) -> dict[str, bytes]:
    blobstore.export_model("m", folder, store=store, **words)
    return files_of(folder)


def test_a_modelpack_artifact_is_an_export(coded: Store, tmp_path: Path) -> None:
    words = {"max_shard_size": 3_000_000}
    home, manifest = sent(coded, "modelpack", **words)
    same = "60d1a93c92e5a8733356fa6f7a33a550e409cffa5130539ab99e4367fcc5b421"
    assert manifest.digest.hex == same
    document = json.loads(manifest.raw)
    cncf = "application/vnd.cncf.model"
    assert (document["mediaType"], document["artifactType"]) == (OCI, f"{cncf}.manifest.v1+json")
    assert document["config"]["mediaType"] == f"{cncf}.config.v1+json"
    layers = document["layers"]
    assert exported(coded, tmp_path / "out", **words) == {
        entry["annotations"]["org.cncf.model.filepath"]: home.blobs.all[layer.digest]
        for entry, layer in zip(layers, manifest.layers, strict=True)
    }
    kinds = [entry["mediaType"].split(".")[-3] for entry in layers]
    assert kinds == sorted(kinds, key=lambda kind: kind != "weight")
    assert manifest.config is not None
    config = json.loads(home.blobs.read(manifest.config))
    assert config["modelfs"]["diffIds"] == [entry["digest"] for entry in layers]
    assert config["descriptor"] == {"family": "qwen3", "name": "m"}
    assert config["config"] == {
        "architecture": "Qwen3ForCausalLM",
        "format": "safetensors",
        "paramSize": "5.2M",
        "precision": "bfloat16",
        "quantization": "int4,int8",
    }
    tokenizer = coded.manifest("m").document("tokenizer.json")
    assert tokenizer is not None
    assert tokenizer.digest in {layer.digest for layer in manifest.layers}  # no copy is made


@pytest.mark.parametrize("how", [{"format": "mlx"}, {"dequantize": "bfloat16"}])
def test_an_image_has_an_exports_files(coded: Store, tmp_path: Path, how: dict[str, Any]) -> None:
    words = {"max_shard_size": 2_500_000, **how}
    home, manifest = sent(coded, "image", **words)
    files = exported(coded, tmp_path / "out", **words)
    assert files_of_layers(home, manifest) == {f"models/{path}": files[path] for path in files}
    shards = [path for path in files if path.endswith(".safetensors")]
    assert len(manifest.layers) == len(shards) + 1 > 2
    assert manifest.config is not None
    config = json.loads(home.blobs.read(manifest.config))
    assert (config["architecture"], config["os"]) == ("amd64", "linux")
    assert config["rootfs"]["diff_ids"] == [str(layer.digest) for layer in manifest.layers]


def test_same_model_same_bytes(coded: Store) -> None:
    _, manifest = sent(coded, "image", max_shard_size=3_000_000, jobs=3)
    same = "c025216adc3856e01d745031b95cc143dd497d8f4be6944408e8c4123bb72fa5"
    assert manifest.digest.hex == same


def test_the_own_blobs_under_an_oci_manifest(host: str, coded: Store, tmp_path: Path) -> None:
    own = coded.manifest("m")
    home, manifest = sent(coded, "oci")
    document = json.loads(manifest.raw)
    assert document["mediaType"] == OCI
    assert document["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json"
    assert manifest.layers == own.layers
    assert {blob.digest for blob in manifest.descriptors} == {one.digest for one in own.descriptors}
    other = blobstore.open_store(tmp_path / "other")
    push("m", home, to=f"{host}/a/m:oci")
    pull(f"{host}/a/m:oci", other, name="n")
    assert other.manifest("n").raw == manifest.raw
    found, wanted = blobstore.open_model("n", store=other), blobstore.open_model("m", store=coded)
    assert {key: found[key].nbytes for key in found} == {key: wanted[key].nbytes for key in wanted}


@pytest.mark.parametrize("kind", ["modelpack", "image"])
def test_a_second_push_sends_nothing_and_it_is_not_taken_for_a_model(
    host: str, coded: Store, tmp_path: Path, kind: str
) -> None:
    with open_artifact("m", coded, kind) as artifact:
        for is_new in (True, False):
            done = push("m", artifact, to=f"{host}/a/m:{kind}", neighbours=coded)
            assert (bool(done.copied), bool(done.there)) == (is_new, not is_new)
            assert done.digest == artifact.manifests.read(artifact.name).digest
        blobstore.save_models(["m"], tmp_path / "m.tar", store=artifact)
    other = blobstore.open_store(tmp_path / "other")
    with pytest.raises(UnsupportedSourceError, match="not a stored model"):
        pull(f"{host}/a/m:{kind}", other)
    assert run(["load", str(tmp_path / "m.tar"), "--store", str(tmp_path / "other")]) == 1
    assert other.manifests.names() == []
    assert other.blobs.digests() == set()


def test_damage_is_not_sent(host: str, store: Store) -> None:
    commit_model(store, "m", safetensors_bytes({"a": np.arange(9)}))
    (path,) = store.blobs.path.iterdir()
    path.write_bytes(safetensors_bytes({"a": np.arange(1, 10)}))
    with pytest.raises(DigestMismatchError), open_artifact("m", store, "image") as artifact:
        push("m", artifact, to=f"{host}/a/m:x")
    with pytest.raises(NotFoundError):
        pull(f"{host}/a/m:x", MemoryStore())


def test_the_command(host: str, coded: Store, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["push", "m", "--store", str(coded.root), "--to", f"{host}/a/m:image"]
    line += ["--artifact", "image", "--format", "mlx", "--max-shard-size", "3MB", "--json"]
    assert run(line) == 0
    printed = json.loads(capsys.readouterr().out)
    _, manifest = sent(coded, "image", format="mlx", max_shard_size=3_000_000)
    assert printed["digest"] == str(manifest.digest)
    assert printed["name"] == f"{host}/a/m:image"
    assert printed["moved"] == {"blobs": len(manifest.descriptors), "bytes": manifest.size}
    assert run(line[:-1]) == 0
    assert f"{len(manifest.descriptors)} reused" in capsys.readouterr().out
