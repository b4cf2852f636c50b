"""repair: what is damaged becomes what it was, byte for byte, and nothing else is touched."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.stores import layer_by_hand, manifest_path, with_newline_config

import blobstore
from blobstore import errors
from blobstore.importer.repair import recorded_import, repair_model
from blobstore.names import ModelName
from blobstore.store.care.checks import BlobChecks
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

M = ModelName.parse("m")
Snapshot = Callable[[Store], dict[str, str]]
EXPERTS = {
    f"model.layers.0.mlp.experts.{index}.up_proj.weight": normal(str(index), 64, 64)
    for index in range(3)
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "source", {**small_tensors(), **EXPERTS})
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


def paths(store: Store, *words: str) -> list[Path]:
    """Return the blobs of ``m`` whose layer names contain a word; "" is the config's."""
    manifest = store.manifest(M)
    named = [(layer.name or "?", layer) for layer in manifest.layers]
    if "" in words and manifest.config is not None:
        named.append(("", manifest.config))
    chosen = [one for n, one in named if any(word in n if word else not n for word in words)]
    assert chosen
    return [store.blobs.path / layer.digest.file_name for layer in chosen]


def contents(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store.root / "blobs").iterdir()}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    stamp = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as bits rot on a disk


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "int8", "group_size": 32, "dtype": "float16"},
        {"quant": "nvfp4", "method": "search", "global_scale": True},
        {"quant": "mxfp8", "rules": ["lm_head*=int8/32"], "alignment": 4096, "experts": "stacked"},
        {"target_bpw": 7.0},
        {"quant": "int4", "profile": "ollama"},
        {"quant": "int4", "pure": True},
    ],
    ids=str,
)
def test_everything_is_made_again(store: Store, source: Path, options: dict[str, Any]) -> None:
    blobstore.import_model(source, M, store=store, **options)
    before = contents(store)
    damaged = paths(store, "embed", "lm_head", "experts", "tokenizer.json")
    times = {path: path.stat().st_ctime_ns for path in store.blobs.path.iterdir()}
    for number, path in enumerate(damaged):
        (damage, Path.unlink, lambda path: os.truncate(path, 9))[number % 3](path)
    result = repair_model("m", source, store=store)
    assert {blob.digest.file_name for blob in result.repaired} == {path.name for path in damaged}
    assert (result.remaining, result.manifest_restored) == ((), False)
    assert contents(store) == before
    assert verify(store).is_sound
    for path in times.keys() - set(damaged):
        assert path.stat().st_ctime_ns == times[path]
    assert not list(store.root.glob(".blobstore/tmp/*"))


def test_documents_are_made_again_usual_options_too(store: Store, source: Path) -> None:
    blobstore.import_model(source, M, store=store, quant="int4")
    before = contents(store)
    moved = source.rename(source.with_name("elsewhere"))
    for lost in ("blobstore.json", "config.json", ""):  # the last is the config
        for path in paths(store, lost, "q_proj"):
            path.unlink()
        assert len(repair_model("m", moved, store=store).repaired) == 2
        assert contents(store) == before


def test_without_a_source_only_a_manifest_comes_back(
    store: Store, source: Path, snapshot: Snapshot
) -> None:
    blobstore.import_model(source, M, store=store)
    before = snapshot(store)
    for nothing in ("nowhere", None):  # a sound model needs no source
        result = repair_model("m", nothing, store=store)
        assert (result.repaired, result.remaining, result.checked) == ((), (), len(contents(store)))
    assert snapshot(store) == before
    path = manifest_path(store, "m")
    manifest = path.read_bytes()
    path.unlink()
    assert repair_model("m", store=store).manifest_restored
    assert path.read_bytes() == manifest
    path.unlink()
    next(store.blobs.path.iterdir()).unlink()
    with pytest.raises(errors.UsageError, match="1 of the") as caught:
        repair_model("m", store=store)
    assert "--from" in str(caught.value.hint)
    assert not path.exists()


def test_files_that_the_import_had_beside_it(store: Store, source: Path, tmp_path: Path) -> None:
    config = {"architectures": ["Draft"]}
    draft = write_checkpoint(tmp_path / "draft", {"d.weight": normal("d", 64, 64)}, config)
    modelfile, importance = tmp_path / "Modelfile", tmp_path / "importance.safetensors"
    modelfile.write_text("FROM source\nTEMPLATE hello\nPARSER qwen3\n")
    importance.write_bytes(safetensors_bytes({"lm_head.weight": np.arange(64, dtype=np.float32)}))
    given: dict[str, Any] = {"draft": draft, "modelfile": modelfile, "importance": importance}
    blobstore.import_model(source, M, store=store, quant="int4", method="search", **given)
    before = contents(store)

    def broken() -> None:
        for path in paths(store, "lm_head", "draft.d", "draft/config.json", "?", ""):
            path.unlink(missing_ok=True)

    broken()
    for wrong in (None, {"lm_head.weight": np.ones(64, np.float32)}):
        with pytest.raises(errors.UsageError, match="importance"):
            repair_model("m", source, store=store, importance=wrong)
    result = repair_model("m", source, store=store, importance=importance)
    assert len(result.repaired) == 1
    assert sorted(
        left.blob.name or left.blob.media_type.rpartition(".")[2] for left in result.remaining
    ) == ["draft.d.weight", "draft/config.json", "template", "v1+json"]
    broken()
    result = repair_model("m", source, store=store, **given)
    assert (len(result.repaired), result.remaining) == (5, ())
    assert contents(store) == before


