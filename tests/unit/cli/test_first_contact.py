"""A new user's first commands: help, empty and misspelt stores, missing models, tags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from hypothesis import given, strategies as st
from support.checkpoints import normal, safetensors_bytes, write_checkpoint
from support.stores import manifest_path

import blobstore
from blobstore.cli.main import app, run
from blobstore.errors import NotFoundError, UsageError
from blobstore.source.inventory import read_inventory
from blobstore.store.local.store import Store, open_store

Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command, and return its exit code, stdout and stderr."""

    def run_it(*arguments: object) -> tuple[int, str, str]:
        code = run([*map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_it


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no other store that the environment names."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path / "home"


# Help


@pytest.mark.parametrize("arguments", [[], ["metadata"]])
def test_a_command_alone_prints_its_help(answer: Answer, arguments: list[str]) -> None:
    assert answer(*arguments) == answer(*arguments, "--help")
    assert answer(*arguments)[0] == 0


def test_blobstore_alone_in_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "blobstore"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: ")
    assert "  import  " in done.stdout
    assert done.stderr == ""


def test_no_command_is_cut_off_in_the_help(answer: Answer) -> None:
    assert "..." not in answer("--help")[1].replace("[ARGS]...", "")


def test_optional_arguments_have_one_pair_of_brackets(answer: Answer) -> None:
    names = list(typer.main.get_group(app).commands)
    assert "import" in names
    for name in names:
        assert "[[" not in answer(name, "--help")[1]


# Stores


def test_the_default_store_before_the_first_import(answer: Answer, home: Path) -> None:
    line = f"No models in {home}/.ollama/models yet. Import one: blobstore import FOLDER\n"
    assert answer("list") == (0, line, "")
    assert answer("list", "--json") == (0, "[]\n", "")
    assert not home.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["list", "--json"],
        ["show", "m"],
        ["rm", "m"],
        ["cp", "m", "n"],
        ["mv", "m", "n"],
        ["verify"],
        ["du"],
        ["diff", "a", "b"],
        ["export", "m", "out"],
        ["prune"],
        ["repair", "m", "--from", "x"],
        ["run", "m", "x"],
    ],
    ids=" ".join,
)
def test_a_store_that_is_named_and_does_not_exist(
    answer: Answer, tmp_path: Path, arguments: list[str]
) -> None:
    code, _, error = answer(*arguments, "--store", tmp_path / "typo")
    assert (code, error.split("\n")[0]) == (1, f"Error: there is no store at {tmp_path}/typo")
    assert "Hint: " in error
    assert not (tmp_path / "typo").exists()


def test_a_store_that_the_environment_names_and_that_does_not_exist(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "typo"))
    assert answer("list")[2].startswith(f"Error: there is no store at {tmp_path}/typo\n")


def test_an_import_makes_a_store(answer: Answer, tmp_path: Path) -> None:
    assert answer("import", write_checkpoint(tmp_path / "m"), "--store", tmp_path / "new")[0] == 0
    assert answer("list", "--store", tmp_path / "new")[0] == 0


