"""Layouts of real checkpoints: every file comes back, byte for byte, and a coverage says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.layouts import (
    BINARY,
    LAYOUTS,
    documented,
    files_of,
    instruct,
    sentencepiece,
    with_draft,
    write,
)

import blobstore
from blobstore.errors import MissingFileError, NotFoundError, UnsupportedSourceError
from blobstore.formats.documents import FILE_MEDIA_TYPE
from blobstore.inspection.listing import stored_coverage
from blobstore.names import ModelName
from blobstore.store.local.store import Store

M = ModelName.parse("m")
Write = Callable[[Path], Path]


def draft_of(source: Path) -> dict[str, Any]:
    return {"draft": source / "draft"} if (source / "draft").is_dir() else {}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_file_of_a_layout_comes_back(store: Store, tmp_path: Path, layout: Write) -> None:
    source, out = layout(tmp_path / "in"), tmp_path / "out"
    result = blobstore.import_model(source, M, store=store, **draft_of(source))
    blobstore.export_model("m", out, store=store, max_shard_size="source")
    assert files_of(out) == files_of(source)
    coverage = result.coverage
    assert coverage.files.covered == coverage.files.source == len(files_of(source))
    assert coverage.tensors.covered == coverage.tensors.source
    assert coverage.left_out == ()
    assert stored_coverage(store, result.manifest) == coverage
    again = blobstore.import_model(out, "again", store=store, **draft_of(out))
    assert again.digest == result.digest


@pytest.mark.parametrize("layout", [sentencepiece, with_draft, documented])
def test_the_ollama_profile_stores_documents(store: Store, tmp_path: Path, layout: Write) -> None:
    source = layout(tmp_path / "in")
    result = blobstore.import_model(source, "m", store=store, profile="ollama", **draft_of(source))
    assert not any(layer.media_type == FILE_MEDIA_TYPE for layer in result.manifest.layers)
    with blobstore.open_model("m", store=store) as opened:
        stored = {*opened.files(), "model.safetensors", "draft/model.safetensors"}
    files = {name for name in files_of(source) if not name.startswith("model-0")}
    assert files - stored == {one.name for one in result.coverage.left_out}
    assert result.coverage.files.source == len(files_of(source))
    without_sources = stored_coverage(store, result.manifest)
    assert (without_sources.files.source, without_sources.tensors.source) == (None, None)


def test_the_files_of_a_model_are_read_by_name(store: Store, tmp_path: Path) -> None:
    source = with_draft(tmp_path / "in")
    blobstore.import_model(source, M, store=store, draft=source / "draft")
    rest = {name: data for name, data in files_of(source).items() if "safetensors" not in name}
    with blobstore.open_model("m", store=store, verify=True) as opened:
        assert {name: opened.file(name) for name in opened.files()} == rest
        assert "blobstore.json" in opened.documents()
        with pytest.raises(NotFoundError, match="'x'"):
            opened.file("x")
        with pytest.raises(NotFoundError):
            opened.document("chat_template.jinja")


def test_a_modelfile_of_the_source_keeps_its_name(store: Store, tmp_path: Path) -> None:
    source = documented(tmp_path / "in")
    blobstore.import_model(source, "m", store=store, system="Be brief.")
    result = blobstore.export_model("m", tmp_path / "out", store=store)
    assert (tmp_path / "out" / "Modelfile").read_bytes() == (source / "Modelfile").read_bytes()
    assert "SYSTEM Be brief." in (tmp_path / "out" / "Modelfile.blobstore").read_text()
    (note,) = result.notes
    assert "'Modelfile.blobstore'" in note


def test_hostile_names_of_files_are_refused(store: Store, tmp_path: Path) -> None:
    manifest = blobstore.import_model(instruct(tmp_path / "in"), M, store=store).manifest
    some = manifest.file("chat_template.jinja")
    assert some is not None
    for name in ("../x", "A/.GIT/x", "model.safetensors", "chat_template.jinja/x"):
        with store.session() as session:
            layers = (*manifest.layers, replace(some, name=name))
            session.publish(M, replace(manifest, layers=layers))
        with pytest.raises(UnsupportedSourceError):
            blobstore.export_model("m", tmp_path / "out" / "deep", store=store)
        assert not (tmp_path / "x").exists()
        assert not any((tmp_path / "out").rglob("*"))


def test_hidden_files_do_not_change_a_models_id(store: Store, tmp_path: Path) -> None:
    source = instruct(tmp_path / "in")
    one = blobstore.import_model(source, "one", store=store)
    write(source, {".cache/huggingface/x.lock": "", ".DS_Store": BINARY, ".env": "SECRET=1"})
    other = blobstore.import_model(source, "other", store=store)
    assert one.digest == other.digest
    assert [left.name for left in other.coverage.left_out] == [".DS_Store", ".cache/", ".env"]
    assert other.coverage.files.source == one.coverage.files.source


def test_the_documents_of_another_folder(store: Store, tmp_path: Path) -> None:
    """They are stored instead of the source's, by a plan and a repair too."""
    source, other = sentencepiece(tmp_path / "in"), instruct(tmp_path / "other")
    result = blobstore.import_model(source, M, store=store, config=other)
    blobstore.export_model("m", tmp_path / "out", store=store, max_shard_size="source")
    stored, own, expected = map(files_of, (tmp_path / "out", source, other))
    assert {name: data for name, data in stored.items() if ".safetensors" not in name} == {
        name: data for name, data in expected.items() if ".safetensors" not in name
    }
    replaced = {one.name for one in result.coverage.left_out}
    assert replaced == {name for name in own if ".safetensors" not in name}

    blobstore.write_plan(blobstore.plan_import(source, config=other), tmp_path / "plan")
    planned = blobstore.run_plan(blobstore.read_plan(tmp_path / "plan"), "planned", store)
    assert planned.digest == result.digest

    layer = result.manifest.document("tokenizer_config.json")
    assert layer is not None
    (store.blobs.path / f"sha256-{layer.digest.hex}").unlink()
    with pytest.raises(UnsupportedSourceError, match="nothing of m"):
        blobstore.repair_model("m", source, store=store)
    assert blobstore.repair_model("m", source, store=store, config=other).repaired == (layer,)


def test_a_folder_of_documents_has_a_config(store: Store, tmp_path: Path) -> None:
    source, other = sentencepiece(tmp_path / "in"), tmp_path / "other"
    other.mkdir()
    with pytest.raises(MissingFileError, match=r"has no config\.json"):
        blobstore.import_model(source, M, store=store, config=other)
