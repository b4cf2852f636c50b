"""The service of models to clients of OpenAI's protocol, without a server.

One thread loads models and computes. Answers of one model without a seed are computed together by
mlx-lm's `BatchGenerator`; one with a seed is computed alone, after those before it, as is every
answer of a model whose cache can't be batched. Answers of another model begin when those before
them have ended. Stop texts are found in the text, not in its tokens.

Answers are documents in OpenAI's form, whole or as a stream, those of mlx_lm/server.py at version
0.32.2. Reasoning and calls of tools are found in the text by mlx-lm's `TextStateMachine`, by the
marks of the model's tokenizer.

Only `cli` imports this module, inside a function: mlx-lm is loaded with it.
"""

import logging
import time
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import mlx.core as mx
from mlx_lm.generate import (
    TextStateMachine,
    make_stop_sequences,
    make_text_state_machine,
)
from mlx_lm.server import ToolCallFormatter, get_system_fingerprint

from blobstore.errors import UsageError
from blobstore.mlx_lm.chat_requests import (
    CHAT,
    complete_request,
    find_model,
    parse_request,
)
from blobstore.mlx_lm.conversation import (
    LanguageModel,
    StopRequest,
    StopTexts,
    load_language_model,
    processors,
    sampler,
)
from blobstore.mlx_lm.grammars import grammar_processors
from blobstore.store.ports import Readable
from blobstore.store.stored_model import StoredModel

_log = logging.getLogger("blobstore.mlx_lm")
# Prompts and answers that are cached, as in mlx-lm's server.
_CACHES = 10
_CLOSE_S = 5
# OpenAI's, of a token that can't come; JSON has no infinity.
_LEAST_LOGPROB = -9999.0
# The most tokens after which a template ends that begins reasoning, as in mlx-lm's server.
_TAIL = 11


Event = dict[str, Any] | tuple[int, int] | Exception | None
"""What a request gets: tokens of its prompt that are computed, and all of them; the documents of
its answer, one unless it is a stream; None or an exception at the end."""


@dataclass(eq=False)
class Job:
    """A request that waits or is answered. ``put`` is called in the service's thread.

    ``document``: of `parse_request`, and then of `complete_request`.
    """

    path: str
    document: Mapping[str, Any]
    put: Callable[[Event], None]
    is_stopped: bool = False

    def __post_init__(self) -> None:
        self.is_stream: bool = self.document["stream"]
        self._choices: list[dict[str, Any]] = []
        self._left: int = self.document["count"]
        self._usage: Counter[str] = Counter()
        is_chat = self.path == CHAT
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": get_system_fingerprint(),
            "object": f"{kind}.chunk" if is_chat and self.is_stream else kind,
            "model": self.document["model"],
            "created": int(time.time()),
        }

    def stop(self) -> None:
        self.is_stopped = True

    def fail(self, error: Exception) -> None:
        self.put(error)
        self.stop()

    def check(self, done: int, total: int) -> None:
        """Say that a part of the prompt is computed. Raises: StopRequest."""
        if self.is_stopped:
            raise StopRequest
        self.put((done, total))

    def add(self, choice: dict[str, Any]) -> None:
        """Send a part of an answer in a stream; keep one that is whole."""
        if self.is_stream:
            self.put({**self._head, "choices": [choice]})
        else:
            self._choices.append(choice)

    def end_answer(self, usage: Mapping[str, int]) -> None:
        """Count an answer that is written; send what is due after the last one."""
        self._usage.update(usage)
        self._left -= 1
        if self._left:
            return
        prompt, answer = self._usage["prompt"], self._usage["answer"]
        total = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": self._usage["cached"]},
        }
        if not self.is_stream or self.document.get("stream_options", {}).get("include_usage"):
            choices = sorted(self._choices, key=lambda choice: choice["index"])
            self.put({**self._head, "choices": choices, "usage": total})
        self.put(None)


