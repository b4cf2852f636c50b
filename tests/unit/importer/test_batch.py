"""Batches: lists of models, worked on by one worker or several, each error by itself."""

import json
from pathlib import Path

import pytest
from support.many import sharded_checkpoint

from blobstore.cli.main import run
from blobstore.errors import DocumentError, UsageError
from blobstore.importer.batch import work_on_batch
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
    with pytest.raises(UsageError, match="2/2"):
        work_on_batch(path, shard=(2, 2), store=home)


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


USUAL = "source = 's'\nname = 'a'\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[model]", "TOML"),
        ("[[model]]\nsource = 's'\nname = '../a'", "model.0.name:"),
        (f"[[model]]\n{USUAL}quantt = 'int4'", "model.0.quantt:"),
        (f"[[model]]\n{USUAL}rules = [1]", "model.0.rules.0:"),
        (f"[[model]]\n{USUAL}target_bpw = inf", "target_bpw:"),
        (f"[[model]]\n{USUAL}" * 2, "model.1.name:"),
    ],
)
def test_what_is_not_a_list_of_models(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(DocumentError, match=named) as error:
        work_on_batch(path, store=MemoryStore())
    assert error.value.rule == "P4"


def test_the_command_reports_fails_and_shows_no_secrets(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ['source = "http://me:SECRET@localhost:1/m.safetensors?sig=SECRET"\nname = "b"']
    path = listed(tmp_path, f'source = "{source}"\nname = "a"', *models)
    line = ["work", "--batch", str(path), "--store", str(tmp_path / "store")]
    assert run([*line, "--json"]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert [model["state"] for model in report["models"]] == ["imported", "failed"]
    assert report["models"][1]["source"] == "http://localhost:1/m.safetensors"
    assert run(line) == 1
    again = capsys.readouterr()
    assert "failed" in again.out
    assert "SECRET" not in shown.out + shown.err + again.out + again.err
