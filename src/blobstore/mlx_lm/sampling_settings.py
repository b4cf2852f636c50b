"""Sampling: the parameters of an answer, and which of several sources counts. Pure.

The command line counts before the model's layer of parameters (Ollama's names), which counts before
generation_config.json (the names of transformers); mlx-lm's own defaults come last.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blobstore.errors import DocumentError, UsageError, quoted
from blobstore.formats.modelfile import RULE

NO_LIMIT = -1
"""For ``max_tokens``: an answer ends when the model ends it, or at the end of the context."""
# The default of mlx_lm.server, and so of `run` and `serve --lm`.
_MAX_TOKENS = 512
MAX_COUNT = 2**31 - 1
PLENTY = 1e6
"""No number of these has a meaning above it; of larger ones, MLX makes infinity or NaN."""
PENALTIES = ("repetition", "presence", "frequency")
_CHARACTERS = 16
# The context of a model that says none, for the characters of a prompt.
_CONTEXT = 2**17
# A lower temperature counts as 0: MLX divides by it, in float32, and would get infinity.
_COLDEST = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of an answer are chosen, and when it ends.

    The defaults are those of mlx-lm. ``context``: the most tokens of prompt and answer together,
    None without a limit. ``seed``: None for a random one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    max_tokens: int = _MAX_TOKENS
    seed: int | None = None
    context: int | None = None

    @property
    def most_characters(self) -> int:
        """The most characters of a prompt, which is refused before it becomes tokens.

        Tokens have 3 to 5 characters in texts, and up to 10 in code with long indents.
        """
        return _CHARACTERS * (self.context or _CONTEXT)

    def check_characters(self, count: int) -> None:
        """Raise UsageError if a prompt has too many characters."""
        if count > self.most_characters:
            raise UsageError(
                f"the prompt has {count:,} characters, at most {self.most_characters:,}",
                hint="Shorten the prompt.",
            )

    def document(self) -> dict[str, Any]:
        """Return these as parameters of OpenAI's protocol, by mlx-lm's names, without a seed."""
        settings: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_tokens": MAX_COUNT if self.max_tokens == NO_LIMIT else self.max_tokens,
            "stop": list(self.stop),
        }
        if size := self.repeat_last_n:  # 0: no token is penalized; to mlx-lm it would mean all
            repetition = 0.0 if self.repeat_penalty == 1 else self.repeat_penalty
            penalties = (repetition, self.presence_penalty, self.frequency_penalty)
            for name, penalty in zip(PENALTIES, penalties, strict=True):
                settings[f"{name}_context_size"] = size
                if penalty:
                    settings[f"{name}_penalty"] = penalty
        return settings

    def room(self, prompt: int, max_tokens: int | None = None) -> int:
        """Return the most tokens of an answer to a prompt of that many tokens.

        ``max_tokens``: that is wanted, instead of the own. Raises: UsageError if the prompt is
        empty, or fills the context.
        """
        if not prompt:
            raise UsageError("the prompt is empty")
        wanted = self.max_tokens if max_tokens is None else max_tokens
        if self.context is None:
            return wanted
        left = self.context - prompt
        if left <= 0:
            raise UsageError(
                f"the prompt has {prompt:,} tokens, and the context has {self.context:,}",
                hint="Shorten the prompt.",
            )
        return left if wanted == NO_LIMIT else min(wanted, left)


NUMBERS: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0, PLENTY),
    "top_p": (float, 0, 1),
    "top_k": (int, 0, MAX_COUNT),
    "min_p": (float, 0, 1),
    "repeat_penalty": (float, 1e-3, PLENTY),
    "repeat_last_n": (int, NO_LIMIT, MAX_COUNT),
    "presence_penalty": (float, -PLENTY, PLENTY),
    "frequency_penalty": (float, -PLENTY, PLENTY),
    "max_tokens": (int, NO_LIMIT - 1, MAX_COUNT),  # both mean no limit
    "seed": (int, 0, 2**63 - 1),
    "context": (int, 1, MAX_COUNT),
}
"""The type of each number, and from where to where."""


def checked_number(key: str, value: Any, kind: type, least: float, most: float) -> Any:
    """Return a number. Raises: UsageError for another type or a value out of the range."""
    if type(value) not in (int, kind) or not least <= value <= most:
        wanted = (
            f"{'a number' if kind is float else 'a whole number'} from {least:g} to {most:,.10g}"
        )
        expected = wanted if least < most else str(least)
        raise UsageError(f"{key} is {quoted(value)}, expected {expected}")
    return kind(value)


def read_field(name: str, value: Any, key: str | None = None) -> Any:
    """Return the value of a field of `Sampling`. ``key``: its name for the message.

    Raises: UsageError if it is invalid.
    """
    key = key or name
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{key} is {quoted(value)}, expected a string or a list of strings")
        return tuple(text for text in texts if text)
    number = checked_number(key, value, *NUMBERS[name])
    if name == "temperature" and number < _COLDEST:
        return 0.0
    if name == "max_tokens":
        if not number:
            raise UsageError(f"{key} is '0', expected 1 or more, or -1 for no limit")
        return max(number, NO_LIMIT)
    return number


_OLLAMA = {
    **{name: name for name in (*NUMBERS, "stop") if name not in ("max_tokens", "context")},
    "num_predict": "max_tokens",
    "num_ctx": "context",
}
_TRANSFORMERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
# What transformers ignores without ``do_sample``, which is off by default: it then takes the most
# likely token. Source: transformers 5.23.0 generation/configuration_utils.py `GenerationConfig`.
_ONLY_SAMPLED = ("temperature", "top_p", "top_k", "min_p")
# What would change a text in transformers, and can't in mlx-lm.
_OTHER_GENERATION = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "length_penalty",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "num_beam_groups",
    "penalty_alpha",
    "sequence_bias",
    "suppress_tokens",
    "top_h",
    "typical_p",
    "watermarking_config",
)


def choose_sampling(
    given: Mapping[str, Any],
    parameters: Mapping[str, Any],
    generation: Mapping[str, Any],
    context: int | None,
) -> tuple[Sampling, tuple[str, ...]]:
    """Return the parameters of answers, and notes on those of the model that are not used.

    ``given``: fields of `Sampling`, of the command line; None is not given. ``parameters``: a
    model's layer of them. ``generation``: generation_config.json. ``context``: tokens that the
    model was made for; it is never exceeded.

    Raises: UsageError for an invalid given value; DocumentError (rule T1) for one of the layer.
    """
    notes: list[str] = []
    fields = dict(_of_generation(generation, notes)) | dict(_of_layer(parameters, notes))
    for name, value in given.items():
        if value is not None:
            fields[name] = read_field(name, value)
    limits = (context, fields.get("context"))
    fields["context"] = min((limit for limit in limits if limit is not None), default=None)
    if fields.get("repeat_last_n") == NO_LIMIT:
        fields["repeat_last_n"] = fields["context"] or MAX_COUNT
    return Sampling(**fields), tuple(notes)


def _of_layer(parameters: Mapping[str, Any], notes: list[str]) -> Iterator[tuple[str, Any]]:
    for key in sorted(parameters.keys() & _OLLAMA.keys()):
        value = parameters[key]
        # By these Ollama's runners mean "not set".
        if type(value) is int and (
            (key == "seed" and value < 0) or (key, value) == ("num_predict", 0)
        ):
            continue
        try:
            yield _OLLAMA[key], read_field(_OLLAMA[key], value, key)
        except UsageError as error:
            raise DocumentError(
                f"the parameters: {error.message} (rule {RULE})", rule=RULE
            ) from None
    if unused := sorted(parameters.keys() - _OLLAMA.keys()):
        notes.append(f"parameters of the model that mlx-lm does not support: {', '.join(unused)}")


def _of_generation(generation: Mapping[str, Any], notes: list[str]) -> Iterator[tuple[str, Any]]:
    is_sampled = generation.get("do_sample") is True
    if is_sampled:
        yield "temperature", 1.0  # the default of transformers
    for key, name in _TRANSFORMERS.items():
        value = generation.get(key)
        if value is None or (key in _ONLY_SAMPLED and not is_sampled):
            continue
        try:
            yield name, read_field(name, value, key)
        except UsageError as error:
            notes.append(f"generation_config.json: {error.message}; it was ignored")
    unused = [key for key in _OTHER_GENERATION if generation.get(key) not in (None, 0, 1, [], {})]
    if unused:
        notes.append(f"generation_config.json: mlx-lm does not support {', '.join(unused)}")
