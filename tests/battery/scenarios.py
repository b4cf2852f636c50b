"""Runs the scenarios of cases.toml: commands in forked processes, and what they leave.

A step is a line: the words of a command, with ``NAME=VALUE`` before it for its environment,
``< FILE`` and ``> FILE`` after it; or an ``@verb``, a method of `_Run`. ``[dense]`` before a step:
only for that model. ``{model}`` and other words are those of the model; servers are ``{registry}``,
``{bucket}``, ``{files}`` and, after ``@serve``, ``{host}``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from support import FIXTURES
from support.hub import hub
from support.registries import CERTIFICATE, moto, registry
from support.servers import server

import blobstore

_MODELS = ("pycode-5m", "pycode-moe-5m")
_TIMES = (
    (r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)?", "<time>"),
    (r"\b(?:127\.0\.0\.1|localhost):\d+", "<host>"),
    (r"\d[\d.]* (?:ms|s|min)\b|\d+ (?:seconds?|minutes?)( ago)?\b|just now", "<duration>"),
    (r"[\d.]+ (?:B|[KMG]B)/s", "<rate>"),
    (r"[\d.,]+ tokens/s", "<rate>"),
    (r"Linux-[\w.-]+", "<system>"),
    (r"-cpython-\d+|blobstore 0\.\d+\.\d+[\w.+-]*", "<version>"),
)
_DURATIONS = frozenset(("seconds", "tokens_per_second", "modified", "age"))
_HEADERS = (
    *("content-type", "docker-content-digest", "content-range", "vary"),
    *("access-control-allow-origin", "accept-ranges", "allow"),
)
_PATIENCE_S = 120


Outcome = tuple[int, bytes, bytes]
"""A command's exit code, and what it printed on stdout and stderr."""


