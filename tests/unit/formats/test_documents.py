"""Manifests and configs: the corpus gets its verdict; Ollama's key order and what is left out."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from support.corpus import accepted, find, layers, refusal, rejected

from blobstore.errors import DocumentError, LimitExceededError
from blobstore.formats.documents import MAX_LAYERS, Draft, Manifest, ModelConfig
from blobstore.store.references import needs_of

# A store's, a registry's, and one that another test exceeds by 1.
ABOUT_OTHERS = {"manifest-size-wrong", "manifest-size-zero-for-nonempty", "manifest-blob-missing"}
ABOUT_OTHERS |= {"manifest-size-5MiB", "manifest-layers-1M"}


def test_manifests_to_accept() -> None:
    for case in accepted("manifest"):
        if case.id == "manifest-layers-100k":
            continue  # takes seconds
        raw = case.data
        manifest, document = Manifest.parse(raw), json.loads(raw)
        assert manifest.raw == raw
        assert manifest.digest.hex == hashlib.sha256(raw).hexdigest()
        assert manifest.media_type == document.get("mediaType", manifest.media_type)
        assert (manifest.config is None) == ("config" not in document)
        assert len(manifest.layers) == len(document["layers"])
        wanted = [*document["layers"], *([document["config"]] if manifest.config else [])]
        assert [
            (str(one.digest), one.media_type, one.size, one.name) for one in manifest.descriptors
        ] == [(one["digest"], one["mediaType"], one["size"], one.get("name")) for one in wanted]


def test_manifests_to_refuse() -> None:
    for case in rejected("manifest"):
        if case.id in ABOUT_OTHERS:
            continue
        raw = case.data
        error = refusal(lambda raw=raw: Manifest.parse(raw))  # type: ignore[misc]  # bound now
        assert isinstance(error, DocumentError | LimitExceededError), case.id
        assert error.rule == case.rule, case.id
        assert len(str(error)) < 2000
    raw = find("manifest", "manifest-index-type").data
    assert "image index" in str(refusal(lambda: Manifest.parse(raw)))


def test_one_layer_beyond_the_limit() -> None:
    with pytest.raises(LimitExceededError):
        needs_of(layers(MAX_LAYERS + 1), "manifest")  # by the fast way, and by `Manifest.parse`


LAYER = {"mediaType": "x", "digest": f"sha256:{'0' * 64}", "size": 5}
CONFIG_LAYER = {"mediaType": "y", "digest": f"sha256:{'1' * 64}", "size": 7}
TWICE = {"schemaVersion": 2, "mediaType": "z", "config": CONFIG_LAYER, "layers": [LAYER, LAYER]}
"""A manifest of two layers that share a blob."""


def test_a_blob_that_two_layers_share_counts_once() -> None:
    assert Manifest.parse(json.dumps(TWICE).encode()).size == 12


PLAIN = (
    b'{"model_format":"safetensors","model_family":"","model_families":null,"model_type":"","file_type":"int4",'
    b'"renderer":"qwen3-coder","parser":"qwen3","requires":"0.19.0","capabilities":["completion"]%s'
    b',"architecture":"","os":""}'
)
DRAFT = (
    b',"draft":{"model_format":"safetensors","architecture":"%s","tensor_prefix":"draft.",'
    b'"config":"draft/config.json"}'
)
CONFIG = ModelConfig(
    model_format="safetensors",
    file_type="int4",
    renderer="qwen3-coder",
    parser="qwen3",
    requires="0.19.0",
    capabilities=["completion"],
)


def test_a_config_has_ollamas_key_order_and_the_draft_after_the_capabilities() -> None:
    assert CONFIG.encode() == PLAIN % b""
    config = replace(CONFIG, draft=Draft.of("<a&b>"))
    assert config.encode() == PLAIN % (DRAFT % rb"\u003ca\u0026b\u003e")
    assert ModelConfig.parse(config.encode()) == config


def test_a_draft_is_read_leniently_and_keeps_what_it_has() -> None:
    for draft in ({}, {"architecture": "X"}, {"config": "draft/config.json"}):
        document = {"model_format": "safetensors", "draft": draft}
        config = ModelConfig.parse(json.dumps(document).encode())
        assert json.loads(config.encode())["draft"] == draft
    refused: list[Any] = ["x", [], {"architecture": 1}]
    for wrong in refused:
        with pytest.raises(DocumentError, match="draft"):
            ModelConfig.parse(json.dumps({"draft": wrong}).encode())
