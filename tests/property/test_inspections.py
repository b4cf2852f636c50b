"""Inspections count every stored tensor once, packed ones by their values."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st
from support.packed import PACKED
from support.sparse import Tensors, header, write_sparse_folder

from blobstore.inspection.inspect import inspect
from blobstore.inspection.inspection import tree_of
from blobstore.source.producers import ASIDE, COUNTED
from blobstore.views.documents import to_json

SUFFIXES = sorted(
    {suffix for row in COUNTED for suffix in (row.weight, *row.companions)}
    | {*ASIDE, ".weight.scale", ".bias"}
)
DTYPES = st.sampled_from(["BF16", "F32", "U8", "I8", "I32", "U32", "I64", "F8_E4M3", "F8_E8M0"])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 32, 96, 128]), max_size=4).map(tuple)
PREFIXES = st.sampled_from(["a", "b.weight", "mlp.experts.x", "a.weight"])
TENSORS = st.dictionaries(
    st.builds(str.__add__, PREFIXES, st.sampled_from(SUFFIXES)),
    st.tuples(DTYPES, SHAPES),
    min_size=1,
    max_size=12,
)
STORED = [config for _, config, _, _ in PACKED.values() if config]
CONFIGS = st.sampled_from([None, {}, *STORED, {"quantization_config": {"bits": "x"}}])


@given(TENSORS, CONFIGS, st.integers(1, 3))
def test_each_stored_tensor_is_counted_once(tensors: Tensors, config: Any, shards: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_sparse_folder(Path(name), tensors, config, min(shards, len(tensors)))
        found = inspect(folder)
    parts = [part for tensor in found.tensors for part in tensor.parts]
    assert sorted(parts) == sorted(tensors)
    assert sum(tensor.nbytes for tensor in found.tensors) == found.nbytes == header(tensors)[1]
    counts = sum(found.parameter_count.values()), sum(one.parameters for one in found.tensors)
    assert counts == (found.parameters, found.parameters)
    top = [branch for branch in tree_of(found.tensors) if branch.depth == 0]
    in_branches = [tensor.name for branch in top for tensor in branch.tensors]
    assert sorted(in_branches) == sorted(tensor.name for tensor in found.tensors)
    to_json(found)
