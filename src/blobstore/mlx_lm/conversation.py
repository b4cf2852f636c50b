"""An answer of a model, token by token, and a conversation that keeps its cache.

The keys and values of earlier messages are kept between answers (mlx-lm's prompt cache), so each
token of a conversation is computed once, unless a template changes earlier text.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blobstore.mlx_lm.loading import build, tokenizer_of
from blobstore.mlx_lm.prompts import Message, Prompts, texts_of
from blobstore.mlx_lm.sampling_settings import PENALTIES, Sampling, choose_sampling
from blobstore.mlx_lm.template_process import limit_templates
from blobstore.model.loader import open_model
from blobstore.model.on_mlx_lm import import_mlx_lm, mlx_lm_errors
from blobstore.names import ModelName
from blobstore.store.ports import Readable

_KEY = "model"


class StopTexts:
    """Finds texts that end an answer, whatever its tokens are; holds back what may begin one.

    The first stop text is the one that is complete first, the longest of several.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        from mlx_lm.generate import TextStateMachine

        self._machine = TextStateMachine({"": [(text, None) for text in texts]})
        self._state = self._machine.make_state("")
        self.is_found = False

    def passed(self, text: str, *, is_last: bool) -> str:
        """Return the text before a stop text, as far as that is known; all of it if it is last."""
        if self.is_found:
            return ""
        self._state, segments = self._machine.split(self._state, text)
        self.is_found = segments[-1][0] is None
        if is_last and not self.is_found:
            segments.append(("", self._machine.flush(self._state)[1]))
        return "".join(part for _, part in segments)


class StopRequest(BaseException):  # not an error of mlx-lm
    """The answer was stopped, or its reader is gone, while its prompt was computed."""


@dataclass(slots=True)
class Generation:
    """An answer that is being written; iterate over it for its text, piece by piece.

    The pieces are valid text: a character of several tokens comes whole. ``finish_reason`` is None
    while it is written, then "stop" (the model ended it, or a stop text appeared), "length", or
    "interrupted". ``seconds``: with its prompt.
    """

    pieces: Iterable[str] = ()
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    finish_reason: str | None = None
    is_stopped: bool = False

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def stop(self) -> None:
        """End the answer at the next token. Can be called from a handler of signals."""
        self.is_stopped = True

    @property
    def tokens_per_second(self) -> float | None:
        """The speed after the first token, None if there are no others."""
        spent = self.seconds - self.first_token_seconds
        return (self.tokens - 1) / spent if self.tokens > 1 and spent > 0 else None


@dataclass(eq=False)
class LanguageModel:
    """A loaded model that answers prompts, with the parameters of ``sampling``.

    ``seed``: of MLX's random numbers, when it was loaded. ``caches``: how many prompts and answers
    keep their keys and values; by default the conversation that goes on, and the one before an
    edit of it.
    """

    network: Any
    prompts: Prompts
    sampling: Sampling
    seed: int
    caches: int = 2

    def __post_init__(self) -> None:
        from mlx_lm.models.cache import LRUPromptCache

        self.name, self.tokenizer = self.prompts.name, self.prompts.tokenizer
        self._caches = LRUPromptCache(self.caches)

    @cached_property
    def generator(self) -> Any:
        """mlx-lm's `BatchGenerator` of the network."""
        from mlx_lm.generate import BatchGenerator

        return BatchGenerator(self.network)

    def nearest(self, prompt: list[int]) -> tuple[Any, list[int]]:
        """Return a cache of the beginning of a prompt, or None, and the tokens that it lacks.

        At least the last token is lacking, without which mlx-lm can't go on.
        """
        cache, rest = self._caches.fetch_nearest_cache(_KEY, prompt[:-1])
        return cache, [*rest, prompt[-1]]

    def keep(self, tokens: Sequence[int], cache: Any) -> None:
        self._caches.insert_cache(_KEY, list(tokens), cache)

    def answer(self, prompt: list[int]) -> Generation:
        """Return the answer to a prompt, whose cache is kept for a longer one.

        Raises: UsageError for a prompt that is empty or fills the context; while it is written,
        UnsupportedSourceError when mlx-lm can't run the model.
        """
        answer = Generation(prompt_tokens=len(prompt))
        answer.pieces = self._pieces(answer, list(prompt), self.sampling.room(len(prompt)))
        return answer

    def _pieces(self, answer: Generation, prompt: list[int], max_tokens: int) -> Iterator[str]:
        def check(_: int, __: int) -> None:
            if answer.is_stopped:
                raise StopRequest

        started, stops = time.monotonic(), StopTexts(self.sampling.stop)
        cache, rest = self.nearest(prompt)
        try:
            with mlx_lm_errors("run", self.name):
                cache = self.new_cache() if cache is None else cache
                document = self.sampling.document()
                change = processors(document)
                for response in self.responses(rest, document, max_tokens, cache, check, change):
                    prompt.append(response.token)
                    answer.tokens += 1
                    answer.seconds = time.monotonic() - started
                    answer.first_token_seconds = answer.first_token_seconds or answer.seconds
                    reason = response.finish_reason
                    piece = stops.passed(response.text, is_last=reason is not None)
                    answer.text += piece
                    if stops.is_found:
                        reason = "stop"
                    elif answer.is_stopped:
                        reason = reason or "interrupted"
                    answer.finish_reason = reason
                    if piece:
                        yield piece
                    if reason is not None:
                        break
        except StopRequest:
            answer.finish_reason = "interrupted"
            return  # its cache is incomplete
        self.keep(prompt, cache)

    def new_cache(self) -> Any:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.network)

    def responses(
        self,
        prompt: list[int],
        document: Mapping[str, Any],
        max_tokens: int,
        cache: Any,
        check: Callable[[int, int], None],
        processors: Sequence[Any],
    ) -> Iterator[Any]:
        """Yield mlx-lm's response for each token of an answer to what ``cache`` lacks of a prompt.

        ``document``: as `Sampling.document`. ``check`` is called with the tokens of the prompt that
        are computed, and all of them. ``processors``: of logits.
        """
        from mlx_lm import stream_generate

        yield from stream_generate(
            self.network,
            self.tokenizer,
            prompt,
            max_tokens=max_tokens,
            sampler=sampler(document, self.tokenizer),
            logits_processors=list(processors),
            prompt_cache=cache,
            prompt_progress_callback=check,
        )


