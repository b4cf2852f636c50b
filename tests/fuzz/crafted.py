"""Crafted inputs of at most 1 MB, and what each takes in every command and page that reads it.

``python tests/fuzz/crafted.py [WORD…]`` makes each (with a word in its name), runs its commands,
and prints the table of docs/reliability.md. None may take more than 300 MB of memory or 60 s of
processor time, or end in a traceback: 1 is returned where one does. Makers and commands are forks,
so this process must stay small.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import NamedTuple

from crafted_inputs import (
    FILES,
    LM,
    MAKERS,
    MB,
    PLACES,
    REPLIES,
    REQUESTS,
    Reply,
    chat,
    get,
    put,
)

import blobstore

MOST_BYTES = 300 * MB
MOST_SECONDS = 60
MLX_BYTES = 320 * MB
"""What `run` and `serve --lm` take for a prompt of two letters: MLX, mlx-lm and transformers."""
SOURCE = Path(__file__).resolve().parents[2] / "fixtures/pycode-5m"


# Servers, and their clients


@contextlib.contextmanager
def serving(replies: dict[str, Reply]) -> Iterator[str]:
    """Run a server whose replies are by a word of the path; yield its host and port."""
    count = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            replied = (reply for word, reply in replies.items() if word in self.path)
            status, fields, body = next(replied, (200, {}, b"{}"))
            self.send_response(status)
            for key, value in {**fields, "Content-Length": str(len(body))}.items():
                me = f"http://{self.headers['Host']}"
                self.send_header(key, value.replace("{n}", str(next(count))).replace("{me}", me))
            self.end_headers()
            with contextlib.suppress(OSError):  # the command has seen enough
                self.wfile.write(body if self.command != "HEAD" else b"")

        do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if (pid := os.fork()) == 0:
            server.serve_forever()
        yield f"127.0.0.1:{server.server_address[1]}"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ask(port: int, request: bytes) -> None:
    """Send a request, and read the answer to its end."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 120) as line:
        with contextlib.suppress(OSError):
            line.sendall(request)
        while line.recv(65536):
            pass


# Running them


def forked(line: list[str], errors: Path, read: str, write: str) -> int:
    """Start a command in a fork, and return its process; ``read``, ``write``: its streams."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS + 5, MOST_SECONDS + 10))
        resource.setrlimit(resource.RLIMIT_DATA, (5 * MOST_BYTES, 5 * MOST_BYTES))
        signal.alarm(10 * MOST_SECONDS)
        os.dup2(os.open(read, os.O_RDONLY), 0)
        os.dup2(os.open(write, os.O_WRONLY | os.O_CREAT, 0o600), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        from blobstore.cli.main import run

        code = run(line)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  # the parent reads it
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


class Taken(NamedTuple):
    share: float
    """The larger of its shares of both limits, more than 1 for a fault."""
    line: str
    nbytes: int
    seconds: float
    ends: str


def command(line: str, folder: Path, request: bytes = b"", host: str = "") -> Taken:
    """Run a command, or a server that is asked for a page, or for what ``request`` wants."""
    words = line.format(at=folder, host=host).split()
    pages = line.startswith("/")
    requests = [request] if request else [get(page) for page in words if pages]
    if pages:
        words = ["serve"]
    read = words.pop() if "<" in words else os.devnull
    words = [word for word in words if word != "<"]
    if words[0] not in ("metadata", "plan") and "--generate-key" not in words:
        words += ["--store", str(folder / "store")]
    errors, said = folder / "stderr", folder / "stdout"
    pid = forked([*words, *["--port", "0"][: 2 * (words[0] == "serve")]], errors, read, str(said))
    if words[0] == "serve" and (address := first_line(said, pid)):
        port = int(address.split("http://")[1].split("/")[0].split(":")[1])
        blob = next((folder / "store/blobs").iterdir()).name.replace("-", ":").encode()
        for one in requests or [chat()]:
            ask(port, one.replace(b"{blob}", blob))
        os.kill(pid, signal.SIGINT)
    _, status, usage = os.wait4(pid, 0)
    text = errors.read_text(errors="replace").replace(f"{folder}/", "").strip()
    for path in (errors, said):
        path.unlink(missing_ok=True)
    seconds, code = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
    nbytes, most = usage.ru_maxrss * 1024, MOST_BYTES
    if line.startswith("run") or LM in line:
        most += MLX_BYTES
    is_ours = code in range(4) and "Traceback" not in text
    share = max(nbytes / most, seconds / MOST_SECONDS) if is_ours else 9
    ends = f"{code}: {text.split(chr(10))[0][:100]}" if code else "success"
    return Taken(share, line.replace("{at}/", "").split(" /api")[0], nbytes, seconds, ends)


def first_line(path: Path, pid: int) -> str:
    """Wait for the first line of a process, and return it; nothing if it ends before."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if path.exists() and "\n" in (text := path.read_text()):
            return text
        time.sleep(0.02)
    return ""


def inputs() -> Iterator[tuple[str, str, Callable[[Path], None], dict[str, Reply], bytes]]:
    """Yield each input's kind and name, what makes its files, a server's replies, a request."""
    for kind, name, data in FILES:
        path = str(PLACES[kind][0]).format(name=name.split()[0])
        yield kind, name, lambda at, path=path, data=data: put(at / path, data()), {}, b""  # type: ignore[misc]  # bound now
    for kind, name, make in MAKERS:
        yield kind, name, make, {}, b""
    for kind, name, replies in REPLIES:
        yield kind, name, lambda _: None, replies(), b""
    for kind, name, request in REQUESTS:
        yield kind, name, lambda _: None, {}, request()


def apart(make: Callable[[Path], None], folder: Path) -> None:
    """Make an input in a fork, whose memory would count for this one's."""
    if (pid := os.fork()) == 0:
        try:
            make(folder)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"{folder} was not made")


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
    """Try the inputs, and print the table."""
    faults = 0
    print("| input | worst of its commands | it ends with | MB | s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="crafted-") as name:
        base, folder = Path(name) / "base", Path(name) / "input"
        prepare(base)
        for kind, what, make, replies, request in inputs():
            if words and not any(word in f"{kind}: {what}" for word in words):
                continue
            subprocess.run(["cp", "-r", base, folder], check=True)
            apart(make, folder)
            lines = [line.strip() for line in PLACES[kind][1].split(";") if line.strip()]
            with serving(replies) as host:
                taken = [command(line, folder, request, host) for line in lines]
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
