"""Broken checkpoints are refused with a typed error, and leave the store as it was.

Held for every broken source that Ollama's importer refuses in fixtures/ollama-records, and for
those that it imports and should not (docs/formats.md sections 2, 5 and 8): data that are cut off, a
gap in the expert numbers, a tensor that the index does not name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.checkpoints import normal, write_checkpoint
from support.ollama_cases import record_of
from support.ollama_sources import INDEX, write_source

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    HeaderError,
    MissingFileError,
    NotFoundError,
    UnsupportedSourceError,
)
from blobstore.importer.run import import_model, plan_import
from blobstore.store.local.store import Store


@dataclass(frozen=True)
class Refusal:
    """The error that is asked for: its exact class, its fields, words of its message."""

    kind: type[BlobStoreError]
    words: tuple[str, ...]
    rule: str | None = None
    tensor: str | None = None
    path: str | None = None


FIRST_FP8 = "model.layers.0.mlp.down_proj.weight"
REFUSALS = {
    "x_ambiguous": Refusal(
        UnsupportedSourceError, ("model.safetensors", "model-*.safetensors"), path=""
    ),
    "x_collision": Refusal(
        UnsupportedSourceError,
        (
            "two tensors would have the name",
            "q_proj.weight",
            "q_proj.weight_packed",
            "model.safetensors",
        ),
        tensor="model.layers.0.self_attn.q_proj.weight",
        path="model.safetensors",
    ),
    "x_expert_mismatch": Refusal(
        UnsupportedSourceError,
        ("model.layers.0.mlp.experts.0.up_proj.weight is BF16 [128, 256]", "is BF16 [64, 256]"),
        tensor="model.layers.0.mlp.experts.2.up_proj.weight",
        path="model.safetensors",
    ),
    "x_fp8_64": Refusal(
        UnsupportedSourceError,
        ("block FP8", "64x64", "128x128"),
        tensor=FIRST_FP8,
        path="model.safetensors",
    ),
    "x_fp8_e5m2": Refusal(
        UnsupportedSourceError,
        ("F8_E5M2", "only F8_E4M3"),
        tensor="model.layers.0.self_attn.q_proj.weight",
        path="model.safetensors",
    ),
    # Ollama refuses it too, but imports it when the scales are missing as well (docs/formats.md
    # section 8).
    "x_fp8_noblock": Refusal(
        UnsupportedSourceError,
        ("block FP8", "weight_block_size"),
        tensor=FIRST_FP8,
        path="model.safetensors",
    ),
    "x_index_badpath": Refusal(
        DocumentError, ("'../evil.safetensors'", "model.embed_tokens.weight"), rule="I1"
    ),
    "x_index_missing_shard": Refusal(
        MissingFileError,
        ("model-00002-of-00002.safetensors",),
        rule="I1",
        path="model-00002-of-00002.safetensors",
    ),
    "x_no_tensors": Refusal(NotFoundError, ("no tensors", "model.safetensors")),
    "x_truncated_data": Refusal(
        HeaderError, ("3178336 bytes", "3278336"), rule="F17", path="model.safetensors"
    ),
}


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The broken sources' folders by name; tests must not change them."""
    root = tmp_path_factory.mktemp("broken")
    return {name: write_source(root, name) for name in REFUSALS}


@pytest.mark.parametrize("source", REFUSALS)
def test_a_broken_source_is_refused_as_by_ollama(
    broken: dict[str, Path],
    source: str,
    store: Store,
    snapshot: Callable[[Store], dict[str, str]],
    tmp_path: Path,
) -> None:
    import_model(write_checkpoint(tmp_path / "good"), "kept", store=store)
    before = snapshot(store)
    refusal, folder = REFUSALS[source], broken[source]
    for quant, profile in (("none", "default"), ("int4", "ollama")):
        with pytest.raises(BlobStoreError) as caught:
            import_model(folder, "kept", store=store, quant=quant, profile=profile)
        error = caught.value
        assert type(error) is refusal.kind
        assert (error.rule, error.tensor) == (refusal.rule, refusal.tensor)
        assert error.path == (None if refusal.path is None else str(folder / refusal.path))
        assert [word for word in refusal.words if word not in str(error)] == []
        # Ollama imports what is cut off as it is.
        assert ("error" in record_of(source)[quant]) == (
            (source, quant) != ("x_truncated_data", "none")
        )
    assert snapshot(store) == before


def test_shard_path_outside_the_folder_is_refused_before_any_file_is_opened(
    broken: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(broken["x_index_badpath"], tmp_path / "source")
    shutil.copy(folder / "model-00001-of-00002.safetensors", tmp_path / "evil.safetensors")
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(b"no header")
    with pytest.raises(DocumentError, match=r"evil\.safetensors") as caught:
        plan_import(folder)
    assert caught.value.rule == "I1"


@pytest.mark.parametrize(
    "name", ["/evil.safetensors", "sub/evil.safetensors", "..", "weights.bin", "a\\b.safetensors"]
)
def test_a_shard_name_that_is_not_a_plain_safetensors_file_is_refused(
    broken: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(broken["x_index_badpath"], tmp_path / "source")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(DocumentError, match=r"a\.weight") as caught:
        plan_import(folder)
    assert caught.value.rule == "I1"


@pytest.mark.parametrize("profile", ["ollama", "default"])
def test_a_gap_in_the_expert_numbers_is_refused(tmp_path: Path, profile: str) -> None:
    experts = "model.layers.0.mlp.experts"
    names = [f"{experts}.{expert}.up_proj.weight" for expert in (0, 1, 3)]
    source = write_checkpoint(tmp_path / "source", {name: normal(name, 64, 64) for name in names})
    for quant in ("none", "int4"):
        with pytest.raises(UnsupportedSourceError) as caught:
            plan_import(source, quant=quant, profile=profile)
        assert caught.value.tensor == f"{experts}.2.up_proj.weight"
