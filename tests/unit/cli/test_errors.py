"""Wrong use and failures: one sentence and maybe a hint on stderr, and the exit code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from support.checkpoints import normal, safetensors_bytes, small_tensors, write_checkpoint
from support.stores import blob_path, commit_model, manifest_path

from blobstore.cli.main import app, run
from blobstore.cli.output import with_flags
from blobstore.store.local.store import Store

Command = Callable[..., subprocess.CompletedProcess[str]]
Fail = Callable[..., str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint named ``tiny``."""
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Fail:
    """A function that runs a command, checks its exit code, and returns its lines on stderr."""

    def run_and_fail(code: int, *arguments: object) -> str:
        assert run([*map(str, arguments)]) == code
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("Error: ")
        assert output.err.count("\n") == 1 + output.err.count("\nHint: ")
        assert "Traceback" not in output.err
        return output.err

    return run_and_fail


@pytest.mark.parametrize("word", ["import", "plan"])
@pytest.mark.parametrize(
    ("options", "says", "hint"),
    [
        (
            ["--quant", "int3"],
            "unknown quantization type 'int3'",
            "int4, int8, nvfp4, mxfp4, mxfp8",
        ),
        (["--quant", ""], "unknown quantization type ''", "int4"),
        (["--quant", "int4", "--group-size", "48"], "int4 has no groups of 48", "32, 64, 128"),
        (["--quant", "nvfp4", "--group-size", "32"], "nvfp4 has no groups of 32", "16"),
        (["--quant", "int4", "--group-size", "0"], "int4 has no groups of 0", "32"),
        (["--quant", "int4", "--group-size", "-32"], "int4 has no groups of -32", "32"),
        (["--group-size", "32"], "a group size needs a quantization type", "--quant"),
        (["--method", "magic"], "unknown quantization method 'magic'", "minmax"),
        (["--dtype", "int8"], "unknown dtype 'int8'", "bfloat16, float16, float32"),
        (["--profile", "mine"], "unknown profile 'mine'", "default, ollama"),
        (["--experts", "loose"], "unknown form of experts 'loose'", "packed, stacked"),
        (["--align", "12"], "an alignment of 12", None),
        (["--align", "0"], "an alignment of 0", None),
        (["--quant", "int4", "--group-size", "many"], "--group-size", "--help"),
        (["--nonsense"], "--nonsense", "--help"),
    ],
)
def test_options_that_do_not_exist(
    fail: Fail, source: Path, word: str, options: list[str], says: str, hint: str | None
) -> None:
    error, _, after = fail(2, word, source, *options).partition("\n")
    assert says in error
    assert after == "" if hint is None else hint in after


@pytest.mark.parametrize("word", ["import", "plan"])
def test_groups_that_divide_nothing(fail: Fail, tmp_path: Path, word: str) -> None:
    source = write_checkpoint(tmp_path / "odd", {"x.weight": normal("x", 64, 100)})
    error = fail(2, word, source, "--quant", "int4")
    assert all(
        part in error for part in ("nothing can be quantized to int4", "'x.weight' [64, 100]", "32")
    )


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ([], None),
        (["config.json"], None),
        (["model-q4.gguf"], "model-q4.gguf is not safetensors: convert it first."),
        (["pytorch_model.bin"], "pytorch_model.bin is not safetensors: convert it first."),
        (["weights.safetensors"], "Import the file itself: {folder}/weights.safetensors"),
        (["a.gguf", "weights.safetensors"], "Import the file itself: {folder}/weights.safetensors"),
    ],
)
def test_a_folder_without_weights(
    fail: Fail, tmp_path: Path, files: list[str], hint: str | None
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"{}")
    error = f"Error: no weights in {folder}: no model.safetensors\n"
    assert fail(1, "import", folder) == (
        error if hint is None else f"{error}Hint: {hint.format(folder=folder)}\n"
    )


def test_sources_that_are_not_there(fail: Fail, tmp_path: Path) -> None:
    assert fail(1, "import", tmp_path / "no") == f"Error: no file or folder at {tmp_path / 'no'}\n"
    assert fail(1, "plan", tmp_path / "no") == f"Error: no file or folder at {tmp_path / 'no'}\n"


def test_files_that_are_no_safetensors(fail: Fail, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(100))
    assert "not a safetensors file" in fail(1, "import", path)


