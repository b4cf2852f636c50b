"""Broken checkpoints are refused with a typed error, and leave the store as it was.

Held for every broken source that Ollama's importer refuses in fixtures/ollama-records, and for
those that it imports and should not (docs/formats.md sections 2, 5 and 8): data that are cut off, a
gap in the expert numbers, a tensor that the index does not name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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

LAYER = "model.layers.0"
Q_PROJ, DOWN = f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mlp.down_proj.weight"
THIRD = f"{LAYER}.mlp.experts.2.up_proj.weight"
MISSING = "model-00002-of-00002.safetensors"
# The error's exact class, its rule, the tensor, and words of its message.
REFUSALS: dict[str, tuple[type[BlobStoreError], str | None, str | None, tuple[str, ...]]] = {
    "x_ambiguous": (UnsupportedSourceError, None, None, ("model-*.safetensors",)),
    "x_collision": (UnsupportedSourceError, None, Q_PROJ, ("q_proj.weight_packed",)),
    "x_expert_mismatch": (UnsupportedSourceError, None, THIRD, ("[128, 256]", "[64, 256]")),
    "x_fp8_64": (UnsupportedSourceError, None, DOWN, ("64x64", "128x128")),
    "x_fp8_e5m2": (UnsupportedSourceError, None, Q_PROJ, ("F8_E5M2", "F8_E4M3")),
    # Ollama imports it when the scales are missing as well (docs/formats.md section 8).
    "x_fp8_noblock": (UnsupportedSourceError, None, DOWN, ("weight_block_size",)),
    "x_index_badpath": (DocumentError, "I1", None, ("'../evil.safetensors'",)),
    "x_index_missing_shard": (MissingFileError, "I1", None, (MISSING,)),
    "x_no_tensors": (NotFoundError, None, None, ("no tensors",)),
    "x_truncated_data": (HeaderError, "F17", None, ("3178336", "3278336")),
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
    kind, rule, tensor, words = REFUSALS[source]
    for quant, profile in (("none", "default"), ("int4", "ollama")):
        with pytest.raises(BlobStoreError) as caught:
            import_model(broken[source], "kept", store=store, quant=quant, profile=profile)
        error = caught.value
        assert (type(error), error.rule, error.tensor) == (kind, rule, tensor)
        assert [word for word in words if word not in str(error)] == []
        # Ollama imports what is cut off as it is.
        assert ("error" in record_of(source)[quant]) == (
            (source, quant) != ("x_truncated_data", "none")
        )
    assert snapshot(store) == before


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/evil.safetensors", "sub/x.safetensors", "..", "weights.bin"]
)
def test_a_shard_name_that_is_not_a_plain_file_name_is_refused_before_any_file_is_opened(
    broken: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(broken["x_index_badpath"], tmp_path / "source")
    shutil.copy(folder / "model-00001-of-00002.safetensors", tmp_path / "evil.safetensors")
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(b"no header")
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
