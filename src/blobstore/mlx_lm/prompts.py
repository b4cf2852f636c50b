"""Prompts: what a model says about them, and the tokens for a conversation, or a text to continue.

Ollama keeps a model's texts in layers (template, system text, parameters, messages), checkpoints in
``generation_config.json`` and ``config.json`` (`ModelTexts`).

The model's own chat template counts (chat_template.jinja, or the one of tokenizer_config.json).
Ollama's template layer is a program of another language, which is not run: only
``{{ .Prompt }}``, the prompt itself, is known. A model without a template continues the text. Jinja
templates are untrusted programs: transformers runs them in Jinja's sandbox, without access to
Python's objects, in a process with limits (template_process.py).
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from blobstore.errors import (
    DocumentError,
    LimitExceededError,
    UnsupportedSourceError,
    UsageError,
    quoted,
)
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config
from blobstore.formats.documents import (
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    SYSTEM_MEDIA_TYPE,
    TEMPLATE_MEDIA_TYPE,
)
from blobstore.formats.modelfile import ROLES, RULE
from blobstore.mlx_lm.template_process import reason_of
from blobstore.model.loader import Model

_GENERATION_CONFIG = "generation_config.json"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

Message = Mapping[str, str]
"""A message of a conversation: ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """A model's own texts and parameters.

    ``template``: Ollama's. ``messages`` come before every conversation. ``parameters``: Ollama's,
    as stored. ``generation``: generation_config.json. ``context``: tokens that config.json says the
    model was made for, None if it does not say.
    """

    template: str | None = None
    system: str | None = None
    messages: tuple[Message, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None


def texts_of(model: Model) -> ModelTexts:
    """Return the texts and parameters of an open model.

    Raises: NotFoundError, CorruptDataError (a layer or document that is missing, damaged, or not
    what its type says), LimitExceededError: each names the model.
    """
    try:
        return ModelTexts(
            template=_text(model, TEMPLATE_MEDIA_TYPE, "the template"),
            system=_text(model, SYSTEM_MEDIA_TYPE, "the system prompt"),
            messages=_messages(model.layer(MESSAGES_MEDIA_TYPE)),
            parameters=_parameters(model.layer(PARAMS_MEDIA_TYPE)),
            generation=generation_config(model),
            context=_context(model),
        )
    except (DocumentError, LimitExceededError) as error:
        raise error.at(f"model {model.name}", model=str(model.name)) from error


def generation_config(model: Model) -> Mapping[str, Any]:
    """Return a model's generation_config.json, empty if it is missing or not JSON.

    Source: mlx_lm/utils.py `load_config` at version 0.32.2, which ignores one that is not JSON.
    """
    if _GENERATION_CONFIG in model.documents():
        with suppress(DocumentError):
            return parse_config(model.document(_GENERATION_CONFIG), _GENERATION_CONFIG)
    return {}


def _text(model: Model, media_type: str, what: str) -> str | None:
    data = model.layer(media_type)
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{what} is not UTF-8 at byte {error.start} (rule {RULE})", rule=RULE
        ) from None


def _parameters(data: bytes | None) -> Mapping[str, Any]:
    return {} if data is None else strictjson.parse_object(data, "the parameters", rule=RULE)


def _messages(data: bytes | None) -> tuple[Message, ...]:
    if data is None:
        return ()
    # Its limits are those of an object, which the list is made for it.
    document = strictjson.parse_object(b'{"messages":%b}' % data, "the messages", rule=RULE)
    messages = document["messages"]
    if not isinstance(messages, list) or document.keys() != {"messages"}:
        raise DocumentError(f"the messages are not a list (rule {RULE})", rule=RULE)
    for one in messages:
        is_message = isinstance(one, dict) and one.get("role") in ROLES
        if not is_message or not isinstance(one.get("content"), str):
            message = f"the messages contain {quoted(one)}, expected a role and a text"
            raise DocumentError(f"{message} (rule {RULE})", rule=RULE)
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _context(model: Model) -> int | None:
    config = parse_config(model.document(CONFIG_NAME))
    inner = config.get("text_config")
    sections = (config, inner if isinstance(inner, dict) else {})
    values = (section.get(key) for section in sections for key in _CONTEXT_KEYS)
    return next((value for value in values if type(value) is int and value > 0), None)