def test_a_store_is_required_by_the_library_too(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        open_store(tmp_path / "no").require()
    assert caught.value.path == str(tmp_path / "no")
    open_store(tmp_path).require()


@pytest.mark.parametrize("inside", ["models", "documents"])
def test_a_folder_of_something_else_is_not_a_store(
    answer: Answer, tmp_path: Path, inside: str
) -> None:
    (tmp_path / "home" / inside / "manifests").mkdir(parents=True)
    for command in ("list", "verify"):
        code, _, error = answer(command, "--store", tmp_path / "home")
        assert code == 1
        assert (
            f"Error: there is no store at {tmp_path}/home: the folder contains neither blobs "
            "nor manifests\n"
        ) in error
        assert (f"Hint: Did you mean {tmp_path}/home/models?" in error) == (inside == "models")


# The order of a list


def test_a_list_is_sorted(answer: Answer, store: Store, tmp_path: Path) -> None:
    made = {"b:large": 512, "a:old": 64, "c:new": 64}
    for age, (name, rows) in enumerate(made.items()):
        source = tmp_path / f"{age}.safetensors"
        source.write_bytes(safetensors_bytes({"x.weight": normal(name, rows, 64)}))
        blobstore.import_model(source, name, store=store)
    for name, moment in (
        ("a:old", 1_000_000_000),
        ("b:large", 1_200_000_000),
        ("c:new", 1_400_000_000),
    ):
        os.utime(manifest_path(store, name), (moment, moment))
    manifest_path(store, "broken").parent.mkdir()
    manifest_path(store, "broken").write_bytes(b"{")
    for option, expected in {
        (): ["c:new", "b:large", "a:old", "broken:latest"],
        ("--sort", "time"): ["c:new", "b:large", "a:old", "broken:latest"],
        ("--sort", "name"): ["a:old", "b:large", "broken:latest", "c:new"],
        ("--sort", "size"): ["b:large", "a:old", "c:new", "broken:latest"],
    }.items():
        text = answer("list", *option, "--store", store.root)[1]
        assert [line.split()[0] for line in text.splitlines()[1:]] == expected
        assert [
            item["name"]
            for item in json.loads(answer("list", *option, "--json", "--store", store.root)[1])
        ] == expected
    code, _, error = answer("list", "--sort", "age", "--store", store.root)
    assert (code, error) == (2, "Error: unknown order 'age'\nHint: Use one of: name, time, size.\n")


# Models that are not there


@pytest.fixture
def models(store: Store, tmp_path: Path) -> Store:
    """A store with models of one checkpoint under several names."""
    source = write_checkpoint(tmp_path / "s")
    for name in ("qwen3:int8", "qwen3:latest", "gemma:int8", "team/qwen3:v1"):
        blobstore.import_model(source, name, store=store, quant="int8")
    return store


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["rm"],
        ["export", "out"],
        ["cp", "x"],
        ["mv", "x"],
        ["run", "prompt"],
        ["verify"],
        ["du"],
        ["diff", "gemma"],
        ["quality", "--against", "SOURCE"],
        ["repair", "--from", "SOURCE"],
    ],
    ids=" ".join,
)
def test_other_tags_are_named(
    answer: Answer, models: Store, tmp_path: Path, arguments: list[str]
) -> None:
    command, *rest = (str(tmp_path / "s") if word == "SOURCE" else word for word in arguments)
    code, _, error = answer(command, "qwen3:int4", *rest, "--store", models.root)
    assert (code, error) == (
        1,
        "Error: model 'qwen3:int4' not found\nHint: The store has qwen3:int8, qwen3:latest.\n",
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen", "Did you mean qwen3:int8, qwen3:latest?"),
        ("GEMMA", "The store has gemma:int8."),
        ("team/qwen", "Did you mean team/qwen3:v1?"),
        ("zzz", "blobstore list shows the models of the store."),
        ("nobody/qwen3", "blobstore list shows the models of the store."),
    ],
)
def test_similar_names_are_offered(answer: Answer, models: Store, name: str, hint: str) -> None:
    assert answer("show", name, "--store", models.root)[2].splitlines()[1] == f"Hint: {hint}"


def test_inspect_names_other_tags(answer: Answer, models: Store) -> None:
    error = answer("inspect", "qwen3:int4", "--store", models.root)[2]
    assert (
        error.splitlines()[1]
        == "Hint: The store has qwen3:int8, qwen3:latest. A Hub repository is hf://ORG/NAME."
    )


def test_what_a_hint_does_not_follow_or_show(answer: Answer, models: Store, tmp_path: Path) -> None:
    """Links below manifests/ lead nowhere, and odd names are no models.

    Manifests/ itself may be a link.
    """
    folder = manifest_path(models, "qwen3:int8").parent
    (folder / "-odd name").write_bytes(b"")
    (folder / "link").symlink_to(folder / "int8")
    (folder / "folder").mkdir()
    folder.parent.joinpath("linked").symlink_to(folder)
    models.manifests.path.rename(tmp_path / "elsewhere")
    models.manifests.path.symlink_to(tmp_path / "elsewhere")
    assert answer("show", "qwen3:x", "--store", models.root)[2].endswith(
        "The store has qwen3:int8, qwen3:latest.\n"
    )
    assert "linked" not in answer("show", "linkee", "--store", models.root)[2]


# Sources that lie elsewhere


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("ftp://host/m", "Download it to a folder first, then: blobstore import FOLDER\n"),
        ("file:///tmp/m", "Give the path: /tmp/m\n"),
    ],
)
def test_addresses_of_other_kinds(answer: Answer, source: str, hint: str) -> None:
    for command in ("import", "plan"):
        code, _, error = answer(command, source)
        assert code == 2
        first, second = error.splitlines(keepends=True)
        says = "sources are paths and http, https, hf, s3, gs and az addresses"
        assert first == f"Error: can't read {source!r}: {says}\n"
        assert second.startswith(f"Hint: {hint}")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("hf://", "not a repository's name: ''"),
        ("hf://a/b/../c", "'../c' has the segment"),
        ("hf://datasets/a/b", "is not a model of the Hub"),
        ("https://[x/m", "not a web address"),
    ],
)
def test_addresses_that_are_wrong(answer: Answer, source: str, says: str) -> None:
    for arguments in (["import"], ["plan"], ["inspect"], ["quality", "qwen3:int8", "--against"]):
        code, _, error = answer(*arguments, source)
        assert (code, says in error) == (2, True), error