def sampler(document: Mapping[str, Any], tokenizer: Any) -> Any:
    """Return mlx-lm's sampler for the parameters of `Sampling.document`, or of a request."""
    from mlx_lm.sample_utils import make_sampler

    return make_sampler(
        document["temperature"],
        top_p=document["top_p"],
        top_k=document["top_k"],
        min_p=document["min_p"],
        xtc_probability=document.get("xtc_probability", 0.0),
        xtc_threshold=document.get("xtc_threshold", 0.1),
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )


def processors(document: Mapping[str, Any]) -> Any:
    """Return what mlx-lm does to logits before it samples, for the same parameters."""
    from mlx_lm.sample_utils import make_logits_processors

    bias = {int(token): float(value) for token, value in document.get("logit_bias", {}).items()}
    values = {
        f"{name}_{what}": document.get(f"{name}_{what}", default)
        for name in PENALTIES
        for what, default in (("penalty", 0.0), ("context_size", 20))
    }
    return make_logits_processors(bias or None, **values)


class Conversation:
    """Messages and answers, in turn. Raises UnsupportedSourceError as `Prompts.check_template`."""

    def __init__(self, model: LanguageModel, system: str | None = None) -> None:
        model.prompts.check_template()
        self._model = model
        self._beginning = model.prompts.first_messages(system)
        self.messages: list[Message] = list(self._beginning)
        self.dropped = 0

    def clear(self) -> None:
        self.messages = list(self._beginning)

    def say(self, text: str) -> Generation:
        """Return the answer to a message, and add both to the conversation.

        The oldest messages are dropped while all are too long for the context; ``dropped`` counts
        them. A message without an answer is not added.

        Raises: as `Prompts.tokens` and `LanguageModel.answer`.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._model.prompts.tokens(messages)
        context = self._model.sampling.context
        first = len(self._beginning)
        self.dropped = 0
        while context is not None and len(prompt) >= context and len(messages) > first + 1:
            del messages[first : first + 2]  # a message and its answer
            self.dropped += 2
            prompt = self._model.prompts.tokens(messages)
        answer = self._model.answer(prompt)
        answer.pieces = self._record(answer, answer.pieces, messages)
        return answer

    def _record(
        self, answer: Generation, pieces: Iterable[str], messages: list[Message]
    ) -> Iterator[str]:
        yield from pieces
        if answer.text or answer.finish_reason != "interrupted":
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]


def load_language_model(
    name: str | ModelName,
    *,
    store: Readable,
    given: Mapping[str, Any],
    is_raw: bool = False,
    caches: int = 2,
) -> tuple[LanguageModel, tuple[str, ...]]:
    """Return a stored model that answers, and notes on parameters without effect.

    ``given``: fields of `Sampling` that count before the model's own. Without a seed, a random one
    is chosen.

    MLX's random numbers are seeded before the network is made, as ``mlx_lm.generate --seed`` does:
    making a network draws numbers for weights that are replaced then, so an answer depends on it.

    Raises: as `load`, `texts_of` and `choose_sampling`.
    """
    with open_model(name, store=store) as model:
        texts = texts_of(model)
        sampling, notes = choose_sampling(given, texts.parameters, texts.generation, texts.context)
        seed = sampling.seed
        seed = random.SystemRandom().randrange(2**32) if seed is None else seed
        import_mlx_lm()
        import mlx.core as mx

        mx.random.seed(seed)
        network, tokenizer = build(model), tokenizer_of(model)
        limit_templates(tokenizer, sampling.most_characters)
        prompts = Prompts(str(model.name), tokenizer, texts, is_raw)
        return LanguageModel(network, prompts, sampling, seed, caches), notes
