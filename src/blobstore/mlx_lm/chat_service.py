"""The service of one model to clients of OpenAI's protocol, without a server.

One thread computes. Answers without a seed are computed together by mlx-lm's `BatchGenerator`; one
with a seed is computed alone, after those before it, as is every answer of a model whose cache
can't be batched. Stop texts are found in the text, not in its tokens.

Answers are documents in OpenAI's form, whole or as a stream, those of mlx_lm/server.py at version
0.32.2. Reasoning and calls of tools are found in the text by mlx-lm's `TextStateMachine`, by the
marks of the model's tokenizer.

Only `cli` imports this module, inside a function: mlx-lm is loaded with it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import mlx.core as mx
from mlx_lm.generate import (
    BatchGenerator,
    TextStateMachine,
    make_stop_sequences,
    make_text_state_machine,
)
from mlx_lm.server import ToolCallFormatter, get_system_fingerprint

from blobstore.mlx_lm.chat_requests import CHAT, ChatModel, check_model, complete_request
from blobstore.mlx_lm.conversation import (
    LanguageModel,
    PromptCaches,
    StopRequest,
    StopTexts,
    load_language_model,
    processors,
    sampler,
)
from blobstore.mlx_lm.prompts import Prompts
from blobstore.store.ports import Readable

_log = logging.getLogger("blobstore.mlx_lm")
_CACHES = 10
"""Prompts and answers that are cached, as in mlx-lm's server."""
_CLOSE_S = 5
_TAIL = 11
"""The most tokens after which a template ends that begins reasoning, as in mlx-lm's server."""


Event = dict[str, Any] | tuple[int, int] | Exception | None
"""What a request gets: tokens of its prompt that are computed, and all of them; the documents of
its answer, one unless it is a stream; None or an exception at the end."""


@dataclass(slots=True)
class Prompt:
    """The tokens of a prompt. ``state``: in which an answer begins, "normal" or "reasoning"."""

    tokens: list[int]
    state: str = "normal"
    cached: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """A request that waits or is answered. ``put`` is called in the service's thread."""

    path: str
    document: Mapping[str, Any]
    put: Callable[[Event], None]
    is_stopped: bool = False

    def stop(self) -> None:
        self.is_stopped = True

    def check(self, done: int, total: int) -> None:
        """Say that a part of the prompt is computed. Raises: StopRequest."""
        if self.is_stopped:
            raise StopRequest
        self.put((done, total))


class ChatAnswer:
    """The answer to one request: documents, made from its tokens."""

    def __init__(self, job: Job, tokenizer: Any, prompt: Prompt) -> None:
        self.job = job
        self.has_stopped = False
        self._is_chat = job.path == CHAT
        self._is_stream: bool = job.document["stream"]
        self._prompt = prompt
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": get_system_fingerprint(),
            "object": f"{kind}.chunk" if self._is_chat and self._is_stream else kind,
            "model": job.document["model"],
            "created": int(time.time()),
        }
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._stops = StopTexts(job.document["stop"])
        self._machine = make_text_state_machine(tokenizer).make_state(prompt.state)
        self._format_calls = ToolCallFormatter(
            tokenizer.tool_parser, job.document.get("tools"), self._is_stream
        )
        self._count = 0
        self._logprobs: list[dict[str, Any]] = []
        self._state = prompt.state
        self._texts: defaultdict[str, str] = defaultdict(str)
        self._calls: list[str] = []
        self._has_called = False

    def write(self, token: int, logprobs: Any, reason: str | None) -> None:
        """Take the next token; send what is certain of the answer with it.

        ``reason``: mlx-lm's, that the answer ends.
        """
        if reason != "stop":  # that token ends the text, and is not a part of it
            self._detokenizer.add_token(token)
        if reason is not None:
            self._detokenizer.finalize()
        text = self._stops.passed(self._detokenizer.last_segment, is_last=reason is not None)
        self.has_stopped = self._stops.is_found
        reason = "stop" if self.has_stopped else reason
        self._count += 1
        self._note(token, logprobs)
        self._machine, segments = TextStateMachine.split(self._machine, text)
        if reason is not None:
            self._machine, rest, state = TextStateMachine.flush(self._machine)
            segments.append((state, rest))
        for state, segment in segments:
            if self._state == "tool" and state == "normal":
                self._end_call()
            self._texts[state] += segment
            self._state = state
        if reason is not None and self._state == "tool" and self._texts["tool"]:
            self._end_call()
        self._send("tool_calls" if reason == "stop" and self._has_called else reason)

    def _note(self, token: int, logprobs: Any) -> None:
        """Note the log probability of a token, or of the likeliest ones, if the request asks."""
        count = self.job.document.get("top_logprobs", 0)
        if self._is_stream:
            return
        if count > 0:
            ids: Any = mx.argsort(-logprobs)[:count].tolist()
            texts, values = self._tokenizer.convert_ids_to_tokens(ids), logprobs[ids].tolist()
            top = [
                {"id": one, "token": text, "logprob": value}
                for one, text, value in zip(ids, texts, values, strict=True)
            ]
            self._logprobs.append({**top[0], "top_logprobs": top})
        elif self.job.document.get("logprobs"):
            self._logprobs.append({"id": token, "logprob": logprobs[token].item()})

    def _end_call(self) -> None:
        self._calls.append(self._texts.pop("tool", ""))
        self._has_called = True

    def _send(self, reason: str | None) -> None:
        has_news = self._texts["normal"] or self._calls or self._texts["reasoning"]
        prompt = len(self._prompt.tokens)
        usage = {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": self._count,
                "total_tokens": prompt + self._count,
                "prompt_tokens_details": {"cached_tokens": self._prompt.cached},
            }
        }
        if not self._is_stream:
            if reason is not None:
                self.job.put({**self._with_choice(reason), **usage})
        elif reason is not None or (has_news and self._state != "tool"):
            self.job.put(self._with_choice(reason))
            self._texts.update(normal="", reasoning="")
            self._calls = []
            options = self.job.document.get("stream_options", {})
            if reason is not None and options.get("include_usage"):
                self.job.put({**self._head, "choices": [], **usage})
        if reason is not None:
            self.job.put(None)

    def _with_choice(self, reason: str | None) -> dict[str, Any]:
        text = self._texts["normal"]
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs}
        if not self._is_chat:
            choice["text"] = text
            return {**self._head, "choices": [choice]}
        message: dict[str, Any] = {"role": "assistant"}
        if text or not self._is_stream:
            message["content"] = text or None
        if reasoning := self._texts["reasoning"]:
            message["reasoning"] = reasoning
        if calls := self._format_calls(self._calls):
            message["tool_calls"] = calls
        choice["delta" if self._is_stream else "message"] = message
        return {**self._head, "choices": [choice]}