@pytest.mark.parametrize(
    "name", ["../x", "a b", "", "a/b/c/d", "x:", "é", "-x/y", "x" * 81, "http:///x"]
)
@pytest.mark.parametrize("word", ["import", "show", "rm", "cp from", "cp to", "run"])
def test_names_that_are_no_names(
    fail: Fail, source: Path, tmp_path: Path, word: str, name: str
) -> None:
    lines: dict[str, list[str | Path]] = {
        "import": ["import", source, "--", name]
        if name.startswith("-")
        else ["import", source, name],
        "show": ["show", "--", name],
        "rm": ["rm", "--", name],
        "cp from": ["cp", "--", name, "x"],
        "cp to": ["cp", "--", "x", name],
        "run": ["run", "--", name, "prompt"],
    }
    command, *arguments = lines[word]
    assert "not a model name" in fail(2, command, "--store", tmp_path / "store", *arguments)
    assert not (tmp_path / "store").exists()


def test_a_source_whose_stem_is_no_name(fail: Fail, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "my model")
    assert "'my model'" in fail(2, "import", source, "--store", tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("word", ["show", "rm", "cp", "run"])
def test_models_that_are_not_there(fail: Fail, tmp_path: Path, word: str) -> None:
    (tmp_path / "store").mkdir()
    arguments = [
        word,
        "ghost",
        *(["x"] if word in ("cp", "run") else []),
        "--store",
        tmp_path / "store",
    ]
    assert fail(1, *arguments).startswith("Error: model 'ghost:latest' not found\n")


@pytest.mark.parametrize("word", ["show", "rm", "cp"])
def test_a_model_that_is_not_there_makes_no_store(fail: Fail, tmp_path: Path, word: str) -> None:
    fail(1, word, "ghost", *(["x"] if word == "cp" else []), "--store", tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "says", "command"),
    [
        (["frobnicate"], "frobnicate", "blobstore"),
        (["show"], "NAME", "blobstore show"),
        (["rm"], "NAME", "blobstore rm"),
        (["cp", "x"], "NEW_NAME", "blobstore cp"),
        (["run"], "NAME", "blobstore run"),
        (["run", "x", "y", "--max-tokens", "0"], "--max-tokens", "blobstore run"),
        (["list", "extra"], "extra", "blobstore list"),
        (["import", "x", "y", "z"], "z", "blobstore import"),
        (["list", "--store"], "--store", "blobstore"),
        (["metadata", "get"], "FILE", "blobstore metadata get"),
    ],
)
def test_commands_that_are_not_complete(
    fail: Fail, arguments: list[str], says: str, command: str
) -> None:
    error, hint, end = fail(2, *arguments).split("\n")
    assert says in error
    assert hint == f"Hint: {command} --help shows what is possible."
    assert end == ""


@pytest.mark.parametrize("word", ["import", "plan"])
def test_an_import_needs_a_source_or_a_modelfile_that_names_one(fail: Fail, word: str) -> None:
    error, hint, end = fail(2, word).split("\n")
    assert error == "Error: the source to import is missing"
    assert hint == "Hint: Name a checkpoint, or a Modelfile with --modelfile FILE."
    assert end == ""


def test_no_threads(fail: Fail, source: Path, tmp_path: Path) -> None:
    assert "at least one thread is needed, not 0" in fail(
        2, "import", source, "--jobs", 0, "--store", tmp_path / "store"
    )


def test_a_bad_weight_is_a_failure(fail: Fail, tmp_path: Path) -> None:
    tensors = small_tensors()
    tensors["lm_head.weight"][2, 3] = np.nan
    source = write_checkpoint(tmp_path / "bad", tensors)
    error = fail(1, "import", source, "--quant", "int8", "--store", tmp_path / "store")
    assert "'lm_head.weight': the weight at [2, 3] is nan" in error


def test_damaged_models(fail: Fail, store: Store) -> None:
    data = safetensors_bytes({"x": normal("x", 3)})
    commit_model(store, "m", data)
    blob_path(store, data).write_bytes(data[:-1])
    for word in ("show", "run"):
        error = fail(1, word, "m", *(["prompt"] if word == "run" else []), "--store", store.root)
        assert blob_path(store, data).name.split("-")[1] in error
    manifest_path(store, "m").write_bytes(b"{")
    assert "m:latest" in fail(1, "show", "m", "--store", store.root)


