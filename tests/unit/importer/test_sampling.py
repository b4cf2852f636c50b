"""Targets of sources on servers: the plan of a local source, from few requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import normal, write_checkpoint
from support.ollama_sources import write_source
from support.streaming import SMALL, streamed

from blobstore.errors import RemoteError
from blobstore.importer import targets
from blobstore.importer.run import plan_import

_ROW = 512 * 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {f"model.{n}.weight": normal(n, 3000, 512).astype(np.float32) for n in "ab"}
    return write_checkpoint(tmp_path / "m", tensors)


def test_rows_come_together(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SAMPLE", 1000 * 512)
    wanted = plan_import(source, target_bpw=6.0).relative_errors
    told: list[str] = []
    with streamed(SMALL) as fetched:
        plan = plan_import(source, target_bpw=6.0, progress=lambda _, name: told.append(name))
    assert plan.relative_errors == wanted
    assert len(fetched.ranges) < 20
    assert max(nbytes for _, _, nbytes in fetched.ranges) > 100 * _ROW
    assert set(told) == {"measuring model.a.weight", "measuring model.b.weight"}


def test_rows_far_apart_come_alone(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SAMPLE", 4 * 512)
    wanted = plan_import(source, target_bpw=6.0).relative_errors
    with streamed(SMALL) as fetched:
        assert plan_import(source, target_bpw=6.0).relative_errors == wanted
    assert [nbytes for _, _, nbytes in fetched.ranges] == [_ROW] * 8


@pytest.mark.parametrize("name", ["e_fp8_moe", "c_sharded"])
def test_other_sources(tmp_path: Path, name: str) -> None:
    folder = write_source(tmp_path, name)
    wanted = plan_import(folder, target_bpw=6.0, requantize=True)
    with streamed(SMALL):
        assert (
            plan_import(folder, target_bpw=6.0, requantize=True).relative_errors
            == wanted.relative_errors
        )


def test_a_lost_connection(source: Path) -> None:
    with streamed(SMALL) as fetched:

        def fail(_name: str, _begin: int) -> None:
            raise RemoteError("cut")

        fetched.before = fail
        with pytest.raises(RemoteError, match="cut"):
            plan_import(source, target_bpw=6.0)
