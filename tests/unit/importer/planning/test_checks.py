"""The checks of a plan: equal names are found, and every blob can be read back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st
from support.inventories import source_tensor

from blobstore.errors import LimitExceededError, UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.formats.quant import Quantization, QuantType
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import OutputTensor, PlannedBlob
from blobstore.importer.plan import check_names, check_readable
from blobstore.source.weights import SourceWeight

INT4 = Quantization(QuantType.INT4, 32)
SAID = {"quant_type": "int4", "group_size": "32"}
NAMES = ("a", "a.scale", "a.bias", "a.scale.scale", "a.scale.bias", "b", "a.global")


def output(name: str, kind: Quantization | None = INT4, dtype: DType = DType.BF16) -> OutputTensor:
    weight = SourceWeight.plain(source_tensor(name, 32, 64, dtype=dtype))
    return OutputTensor(name, (weight,), dtype, (32, 64), kind)


def blob(name: str, metadata: Mapping[str, str], *tensors: OutputTensor) -> PlannedBlob:
    return PlannedBlob(name, tensors or (output(name),), metadata, ImportOptions())


def test_blobs_that_could_not_be_read_back_are_refused() -> None:
    about_a = {f"a.{key}": value for key, value in SAID.items()}
    check_readable([blob("a", SAID), blob("b", SAID), blob("a", about_a)])
    for other in (
        blob("b", {**SAID, "group_size": "64"}),
        blob("b", SAID, output("b", None)),
        blob("b", about_a),  # these metadata say nothing of it
        blob("b", {}, output("a", None, DType.U32), output("a.scale", None)),
    ):
        with pytest.raises(UnsupportedSourceError, match="read back"):
            check_readable([blob("a", SAID), blob("a", about_a), other])
    with pytest.raises(LimitExceededError, match="65,536"):
        check_readable([blob("a", SAID), blob("é" * 32_768, SAID)])


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=4), st.booleans())
def test_equal_names_are_found(tensors: list[tuple[str, bool]], in_one_blob: bool) -> None:
    outputs = [output(name, INT4 if quantized else None) for name, quantized in tensors]
    arrays = [one.name + part.suffix for one in outputs for part in one.stored.parts]
    blobs = [blob(one.name, {}, one) for one in outputs]
    if in_one_blob and outputs:
        blobs = [blob("all", {}, *outputs)]
    if len(set(arrays)) == len(arrays):
        check_names(blobs)
    else:
        with pytest.raises(UnsupportedSourceError, match="two tensors"):
            check_names(blobs)
