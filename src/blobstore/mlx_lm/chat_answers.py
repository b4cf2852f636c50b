"""Answers in OpenAI's form, whole or as a stream, from the pieces that a model writes.

Reasoning and calls of tools are found in the text by mlx-lm's `TextStateMachine`, by the marks of
the model's tokenizer. The documents are those of mlx_lm/server.py at version 0.32.2.

Only `chat_service` imports this module: mlx-lm is loaded with it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter, get_system_fingerprint

from blobstore.mlx_lm.chat_requests import CHAT


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of an answer. ``text``: what is certain of the answer with it.

    ``top``: the most likely tokens instead of it, with their ``logprob``. ``finish_reason``: of the
    last piece, "stop" or "length".
    """

    text: str
    token: int
    logprob: float
    top: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt. ``state``: in which an answer begins, "normal" or "reasoning"."""

    tokens: list[int]
    state: str = "normal"
    cached: int = 0


class ChatAnswer:
    """The documents of an answer to one request. `add` its pieces as they are written."""

    def __init__(
        self, path: str, document: Mapping[str, Any], tokenizer: Any, prompt: Prompt
    ) -> None:
        self._is_chat = path == CHAT
        self.is_stream: bool = document["stream"]
        self._document = document
        self._prompt = prompt
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": get_system_fingerprint(),
            "object": f"{kind}.chunk" if self._is_chat and self.is_stream else kind,
            "model": document["model"],
            "created": int(time.time()),
        }
        self._machine = make_text_state_machine(tokenizer).make_state(prompt.state)
        self._format_calls = ToolCallFormatter(
            tokenizer.tool_parser, document.get("tools"), self.is_stream
        )
        self._pieces: list[Piece] = []
        self._state = prompt.state
        self._text = self._reasoning = self._call = ""
        self._calls: list[str] = []
        self._has_called = False

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self._pieces.append(piece)
        self._machine, segments = TextStateMachine.split(self._machine, piece.text)
        if piece.finish_reason is not None:
            self._machine, rest, state = TextStateMachine.flush(self._machine)
            segments.append((state, rest))
        for state, text in segments:
            self._add(state, text)
        if piece.finish_reason is not None and self._state == "tool" and self._call:
            self._end_call()

    def _add(self, state: str, text: str) -> None:
        if state == "reasoning":
            self._reasoning += text
        elif state == "tool":
            self._call += text
        elif state == "normal":
            if self._state == "tool":
                self._end_call()
            self._text += text
        self._state = state

    def _end_call(self) -> None:
        self._calls.append(self._call)
        self._call = ""
        self._has_called = True

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the documents that a stream has to send now; after the last piece its end."""
        reason = self._finish_reason()
        has_news = self._text or self._calls or self._reasoning
        if reason is not None or (has_news and self._state != "tool"):
            yield self._with_choice(reason)
            self._text = self._reasoning = ""
            self._calls = []
        options = self._document.get("stream_options", {})
        if reason is not None and options.get("include_usage"):
            yield {**self._head, "choices": [], "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """Return the document of the whole answer, which is complete."""
        return {**self._with_choice(self._finish_reason()), "usage": self._usage()}

    def _finish_reason(self) -> str | None:
        reason = self._pieces[-1].finish_reason
        return "tool_calls" if reason == "stop" and self._has_called else reason

    def _with_choice(self, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if not self.is_stream and (logprobs := self._logprobs()):
            choice["logprobs"] = {"content": logprobs}
        if self._is_chat:
            choice["delta" if self.is_stream else "message"] = self._message()
        else:
            choice["text"] = self._text
        return {**self._head, "choices": [choice]}

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if self._text or not self.is_stream:
            message["content"] = self._text or None
        if self._reasoning:
            message["reasoning"] = self._reasoning
        if calls := self._format_calls(self._calls):
            message["tool_calls"] = calls
        return message

    def _logprobs(self) -> list[dict[str, Any]]:
        if self._document.get("top_logprobs", 0) > 0:
            return [{**piece.top[0], "top_logprobs": piece.top} for piece in self._pieces]
        if self._document.get("logprobs"):
            return [{"id": piece.token, "logprob": piece.logprob} for piece in self._pieces]
        return []

    def _usage(self) -> dict[str, Any]:
        prompt, count = len(self._prompt.tokens), len(self._pieces)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": self._prompt.cached},
        }
