"""Inspections count every stored tensor once, packed ones by their values; JSON is exact."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st
from support.checkpoints import raw_safetensors
from support.packed import PACKED
from support.sparse import Tensors, header, write_sparse_folder

from blobstore.inspection.inspect import inspect
from blobstore.inspection.inspection import Inspection, tree_of
from blobstore.source.producers import ASIDE, COUNTED
from blobstore.views.documents import document_of, to_json

SUFFIXES = sorted(
    {suffix for row in COUNTED for suffix in (row.weight, *row.companions)}
    | {*ASIDE, ".weight.scale", ".bias"}
)
DTYPES = [
    "BF16",
    "F16",
    "F32",
    "U8",
    "I8",
    "I16",
    "I32",
    "U32",
    "I64",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E5M2",
    "BOOL",
]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 64, 96, 128]), max_size=4).map(tuple)
TENSORS = st.dictionaries(
    st.tuples(
        st.sampled_from(["a", "b.weight", "mlp.experts.x", "a.weight"]), st.sampled_from(SUFFIXES)
    ).map("".join),
    st.tuples(st.sampled_from(DTYPES), SHAPES),
    min_size=1,
    max_size=12,
)
CONFIGS = st.sampled_from(
    [
        None,
        {},
        *(config for _, config, _, _ in PACKED.values() if config),
        {"quantization_config": {"bits": "x"}},
    ]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def inspected(tensors: Tensors, config: Any, shards: int = 1) -> Inspection:
    with tempfile.TemporaryDirectory() as folder:
        return inspect(write_sparse_folder(Path(folder), tensors, config, shards=shards))


def assert_counted_once(found: Inspection, tensors: Tensors) -> None:
    parts = [part for tensor in found.tensors for part in tensor.parts]
    assert sorted(parts) == sorted(tensors)
    _, nbytes = header(tensors)
    assert sum(tensor.nbytes for tensor in found.tensors) == found.nbytes == nbytes
    assert (
        found.parameters
        == sum(found.parameter_count.values())
        == sum(tensor.parameters for tensor in found.tensors)
    )
    branches = list(tree_of(found.tensors))
    top = [branch for branch in branches if branch.depth == 0]
    assert sum(len(branch.tensors) for branch in top) == len(found.tensors)
    assert {tensor for branch in top for tensor in branch.tensors} == {*found.tensors}


@given(TENSORS, CONFIGS, st.integers(1, 3))
def test_whatever_the_names_each_stored_tensor_is_counted_once(
    tensors: Tensors, config: Any, shards: int
) -> None:
    found = inspected(tensors, config, min(shards, len(tensors)))
    assert_counted_once(found, tensors)
    to_json(found)


@given(
    st.lists(st.sampled_from(sorted(PACKED)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_a_mixture_of_forms_counts_as_the_sum_of_its_weights(
    names: list[str], shards: int, random: Any
) -> None:
    """Those forms that need no config.json, in any order of tensors, over any shards."""
    chosen = [name for name in names if PACKED[name][1] is None]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"norm.weight": ("BF16", (7,))}
    for number, name in enumerate(chosen):
        tensors |= {
            f"layers.{number}{suffix}": tensor for suffix, tensor in PACKED[name][0].items()
        }
    shuffled = list(tensors.items())
    random.shuffle(shuffled)
    found = inspected(dict(shuffled), None, min(shards, len(shuffled)))
    assert_counted_once(found, tensors)
    assert found.parameters == 7 + sum(math.prod(PACKED[name][3]) for name in chosen)
    assert found.notes == ()


@given(
    st.dictionaries(TEXT.filter(lambda name: name != "__metadata__"), SHAPES, min_size=1),
    st.dictionaries(TEXT, TEXT),
)
def test_json_has_the_header_exactly(
    shapes: dict[str, tuple[int, ...]], metadata: dict[str, str]
) -> None:
    entries, nbytes = header({name: ("U8", shape) for name, shape in shapes.items()}, metadata)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(raw_safetensors(json.dumps(entries, ensure_ascii=False).encode()))
        with path.open("ab") as file:
            file.truncate(path.stat().st_size + nbytes)
        document = document_of(inspect(path))
    assert document["header"] == entries
    assert list(document["header"]) == list(entries)
