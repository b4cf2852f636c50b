"""pack and unpack on the command line, and what other commands say of a packed model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import PYCODE

import blobstore
from blobstore.cli.main import run
from blobstore.store.local.store import Store

Run = Callable[..., str]


@pytest.fixture
def cli(store: Store, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command on the store, and returns what it prints."""

    def call(*words: str | Path, code: int = 0) -> str:
        found = run([*map(str, words), "--store", str(store.root)])
        captured = capsys.readouterr()
        assert found == code, captured.err
        return captured.out if code == 0 else captured.err

    return call


def document(printed: str) -> Any:
    return json.loads(printed)


@pytest.fixture
def packed(cli: Run, store: Store) -> Store:
    blobstore.import_model(PYCODE, "m", store=store, quant="int4")
    cli("pack", "m")
    return store


def test_pack_and_unpack(cli: Run, store: Store) -> None:
    blobstore.import_model(PYCODE, "m", store=store)
    before = cli("du", "--json")
    found = document(cli("pack", "m", "--json"))
    assert found["name"] == "m:latest"
    assert found["stored"] < 0.69 * found["size"]
    assert (found["kept"], found["reason"]) == (0, None)
    assert document(cli("unpack", "m", "--json")) == {
        "name": "m:latest",
        "blobs": found["blobs"],
        "bytes": found["size"],
    }
    assert cli("du", "--json") == before


def test_what_is_printed(cli: Run, packed: Store) -> None:
    lines = cli("unpack", "m").splitlines()
    assert lines == [f"Unpacked m:latest: {len(packed.blobs.digests())} blobs, 5.98 MB"]
    lines = cli("pack", "m").splitlines()
    assert lines[0].startswith("Packed m:latest: ")
    assert lines[1:] == ["Freed 5.98 MB"]


def test_lists_say_that_it_is_packed(cli: Run, packed: Store) -> None:
    table = cli("list").splitlines()
    assert table[0].split()[-1] == "STATE"
    assert table[1].split()[0] == "m:latest"
    assert table[1].split()[-1] == "packed"
    [item] = document(cli("list", "--json"))
    assert item["packed"] is True
    assert "state" in cli("show", "m")
    assert document(cli("show", "m", "--json"))["packed"] is True
    assert "m:latest (packed)" in cli("du")
    assert "in packed files" in cli("du")
    cli("unpack", "m")
    assert "STATE" not in cli("list")
    assert "packed" not in document(cli("list", "--json"))[0]


def test_commands_that_need_a_whole_model_say_so(cli: Run, packed: Store) -> None:
    assert cli("export", "m", packed.root.parent / "out", code=1) == (
        "Error: model m:latest is packed\nHint: blobstore unpack m:latest restores it.\n"
    )


def test_rm_cp_and_mv_of_a_packed_model(cli: Run, packed: Store) -> None:
    assert cli("cp", "m", "n") == "Copied m:latest to n:latest\n"
    assert cli("mv", "n", "o") == "Moved n:latest to o:latest\n"
    cli("rm", "m")
    cli("verify")
    cli("rm", "o")
    assert cli("list").startswith("No models")