# Halves of surrogate pairs, which tokenizers do not take.
_HALVES = re.compile("[\ud800-\udfff]")
_PROMPT_ALONE = re.compile(r"\s*\{\{-?\s*\.Prompt\s*-?\}\}\s*")


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The prompts of one model. ``name`` is for messages of errors.

    ``tokenizer``: mlx-lm's. ``is_raw``: texts are continued, whatever the template.
    """

    name: str
    tokenizer: Any
    texts: ModelTexts
    is_raw: bool = False

    @property
    def continues(self) -> bool:
        """Whether the model continues texts: there is no template, or it is not to be used."""
        return self.is_raw or not (self.tokenizer.has_chat_template or self._has_only_ollamas)

    @property
    def _has_only_ollamas(self) -> bool:
        template = self.texts.template
        is_program = template is not None and _PROMPT_ALONE.fullmatch(template) is None
        return is_program and not self.tokenizer.has_chat_template

    def check_template(self) -> None:
        """Raise UnsupportedSourceError if the only template is Ollama's."""
        if self._has_only_ollamas and not self.is_raw:
            raise UnsupportedSourceError(
                f"model {self.name}: its only chat template is Ollama's, which is not supported",
                model=self.name,
                hint="Use --raw to continue the text without a template, or import the model from"
                " a checkpoint with a chat_template.jinja.",
            )

    def first_messages(self, system: str | None = None) -> list[Message]:
        """Return the messages before a conversation: a system text, and those of the model.

        ``system`` replaces the model's own; "" removes it. A text that is continued has none.
        Source: ollama/ollama@0097ef5f server/routes.go `ChatHandler`.
        """
        if self.continues:
            return []
        text = self.texts.system if system is None else system
        own = [
            message
            for message in self.texts.messages
            if system is None or message["role"] != "system"
        ]
        return [{"role": "system", "content": text}, *own] if text else own

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt for the next answer to ``messages``, which may be one text.

        Raises: UsageError for an empty text, and for one that is not Unicode;
        UnsupportedSourceError when the only template is Ollama's, and when the template refuses the
        messages, or is broken.
        """
        check_prompt(messages[-1]["content"])
        if self.continues:
            text = _join(messages)
            bos = self.tokenizer.bos_token  # as mlx_lm's `stream_generate` does
            has_special = bos is not None and text.startswith(bos)
            return list(self.tokenizer.encode(text, add_special_tokens=not has_special))
        self.check_template()
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=True,
                    add_generation_prompt=True,
                )
            )
        except Exception as error:  # a template can raise anything
            raise UnsupportedSourceError(
                f"model {self.name}: its chat template can't be applied: {reason_of(error)}",
                model=self.name,
                hint="Use --raw to continue the text without a template.",
            ) from error

    def chat_tokens(self, document: Mapping[str, Any]) -> list[int]:
        """Return the prompt for a chat request of OpenAI's form, as mlx_lm.server makes it.

        Raises: UsageError when the template refuses the messages, or is broken;
        UnsupportedSourceError as `check_template`.
        """
        from mlx_lm.server import convert_chat, process_message_content

        self.check_template()
        messages = document["messages"]
        if self.continues:
            if self.texts.template is not None:  # the prompt itself
                return self.tokens(messages)
            return list(self.tokenizer.encode(convert_chat(messages, document.get("role_mapping"))))
        try:
            process_message_content(messages)  # reads the arguments of tool calls
            tokens = self.tokenizer.apply_chat_template(
                messages,
                tools=document.get("tools") or None,
                tokenize=True,
                add_generation_prompt=True,
                **document.get("chat_template_kwargs", {}),
            )
        except Exception as error:  # as above
            raise UsageError(f"can't make a prompt of the messages: {reason_of(error)}") from error
        return list(tokens)


def check_prompt(text: str) -> None:
    """Raise UsageError for an empty prompt, and for one that is not Unicode text."""
    if not text:
        raise UsageError("the prompt is empty")
    if _HALVES.search(text):
        raise UsageError("the prompt is not valid text")


def _join(messages: Sequence[Message]) -> str:
    """Return the text so far; what a person adds begins on a line of its own."""
    whole = ""
    for message in messages:
        is_added = whole and message["role"] != "assistant" and not whole.endswith("\n")
        whole += ("\n" if is_added else "") + message["content"]
    return whole
