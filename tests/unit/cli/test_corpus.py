"""The corpus through the CLI: one Error line and an unchanged store, or the file's bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
from support.checkpoints import raw_safetensors, write_checkpoint
from support.corpus import Case, accepted, case_id, find, refusal, rejected, write_index_folder

from blobstore import open_model, plan_import
from blobstore.cli.main import run
from blobstore.errors import LimitExceededError
from blobstore.formats import documents
from blobstore.formats.documents import MAX_LAYERS, MAX_MANIFEST
from blobstore.importer import plan
from blobstore.importer.run import import_model
from blobstore.names import ModelName
from blobstore.store.local.store import Store, open_store

Command = Callable[..., subprocess.CompletedProcess[str]]
Snapshot = Callable[[Store], dict[str, str]]

# A million blobs are too many for a test: test_more_tensors_than_a_manifest_may_have_layers stands
# for it.
NOT_IMPORTED = {"st-many-1e6-empty"}
BEYOND_LIMITS = {"st-shape-65-dims", "st-name-1MB", "st-hdr-99MB-name"}
WITHOUT_TENSORS = {
    "st-len-n2-empty-object",
    "st-ws-trailing-spaces",
    "st-meta-empty",
    "st-meta-null",
    "st-meta-only",
    "st-meta-1MB-value",
    "st-meta-10k-keys",
}
VALID = [case for case in accepted("header") if case.id not in NOT_IMPORTED]
IMPORTED = [case for case in VALID if case.id not in BEYOND_LIMITS | WITHOUT_TENSORS]
ABOUT_A_STORE = ("manifest-size-wrong", "manifest-size-zero-for-nonempty", "manifest-blob-missing")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with one small model, which no test may change."""
    folder = tmp_path_factory.mktemp("held")
    store = open_store(folder / "store")
    import_model(write_checkpoint(folder / "small"), "small", store=store)
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed after the test, because some files of the corpus are large.

    pytest keeps the contents of tmp_path.
    """
    folder = tmp_path / "source"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def write_checkpoint_of(case: Case, folder: Path) -> Path:
    """Write what a header or index case is about; return what to import."""
    if case.id.startswith("index-"):
        write_index_folder(case, folder / "model")
        return folder / "model"
    return case.write(folder / "model.safetensors")


def check_printable(text: str) -> None:
    assert all(character.isprintable() for character in text.replace("\n", ""))


def check_failure(code: int, out: str, err: str, wanted: int) -> str:
    """Return the message of a failed command: one line ``Error:``, and at most one ``Hint:``."""
    assert code == wanted, err
    assert out == ""
    error, *hints, end = err.split("\n")
    assert error.startswith("Error: ")
    assert end == ""
    assert len(hints) <= 1
    assert all(hint.startswith("Hint: ") for hint in hints)
    assert "Traceback" not in err
    check_printable(err)
    return error.removeprefix("Error: ")


def fail(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], wanted: int = 1) -> str:
    code = run([*arguments])
    return check_failure(code, *capsys.readouterr(), wanted)


def succeed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run([*arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    check_printable(out)
    return out


def arguments_of(store: Store, source: Path, name: str = "corpus") -> list[str]:
    return ["import", "--store", str(store.root), "--", str(source), name]


@pytest.mark.parametrize("case", [*rejected("header"), *rejected("index")], ids=case_id)
def test_checkpoints_to_refuse(
    case: Case, held: Store, folder: Path, capsys: pytest.CaptureFixture[str], snapshot: Snapshot
) -> None:
    source = write_checkpoint_of(case, folder)
    before = snapshot(held)
    fail(capsys, arguments_of(held, source))
    fail(capsys, ["plan", str(source)])
    assert snapshot(held) == before


@pytest.mark.parametrize(
    "case", [case for case in VALID if case.id in BEYOND_LIMITS | WITHOUT_TENSORS], ids=case_id
)
def test_checkpoints_without_tensors_or_beyond_limits(
    case: Case, held: Store, folder: Path, capsys: pytest.CaptureFixture[str], snapshot: Snapshot
) -> None:
    source = write_checkpoint_of(case, folder)
    before = snapshot(held)
    message = fail(capsys, arguments_of(held, source))
    assert ("limit exceeded" if case.id in BEYOND_LIMITS else "no tensors") in message
    assert isinstance(refusal(lambda: plan_import(source)), LimitExceededError) == (
        case.id in BEYOND_LIMITS
    )
    assert snapshot(held) == before


@pytest.mark.parametrize(
    "name",
    [
        "st-shape-65-dims",
        "st-name-1MB",
        "st-json-deep-in-unknown-field",
        "st-hdr-90MB-open-brackets",
    ],
)
def test_a_limit_error_says_which_file(
    name: str, held: Store, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint_of(find("header", name), folder)
    assert str(source) in fail(capsys, arguments_of(held, source))


@pytest.mark.parametrize("case", IMPORTED, ids=case_id)
def test_every_byte_comes_back(
    case: Case, store: Store, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint_of(case, folder)
    reference: dict[str, Any] = dict(safetensors.deserialize(case.data))
    succeed(capsys, *arguments_of(store, source))
    with open_model("corpus", store=store, verify=True) as model:
        assert set(model) == set(reference)
        for name, tensor in model.items():
            wanted = reference[name]
            assert (tensor.dtype.value, list(tensor.shape)) == (wanted["dtype"], wanted["shape"])
            assert tensor.raw() == wanted["data"]
    for command in (["list"], ["show", "--tensors", "corpus"]):
        succeed(capsys, *command, "--store", str(store.root))


@pytest.mark.parametrize("case", accepted("index"), ids=case_id)
def test_sharded_checkpoints(
    case: Case, store: Store, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint_of(case, folder)
    succeed(capsys, *arguments_of(store, source))
    shards = [safetensors.deserialize(file.read_bytes()) for file in source.glob("*.safetensors")]
    reference = {name: entry["data"] for shard in shards for name, entry in shard}
    with open_model("corpus", store=store, verify=True) as model:
        assert {name: tensor.raw() for name, tensor in model.items()} == reference


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("st-name-ansi", "\\x1b"),
        ("st-name-rtl-override", "\\u202e"),
        ("st-name-nul-escape", "\\x00"),
        ("st-name-nul-collision", "\\x00"),
    ],
)
def test_control_characters_do_not_reach_the_terminal(
    name: str, escaped: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint_of(find("header", name), folder)
    assert escaped in succeed(capsys, "plan", str(source))
    out = succeed(capsys, "plan", "--json", str(source))
    assert out.isascii()
    names = {tensor["name"] for blob in json.loads(out)["blobs"] for tensor in blob["tensors"]}
    assert names == {tensor for tensor, _ in safetensors.deserialize(source.read_bytes())}


def test_control_characters_of_a_refused_file_do_not_either(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder / "model.safetensors"
    source.write_bytes(
        raw_safetensors(
            {"\x1b[2J\u202e\n\x85": {"dtype": "\x1b[31m", "shape": [], "data_offsets": [0, 0]}}
        )
    )
    assert "\\x1b[2J\\u202e\\n\\x85" in fail(capsys, ["plan", str(source)])


@pytest.mark.parametrize("most", [1000, pytest.param(MAX_LAYERS, marks=pytest.mark.long)])
def test_more_tensors_than_a_manifest_may_have_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(plan, "MAX_LAYERS", most)
    source = folder / "model.safetensors"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    source.write_bytes(raw_safetensors({f"t{number:06d}": entry for number in range(most + 1)}))
    assert isinstance(refusal(lambda: plan_import(source)), LimitExceededError)


@pytest.mark.parametrize("most", [2**20, pytest.param(MAX_MANIFEST, marks=pytest.mark.long)])
def test_a_manifest_that_could_not_be_read_back_is_not_written(
    store: Store,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    snapshot: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    monkeypatch.setattr(documents, "MAX_MANIFEST", most)
    import_model(write_checkpoint(folder / "small"), "small", store=store)
    source = folder / "model.safetensors"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    source.write_bytes(
        raw_safetensors(
            {f"{number:04d}".ljust(65_000, "n"): entry for number in range(most // 61_000)}
        )
    )
    before = snapshot(store)
    assert "limit exceeded" in fail(capsys, arguments_of(store, source, "small"))
    assert snapshot(store) == before


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that can be imported."""
    return find("header", "st-cov-two-adjacent").write(
        tmp_path_factory.mktemp("source") / "model.safetensors"
    )


