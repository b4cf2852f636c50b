"""Impossible importance and global scales: a clear error, and an unchanged store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint

import blobstore
from blobstore.cli.main import run
from blobstore.errors import (
    BlobStoreError,
    HeaderError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.kernels.arrays import Array
from blobstore.store.local.store import Store

Snapshot = Callable[[Store], dict[str, str]]
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EVIL = "evil\x1b[31m\u202e"
SEARCH = ["--quant", "int4", "--method", "search"]


def _with(value: float) -> Any:
    vector = np.ones(64, np.float32)
    vector[5] = value
    return vector


BAD_VECTORS: dict[str, tuple[dict[str, Array], str]] = {
    "unknown": ({"nobody.weight": np.ones(64, np.float32)}, "'nobody.weight'"),
    "escaped": ({EVIL: np.ones(64, np.float32)}, "evil"),
    "unquantized": ({NORM: np.ones(64, np.float32)}, f"'{NORM}'"),
    "embedding": ({"model.embed_tokens.weight": np.ones(64, np.float32)}, "embed_tokens"),
    "long": ({UP: np.ones(65, np.float32)}, "65 values for 64 columns"),
    "rows": ({UP: np.ones(128, np.float32)}, "128 values for 64 columns"),
    "empty": ({UP: np.ones(0, np.float32)}, "0 values for 64 columns"),
    "negative": ({UP: _with(-1.0)}, "column 5"),
    "nan": ({UP: _with(np.nan)}, "column 5"),
    "infinite": ({UP: _with(np.inf)}, "column 5"),
}
BAD_TENSORS: dict[str, tuple[dict[str, Array], str]] = {
    "F16": ({UP: np.ones(64, np.float16)}, "F16 [64]"),
    "F64": ({UP: np.ones(64)}, "F64 [64]"),
    "rank 2": ({UP: np.ones((1, 64), np.float32)}, "F32 [1, 64]"),
    "scalar": ({UP: np.array(1, np.float32)}, "F32 []"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint named ``tiny``."""
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def filled(store: Store, source: Path) -> Store:
    """A store with a model of the name that the imports want."""
    blobstore.import_model(source, "m", store=store)
    return store


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert run([*map(str, arguments)]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Error: ")
    assert output.err.count("\n") == 1 + output.err.count("\nHint: ")
    assert not {"\x1b", "\u202e"} & set(output.err)
    return output.err


@pytest.mark.parametrize("case", [*BAD_VECTORS, *BAD_TENSORS])
def test_files_of_importance_that_do_not_fit(
    filled: Store,
    source: Path,
    tmp_path: Path,
    snapshot: Snapshot,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    before = snapshot(filled)
    tensors, says = (BAD_VECTORS | BAD_TENSORS)[case]
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes(tensors))
    for word, rest in (("plan", []), ("import", ["m", "--store", filled.root])):
        assert says in fails(capsys, 2, word, source, *rest, *SEARCH, "--importance", file)
    assert snapshot(filled) == before


@pytest.mark.parametrize("case", [*BAD_VECTORS, "rank 2", "scalar"])
def test_mappings_of_importance_that_do_not_fit(
    filled: Store, source: Path, snapshot: Snapshot, case: str
) -> None:
    before = snapshot(filled)
    with pytest.raises(UsageError) as caught:
        blobstore.import_model(
            source,
            "m",
            store=filled,
            quant="int4",
            method="search",
            importance=(BAD_VECTORS | BAD_TENSORS)[case][0],
        )
    assert "importance" in caught.value.message
    assert snapshot(filled) == before


def _missing(path: Path) -> None:
    """Leave it away."""


def _garbage(path: Path) -> None:
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(100))


def _cut(path: Path) -> None:
    path.write_bytes(safetensors_bytes({UP: np.ones(64, np.float32)})[:-1])


FILES: dict[str, tuple[Callable[[Path], Any], type[BlobStoreError]]] = {
    "missing": (_missing, NotFoundError),
    "fifo": (os.mkfifo, StorageError),
    "folder": (Path.mkdir, StorageError),
    "empty": (Path.touch, HeaderError),
    "garbage": (_garbage, HeaderError),
    "cut": (_cut, HeaderError),
}


@pytest.mark.parametrize("case", FILES)
def test_importance_that_is_no_file_of_vectors(
    filled: Store,
    source: Path,
    tmp_path: Path,
    snapshot: Snapshot,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    before = snapshot(filled)
    make, kind = FILES[case]
    file = tmp_path / "importance"
    make(file)
    with pytest.raises(kind):
        blobstore.import_model(
            source, "m", store=filled, quant="int4", method="search", importance=file
        )
    assert str(file) in fails(
        capsys, 1, "import", source, "m", *SEARCH, "--importance", file, "--store", filled.root
    )
    assert snapshot(filled) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--importance", "FILE"], "importance needs the method search"),
        (["--importance", "FILE", "--method", "search"], "importance needs the method search"),
        (["--importance", "FILE", "--quant", "int4"], "importance needs the method search"),
        (
            ["--importance", "FILE", "--quant", "none", "--method", "search"],
            "importance needs the method search",
        ),
        (
            ["--importance", "FILE", "--quant", "int4", "--method", "minmax"],
            "importance needs the method search",
        ),
        (["--method", "search"], "the method search needs a quantization type"),
        (
            ["--importance", "FILE", "--quant", "int4", "--method", "serach"],
            "unknown quantization method 'serach'",
        ),
        (["--global-scale"], "only nvfp4 has a global scale"),
        *(
            (["--global-scale", "--quant", quant], "only nvfp4 has a global scale")
            for quant in ("int4", "q8", "mxfp4", "none")
        ),
        (["--quant", "int4", "--method", "Search"], "unknown quantization method 'Search'"),
    ],
)
def test_options_that_say_nothing_alone(
    filled: Store,
    source: Path,
    tmp_path: Path,
    snapshot: Snapshot,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    before = snapshot(filled)
    file = tmp_path / "importance.safetensors"
    file.write_bytes(safetensors_bytes({UP: np.ones(64, np.float32)}))
    given = [str(file) if option == "FILE" else option for option in options]
    error = fails(capsys, 2, "import", source, "m", *given, "--store", filled.root)
    assert says in error
    assert "\nHint: " in error
    assert snapshot(filled) == before


def test_an_import_that_fails_late_keeps_the_store(
    filled: Store, tmp_path: Path, snapshot: Snapshot
) -> None:
    before = snapshot(filled)
    tensors = small_tensors()
    tensors[UP][100, 3] = np.nan
    bad = write_checkpoint(tmp_path / "bad", tensors)
    for options in ({"quant": "int4"}, {"quant": "nvfp4", "global_scale": True}):
        with pytest.raises(blobstore.errors.NonFiniteWeightError) as caught:
            blobstore.import_model(bad, "m", store=filled, method="search", **options)
        assert (caught.value.tensor, caught.value.index) == (UP, (100, 3))
    assert snapshot(filled) == before


def test_a_tensor_that_has_the_name_of_a_global_scale_is_refused(
    store: Store, tmp_path: Path, snapshot: Snapshot
) -> None:
    source = write_checkpoint(
        tmp_path / "m", {"x.weight": normal("x", 32, 64), "x.weight.global_scale": normal("g", 1)}
    )
    with pytest.raises(blobstore.errors.UnsupportedSourceError, match=r"x\.weight\.global_scale"):
        blobstore.import_model(source, "m", store=store, quant="nvfp4", global_scale=True)
    assert snapshot(store) == {}
