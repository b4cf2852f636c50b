"""Talking to models: `serve --lm` as a process, and a command on a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.mlx_lm.conversation import Generation
from blobstore.mlx_lm.sampling_settings import Sampling
from support.patient import patient

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant") %}
{{- raise_exception("unknown role " + message.role) }}
{%- endif %}
{{- "# " + message.role + "\\n" + message.content + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "# assistant\\n" }}{% endif %}"""
COMMAND = (sys.executable, "-m", "blobstore")
_PATIENCE_S = 600


def that_chats(folder: Path, source: Path, template: str = CHAT_TEMPLATE) -> Path:
    """Copy a checkpoint and give it a chat template."""
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Letters:
    """A tokenizer whose tokens are characters; ``^`` begins a text. It has mlx-lm's methods."""

    bos_token = "^"  # noqa: S105

    def __init__(self, template: str | None = None) -> None:
        self.has_chat_template = template is not None
        self._template = template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        text.encode()  # as tokenizers, which refuse halves of characters
        return [ord(one) for one in ("^" if add_special_tokens else "") + text]

    @staticmethod
    def decode(tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, **options: Any
    ) -> str | list[int]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[messages], chat_template=self._template, **options
        )
        text = str(rendered[0][0])
        return self.encode(text, add_special_tokens=False) if tokenize else text


class Parrot:
    """A talker that says "ok" in two tokens, and keeps its prompts."""

    name = "m:latest"

    def __init__(self, context: int | None = None) -> None:
        self.sampling = Sampling(context=context)
        self.seen: list[str] = []
        self._room = 0

    def answer(self, prompt: list[int]) -> Generation:
        self._room = self.sampling.room(len(prompt))
        self.seen.append(Letters.decode(prompt))
        answer = Generation(prompt_tokens=len(prompt))
        answer.pieces = self.pieces(answer)
        return answer

    def pieces(self, answer: Generation) -> Iterator[str]:
        for piece in ("o", "k")[: self._room]:
            if answer.is_stopped:
                answer.finish_reason = "interrupted"
                return
            answer.text += piece
            answer.tokens += 1
            yield piece
        answer.finish_reason = "stop" if answer.text == "ok" else "length"


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answers; ``address``: of its models."""

    process: subprocess.Popen[str]
    address: str


@contextmanager
def serving(store: Path, name: str, *words: str) -> Iterator[Serving]:
    """Yield `serve --lm` over a store, at a free port."""
    line = patient("serve", "--lm", name, "--store", str(store), "--port", "0", *words)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            addresses = [process.stdout.readline().split(" at ")[-1].split()[0] for _ in range(2)]
            yield Serving(process, addresses[1])
        finally:
            process.terminate()
            process.wait(240)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *line: str) -> None:
        process, self._file = pty.fork()
        if process == 0:
            os.environ["TERM"] = "dumb"
            os.execv(line[0], line)  # noqa: S606
        self._process = process
        self.shown = ""
        self._seen = 0

    def wait_for(self, text: str) -> None:
        """Read until the text is shown, after the last one that was waited for.

        Raises: AssertionError if it never is.
        """
        end = time.monotonic() + _PATIENCE_S
        while text not in self.shown[self._seen :]:
            assert time.monotonic() < end, f"{text!r} is not shown: {self.shown[self._seen :]!r}"
            if not self._read(1):
                raise AssertionError(f"ended before {text!r}: {self.shown[self._seen :]!r}")
        self._seen = self.shown.index(text, self._seen) + len(text)

    def send(self, text: str) -> None:
        os.write(self._file, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C at a prompt that is shown.

        CPython's `input` shows the prompt, then waits for a key. A signal in between is noticed
        with the next key only (Modules/readline.c: readline_until_enter_or_signal).
        """
        end = time.monotonic() + _PATIENCE_S
        while self._state() != "S":
            is_running = self._read(0.01)
            assert is_running and time.monotonic() < end, "the command does not wait for a key"  # noqa: PT018  # one fault
        self.send("\x03")

    def _state(self) -> str:
        """Return the state of the command's main thread: "S" while it waits (proc_pid_stat(5))."""
        return Path(f"/proc/{self._process}/stat").read_text().rpartition(") ")[2][0]

    def end(self) -> int:
        """Return the exit code of the command, which ends now."""
        while self._read(1):
            pass
        _, status = os.waitpid(self._process, 0)
        os.close(self._file)
        return os.waitstatus_to_exitcode(status)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._file], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._file, 4096)
        except OSError:  # Linux says this when the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)
