"""Runs the scenarios of cases.toml: commands in forked processes, and what they leave.

A step is a line: the words of a command, with ``NAME=VALUE`` before it for its environment,
``< FILE`` and ``> FILE`` after it; or an ``@verb``, a method of `_Run`. ``[dense]`` before a step:
only for that model. ``{model}`` and other words are those of the model.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import FIXTURES

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
Outcome = tuple[int, bytes, bytes]
"""A command's exit code, and what it printed on stdout and stderr."""


@contextmanager
def sources() -> Iterator[Path]:
    # Not TemporaryDirectory: a command that runs exit functions in its fork would remove it.
    root = Path(tempfile.mkdtemp(prefix="battery-"))
    try:
        for name in _MODELS:
            shutil.copytree(FIXTURES / name, root / name)
            for path in (root / name).iterdir():
                os.utime(path, (1_700_000_000, 1_700_000_000))
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"\{([a-z]+)\}", lambda match: words.get(match[1], match[0]), text)


def warm_up(*, has_lm: bool) -> None:
    """Import what most commands need, once for all forked processes."""
    for name in blobstore.__all__:
        getattr(blobstore, name)
    for name in ("blobstore.cli.main", "pydantic"):
        importlib.import_module(name)
    if has_lm:  # not mlx: its threads would be missing in the forked processes
        importlib.import_module("transformers.models.auto.tokenization_auto")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Steps in a folder of their own, in which ``store`` is the store."""

    name: str
    steps: tuple[str, ...]
    files: dict[str, str]
    words: dict[str, str]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> list[Scenario]:
        """Return the scenarios of cases.toml, one for each of their models."""
        found = []
        for table in document["scenario"]:
            for model in table.get("models", ["dense"]):
                lines = [line.removeprefix(f"[{model}] ") for line in table["steps"].splitlines()]
                steps = tuple(line for line in lines if line and not line.startswith("["))
                name = table["name"] + (f"-{model}" if "models" in table else "")
                found.append(cls(name, steps, table.get("files", {}), document["models"][model]))
        return found

    def run(self, root: Path, variables: Mapping[str, str]) -> dict[str, Any]:
        """Return the outcome of each step, by its line."""
        run = _Run(self, root, variables)
        found: dict[str, Any] = {}
        for step in self.steps:
            name = step
            while name in found:  # the same step again
                name += " #"
            found[name] = run.step(step)
        return found


class _Run:
    def __init__(self, scenario: Scenario, root: Path, variables: Mapping[str, str]) -> None:
        self._root = root
        self.folder = root / scenario.name
        (self.folder / "home").mkdir(parents=True)
        self._words = scenario.words
        places = {"home": str(self.folder / "home"), "root": str(root)}
        self._environment = {key: filled(text, places) for key, text in variables.items()}
        self._environment |= {
            key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ
        }
        for name, text in scenario.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(text, self._words))

    def command(
        self, words: list[str], more: Mapping[str, str], stdin: Path | None = None
    ) -> Outcome:
        out, err = (self._root / f"{time.monotonic_ns()}.{name}" for name in ("out", "err"))
        sys.stdout.flush()
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            return os.waitstatus_to_exitcode(status), out.read_bytes(), err.read_bytes()
        code = 70
        try:
            os.chdir(self.folder)
            os.environ.clear()
            os.environ.update({**self._environment, **more})
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

    def step(self, line: str) -> dict[str, Any]:
        words = shlex.split(filled(line, self._words), comments=False)
        if words[0].startswith("@"):
            return dict(getattr(self, words[0][1:])(*words[1:]) or {})
        more = {}
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            more[name] = value
        files = {}
        while len(words) > 2 and words[-2] in {"<", ">"}:
            file, sign = words.pop(), words.pop()
            files[sign] = self.folder / file
        code, out, err = self.command(words, more, files.get("<"))
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
        text = text.replace(str(self._root), "<root>")
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

    def store(self, name: str = "store") -> dict[str, Any]:
        manifests = self.normal(_digests(self.folder / name / "manifests"))
        blobs = _digests(self.folder / name / "blobs")
        wrong = [key for key, found in blobs.items() if not key.startswith(f"blobs/sha256-{found}")]
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
