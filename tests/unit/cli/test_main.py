"""The command line as a whole: help, how values are read, exit codes, and how its process ends."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.commands import Cli

from blobstore import hashing, kernels

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_a_group_alone_prints_its_help(cli: Cli) -> None:
    for words in ([], ["metadata"]):
        assert cli(*words) == cli(*words, "--help")
        assert cli(*words, "-h")[1].startswith("Usage: ")


def test_the_version_names_the_kernels_and_the_way_to_hash(cli: Cli, command: Command) -> None:
    best = kernels.KERNELS["native"].name
    found = cli.text("--version")
    assert found.endswith(f" (kernels: {best}; SHA-256: {hashing.in_use()})\n")
    chosen = {"BLOBSTORE_KERNELS": "reference", "BLOBSTORE_SHA256": "plain"}
    done = command("--version", env={**os.environ, **chosen})
    assert f"kernels: {kernels.KERNELS['reference'].name}; SHA-256: plain)" in done.stdout


@pytest.mark.parametrize("name", ["BLOBSTORE_KERNELS", "BLOBSTORE_SHA256"])
def test_an_unknown_implementation(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "magic")
    assert "'magic'" in cli.refused("list")


@pytest.mark.parametrize(
    ("words", "says", "command"),
    [
        ("frobnicate", "frobnicate", "blobstore"),
        ("cp x", "NEW_NAME", "blobstore cp"),
        ("run x y --max-tokens 0", "--max-tokens", "blobstore run"),
        ("metadata get", "FILE", "blobstore metadata get"),
        ("plan x --nonsense", "--nonsense", "blobstore plan"),
    ],
)
def test_incomplete_commands_name_the_help(cli: Cli, words: str, says: str, command: str) -> None:
    error, hint, _ = cli.refused(*words.split()).split("\n")
    assert says in error
    assert hint == f"Hint: {command} --help shows the usage."


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("version", "Use blobstore --version."),
        ("create m -f Modelfile", "Use blobstore import."),
        ("rmi m", "Use blobstore rm."),
        ("serve m", "To serve a model, use --lm NAME. "),
        (
            "inspect docker://h.org/a/b",
            "A registry's model has no scheme: blobstore inspect h.org/a/b",
        ),
        ("list docker://h.org/a/b", "Write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONT"),
        ("push m docker://h.org/a/b", "A registry's model is HOST/NAMESPACE/MODEL:TAG."),
        ("plan x --quant q4_K_M", "The nearest is int4. Use one of: int4, "),
        ("plan x --quant Q6_K", "The nearest is int8. Use one of: int4, "),
        ("plan x --quant f16", "Use one of: int4, "),
        ("plan x --quant awq", "Use one of: int4, "),
    ],
)
def test_words_of_other_programs_name_ours(cli: Cli, words: str, hint: str) -> None:
    assert f"\nHint: {hint}" in cli.refused(*words.split())


def test_help_is_a_word_too(cli: Cli) -> None:
    assert cli("help") == cli("--help")
    assert cli("help", "metadata", "get") == cli("metadata", "get", "--help")
    assert cli("-V") == cli("--version")


# The end of a process


NATIVE = """
import os, signal, threading
from blobstore.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" lets it be ignored
main.end_soon_when_interrupted()
try:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
except KeyboardInterrupt:
    pass
threading.Event().wait()  # as native code that does not give up
"""


def test_ctrl_c_ends_a_command_that_does_not_give_up() -> None:
    done = subprocess.run([sys.executable, "-c", NATIVE], check=False, capture_output=True)
    assert done.returncode == 130