class ChatAnswer:
    """One answer to a request: its parts, made from its tokens.

    ``prompt``: its tokens. ``index``: of the answer, among those to the request; ``state``: in
    which it begins, "normal" or "reasoning". ``cached``: tokens of the prompt that are computed.
    """

    def __init__(
        self, job: Job, tokenizer: Any, prompt: list[int], index: int, state: str, cached: int
    ) -> None:
        self.job = job
        self.prompt, self.index, self.cached = prompt, index, cached
        self.has_stopped = False
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._stops = StopTexts(job.document["stop"])
        self._machine = make_text_state_machine(tokenizer).make_state(state)
        self._format_calls = ToolCallFormatter(
            tokenizer.tool_parser, job.document.get("tools"), job.is_stream
        )
        self._count = 0
        self._logprobs: list[dict[str, Any]] = []
        self._state = state
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
        if self.job.is_stream:
            return
        if count > 0:
            ids: Any = mx.argsort(-logprobs)[:count].tolist()
            texts = self._tokenizer.convert_ids_to_tokens(ids)
            values: Any = mx.maximum(logprobs[ids], _LEAST_LOGPROB).tolist()
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
        if reason is not None or (self.job.is_stream and has_news and self._state != "tool"):
            self.job.add(self._choice(reason))
            self._texts.update(normal="", reasoning="")
            self._calls = []
        if reason is not None:
            is_first = self.index % self.job.document.get("n", 1) == 0
            own = {"prompt": len(self.prompt), "cached": self.cached} if is_first else {}
            self.job.end_answer({**own, "answer": self._count})

    def _choice(self, reason: str | None) -> dict[str, Any]:
        text = self._texts["normal"]
        choice: dict[str, Any] = {"index": self.index, "finish_reason": reason}
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs}
        if self.job.path != CHAT:
            return {**choice, "text": text}
        message: dict[str, Any] = {"role": "assistant"}
        if text or not self.job.is_stream:
            message["content"] = text or None
        if reasoning := self._texts["reasoning"]:
            message["reasoning"] = reasoning
        if calls := self._format_calls(self._calls):
            message["tool_calls"] = calls
        return {**choice, "delta" if self.job.is_stream else "message": message}


class ChatService:
    """Models that are served. It has a thread: call `close`.

    ``sizes``: the bytes of weights of each model by its name. ``load`` loads one when it is first
    asked for; ``memory``: the most bytes of those that are loaded. The one that was used least
    recently is unloaded before another that would not fit.

    Raises: as ``load``, for the first model.
    """

    def __init__(
        self, sizes: Mapping[str, int], load: Callable[[str], LanguageModel], memory: int
    ) -> None:
        self._sizes = sizes
        self._load = load
        self._memory = memory
        self._created = int(time.time())
        self._loaded: OrderedDict[str, LanguageModel] = OrderedDict()
        self._use(next(iter(sizes)))
        self._answers: dict[int, ChatAnswer] = {}
        self._jobs: SimpleQueue[tuple[Job, int] | None] = SimpleQueue()
        self._next: tuple[Job, int] | None = None
        self._is_closed = False
        # A daemon: a template may take long, and then the process has to end without it.
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def _current(self) -> LanguageModel:
        return next(reversed(self._loaded.values()))

    def _use(self, name: str) -> LanguageModel:
        """Return a model, which is then the current one. No other may have answers."""
        if name not in self._loaded:
            room = self._memory - self._sizes[name]
            while sum(self._sizes[loaded] for loaded in self._loaded) > room:
                self._loaded.popitem(last=False)
            mx.clear_cache()
            self._loaded[name] = self._load(name)
        self._loaded.move_to_end(name)
        return self._current

    def models(self, name: str | None = None) -> dict[str, Any]:
        """Return the document of a model, or of the list of all.

        Raises: ModelNotFoundError for another name.
        """
        head = {"object": "model", "created": self._created, "owned_by": "blobstore"}
        if name is not None:
            return {"id": find_model(name, [*self._sizes]), **head}
        return {"object": "list", "data": [{"id": one, **head} for one in self._sizes]}

    def submit(self, path: str, body: bytes, put: Callable[[Event], None]) -> Job:
        """Begin to answer a request to ``path``, CHAT or TEXT. Raises: as `parse_request`."""
        job = Job(path, parse_request(body, path, [*self._sizes]), put)
        for index in range(job.document["count"]):
            self._jobs.put((job, index))
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
                    answer.job.fail(error)
                self._answers.clear()
                vars(self._current).pop("generator", None)

    def _begin_or_go_on(self) -> None:
        """Begin the next answer, if one waits and may begin; else compute a token of each."""
        if self._next is None:
            with suppress(Empty):
                self._next = self._jobs.get(block=not self._answers)
        waiting = self._next
        if waiting is not None and not (self._answers and self._is_alone(waiting[0])):
            self._next = None
            self._begin(*waiting)
        elif self._answers:
            self._go_on()

    def _is_alone(self, job: Job) -> bool:
        model = self._current
        has_seed = "seed" in job.document or model.sampling.seed is not None
        can_batch = all(hasattr(one, "merge") for one in model.new_cache())
        return has_seed or job.document["model"] != model.name or not can_batch

    def _begin(self, job: Job, index: int) -> None:
        if job.is_stopped:
            return
        try:
            model = self._use(job.document["model"])
            tokenizer = model.tokenizer
            if not index:
                defaults = model.sampling, len(tokenizer), model.prompts.first_messages()
                job.document = complete_request(job.document, job.path, *defaults)
            prompt, state = _prompt(model, job, index)
            limit = job.document.get("max_completion_tokens", job.document["max_tokens"])
            limit = model.sampling.room(len(prompt), limit)
            cache, rest = model.nearest(prompt)
            is_reasoning = state == "reasoning"
            change = processors(job.document)
            change += grammar_processors(job.document, tokenizer, is_reasoning=is_reasoning)
            answer = ChatAnswer(job, tokenizer, prompt, index, state, len(prompt) - len(rest))
            begin = self._answer_alone if self._is_alone(job) else self._add_to_batch
            begin(answer, cache, limit, change)
        except StopRequest:
            _log.debug("a client disconnected")
        except Exception as error:  # noqa: BLE001  # it is the answer
            job.fail(error)

    def _answer_alone(self, answer: ChatAnswer, cache: Any, limit: int, change: list[Any]) -> None:
        job, model = answer.job, self._current
        if "seed" in job.document:  # each of several answers to one prompt has its own
            mx.random.seed(job.document["seed"] + answer.index % job.document.get("n", 1))
        cache = model.new_cache() if cache is None else cache
        written, rest = list(answer.prompt), answer.prompt[answer.cached :]
        for response in model.responses(rest, job.document, limit, cache, job.check, change):
            written.append(response.token)
            answer.write(response.token, response.logprobs, response.finish_reason)
            if answer.has_stopped or job.is_stopped or self._is_closed:
                break
        self._current.keep(written, cache)

    def _add_to_batch(self, answer: ChatAnswer, cache: Any, limit: int, change: list[Any]) -> None:
        """Add an answer to those that are computed together.

        Of a prompt that ends with the mark that begins reasoning, the cache of the part before is
        kept alone: a later prompt has another text in place of the mark.
        """
        tokenizer = self._current.tokenizer
        tokens, begin, cut = answer.prompt, answer.cached, -1
        if tokenizer.has_thinking:
            cut = tokenizer.rfind_think_start(tokens, start=len(tokens) - _TAIL)
        cut = cut if cut > begin else len(tokens)
        (uid,) = self._current.generator.insert_segments(
            [[tokens[begin:cut], tokens[cut:]]],
            max_tokens=[limit],
            caches=[cache],
            all_tokens=[tokens[:begin]],
            samplers=[sampler(answer.job.document, tokenizer)],
            logits_processors=[change],
            stop_sequences=[make_stop_sequences(tokenizer)],
        )
        self._answers[uid] = answer

    def _go_on(self) -> None:
        """Compute a token of each answer, or a part of its prompt."""
        model = self._current
        prompts, tokens = model.generator.next()
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
                answer.job.fail(error)
            if response.finish_reason is not None:
                model.keep(response.all_tokens, response.prompt_cache)
                del self._answers[response.uid]
        stopped = {uid for uid, answer in self._answers.items() if answer.has_stopped}
        self._keep(stopped)
        gone = {uid for uid, answer in self._answers.items() if answer.job.is_stopped}
        if ended := stopped | gone:
            model.generator.remove(ended)
            self._answers = {uid: self._answers[uid] for uid in self._answers.keys() - ended}

    def _keep(self, uids: Iterable[int]) -> None:
        for cache, tokens in self._current.generator.extract_cache(uids).values():
            self._current.keep(tokens, cache)