class ChatService:
    """A model that is served. It has a thread: call `close`.

    ``served`` has the defaults of requests.
    """

    def __init__(self, model: LanguageModel, prompts: Prompts, served: ChatModel) -> None:
        self.served = served
        self._model = model
        self._prompts = prompts
        self._created = int(time.time())
        self._caches = PromptCaches(_CACHES)
        self._can_batch = all(hasattr(one, "merge") for one in model.new_cache())
        self._answers: dict[int, ChatAnswer] = {}
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._next: Job | None = None
        self._is_closed = False
        # A daemon: a template may take long, and then the process has to end without it.
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @cached_property
    def _generator(self) -> BatchGenerator:
        return BatchGenerator(self._model.network)

    def models(self, name: str | None = None) -> dict[str, Any]:
        """Return the document of the model, or of the list that has only this one.

        Raises: ModelNotFoundError for another name.
        """
        document = {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "blobstore",
        }
        if name is None:
            return {"object": "list", "data": [document]}
        check_model(name, self.served)
        return document

    def submit(self, path: str, body: bytes, put: Callable[[Event], None]) -> Job:
        """Begin to answer a request to ``path``, CHAT or TEXT. Raises: as `complete_request`."""
        job = Job(path, complete_request(body, path, self.served), put)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End all answers and the thread; leave it after 5 seconds."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("an answer was not finished")

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._begin_or_go_on()
            except Exception as error:  # noqa: BLE001  # of MLX: it is the end of all
                _log.exception("the answers that were computed together failed")
                for answer in self._answers.values():
                    answer.job.put(error)
                self._answers.clear()
                self.__dict__.pop("_generator", None)

    def _begin_or_go_on(self) -> None:
        """Begin the next answer, if one waits and may begin; else compute a token of each."""
        if self._next is None:
            with suppress(Empty):
                self._next = self._jobs.get(block=not self._answers)
        job = self._next
        if job is not None and not (self._answers and self._is_alone(job)):
            self._next = None
            self._begin(job)
        elif self._answers:
            self._go_on()

    def _is_alone(self, job: Job) -> bool:
        return not self._can_batch or "seed" in job.document

    def _begin(self, job: Job) -> None:
        if job.is_stopped:
            return
        try:
            prompt = self._prompt(job)
            limit = job.document.get("max_completion_tokens", job.document["max_tokens"])
            limit = self._model.sampling.room(len(prompt.tokens), limit)
            cache, rest = self._caches.nearest(prompt.tokens)
            prompt.cached = len(prompt.tokens) - len(rest)
            answer = ChatAnswer(job, self._model.tokenizer, prompt)
            begin = self._answer_alone if self._is_alone(job) else self._add_to_batch
            begin(answer, prompt, cache, limit)
        except StopRequest:
            _log.debug("a client disconnected")
        except Exception as error:  # noqa: BLE001  # it is the answer
            job.put(error)

    def _prompt(self, job: Job) -> Prompt:
        tokenizer = self._model.tokenizer
        if job.path == CHAT:
            tokens = self._prompts.chat_tokens(job.document)
        else:
            tokens = list(tokenizer.encode(job.document["prompt"]))
        if job.path != CHAT or self._prompts.continues:
            return Prompt(tokens)
        state = "normal"
        if tokenizer.has_thinking:
            begins, ends = tokenizer.rfind_think_start(tokens), tokenizer.rfind_think_end(tokens)
            state = "reasoning" if begins > ends else state
        return Prompt(tokens, tokenizer.response_initial_state or state)

    def _answer_alone(self, answer: ChatAnswer, prompt: Prompt, cache: Any, limit: int) -> None:
        job = answer.job
        if "seed" in job.document:
            mx.random.seed(job.document["seed"])
        cache = self._model.new_cache() if cache is None else cache
        written, rest = list(prompt.tokens), prompt.tokens[prompt.cached :]
        for response in self._model.responses(rest, job.document, limit, cache, job.check):
            written.append(response.token)
            answer.write(response.token, response.logprobs, response.finish_reason)
            if answer.has_stopped or job.is_stopped or self._is_closed:
                break
        self._caches.keep(written, cache)

    def _add_to_batch(self, answer: ChatAnswer, prompt: Prompt, cache: Any, limit: int) -> None:
        """Add an answer to those that are computed together.

        Of a prompt that ends with the mark that begins reasoning, the cache of the part before is
        kept alone: a later prompt has another text in place of the mark.
        """
        document, tokenizer = answer.job.document, self._model.tokenizer
        tokens, begin, cut = prompt.tokens, prompt.cached, -1
        if tokenizer.has_thinking:
            cut = tokenizer.rfind_think_start(tokens, start=len(tokens) - _TAIL)
        cut = cut if cut > begin else len(tokens)
        (uid,) = self._generator.insert_segments(
            [[tokens[begin:cut], tokens[cut:]]],
            max_tokens=[limit],
            caches=[cache],
            all_tokens=[tokens[:begin]],
            samplers=[sampler(document, tokenizer)],
            logits_processors=[processors(document)],
            stop_sequences=[make_stop_sequences(tokenizer)],
        )
        self._answers[uid] = answer

    def _go_on(self) -> None:
        """Compute a token of each answer, or a part of its prompt."""
        prompts, tokens = self._generator.next()
        for done in prompts:
            self._answers[done.uid].job.put(done.progress)
        self._keep(
            prompt.uid for prompt in prompts if prompt.end_of_segment and not prompt.end_of_prompt
        )
        for response in tokens:
            answer = self._answers[response.uid]
            try:
                answer.write(response.token, response.logprobs, response.finish_reason)
            except Exception as error:  # noqa: BLE001  # of mlx-lm's parser of calls
                answer.job.put(error)
                answer.job.stop()
            if response.finish_reason is not None:
                self._caches.keep(response.all_tokens, response.prompt_cache)
                del self._answers[response.uid]
        stopped = {uid for uid, answer in self._answers.items() if answer.has_stopped}
        self._keep(stopped)
        gone = {uid for uid, answer in self._answers.items() if answer.job.is_stopped}
        if ended := stopped | gone:
            self._generator.remove(ended)
        for uid in ended:
            del self._answers[uid]

    def _keep(self, uids: Iterable[int]) -> None:
        for cache, tokens in self._generator.extract_cache(uids).values():
            self._caches.keep(tokens, cache)


def load_service(name: str, *, store: Readable) -> tuple[ChatService, tuple[str, ...]]:
    """Return the service of a stored model, and notes on parameters without effect.

    The model's own parameters, system text and messages are the defaults of requests; its seed too,
    but without one requests are not seeded. Raises: as `load_language_model`.
    """
    model, prompts, notes = load_language_model(name, store=store, given={})
    seed = prompts.texts.parameters.get("seed", -1)  # valid, or below 0: not set
    served = ChatModel(
        name=model.name,
        sampling=replace(model.sampling, seed=seed if seed >= 0 else None),
        vocabulary=len(model.tokenizer),
        beginning=prompts.first_messages(),
    )
    return ChatService(model, prompts, served), notes
