"""The command line as a whole: help, how values are read, exit codes, and how its process ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Cli

from blobstore import hashing, kernels


def test_a_group_alone_prints_its_help(cli: Cli) -> None:
    cli.text("complete", "--", "metadata", "")  # it leaves the group as it is
    for words in ([], ["metadata"]):
        assert cli(*words) == cli(*words, "--help")
        assert cli(*words, "-h")[1].startswith("Usage: ")
    assert cli("help", "metadata", "get") == cli("metadata", "get", "--help")


def test_the_version_names_the_kernels_and_the_way_to_hash(cli: Cli) -> None:
    best = kernels.KERNELS["native"].name
    found = cli.text("--version")
    assert found.endswith(f" (kernels: {best}; SHA-256: {hashing.in_use()})\n")
    assert cli.text("-V") == found
    chosen = {**os.environ, "BLOBSTORE_KERNELS": "reference", "BLOBSTORE_SHA256": "plain"}
    line = [sys.executable, "-m", "blobstore", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=chosen)
    assert f"kernels: {kernels.KERNELS['reference'].name}; SHA-256: plain)" in done.stdout


@pytest.mark.parametrize("name", ["BLOBSTORE_KERNELS", "BLOBSTORE_SHA256"])
def test_an_unknown_implementation(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "magic")
    assert "'magic'" in cli.refused("list")


WRONG = {
    "frobnicate": "frobnicate'.*\nHint: blobstore --help shows the usage",
    "cp x": "NEW_NAME.*\nHint: blobstore cp --help",
    "run x y --max-tokens 0": "--max-tokens.*\nHint: blobstore run --help",
    "metadata get": "FILE.*\nHint: blobstore metadata get --help",
    "plan x --nonsense": "--nonsense.*\nHint: blobstore plan --help",
    "import tiny --quant int4 --group-size 48": "48.*\n.*32, 64, 128",
    "import tiny --method magic": "unknown quantization method 'magic'.*\n.*minmax",
    "import tiny --profile mine": "unknown profile 'mine'.*\n.*default, ollama",
    "import tiny --jobs 0": "not 0",
    "import ftp://host/m": "can't read 'ftp://host/m'.*\n.*Download it to a folder first",
    "import file:///tmp/m": "can't read 'file:///tmp/m'.*\n.*Give the path: /tmp/m",
    "import hf://datasets/a/b": "is not a model of the Hub",
    "import https://[x/m": "not a web address",
    "import": "missing.*\n.*--modelfile FILE",
    "import model --adapter a --adapter b": "--adapter was given twice",
    "export m out --max-shard-size bananas": "bananas",
    "schema": "needs a COMMAND",
    "schema bake": "no command 'bake'",
    "serve --allowed-host a.example:80": "'a.example:80' is not a host name",
    "serve --allow-origin https://a.example": "--allow-origin needs a model",
    "serve --memory 8GB": "--memory needs a model",
    "serve --api-key x": "--api-key needs a model",
    "serve --lm m --api-key=": "--api-key is empty",
    "serve --lm m --allow-origin https://a.example/b": "is not an origin",
}
OTHERS = {
    "version": "Use blobstore --version.",
    "create m -f Modelfile": "Use blobstore import.",
    "rmi m": "Use blobstore rm.",
    "serve m": "To serve a model, use --lm NAME. ",
    "inspect docker://h/a/b": "A registry's model has no scheme: blobstore inspect h/a/b",
    "list docker://h.org/a/b": "Write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONT",
    "push m docker://h.org/a/b": "A registry's model is HOST/NAMESPACE/MODEL:TAG.",
    "plan x --quant q4_K_M": "The nearest is int4. Use one of: int4, ",
    "plan x --quant Q6_K": "The nearest is int8. Use one of: int4, ",
    "plan x --quant f16": "Use one of: int4, ",
}


def test_wrong_use_and_words_of_other_programs(
    cli: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    for words, pattern in WRONG.items():
        assert re.search(pattern, cli.refused(*words.split())), words
    for words, hint in OTHERS.items():
        assert f"\nHint: {hint}" in cli.refused(*words.split()), words


NATIVE = """
import os, signal, threading
from blobstore.cli import main
main.GRACE_S = 0
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