def test_another_source_is_refused_and_nothing_is_written(
    store: Store, source: Path, tmp_path: Path, snapshot: Snapshot
) -> None:
    blobstore.import_model(source, M, store=store, quant="int4")
    usual = small_tensors()
    other = {**usual, "lm_head.weight": usual["lm_head.weight"] * 2}
    shorter = {**usual, "lm_head.weight": normal("x", 32, 64)}
    without = {name: array for name, array in usual.items() if "lm_head" not in name}
    (path,) = paths(store, "lm_head")
    damage(path)
    before = snapshot(store)
    for number, tensors in enumerate((other, shorter, without)):
        with pytest.raises(errors.UnsupportedSourceError) as caught:
            repair_model("m", write_checkpoint(tmp_path / str(number), tensors), store=store)
        assert caught.value.blob == path.name.replace("-", ":")
    assert snapshot(store) == before


def test_a_manifest_comes_back(store: Store, source: Path) -> None:
    blobstore.import_model(source, M, store=store, quant="int4")
    path = manifest_path(store, "m")
    raw, before = path.read_bytes(), contents(store)
    for change in (lambda path: path.write_bytes(b"{"), damage, Path.unlink):
        paths(store, "lm_head")[0].unlink()
        change(path)
        result = repair_model("m", source, store=store)
        assert (result.manifest_restored, len(result.repaired)) == (True, 1)
        assert path.read_bytes() == raw
        assert contents(store) == before


def test_a_model_that_is_imported_again_during_the_repair_of_its_manifest_stays(
    store: Store, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.import_model(source, M, store=store, quant="int4")
    manifest_path(store, "m").write_bytes(b"{")
    real = BlobChecks.run

    def meanwhile(self: BlobChecks, *arguments: Any) -> None:
        real(self, *arguments)
        blobstore.import_model(source, M, store=store, quant="int8")

    monkeypatch.setattr(BlobChecks, "run", meanwhile)
    with pytest.raises(errors.BusyError):
        repair_model("m", source, store=store)
    with blobstore.open_model("m", store=store) as model:
        assert model.config.file_type == "int8"


@pytest.mark.parametrize(("there", "never", "kept"), [("int4", "int8", 1.0), ("int8", "int4", 0.5)])
def test_a_manifest_does_not_become_that_of_an_import_that_was_killed(
    store: Store, source: Path, there: str, never: str, kept: float
) -> None:
    blobstore.import_model(source, M, store=store, quant=there)
    blobstore.import_model(source, "n", store=store, quant=never)
    store.copies.write(M, store.manifests.text(ModelName.parse("n")))
    raw = store.manifests.text(M)
    manifest_path(store, "m").write_bytes(raw[: int(kept * len(raw)) - 9] + b"\x00" * 9)
    assert repair_model("m", source, store=store).manifest_restored
    assert store.manifests.text(M) == raw


def test_a_model_missing_beyond_help_or_of_another_kind(store: Store, source: Path) -> None:
    with pytest.raises(errors.NotFoundError):
        repair_model("m", source, store=store)
    assert not store.root.exists()
    path = manifest_path(store, "m")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    with pytest.raises(errors.DocumentError, match="no copy"):
        repair_model("m", source, store=store)
    layer = layer_by_hand(store, "", b"GGUF") | {"mediaType": "application/vnd.ollama.image.model"}
    path.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    next((store.root / "blobs").iterdir()).unlink()
    with pytest.raises(errors.BlobStoreError):
        repair_model("m", source, store=store)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"version":1', b'"version":2'),
        (b'"options":', b'"options":null,"others":'),
        (b'"group_size":32', b'"group_size":"32"'),
        (b'"groups":{}', b'"groups":{"int4":31}'),
    ],
)
def test_a_document_that_is_not_ours(source: Path, old: bytes, new: bytes) -> None:
    raw = blobstore.plan_import(source, quant="int4").documents["blobstore.json"]
    assert recorded_import(raw)[0].quant_type is not None
    with pytest.raises((errors.DocumentError, errors.UnsupportedSourceError), match=r"B1|version"):
        recorded_import(raw.replace(old, new))


def test_a_config_that_a_newline_ends_comes_back_so(store: Store, source: Path) -> None:
    blobstore.import_model(source, M, store=store, quant="int4", profile="ollama")
    config = with_newline_config(store, "m", "n")
    before = contents(store)
    config.unlink()
    assert repair_model("n", source, store=store).remaining == ()
    assert contents(store) == before
