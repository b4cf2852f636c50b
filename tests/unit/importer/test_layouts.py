"""Layouts of real checkpoints: every file comes back, byte for byte, and a coverage says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.layouts import (
    BINARY,
    LAYOUTS,
    documented,
    instruct,
    model,
    save,
    sentencepiece,
    with_draft,
    write,
)

import blobstore
from blobstore.errors import NotFoundError, UnsupportedSourceError
from blobstore.formats.documents import FILE_MEDIA_TYPE, Descriptor
from blobstore.importer.run import run_plan
from blobstore.inspection.listing import stored_coverage
from blobstore.names import ModelName
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store

M = ModelName.parse("m")
Write = Callable[[Path], Path]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def draft_of(source: Path) -> dict[str, Any]:
    return {"draft": source / "draft"} if (source / "draft").is_dir() else {}


def expect_back(store: Store, source: Path, folder: Path, **options: Any) -> None:
    result = blobstore.import_model(source, M, store=store, **options)
    blobstore.export_model("m", folder, store=store, max_shard_size="source")
    files = files_of(source)
    assert files_of(folder) == files
    assert result.coverage.files.covered == result.coverage.files.source == len(files)
    assert result.coverage.tensors.covered == result.coverage.tensors.source
    assert result.coverage.left_out == ()
    assert stored_coverage(store, result.manifest) == result.coverage


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_file_of_a_layout_comes_back(store: Store, tmp_path: Path, layout: Write) -> None:
    source = layout(tmp_path / "in")
    expect_back(store, source, tmp_path / "out", **draft_of(source))
    assert not verify(store).damaged
    blobstore.import_model(tmp_path / "out", "again", store=store, **draft_of(tmp_path / "out"))
    assert store.manifest(ModelName.parse("again")).raw == store.manifest(M).raw


@pytest.mark.parametrize("layout", [sentencepiece, with_draft])
def test_quantized_all_but_the_weights_comes_back(
    store: Store, tmp_path: Path, layout: Write
) -> None:
    source = layout(tmp_path / "in")
    blobstore.import_model(source, "m", store=store, quant="int4", **draft_of(source))
    blobstore.export_model("m", tmp_path / "out", store=store)
    left = {"model.safetensors.index.json"} | {
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    }
    made = {"model.safetensors", "draft/model.safetensors"}
    found, files = files_of(tmp_path / "out"), files_of(source)
    assert {name: found[name] for name in files.keys() - left - made} == {
        name: data for name, data in files.items() if name not in left | made
    }
    assert found.keys() - files.keys() <= made


@pytest.mark.parametrize("layout", [sentencepiece, with_draft, documented])
def test_the_ollama_profile_stores_documents_only_and_says_so(
    store: Store, tmp_path: Path, layout: Write
) -> None:
    source = layout(tmp_path / "in")
    result = blobstore.import_model(source, "m", store=store, profile="ollama", **draft_of(source))
    assert not any(layer.media_type == FILE_MEDIA_TYPE for layer in result.manifest.layers)
    with blobstore.open_model("m", store=store) as opened:
        stored = {*opened.files(), "model.safetensors", "draft/model.safetensors"}
    left_out = {one.name for one in result.coverage.left_out}
    files = {name for name in files_of(source) if not name.startswith("model-0")}
    assert files - stored == left_out
    assert result.coverage.files.source == len(files_of(source))
    stored_without_sources = stored_coverage(store, result.manifest)
    assert (stored_without_sources.files.source, stored_without_sources.tensors.source) == (
        None,
        None,
    )


def test_the_files_of_a_model_are_read_by_name(store: Store, tmp_path: Path) -> None:
    source = with_draft(tmp_path / "in")
    blobstore.import_model(source, M, store=store, draft=source / "draft")
    weights = {"model.safetensors", "draft/model.safetensors"}
    with blobstore.open_model("m", store=store, verify=True) as opened:
        assert {name: opened.file(name) for name in opened.files()} == {
            name: data for name, data in files_of(source).items() if name not in weights
        }
        assert "blobstore.json" in opened.documents()
        with pytest.raises(NotFoundError, match="has no file 'x'"):
            opened.file("x")
        with pytest.raises(NotFoundError):
            opened.document("chat_template.jinja")


def test_layers_are_in_one_order(store: Store, tmp_path: Path) -> None:
    source = with_draft(tmp_path / "in")
    manifest = blobstore.import_model(source, M, store=store, draft=source / "draft").manifest
    assert [layer.name for layer in manifest.layers] == [
        *("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"),
        *(
            "config.json",
            "generation_config.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "blobstore.json",
        ),
        *(
            "draft.fc.weight",
            "draft/config.json",
            "draft/chat_templates/a.jinja",
            "draft/tokenizer.model",
        ),
    ]


def test_a_draft_folder_that_is_not_the_draft_is_left_out_and_said(
    store: Store, tmp_path: Path
) -> None:
    source, draft = with_draft(tmp_path / "in"), with_draft(tmp_path / "other") / "draft"
    coverage = blobstore.import_model(source, M, store=store, draft=draft).coverage
    assert {one.name for one in coverage.left_out} == {
        name for name in files_of(source) if name.startswith("draft/")
    }
    assert {one.reason for one in coverage.left_out} == {
        "the draft model's files are called draft/…"
    }


def test_without_a_draft_a_folder_of_that_name_is_kept_as_files(
    store: Store, tmp_path: Path
) -> None:
    source = with_draft(tmp_path / "in")
    expect_back(store, source, tmp_path / "out")
    assert blobstore.plan_import(source).coverage.kept_whole == ("draft/model.safetensors",)


def test_a_modelfile_of_the_source_keeps_its_name(store: Store, tmp_path: Path) -> None:
    source = documented(tmp_path / "in")
    blobstore.import_model(source, "m", store=store, system="Be brief.")
    result = blobstore.export_model("m", tmp_path / "out", store=store)
    assert (tmp_path / "out" / "Modelfile").read_bytes() == (source / "Modelfile").read_bytes()
    assert "SYSTEM Be brief." in (tmp_path / "out" / "Modelfile.blobstore").read_text()
    assert result.notes == (
        (
            "Modelfile is the source's; what the model has besides its weights is in "
            "'Modelfile.blobstore'"
        ),
    )


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/x", "a\\b", "C:x", "x\0", "..", "", "a//b", "A/.GIT/x"),
        *("model.safetensors", "config.json", "chat_template.jinja/x"),
    ],
)
def test_hostile_names_of_files_are_refused(store: Store, tmp_path: Path, name: str) -> None:
    manifest = blobstore.import_model(instruct(tmp_path / "in"), M, store=store).manifest
    some = manifest.file("chat_template.jinja")
    assert some is not None
    evil = Descriptor(media_type=FILE_MEDIA_TYPE, digest=some.digest, size=some.size, name=name)
    with store.session() as session:
        session.publish(M, replace(manifest, layers=(*manifest.layers, evil)))
    with pytest.raises(UnsupportedSourceError, match=r"can't be a file|would be called"):
        blobstore.export_model("m", tmp_path / "out" / "deep", store=store)
    assert not (tmp_path / "x").exists()
    assert not any((tmp_path / "out").rglob("*"))


def test_a_file_that_changes_after_it_was_planned_is_an_error(store: Store, tmp_path: Path) -> None:
    source = instruct(tmp_path / "in")
    plan = blobstore.plan_import(source)
    (source / "chat_template.jinja").write_text("another")
    with pytest.raises(blobstore.BlobStoreError, match=r"chat_template\.jinja changed"):
        run_plan(plan, M, store)
    assert not (store.root / "manifests").exists()


def test_what_an_early_version_recorded_has_no_coverage(store: Store, tmp_path: Path) -> None:
    manifest = blobstore.import_model(instruct(tmp_path / "in"), M, store=store).manifest
    own = manifest.document("blobstore.json")
    assert own is not None
    document = json.loads(store.blobs.read(own))
    del document["coverage"]
    with store.session() as session:
        blob = session.put(json.dumps(document).encode())
        changed = replace(own, digest=blob.digest, size=blob.size)
        layers = tuple(changed if layer is own else layer for layer in manifest.layers)
        session.publish(M, replace(manifest, layers=layers))
    coverage = stored_coverage(store, store.manifest(M))
    assert (coverage.tensors.source, coverage.tensors.stored, coverage.files.stored) == (None, 3, 4)


def test_links_and_hidden_files_do_not_change_a_models_id(store: Store, tmp_path: Path) -> None:
    source = instruct(tmp_path / "in")
    one = blobstore.import_model(source, "one", store=store)
    write(
        source,
        {
            ".cache/huggingface/x.lock": "",
            ".DS_Store": BINARY,
            ".env": "SECRET=1",
            ".git/config": "",
        },
    )
    other = blobstore.import_model(source, "other", store=store)
    assert one.digest == other.digest
    assert [left.name for left in other.coverage.left_out] == [
        ".DS_Store",
        ".cache/",
        ".env",
        ".git/",
    ]
    assert (
        other.coverage.files.source == one.coverage.files.source == len(list(source.iterdir())) - 4
    )


def test_weights_of_folders_that_are_too_large_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.source.files.MAX_FILE", 2**20)
    source = model(tmp_path / "in")
    save(source / "vision" / "model.safetensors", "a")
    with (source / "vision" / "model.safetensors").open("ab") as file:
        file.truncate(2**20 + 1)
    (left,) = blobstore.plan_import(source).coverage.left_out
    assert (left.name, left.reason) == ("vision/model.safetensors", "larger than 1 MiB")
