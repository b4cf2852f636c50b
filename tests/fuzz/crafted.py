"""Crafted inputs of at most 1 MB, and what each takes in every command that reads it.

``python tests/fuzz/crafted.py [WORD…]`` makes each (with a word in its name), runs its commands,
and prints the table of docs/reliability.md. None may take more than 300 MB of memory or 60 s of
processor time, or end in a traceback: 1 is returned where one does. Makers and commands are forks,
so this process must stay small.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import NamedTuple

from crafted_inputs import INPUTS, MB, PLACES, put

import blobstore

MOST_BYTES = 300 * MB
MOST_SECONDS = 60
MLX_BYTES = 320 * MB
"""What `run` takes for a prompt of two letters: MLX, mlx-lm and transformers."""
SOURCE = Path(__file__).resolve().parents[2] / "fixtures/pycode-5m"


def forked(work: Callable[[], int]) -> int:
    """Start ``work``, which returns an exit code, in a fork; return its process."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        code = work()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  # the parent reads it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Taken(NamedTuple):
    share: float
    """The larger of its shares of both limits, more than 1 for a fault."""
    line: str
    nbytes: int
    seconds: float
    ends: str


def command(line: str, folder: Path) -> Taken:
    words, _, read = line.format(at=folder).partition(" < ")
    arguments, errors = words.split(), folder / "stderr"
    if arguments[0] not in ("metadata", "plan") and "--generate-key" not in arguments:
        arguments += ["--store", str(folder / "store")]

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS + 5, MOST_SECONDS + 10))
        resource.setrlimit(resource.RLIMIT_DATA, (5 * MOST_BYTES, 5 * MOST_BYTES))
        signal.alarm(10 * MOST_SECONDS)
        os.dup2(os.open(read or os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        from blobstore.cli.main import run

        return run(arguments)

    _, status, usage = os.wait4(forked(work), 0)
    text = errors.read_text(errors="replace").replace(f"{folder}/", "").strip()
    errors.unlink()
    seconds, code = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
    nbytes, most = usage.ru_maxrss * 1024, MOST_BYTES + MLX_BYTES * (arguments[0] == "run")
    is_ours = code in range(4) and "Traceback" not in text
    share = max(nbytes / most, seconds / MOST_SECONDS) if is_ours else 9
    ends = f"{code}: {text.split(chr(10))[0][:100]}" if code else "success"
    return Taken(share, line.replace("{at}/", ""), nbytes, seconds, ends)


def prepare(folder: Path) -> None:
    """Make what every input changes: a store with a signed model, a checkpoint, keys."""
    os.environ.update({"COSIGN_PASSWORD": "p", "HOME": str(folder)})
    for module in walk_packages(blobstore.__path__, "blobstore."):
        if not module.name.endswith((".__main__", ".chat_service")):
            import_module(module.name)  # once, for all forks; those would import MLX, 220 MB
    shutil.copytree(SOURCE, folder / "model")
    put(folder / "policy.json", b'{"default":[{"type":"sigstoreSigned","keyPath":"k.pub"}]}')
    signing = "sign good:1 --key {at}/k.key --identity localhost/a/b:c"
    for line in ("import {at}/model good:1 --quant int4", "sign --generate-key {at}/k", signing):
        taken = command(line, folder)
        if taken.ends != "success":
            raise SystemExit(f"{line}: {taken.ends}")


def main(words: Sequence[str]) -> int:
    faults = 0
    print("| input | worst of its commands | it ends with | MB | s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="crafted-") as name:
        base, folder = Path(name) / "base", Path(name) / "input"
        prepare(base)
        for kind, what, make in INPUTS:
            if words and not any(word in f"{kind}: {what}" for word in words):
                continue
            subprocess.run(["cp", "-r", base, folder], check=True)
            # In a fork, because its memory would count for this process's.
            if os.waitpid(forked(lambda make=make: make(folder) or 0), 0)[1]:  # type: ignore[misc]  # bound now
                raise SystemExit(f"{kind}: {what} was not made")
            lines = [line.strip() for line in PLACES[kind][1].split(";") if line.strip()]
            taken = [command(line, folder) for line in lines]
            subprocess.run(["rm", "-rf", folder], check=True)
            worst = max(taken)
            faults += worst.share > 1
            fault = "**FAULT** " if worst.share > 1 else ""
            most, longest = max(one.nbytes for one in taken), max(one.seconds for one in taken)
            ends = f"{fault}{worst.ends} | {most // MB} | {longest:.1f}"
            print(f"| {kind}: {what} | `{worst.line}`, {len(taken)} | {ends} |", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
