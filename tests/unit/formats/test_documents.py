"""The config blob: Ollama's key order, what is left out, and the draft model in it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from blobstore.errors import DocumentError
from blobstore.formats.documents import Draft, Manifest, ModelConfig

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


def test_a_config_without_a_draft_has_no_such_key() -> None:
    assert CONFIG.encode() == PLAIN % b""


def test_the_draft_comes_after_the_capabilities_in_ollamas_key_order() -> None:
    config = replace(CONFIG, draft=Draft.of("Gemma4AssistantForCausalLM"))
    assert config.encode() == PLAIN % (DRAFT % b"Gemma4AssistantForCausalLM")
    assert ModelConfig.parse(config.encode()) == config


def test_an_architecture_is_escaped_as_go_does() -> None:
    assert replace(CONFIG, draft=Draft.of("<a&b>")).encode() == PLAIN % (
        DRAFT % rb"\u003ca\u0026b\u003e"
    )


@pytest.mark.parametrize(
    "draft",
    [{}, {"architecture": "X"}, {"config": "draft/config.json", "model_format": "safetensors"}],
)
def test_a_draft_is_read_leniently_and_keeps_what_it_has(draft: dict[str, str]) -> None:
    config = ModelConfig.parse(json.dumps({"model_format": "safetensors", "draft": draft}).encode())
    assert json.loads(config.encode())["draft"] == draft


@pytest.mark.parametrize("draft", ['"x"', "[]", "1", '{"architecture":1}'])
def test_a_draft_of_another_shape_is_refused(draft: str) -> None:
    with pytest.raises(DocumentError, match="draft"):
        ModelConfig.parse(b'{"draft":%s}' % draft.encode())


def manifest_with(**fields: object) -> dict[str, object]:
    """Return a manifest of two layers that share a blob, with other fields."""
    layer = {"mediaType": "x", "digest": f"sha256:{'0' * 64}", "size": 5}
    config = {"mediaType": "y", "digest": f"sha256:{'1' * 64}", "size": 7}
    return {
        "schemaVersion": 2,
        "mediaType": "z",
        "config": config,
        "layers": [layer, layer],
    } | fields


def parsed_manifest(document: dict[str, object]) -> Manifest:
    return Manifest.parse(json.dumps(document).encode())


def test_a_blob_that_two_layers_share_counts_once() -> None:
    assert parsed_manifest(manifest_with()).size == 12


def test_a_manifest_without_its_version_is_refused() -> None:
    document = manifest_with()
    del document["schemaVersion"]
    with pytest.raises(DocumentError, match="schemaVersion is missing"):
        parsed_manifest(document)


@pytest.mark.parametrize("size", [-1, -(2**63)])
def test_no_blob_has_a_size_below_zero(size: int) -> None:
    config = {"mediaType": "y", "digest": f"sha256:{'1' * 64}", "size": size}
    with pytest.raises(DocumentError, match=r"config\.size"):
        parsed_manifest(manifest_with(config=config))