def name_text(case: Case) -> str:
    return case.data.decode()


@pytest.mark.parametrize("case", accepted("name"), ids=case_id)
def test_names(case: Case, source: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    succeed(capsys, *arguments_of(store, source, name_text(case)))
    name = ModelName.parse(name_text(case))
    assert store.root.joinpath("manifests", *name.path_parts).is_file()
    with open_model(name_text(case), store=store) as model:
        assert len(model) == 2
    assert str(name) in succeed(capsys, "list", "--store", str(store.root))


@pytest.mark.parametrize("case", rejected("name"), ids=case_id)
def test_names_to_refuse(
    case: Case, source: Path, held: Store, capsys: pytest.CaptureFixture[str], snapshot: Snapshot
) -> None:
    before = snapshot(held)
    fail(capsys, arguments_of(held, source, name_text(case)), 2)
    for command in ("show", "rm"):
        fail(capsys, [command, "--store", str(held.root), "--", name_text(case)], 2)
    fail(capsys, ["cp", "--store", str(held.root), "--", "small", name_text(case)], 2)
    assert snapshot(held) == before


@pytest.mark.parametrize("name", ABOUT_A_STORE)
def test_models_whose_blobs_are_not_as_the_manifest_says(
    name: str, store: Store, capsys: pytest.CaptureFixture[str], snapshot: Snapshot
) -> None:
    path = store.root.joinpath("manifests", *ModelName.parse("corpus").path_parts)
    path.parent.mkdir(parents=True)
    find("manifest", name).write(path)
    (store.root / "blobs").mkdir()
    (store.root / "blobs" / ("sha256-" + "a3f5" * 16)).write_bytes(b"blob")
    before = snapshot(store)
    digest = "sha256:" + ("c" * 64 if name == "manifest-blob-missing" else "a3f5" * 16)
    assert digest in fail(capsys, ["show", "--store", str(store.root), "corpus"])
    row = succeed(capsys, "list", "--store", str(store.root)).split("\n")[1]
    assert "broken" in row
    assert digest in row
    assert snapshot(store) == before


@pytest.mark.parametrize(
    "case",
    [
        find("header", "st-alien-git-lfs-pointer"),
        find("header", "st-utf8-invalid-ff"),
        find("header", "st-json-deep-array-100k"),
        find("header", "st-sparse-1TiB-empty-object"),
        find("index", "index-traversal"),
        find("index", "index-tensor-in-two-shards"),
    ],
    ids=case_id,
)
def test_processes_that_refuse(
    case: Case,
    held: Store,
    folder: Path,
    command: Command,
    snapshot: Snapshot,
) -> None:
    before = snapshot(held)
    done = command(*arguments_of(held, write_checkpoint_of(case, folder)))
    check_failure(done.returncode, done.stdout, done.stderr, 1)
    assert snapshot(held) == before


@pytest.mark.parametrize("name", ["name-dash-start", "name-trailing-newline"])
def test_processes_that_refuse_names(
    name: str, source: Path, held: Store, command: Command, snapshot: Snapshot
) -> None:
    before = snapshot(held)
    done = command("import", "--store", str(held.root), source, name_text(find("name", name)))
    check_failure(done.returncode, done.stdout, done.stderr, 2)
    assert snapshot(held) == before


def test_a_process_that_imports(source: Path, store: Store, command: Command) -> None:
    done = command(*arguments_of(store, source))
    assert (done.returncode, done.stderr) == (0, "")
    with open_model("corpus", store=store, verify=True) as model:
        assert len(model) == 2
