"""For any inventory, runs and gaps cover a blob once, and read every source once, in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import assume, given, settings, strategies as st
from support.chunks import chunks_of
from support.inventories import inventory, source_tensor

from blobstore.errors import BlobStoreError
from blobstore.formats.dtypes import DType
from blobstore.importer.making import Constant, Copy, GlobalScale, Run, Values, runs_of
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import PlannedBlob
from blobstore.importer.plan import make_plan
from blobstore.source.folders import SourceTensor

FLOATS = st.sampled_from([DType.BF16, DType.F16, DType.F32])
ROWS, COLUMNS = st.integers(1, 40), st.sampled_from([32, 64, 128, 256, 1024])
ODD_TYPES = [DType.F64, DType.U8, DType.I64, DType.F4, DType.BOOL, DType.U32, DType.C64]
ODD_SHAPES = [(0,), (8,), (3, 16), (300, 16), (5, 0, 8), (1, 4096)]
ODD = st.tuples(st.sampled_from(ODD_TYPES), st.sampled_from(ODD_SHAPES))


@st.composite
def sources(draw: st.DrawFn) -> list[SourceTensor]:
    """Weights of a few sizes, some transposed, equal experts, and copied tensors.

    The copied ones have other dtypes, or are empty.
    """
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(4)]
    names += [f"h.{number}.mlp.c_fc.weight" for number in range(2)]
    tensors = [
        source_tensor(name, draw(ROWS), draw(COLUMNS), dtype=draw(FLOATS))
        for name in draw(st.lists(st.sampled_from(names), unique=True))
    ]
    for number, (dtype, shape) in enumerate(draw(st.lists(ODD, max_size=4))):
        name = "x" * draw(st.sampled_from([1, 30, 3000]))
        tensors.append(source_tensor(f"odd.{number}.{name}", *shape, dtype=dtype))
    shape, dtype = (draw(ROWS), draw(COLUMNS)), draw(FLOATS)
    for expert in range(draw(st.integers(0, 5))):
        path = f"model.layers.0.mlp.experts.{expert}"
        tensors += [source_tensor(f"{path}.{one}.weight", *shape, dtype=dtype) for one in "ab"]
    return tensors


OPTIONS = st.fixed_dictionaries(
    {
        "quant": st.sampled_from(["none", "int4", "int8", "nvfp4", "mxfp4", "mxfp8"]),
        "experts": st.sampled_from(["packed", "stacked"]),
        "dtype": st.sampled_from([None, "float32", "bfloat16"]),
        "global_scale": st.booleans(),
        "alignment": st.sampled_from([None, 8, 4096]),
    }
)


def ranges_of(run: Run) -> list[tuple[int, int]]:
    """Return where in the blob the steps of a run write, begin and end."""
    found: list[tuple[int, int]] = []
    for step in run.steps:
        match step:
            case Constant(data, at):
                found.append((at, at + len(data)))
            case Copy(_, _, nbytes, at):
                found.append((at, at + nbytes))
            case GlobalScale(_, at):
                found.append((at, at + 4))
            case Values(output, _, _, count, starts):
                sizes = output.stored_of(count).sizes
                assert starts.keys() == sizes.keys()
                found += [(at, at + sizes[suffix]) for suffix, at in starts.items()]
    return [(begin, end) for begin, end in found if begin < end]


def check_places(blob: PlannedBlob, runs: list[Run], chunk: int) -> None:
    """Assert that runs and gaps follow each other, and that steps fill each byte once, in time."""
    at = 0
    filled: list[tuple[int, int]] = []
    for run in runs:
        assert run.begin == at
        assert 0 < run.end - run.begin <= chunk
        filled += ranges_of(run)
        at = run.end + run.gap
        # All of a gap is there when the run before it is.
        assert sum(end - begin for begin, end in filled if begin < at) == at
    assert at == blob.size
    places = sorted(filled)
    assert [begin for begin, _ in places] == [0, *(end for _, end in places)][: len(places)]


def check_sources(blob: PlannedBlob, runs: list[Run]) -> None:
    """Assert that all values and bytes of all sources are read once, in order, by whole groups."""
    read: Counter[str] = Counter()
    for step in (step for run in runs for step in run.steps):
        if isinstance(step, Values):
            assert step.start == read[step.source.name]
            read[step.source.name] += step.count
            if step.output.quantization is not None:
                assert step.count % step.output.quantization.group_size == 0
        elif isinstance(step, Copy):
            assert step.start == read[step.tensor.name]
            read[step.tensor.name] += step.nbytes
    for tensor in blob.tensors:
        for source in tensor.sources:
            assert read[source.name] == (source.nbytes if tensor.copies else source.elements)
    assert sum(run.source_bytes for run in runs) == blob.source_bytes


@settings(max_examples=40)
@given(sources(), OPTIONS, st.sampled_from([1024, 4096, 65_536, 4 * 2**20]))
def test_runs_cover_a_blob_once(
    tensors: list[SourceTensor], options: dict[str, Any], chunk: int
) -> None:
    options["global_scale"] &= options["quant"] == "nvfp4"
    try:
        plan = make_plan(inventory(tensors, model_type="gpt2"), ImportOptions.parse(**options))
    except BlobStoreError:  # nothing to import, or to quantize, is no example
        assume(False)
        raise
    with chunks_of(chunk):
        for blob in plan.blobs:
            runs = list(runs_of(blob))
            check_places(blob, runs, chunk)
            check_sources(blob, runs)
            steps = [step for run in runs for step in run.steps]
            header = b"".join(step.data for step in steps if isinstance(step, Constant))
            assert header == blob.header
