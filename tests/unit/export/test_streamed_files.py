"""Streamed files are those that an export writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE_MOE
from support.checkpoints import write_checkpoint
from support.exports import mixture_tensors

import blobstore
from blobstore.errors import CorruptDataError, UnsupportedSourceError
from blobstore.export import planned_files, values
from blobstore.export.contents import plan_export
from blobstore.export.folder import open_file
from blobstore.export.planned_files import ExportOptions, ExportPlan
from blobstore.store.local.store import Store
from blobstore.store.stored_model import StoredModel


def planned(store: Store, **words: Any) -> ExportPlan:
    said = {"format": "safetensors", "dequantize": None, "max_shard_size": 5 * 10**9} | words
    return plan_export(StoredModel.find("m", store), ExportOptions.parse(*said.values()))


def assert_same(store: Store, folder: Path, **words: Any) -> None:
    """Check that the streamed files are those of an export with the same options."""
    blobstore.export_model("m", folder, store=store, **words)
    files = planned(store, **words).files
    assert sorted(file.path for file in files) == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    for file in files:
        written = (folder / file.path).read_bytes()
        with open_file(file) as reader:
            assert (reader.size, file.size) == (len(written), len(written))
            assert reader.read(0, reader.size) == written


@pytest.mark.parametrize(
    ("quant", "dequantize"), [(None, None), ("int4", "float32"), ("nvfp4", None)]
)
def test_a_mixture(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quant: str | None,
    dequantize: str | None,
) -> None:
    monkeypatch.setattr(planned_files, "_COPIED_AT_ONCE", 9000)
    monkeypatch.setattr(values, "VALUES_AT_ONCE", 4096)
    source = write_checkpoint(tmp_path / "in", mixture_tensors())
    blobstore.import_model(source, "m", store=store, quant=quant)
    assert_same(store, tmp_path / "out", dequantize=dequantize, max_shard_size=50_000)


def test_a_folder_for_mlx(store: Store, tmp_path: Path) -> None:
    blobstore.import_model(PYCODE_MOE, "m", store=store, quant="int4")
    assert_same(store, tmp_path / "out", format="mlx")


def test_values_that_do_not_fit_and_a_blob_that_changed(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", {"a": np.full((8, 8), 70_000, np.float32)})
    blobstore.import_model(source, "m", store=store)
    (shard,) = planned(store, dequantize="float16").shards
    with open_file(shard) as reader, pytest.raises(UnsupportedSourceError, match="does not fit"):
        reader.digest()
    (shard,) = planned(store).shards
    (layer,) = StoredModel.find("m", store).weight_layers
    path = store.root / "blobs" / layer.digest.file_name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes())
    with open_file(shard) as reader, pytest.raises(CorruptDataError, match="changed"):
        reader.digest()