@pytest.mark.parametrize("command", ["import", "plan", "inspect"])
def test_a_bucket_needs_credentials(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    code, _, error = answer(command, "s3://bucket/models/qwen")
    assert code == 1
    assert error.startswith("Error: missing credentials for s3://bucket/models/qwen\nHint: Set")


@given(st.sampled_from(["ftp://", "file://", "xy://"]), st.text())
def test_an_address_is_refused_with_a_hint(scheme: str, rest: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_inventory(scheme + rest)
    assert caught.value.hint


def test_a_repository_by_its_name(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "Hint: A model of the Hugging Face Hub is hf://Qwen/Qwen3-0.6B.\n"
    error = f"Error: no file or folder at Qwen/Qwen3-0.6B\n{hint}"
    assert answer("import", "Qwen/Qwen3-0.6B") == (1, "", error)
    assert hint in answer("import", "hf.co/Qwen/Qwen3-0.6B")[2]
    (tmp_path / "Qwen").mkdir()  # then it is more likely a misspelt path
    assert answer("import", "Qwen/Qwen3-0.6B") == (1, "", error.splitlines(keepends=True)[0])


# Tags that say a type


@pytest.mark.parametrize(
    ("tag", "quant", "weights"),
    [
        ("int4", "int8", "int8"),
        ("INT4", "mxfp8", "mxfp8"),
        ("q8", "q4", "int4"),
        ("fp8", "nvfp4", "nvfp4"),
        ("int4", None, "BF16"),
        ("fp16", None, "BF16"),
        ("bf16", "int4", "int4"),
    ],
)
def test_a_tag_that_says_another_type(
    answer: Answer, store: Store, tmp_path: Path, tag: str, quant: str | None, weights: str
) -> None:
    source, options = write_checkpoint(tmp_path / "s"), ["--quant", quant] if quant else []
    for more in ([], ["--dry-run"]):
        code, _, error = answer(
            "import", source, f"x:{tag}", *options, *more, "--store", store.root
        )
        assert (code, error) == (
            2,
            (
                f"Error: the tag of x:{tag} says {tag}, but the weights will be {weights}\n"
                "Hint: Choose another tag, or keep this one with --force.\n"
            ),
        )
    with pytest.raises(UsageError):
        blobstore.import_model(source, f"x:{tag}", store=store, quant=quant)
    assert not store.root.exists()
    assert answer("import", source, f"x:{tag}", *options, "--force", "--store", store.root)[0] == 0
    assert (
        str(blobstore.import_model(source, f"x:{tag}", store=store, quant=quant, force=True).name)
        == f"x:{tag}"
    )


@pytest.mark.parametrize(
    ("tag", "quant"),
    [
        ("int4", "int4"),
        ("q4", "int4"),
        ("fp8", "int8"),
        ("fp8", "mxfp8"),
        ("fp4", "nvfp4"),
        ("bf16", None),
        ("8b", "int4"),
    ],
)
def test_a_tag_that_says_the_type(
    store: Store, tmp_path: Path, tag: str, quant: str | None
) -> None:
    blobstore.import_model(write_checkpoint(tmp_path / "s"), f"x:{tag}", store=store, quant=quant)


def test_a_tag_and_rules_alone(store: Store, tmp_path: Path) -> None:
    source, rules = write_checkpoint(tmp_path / "s"), ["*.up_proj.weight=mxfp4"]
    blobstore.import_model(source, "x:mxfp4", store=store, rules=rules)
    with pytest.raises(UsageError, match="will be mxfp4"):
        blobstore.import_model(source, "x:int4", store=store, rules=rules)


def test_a_tag_and_a_source_that_is_quantized(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s")
    blobstore.import_model(source, "x:int4", store=store, quant="int4")
    blobstore.export_model("x:int4", tmp_path / "out", store=store)
    blobstore.import_model(tmp_path / "out", "y:int4", store=store)
    with pytest.raises(UsageError, match="will be int4"):
        blobstore.import_model(tmp_path / "out", "y:mxfp4", store=store)


def test_an_empty_source_is_not_the_current_folder(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_checkpoint(tmp_path / "m"))
    assert answer("plan", "") == (2, "", "Error: the source is empty\nHint: Is a variable unset?\n")


def test_a_file_that_is_not_safetensors(answer: Answer, tmp_path: Path) -> None:
    code, _, error = answer("plan", write_checkpoint(tmp_path / "m") / "config.json")
    assert code == 1
    assert error.endswith(
        "\nHint: A checkpoint is a .safetensors file, or a folder with such files in it.\n"
    )


def test_a_file_with_the_name_of_our_record(answer: Answer, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    (source / "blobstore.json").write_text("{}")
    expected = f"Error: {source} contains a file named blobstore.json, the name of our own record\n"
    assert answer("plan", source) == (1, "", f"{expected}Hint: Rename the file, or move it away.\n")
