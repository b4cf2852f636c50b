"""The Modelfile of an export, and draft models: an import of the folder restores them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.exports import raw_tensors, tensor_layers
from support.stores import commit_model, descriptor

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.export.texts import modelfile
from blobstore.formats.documents import (
    JSON_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    SYSTEM_MEDIA_TYPE,
    TEMPLATE_MEDIA_TYPE,
    Manifest,
    ModelConfig,
)
from blobstore.names import ModelName
from blobstore.store.local.store import Store

QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def test_texts_come_back(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", config=QWEN)
    options: dict[str, Any] = {
        "template": "{{ .System }}\n<|user|>{{ .Prompt }}\n\n",
        "system": ' spaces around, "quotes" and ### ',
        "licenses": ["one\r\nline", 'ends with "'],
        "parameters": ["temperature=0.7", "stop=<|end|>", 'stop="x"', "use_mmap=true"],
    }
    file = tmp_path / "Modelfile"
    file.write_text(
        "FROM in\nPARSER glm-4.7\nREQUIRES 0.20.0\n"
        'MESSAGE user hello\nMESSAGE assistant """two\n lines"""\n'
    )
    manifest = blobstore.import_model(source, "m", store=store, modelfile=file, **options).manifest
    result = blobstore.export_model("m", tmp_path / "out", store=store)
    assert result.notes == ()
    again = blobstore.import_model(
        None, "again", store=store, modelfile=tmp_path / "out" / "Modelfile"
    ).manifest
    assert again.config == manifest.config
    assert others(again) == others(manifest)
    assert len(others(manifest)) == 6


def others(manifest: Manifest) -> list[tuple[str, str]]:
    return [(one.media_type, str(one.digest)) for one in manifest.layers if one.name is None]


UNWRITABLE = [
    (SYSTEM_MEDIA_TYPE, b'a """\n in the middle of lines that end with "\n"""\n'),
    (SYSTEM_MEDIA_TYPE, b"an escape \x1b[31m"),
    (TEMPLATE_MEDIA_TYPE, b"\xff\xfe no text"),
    (PARAMS_MEDIA_TYPE, b'{"x\\nSYSTEM injected":1}'),
    (PARAMS_MEDIA_TYPE, b"[]"),
    (MESSAGES_MEDIA_TYPE, b'[{"role":"user\\nSYSTEM x","content":"y"}]'),
    ("application/vnd.ollama.image.adapter", b""),
]


def test_what_a_modelfile_can_not_say_is_left_out_with_a_note() -> None:
    for layer in UNWRITABLE:
        kept = (LICENSE_MEDIA_TYPE, b"MIT")
        text, notes = modelfile([layer, kept], ModelConfig(), None, draft=False)
        assert text == b"FROM .\nLICENSE MIT\n"
        assert len(notes) == 1


def test_a_draft_model_is_a_checkpoint_of_its_own(store: Store, tmp_path: Path) -> None:
    draft = write_checkpoint(
        tmp_path / "draft",
        {"d.weight": normal("d", 64, 64)},
        {"architectures": ["Eagle"], "eagle": 1},
    )
    source = write_checkpoint(tmp_path / "in")
    manifest = blobstore.import_model(
        source, "m", store=store, quant="int4", draft=draft, draft_quant="int8", system="s"
    ).manifest
    blobstore.export_model("m", tmp_path / "out", store=store)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        *("Modelfile", "config.json", "draft", "model.safetensors")
    ]
    assert (out / "draft" / "config.json").read_bytes() == (draft / "config.json").read_bytes()
    parts = {"d.weight", "d.weight.scale", "d.weight.bias"}
    assert raw_tensors(out / "draft").keys() == parts
    again = blobstore.import_model(
        None, "again", store=store, modelfile=tmp_path / "out" / "Modelfile"
    ).manifest
    assert tensor_layers(again) == tensor_layers(manifest)


def test_hostile_names_of_documents(store: Store, tmp_path: Path) -> None:
    """A stored model may have a JSON layer of any name."""
    weights = commit_model(store, "other", safetensors_bytes(small_tensors())).layers
    for name in ("../x.json", "/etc/x.json", "x\0.json", "..", "model.safetensors"):
        with store.session() as session:
            blob = session.put(b"{}")
            layer = replace(descriptor(b"{}", name), media_type=JSON_MEDIA_TYPE)
            assert layer.digest == blob.digest
            session.publish(ModelName.parse("m"), Manifest(layers=(*weights, layer)))
        with pytest.raises(UnsupportedSourceError):
            blobstore.export_model("m", tmp_path / "out" / "deep", store=store)
    assert not (tmp_path / "x.json").exists()
    assert not any((tmp_path / "out").rglob("*"))
