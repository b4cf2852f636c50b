"""Batches: lists of models, worked on by one worker or several, each error by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.many import sharded_checkpoint
from support.servers import reply, server

from blobstore.cli.main import run
from blobstore.errors import DocumentError, LimitExceededError, UsageError
from blobstore.importer.batch import read_batch, work_on_batch
from blobstore.importer.run import import_model
from blobstore.store.memory import MemoryStore


def listed(folder: Path, *models: str) -> Path:
    path = folder / "models.toml"
    path.write_text("".join(f"[[model]]\n{model}\n" for model in models))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sharded_checkpoint(tmp_path / "m", 4)


def test_two_workers_import_all_models(source: Path, tmp_path: Path) -> None:
    home = MemoryStore()
    path = listed(
        tmp_path,
        f'source = "{source}"\nname = "a:int4"\nquant = "int4"',
        f'source = "{source}"\nname = "b"\nrules = ["*.up_proj.*=int8"]',
    )
    first = work_on_batch(path, shard=(0, 2), store=home)
    assert [one.waits_for > 0 for one in first] == [True, True]
    second = work_on_batch(path, shard=(1, 2), store=home)
    assert [one.waits_for for one in second] == [0, 0]
    peer = MemoryStore()
    digests = [
        import_model(source, "a:int4", store=peer, quant="int4").digest,
        import_model(source, "b", store=peer, rules=["*.up_proj.*=int8"]).digest,
    ]
    assert [one.digest for one in second] == digests
    again = work_on_batch(path, store=home)
    assert [(one.made, one.digest) for one in again] == [(0, digest) for digest in digests]


@pytest.mark.parametrize(
    ("shard", "says"), [((3, 3), "shard 3/3 does not exist"), ((0, 0), "shard 0/0 does not exist")]
)
def test_a_shard_that_does_not_exist(
    shard: tuple[int, int], says: str, source: Path, tmp_path: Path
) -> None:
    path = listed(tmp_path, f'source = "{source}"\nname = "a"')
    with pytest.raises(UsageError, match=says):
        work_on_batch(path, shard=shard, store=MemoryStore())


def test_the_error_of_one_model_stops_no_other(source: Path, tmp_path: Path) -> None:
    home = MemoryStore()
    path = listed(
        tmp_path,
        f'source = "{tmp_path / "missing"}"\nname = "a"',
        f'source = "{source}"\nname = "b:int8"\nquant = "int4"',
        f'source = "{source}"\nname = "c"',
        f'source = "{source}"\nname = "d"\nquant = "int5"',
    )
    found = work_on_batch(path, store=home)
    assert [one.error is None for one in found] == [False, False, True, False]
    assert [str(name) for name in home.manifests.names()] == ["c:latest"]
    (tmp_path / "m").rename(tmp_path / "missing")  # the first is mended, the third has gone
    again = work_on_batch(path, store=home)
    assert [one.error is None for one in again] == [True, False, False, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "model: Field required"),
        ("[[model]]\nsource = 's'", "model.0.name: Field required"),
        ("[[model]]\nsource = 's'\nname = '../a'", "model.0.name: "),
        (
            "[[model]]\nsource = 's'\nname = 'a'\nquantt = 'int4'",
            "model.0.quantt: unknown key; did you",
        ),
        ("[[model]]\nsource = 's'\nname = 'a'\nrules = [1]", "model.0.rules.0: Input should be"),
        ("more = 1\n[[model]]\nsource = 's'\nname = 'a'", "more: unknown key"),
        ("[[model]]\nsource = 's'\nname = 'a'\n" * 2, "model.1.name: two models are called a"),
        ("[[model]", "not a TOML document"),
    ],
)
def test_what_is_not_a_list_of_models(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(DocumentError, match=says) as error:
        read_batch(path)
    assert error.value.rule == "P4"


def test_a_list_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(LimitExceededError):
        read_batch(path)


def test_reports_do_not_show_signatures_and_passwords(tmp_path: Path) -> None:
    with server() as running:
        running.play(lambda _: reply(404))
        address = running.at("m.safetensors")
        models = [
            f'source = "{address}?sig=SECRET"\nname = "a"',
            f'source = "{address.replace("//", "//me:SECRET@")}"\nname = "b"',
        ]
        found = work_on_batch(listed(tmp_path, *models), store=MemoryStore())
    assert all(one.error for one in found)
    assert "SECRET" not in repr(found)
    assert [one.source for one in found] == [address, address]


def test_the_command_reports_and_fails(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = listed(tmp_path, f'source = "{source}"\nname = "a"', 'source = "nowhere"\nname = "b"')
    line = ["work", "--batch", str(path), "--store", str(tmp_path / "store")]
    assert run([*line, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["imported"], report["failed"]) == (1, 1)
    assert [model["state"] for model in report["models"]] == ["imported", "failed"]
    assert run(line) == 1
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("group_size = true", "group_size: Input should be a whole number"),
        ("target_bpw = inf", "target_bpw: Input should be a number"),
        ("requantize = 1", "requantize: Input should be true or false"),
        ('rules = "a"', "rules: Input should be a list of texts"),
        ("importance = 2026-11-23", "importance: Input should be a text"),
    ],
)
def test_options_of_another_type(option: str, says: str, tmp_path: Path) -> None:
    path = listed(tmp_path, f'source = "x"\nname = "a"\n{option}')
    with pytest.raises(DocumentError, match=says):
        work_on_batch(path, store=MemoryStore())
