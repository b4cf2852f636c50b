"""Chat templates in a process of their own, with limits: they are untrusted programs.

Jinja's sandbox keeps a template from Python's objects, but not from a text of gigabytes, a power of
large numbers or loops in loops, and a thread can't be ended from outside. So transformers renders
templates in a child process, which limits its own memory and processor time, and which its parent
ends if it takes too long: not every system enforces limits of memory.

The child answers one line of JSON with another. It ends with its standard input.
"""

import json
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock, Timer
from typing import Any

from blobstore.model.on_mlx_lm import in_one_line

SECONDS = 10
"""Processor time of one prompt. That of a megabyte of messages takes 0.1 s."""
MEMORY = 256 * 2**20
"""Bytes that rendering may take in addition to what transformers takes."""
_WALL_S = 120
# Bytes of a character in JSON, if it is escaped as two halves: the longest escape.
_ESCAPE = 12
_MAX_ERROR = 2**16


class TemplateError(ValueError):
    """A template can't be rendered. The message is one line, with the type of the error."""


class TemplateProcess:
    """A child process that renders templates; threads and models may share it.

    It starts when it is needed, and again after a template for which it had to be ended.
    """

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = RLock()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the child, if none runs, without waiting for it. It takes two seconds."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(  # noqa: S603  # our own program
                    [sys.executable, "-m", __name__, str(self._seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                weakref.finalize(self, _end, self._process)
            return self._process

    def render(
        self, template: str, tokens: dict[str, str], messages: Any, most: int, **options: Any
    ) -> str:
        """Return the text of a conversation, as transformers' ``apply_chat_template`` makes it.

        ``tokens``: the special tokens by name. ``most``: characters of the text. ``options``: those
        of ``apply_chat_template``.

        Raises: TemplateError for a template that fails, or exceeds a limit.
        """
        line = _line([template, tokens, messages, options, most])
        with self._lock:
            answer = self._answer(line, _MAX_ERROR + _ESCAPE * most)
        if not answer.endswith(b"\n"):
            raise TemplateError(
                f"it exceeds {self._seconds} s of processor time or the memory that it may take"
            )
        document = json.loads(answer)
        if "error" in document:
            raise TemplateError(document["error"])
        return str(document["text"])

    def _answer(self, line: bytes, longest: int) -> bytes:
        """Return the child's answer; a part of it, or none, if the child ended."""
        process = self.start()
        assert process.stdin is not None  # noqa: S101  # for mypy: both are pipes
        assert process.stdout is not None  # noqa: S101
        timer = Timer(_WALL_S, process.kill)
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(longest)
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self.close()
        return answer

    def close(self) -> None:
        """End the child; another template starts it again."""
        if self._process is not None:
            _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes, and waits
        process.kill()


_PROCESS = TemplateProcess()


def limit_templates(tokenizer: Any, characters: int) -> None:
    """Let a tokenizer of mlx-lm render its templates in the process for them, which all share.

    ``characters``: the most of a prompt, which is checked before it becomes tokens.
    One with code of mlx-lm or transformers in the place of a template stays as it is.
    """
    from transformers import PreTrainedTokenizerBase

    own = tokenizer.get_chat_template.__self__  # mlx-lm's tokenizer is a wrapper of transformers'
    if type(own).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return
    _PROCESS.start()

    def apply_chat_template(
        messages: Sequence[Any], *, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> Any:
        template = own.get_chat_template(None, options.get("tools"))
        tokens = {name: str(token) for name, token in own.special_tokens_map.items()}
        options["return_dict"] = return_dict
        text = _PROCESS.render(template, tokens, messages, characters, **options)
        return own.encode(text, add_special_tokens=False) if tokenize else text

    own.apply_chat_template = apply_chat_template


def reason_of(error: Exception) -> str:
    """Return one line that says why a prompt could not be made."""
    if isinstance(error, TemplateError):
        return str(error)
    return in_one_line(f"{type(error).__name__}: {error}")


def _render(
    template: str, tokens: dict[str, str], messages: Any, options: dict[str, Any], most: int
) -> dict[str, str]:
    from transformers import PreTrainedTokenizerBase

    try:
        tokenizer = PreTrainedTokenizerBase(chat_template=template, **tokens)
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except MemoryError:
        return {"error": "it exceeds the memory that it may take"}
    except Exception as error:  # noqa: BLE001  # a template can raise anything
        return {"error": reason_of(error)}
    if len(text) > most:
        return {"error": f"the prompt has {len(text):,} characters, at most {most:,}"}
    return {"text": text}


def _line(document: Any) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _limit(kind: int, amount: float) -> None:
    with suppress(ValueError):  # the limit that cannot be raised is lower
        resource.setrlimit(kind, (int(amount), resource.getrlimit(kind)[1]))


def _address_space() -> int:
    """Return the bytes of this process's address space; as Linux says it, else a gigabyte."""
    try:
        pages, _ = Path("/proc/self/statm").read_text("ascii").split(maxsplit=1)
    except OSError:
        return 2**30
    return int(pages) * resource.getpagesize()


def answer_requests(seconds: int) -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may go on
    _render("", {}, [{}], {}, 0)  # loads modules
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY)
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, used.ru_utime + used.ru_stime + seconds + 1)
        sys.stdout.buffer.write(_line(_render(*json.loads(line))))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    answer_requests(int(sys.argv[1]))
