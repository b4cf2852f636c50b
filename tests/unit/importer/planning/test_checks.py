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
OPTIONS = ImportOptions()


def output(name: str, kind: Quantization | None = INT4, dtype: DType = DType.BF16) -> OutputTensor:
    """Return a planned tensor of 32 x 64 values."""
    weight = SourceWeight.plain(source_tensor(name, 32, 64, dtype=dtype))
    return OutputTensor(name, (weight,), dtype, (32, 64), kind)


def blob(name: str, metadata: Mapping[str, str], *tensors: OutputTensor) -> PlannedBlob:
    return PlannedBlob(name, tensors or (output(name),), metadata, OPTIONS)


def test_metadata_about_another_tensor_are_not_of_the_same_kind() -> None:
    about_a = {"a.quant_type": "int4", "a.group_size": "32"}
    check_readable([blob("a", about_a)])
    with pytest.raises(UnsupportedSourceError, match="'b' could not be read back") as caught:
        check_readable([blob("a", about_a), blob("b", about_a)])
    assert caught.value.tensor == "a"


def test_a_kind_is_what_is_stored_and_what_is_said_of_it() -> None:
    said = {"quant_type": "int4", "group_size": "32"}
    check_readable([blob("a", said), blob("b", said)])
    for other in (blob("b", {**said, "group_size": "64"}), blob("b", said, output("b", None))):
        with pytest.raises(UnsupportedSourceError, match="'b' could not be read back"):
            check_readable([blob("a", said), other])


def test_a_long_name_is_checked_itself() -> None:
    said = {"quant_type": "int4", "group_size": "32"}
    with pytest.raises(LimitExceededError, match="over 65,536 bytes"):
        check_readable([blob("a", said), blob("é" * 32_768, said)])


def test_codes_that_are_none() -> None:
    tensors = output("a", None, DType.U32), output("a.scale", None)
    with pytest.raises(UnsupportedSourceError, match="read back"):
        check_readable([blob("a", {}, *tensors)])


NAMES = ("a", "a.scale", "a.bias", "a.scale.scale", "a.scale.bias", "b", "global", "a.global")


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=4), st.booleans())
def test_equal_names_are_found(
    tensors: list[tuple[str, bool]], in_one_blob: bool
) -> None:  # hypothesis
    outputs = [output(name, INT4 if quantized else None) for name, quantized in tensors]
    arrays = [one.name + part.suffix for one in outputs for part in one.stored.parts]
    blobs = [blob(one.name, {}, one) for one in outputs]
    if in_one_blob and outputs:
        blobs = [blob("all", {}, *outputs)]
    if len(set(arrays)) == len(arrays):
        check_names(blobs)
    else:
        with pytest.raises(UnsupportedSourceError, match="two tensors would have the name"):
            check_names(blobs)
