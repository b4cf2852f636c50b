"""Mistakes in an import's arguments, odd files and limits of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PYCODE
from support.checkpoints import normal, safetensors_bytes, write_checkpoint

import blobstore
from blobstore.errors import UsageError
from blobstore.store.local import session
from blobstore.store.local.store import Store


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
    blobstore.import_model(
        source, "m", store=store, draft=PYCODE, draft_quant="int4", requantize=True
    )
    with blobstore.open_model("m", store=store) as model:
        assert model["a.weight"].quant_type is None
        assert str(model["draft.model.layers.0.mlp.up_proj.weight"].quant_type) == "int4"
    measured = blobstore.measure_quality("m", source, store=store)
    assert [tensor.name for tensor in measured.tensors] == [
        "a.weight"
    ]  # the draft is of another checkpoint


def test_few_threads_for_little_work(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "m", {"a.weight": normal("a", 64, 64)})
    one = blobstore.import_model(source, "one", store=store, quant="int4", jobs=1)
    many = blobstore.import_model(source, "many", store=store, quant="int4", jobs=500, memory=2**34)
    assert one.digest == many.digest


def test_rules_say_what_is_wrong_with_them() -> None:
    for rule, named in (
        ("*q=none/32", "'none'"),
        ("*q=int5", "'int5'"),
        ("*q=int4/x", "groups of 0"),
    ):
        with pytest.raises(UsageError, match=f"the rule .*{named}"):
            blobstore.plan_import(PYCODE, rules=[rule])
    plan = blobstore.plan_import(PYCODE, rules=["*.q_proj.weight = int8"])
    assert {str(tensor.quantization) for tensor in plan.tensors if "q_proj" in tensor.name} == {
        "int8/64"
    }


def test_every_file_is_synced_where_the_file_system_can_not_be(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(session, "syncs_whole", lambda _: False)
    monkeypatch.setattr(
        session, "sync_file_system", lambda _: pytest.fail("it would do nothing there")
    )
    monkeypatch.setattr(session, "sync", lambda fd: synced.append(os.fstat(fd).st_size))
    result = blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    sizes = [layer.size for layer in result.manifest.descriptors]
    assert sorted(synced) == sorted(sizes)


def test_a_source_changed_through_a_map_is_imported_again(tmp_path: Path, store: Store) -> None:
    source = write_checkpoint(tmp_path / "m", {"a.weight": normal("a", 64, 64)})
    weights = np.memmap(source / "model.safetensors", np.uint8, "r+")
    # The pages are dirty from here on: later writes alone leave no trace in the file's times.
    weights[-8192:] = 1
    first = blobstore.import_model(source, "m", store=store)
    weights[-8192:] = 2
    assert blobstore.import_model(source, "m", store=store).digest != first.digest


def test_more_shards_than_files_may_be_open(tmp_path: Path, store: Store) -> None:
    names = [f"model-{number:05d}-of-00080.safetensors" for number in range(1, 81)]
    (tmp_path / "m").mkdir()
    for number, name in enumerate(names):
        (tmp_path / "m" / name).write_bytes(
            safetensors_bytes({f"{number}.weight": normal(str(number), 4, 4)})
        )
    code = (
        "import resource, sys, blobstore\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, "
        "resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "blobstore.import_model(sys.argv[1], 'm', store=blobstore.open_store(sys.argv[2]))\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m", store.root], check=True
    )  # our own code
    with blobstore.open_model("m", store=store) as model:
        assert len(model) == len(names)