@pytest.mark.parametrize("word", ["import", "list", "cp"])
@pytest.mark.parametrize("name", ["file", "loop"])
def test_a_store_that_is_no_folder(
    fail: Fail, source: Path, tmp_path: Path, name: str, word: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    arguments: dict[str, list[object]] = {"import": [source], "list": [], "cp": ["a", "b"]}
    assert name in fail(1, word, *arguments[word], "--store", tmp_path / name)


def test_kernels_that_do_not_exist(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOBSTORE_KERNELS", "magic")
    assert "unknown kernel 'magic'" in fail(2, "list")


def test_a_way_to_hash_that_does_not_exist(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOBSTORE_SHA256", "magic")
    assert "unknown SHA-256 method 'magic'" in fail(2, "list")


def test_the_exit_code_reaches_the_shell(command: Command, tmp_path: Path) -> None:
    for arguments, code in (
        (["list"], 0),
        (["show", "ghost"], 1),
        (["show", "../x"], 2),
        (["frobnicate"], 2),
    ):
        done = command(
            *arguments, *(["--store", tmp_path] if code != 2 or arguments[0] == "show" else [])
        )
        assert done.returncode == code
        assert (done.stderr == "") == (code == 0)
        assert (done.stdout != "") == (code == 0)


EVIL = "evil\x1b]0;owned\x07\x1b[31m\u202e\n\x9b"


def test_control_characters_of_files_are_never_printed_raw(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(
        tmp_path / "m", {**small_tensors(), EVIL: normal("e", 3)}, {"architectures": [EVIL]}
    )
    (source / f"{EVIL.replace('/', '')}.safetensors").write_bytes(b"")
    store_option = ["--store", str(store.root)]
    assert run(["plan", str(source)]) == 0
    assert run(["import", str(source), "m", *store_option]) == 0
    assert run(["show", "m", "--tensors", *store_option]) == 0
    assert run(["show", "m", "--json", *store_option]) == 0
    assert run(["plan", str(tmp_path / EVIL)]) == 1
    assert run(["show", EVIL, *store_option]) == 2
    output = capsys.readouterr()
    for text in (output.out, output.err):
        assert "evil" in text
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)


@pytest.mark.parametrize("command", ["import", "plan"])
def test_left_out_files_are_said(
    source: Path, store: Store, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (source / "consolidated.safetensors").write_bytes(b"")
    options = ["--store", str(store.root)] if command == "import" else []
    assert run([command, str(source), *options]) == 0
    *_, count, line = capsys.readouterr().out.splitlines()
    assert count.endswith("tensors and 2 of 3 files stored")
    assert (
        line
        == "Left out: consolidated.safetensors: safetensors that are not part of the checkpoint"
    )
    assert run([command, str(source), *options, "--json"]) == 0
    (left_out,) = json.loads(capsys.readouterr().out)["coverage"]["files"]["left_out"]
    assert (left_out["name"], left_out["count"]) == ("consolidated.safetensors", 1)


def flags_in(group: Any) -> set[str]:
    """Return the flags of all commands."""
    own = {flag for parameter in group.params for flag in parameter.opts}
    names = getattr(group, "commands", ())
    return own.union(*(flags_in(group.get_command(None, name)) for name in names))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("replace it: replace=True.", "replace it: --force."),
        ("say so: `sole_owner=True`.", "say so: --sole-owner."),
        ("wait for it: `wait_s=SECONDS`.", "wait for it: --wait SECONDS."),
        ("wait for it: wait_s=SECONDS.", "wait for it: --wait SECONDS."),
        ('(import with experts="stacked")', "(import with --experts stacked)"),
        ("Give max_shard_size=SIZE.", "Give --max-shard-size SIZE."),
        ("Leave out in_place=True, and", "Leave out --in-place, and"),
    ],
)
def test_an_option_that_the_library_names_is_shown_as_its_flag(text: str, says: str) -> None:
    assert with_flags(text) == says
    flag = next(word for word in says.replace("(", " ").split() if word.startswith("--"))
    assert flag.rstrip(".,") in flags_in(typer.main.get_command(app))


@pytest.mark.parametrize(
    ("option", "flag"),
    [("--rule=*=int8", "--rule"), ("--param=a=1", "--param"), ("--align=64", "--align")],
)
def test_options_beside_a_plan_are_named_by_their_flags(
    fail: Fail, source: Path, tmp_path: Path, option: str, flag: str
) -> None:
    assert f"{flag} can't be used with --plan" in fail(
        2, "import", "--plan", tmp_path / "p", source, "m", option
    )
