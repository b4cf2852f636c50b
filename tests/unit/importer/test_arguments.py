"""Arguments of an import that are no options, or of the wrong kind; and what a draft model asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import PYCODE
from support.checkpoints import normal, write_checkpoint

import blobstore
from blobstore.errors import UsageError
from blobstore.store import Store


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"qaunt": "int4"}, "no option 'qaunt'"),
        ({"rule": ["*=int4"]}, "no option 'rule'"),
        ({"rules": "*=int4"}, "rules is"),
        ({"licenses": "MIT"}, "licenses is"),
        ({"parameters": {"temperature": 0.5}}, "parameters is"),
    ],
)
def test_what_is_no_option_is_a_usage_error(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        blobstore.plan_import(PYCODE, **options)


def test_a_draft_alone_can_be_requantized(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "m", {"a.weight": normal("a", 64, 64)})
    blobstore.import_model(source, "m", store=store, draft=PYCODE, draft_quant="int4", requantize=True)
    with blobstore.open_model("m", store=store) as model:
        assert model["a.weight"].quant_type is None
        assert str(model["draft.model.layers.0.mlp.up_proj.weight"].quant_type) == "int4"
    measured = blobstore.measure_quality("m", source, store=store)
    assert [tensor.name for tensor in measured.tensors] == ["a.weight"]  # the draft is of another checkpoint


def test_few_threads_for_little_work(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "m", {"a.weight": normal("a", 64, 64)})
    one = blobstore.import_model(source, "one", store=store, quant="int4", jobs=1)
    many = blobstore.import_model(source, "many", store=store, quant="int4", jobs=500, memory=2**34)
    assert one.digest == many.digest