def _prompt(model: LanguageModel, job: Job, index: int) -> tuple[list[int], str]:
    """Return the prompt of an answer, and in which state that begins.

    Raises: as `Prompts.chat_tokens`.
    """
    tokenizer = model.tokenizer
    if job.path == CHAT:
        tokens = model.prompts.chat_tokens(job.document)
    else:
        given = job.document["prompts"][index // job.document.get("n", 1)]
        tokens = list(tokenizer.encode(given)) if isinstance(given, str) else given
    state = "normal"
    if job.path == CHAT and not model.prompts.continues:
        if tokenizer.has_thinking:
            begin, end = tokenizer.rfind_think_start(tokens), tokenizer.rfind_think_end(tokens)
            state = "reasoning" if begin > end else state
        state = tokenizer.response_initial_state or state
    return tokens, state


def load_service(
    names: Sequence[str],
    *,
    store: Readable,
    note: Callable[[str], None],
    memory: int = 2**63,
) -> ChatService:
    """Return the service of stored models, of which the first is loaded.

    A model's own parameters, system text and messages are the defaults of requests; its seed too,
    but without one requests are not seeded. ``note`` is called with parameters without effect.

    Raises: NotFoundError and the like for any of the models; UsageError for one that is larger than
    ``memory``; as `load_language_model` for the first.
    """
    models = [StoredModel.find(name, store) for name in names]
    sizes = {str(model.name): sum(one.size for one in model.weight_layers) for model in models}
    for name, size in sizes.items():
        if size > memory:
            raise UsageError(f"{name} has {size:,} bytes of weights, the limit is {memory:,}")

    def load(name: str) -> LanguageModel:
        model, notes = load_language_model(name, store=store, given={}, caches=_CACHES)
        for text in notes:
            note(f"{name}: {text}")
        return model

    return ChatService(sizes, load, memory)