@dataclass(slots=True)
class World:
    """A folder with the sources, and the servers."""

    root: Path
    variables: dict[str, str]
    places: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _MODELS:
            shutil.copytree(FIXTURES / name, self.root / name)
            for path in (self.root / name).iterdir():
                os.utime(path, (1_700_000_000, 1_700_000_000))
        shutil.copy(CERTIFICATE, self.root / "ca.pem")

    @contextmanager
    def servers(self, kinds: set[str]) -> Iterator[None]:
        """Run the servers that scenarios need."""
        with ExitStack() as stack:
            if "registry" in kinds:
                there = registry(self.root / "registry", htpasswd=True)
                self.places["registry"] = f"127.0.0.1:{stack.enter_context(there).port}"
            if "bucket" in kinds:
                self.places["endpoint"] = stack.enter_context(moto(self.root / "moto"))
            if "files" in kinds:
                self.places["files"] = stack.enter_context(_hub(self.root / _MODELS[0]))
            yield

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of commands: that of cases.toml, and where programs are."""
        named = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
        words = {"home": str(folder / "home"), "root": str(self.root), **self.places}
        named |= {key: filled(text, words) for key, text in self.variables.items()}
        return {key: text for key, text in named.items() if "{" not in text}

    def start(
        self,
        words: list[str],
        folder: Path,
        more: dict[str, str],
        stdin: Path | None = None,
        pipe: Path | None = None,
    ) -> tuple[int, Path, Path]:
        """Start a command in a forked process; return its id, and the files of its output.

        ``pipe``: a named pipe instead of the first file.
        """
        out, err = (self.root / f"{time.monotonic_ns()}.{name}" for name in ("out", "err"))
        out = pipe or out
        sys.stdout.flush()
        if pid := os.fork():
            return pid, out, err
        code = 70
        try:
            os.chdir(folder)
            environment = self.environment(folder) | more
            os.environ.clear()
            os.environ.update(environment)
            for number, path in enumerate((stdin or os.devnull, out, err)):
                flags = os.O_CREAT | os.O_WRONLY if number else os.O_RDONLY
                os.dup2(os.open(path, flags, 0o600), number)
            sys.argv = ["blobstore", *words]
            sys.stdin, sys.stdout, sys.stderr = (
                open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
                for number, mode in enumerate("rww")
            )
            from blobstore.cli.main import main as command

            command()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  # shown as the command would
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def command(
        self, words: list[str], folder: Path, more: dict[str, str], stdin: Path | None = None
    ) -> Outcome:
        """Run a command."""
        pid, out, err = self.start(words, folder, more, stdin)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), out.read_bytes(), err.read_bytes()


def filled(text: str, words: Mapping[str, str]) -> str:
    """Return a text with the words that it names in braces."""
    return re.sub(r"\{([a-z]+)\}", lambda match: words.get(match[1], match[0]), text)


def warm_up(*, has_lm: bool) -> None:
    """Import what most commands need, once for all forked processes."""
    for name in blobstore.__all__:
        getattr(blobstore, name)
    for name in ("blobstore.cli.main", "pydantic", "obstore", "uvicorn"):
        importlib.import_module(name)
    if has_lm:  # not mlx: its threads would be missing in the forked processes
        importlib.import_module("transformers.models.auto.tokenization_auto")


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    """Serve a folder as the Hub does, in a forked process: the caller stays without threads."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        with server() as running:
            running.play(hub(folder, f"org/{folder.name}"))
            os.write(write, running.url.encode())
            signal.pause()
    try:
        yield os.read(read, 1000).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what functions return, each in a forked process, which may import anything."""
    pipes = []
    for function in functions:
        read, write = os.pipe()
        if not os.fork():
            code = 1
            try:
                with os.fdopen(write, "wb") as pipe:
                    pickle.dump(function(), pipe)
                code = 0
            except BaseException:  # noqa: BLE001  # the reader fails, too
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        pipes.append(read)
    found = []
    for read in pipes:
        with os.fdopen(read, "rb") as pipe:
            found.append(pickle.load(pipe))
    for _ in functions:
        os.wait()
    return found


@dataclass(frozen=True, slots=True)
class Scenario:
    """Steps in a folder of their own, in which ``store`` is the store."""

    name: str
    steps: tuple[str, ...]
    files: dict[str, str]
    words: dict[str, str]
    servers: frozenset[str]

    @property
    def has_lm(self) -> bool:
        """Whether models of it answer."""
        return any(step.startswith("run ") or "--lm" in step for step in self.steps)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> list[Scenario]:
        """Return the scenarios of cases.toml, one for each of their models."""
        found = []
        for table in document["scenario"]:
            for model in table.get("models", ["dense"]):
                lines = [line.removeprefix(f"[{model}] ") for line in table["steps"].splitlines()]
                steps = tuple(line for line in lines if line and not line.startswith("["))
                name = table["name"] + (f"-{model}" if "models" in table else "")
                kinds = frozenset(table.get("servers", ()))
                words = document["models"][model]
                found.append(cls(name, steps, table.get("files", {}), words, kinds))
        return found

    def run(self, world: World) -> dict[str, Any]:
        """Return the outcome of each step, by its line."""
        run = _Run(self, world)
        found: dict[str, Any] = {}
        for step in self.steps:
            name = step
            while name in found:  # the same step again
                name += " #"
            found[name] = run.step(step)
        return found


class _Run:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self._world = world
        self.folder = world.root / scenario.name
        (self.folder / "home").mkdir(parents=True)
        self._places = {**scenario.words, **world.places, "bucket": f"s3://models/{scenario.name}"}
        self._server: tuple[int, IO[str], Path] | None = None
        for name, text in scenario.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(text, self._places))

    def step(self, line: str) -> dict[str, Any]:
        words = shlex.split(filled(line, self._places), comments=False)
        if words[0] in {"@get", "@head", "@post"}:
            return self.ask(words[0][1:].upper(), *words[1:])
        if words[0].startswith("@"):
            return dict(getattr(self, words[0][1:])(*words[1:]) or {})
        more = {}
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            more[name] = value
        files = {}
        while len(words) > 2 and words[-2] in {"<", ">"}:
            files[words[-2]] = self.folder / words[-1]
            words = words[:-2]
        code, out, err = self._world.command(words, self.folder, more, files.get("<"))
        if ">" in files:
            files[">"].write_bytes(out)
            out = b""
        found: dict[str, Any] = {"exit": code, "words": {"err": self._lines(err.decode())}}
        try:
            found["json"] = self.normal(json.loads(out))
        except ValueError:
            found["words"]["out"] = self._lines(out.decode(errors="replace"))
        found["words"] = {key: lines for key, lines in found["words"].items() if lines}
        return found

    def _lines(self, text: str) -> list[str]:
        return [" ".join(self.plain(line).split()) for line in text.splitlines() if line.strip()]

    def plain(self, text: str) -> str:
        """Return a text without what differs from run to run."""
        text = text.replace(str(self._world.root), "<root>")
        for pattern, instead in _TIMES:
            text = re.sub(pattern, instead, text)
        return text

    def normal(self, value: Any) -> Any:
        """Return JSON without what differs from run to run."""
        if isinstance(value, dict):
            return {
                self.plain(key): "<varies>"
                if key in _DURATIONS and not isinstance(part, (dict, list))
                else self.normal(part)
                for key, part in value.items()
            }
        if isinstance(value, list):
            return [self.normal(part) for part in value]
        return self.plain(value) if isinstance(value, str) else value

    # The verbs.

    def serve(self, *words: str) -> dict[str, Any]:
        """Start ``blobstore serve`` and wait for the line with its address."""
        pipe = self._world.root / f"{self.folder.name}.pipe"
        os.mkfifo(pipe)
        command = ["serve", "--port", "0", *words]
        pid, _, err = self._world.start(command, self.folder, {}, pipe=pipe)
        output = pipe.open()
        pipe.unlink()
        line = output.readline()
        if not line:
            output.close()
            os.waitpid(pid, 0)
            return {"exit": "ended", "words": self._lines(err.read_text())}
        self._server = pid, output, err
        line = line.rstrip("\n")
        self._places["host"] = line.rpartition("//")[2].rstrip("/")
        manifest = self.folder / "store/manifests/registry.ollama.ai/library/a/latest"
        if manifest.exists():
            self._places["config"] = json.loads(manifest.read_bytes())["config"]["digest"]
        return {"words": self._lines(line)}

    def stop(self) -> dict[str, Any]:
        """End the server as Ctrl-C does."""
        if self._server is None:
            return {"exit": "ended before"}
        pid, output, err = self._server
        self._server = None
        os.kill(pid, signal.SIGINT)
        _, status = os.waitpid(pid, 0)
        output.close()
        return {"exit": os.waitstatus_to_exitcode(status), "words": self._lines(err.read_text())}

    def ask(self, method: str, target: str, *more: str) -> dict[str, Any]:
        """Ask the server: the status, some headers, and the body. ``more``: a body, or headers."""
        if self._server is None:
            return {"status": "the server has ended"}
        fields = dict(header.split("=", 1) for header in more if method != "POST")
        data = None
        if method == "POST":
            fields, data = {"Content-Type": "application/json"}, more[0].encode()
        url = f"http://{self._places['host']}{target}"
        request = Request(url, data, fields, method=method)
        try:
            with urlopen(request, timeout=_PATIENCE_S) as answer:  # noqa: S310
                status, got, raw = answer.status, answer.headers, answer.read()
        except HTTPError as error:
            status, got, raw = error.code, error.headers, error.read()
        headers = {key: got[key] for key in _HEADERS if got[key]}
        found = {"status": status, "headers": headers}
        text = raw.decode(errors="replace")
        with suppress(ValueError):
            return found | {"json": self.normal(json.loads(text))}
        if "text/html" in str(got["content-type"]):
            return found | {"body": "a page"}
        if "event-stream" in str(got["content-type"]):
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            events = [json.loads(line) if line[0] == "{" else line for line in lines]
            return found | {"body": self.normal(events)}
        return found | {"body": [len(raw), hashlib.sha256(raw).hexdigest()]}

    def store(self, name: str = "store") -> dict[str, Any]:
        """Return the digests of a store's manifests and blobs."""
        manifests = self.normal(_digests(self.folder / name / "manifests"))
        blobs = _digests(self.folder / name / "blobs")
        wrong = [
            key for key, digest in blobs.items() if not key.startswith(f"blobs/sha256-{digest}")
        ]
        return {"manifests": manifests, "blobs": [key[6:] for key in blobs], "wrong": wrong}

    def files(self, name: str) -> dict[str, Any]:
        """Return the digests of a folder's files, or of one file."""
        return {"files": _digests(self.folder / name)}

    def page(self, name: str) -> dict[str, Any]:
        """Return the headings of a page, and how many tables it has."""
        text = (self.folder / name).read_text()
        headings = re.findall(r"<h[123][^>]*>\s*([^<]+)", text)
        return {"parts": self.normal(headings), "tables": text.count("<table")}

    def sh(self, *words: str) -> None:
        """Run a program of the system."""
        subprocess.run(words, cwd=self.folder, check=True)

    def damage(self, name: str, size: str) -> None:
        """Flip a bit of the first blob of so many bytes at least."""
        blobs = sorted((self.folder / name / "blobs").iterdir())
        blob = next(path for path in blobs if path.stat().st_size >= int(size))
        raw = bytearray(blob.read_bytes())
        raw[-1] ^= 1
        blob.unlink()
        blob.write_bytes(raw)

    def importance(self, name: str, tensor: str) -> None:
        """Write the importance of a tensor's 256 columns."""
        header = {tensor: {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}
        text = json.dumps(header).encode()
        numbers = array("f", [1 + column % 7 for column in range(256)]).tobytes()
        (self.folder / name).write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def _digests(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return {
        one.relative_to(path.parent).as_posix(): hashlib.sha256(one.read_bytes()).hexdigest()[:16]
        for one in files
    }
