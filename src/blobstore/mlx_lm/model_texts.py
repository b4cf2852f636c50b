"""What a stored model's layers and documents say about its prompts and its parameters.

Ollama keeps them in layers (template, system text, parameters, messages), checkpoints in
``generation_config.json`` and ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from blobstore.errors import DocumentError, LimitExceededError, quoted
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config
from blobstore.formats.documents import (
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    SYSTEM_MEDIA_TYPE,
    TEMPLATE_MEDIA_TYPE,
)
from blobstore.formats.modelfile import ROLES, RULE
from blobstore.model.loader import Model

_GENERATION_CONFIG = "generation_config.json"
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

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
            system=_text(model, SYSTEM_MEDIA_TYPE, "the system text"),
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
        message = f"{what} is not UTF-8 at byte {error.start} (rule {RULE})"
        raise DocumentError(message, rule=RULE) from None


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
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            message = f"the messages contain {quoted(one)}, expected a role and a content"
            raise DocumentError(f"{message} (rule {RULE})", rule=RULE)
        if not isinstance(one.get("content"), str):
            message = f"the messages contain a message of role {one['role']} without text"
            raise DocumentError(f"{message} (rule {RULE})", rule=RULE)
    return tuple({"role": one["role"], "content": one["content"]} for one in messages)


def _context(model: Model) -> int | None:
    config = parse_config(model.document(CONFIG_NAME))
    inner = config.get("text_config")
    for settings in (config, inner if isinstance(inner, dict) else {}):
        for key in _CONTEXT_KEYS:
            value = settings.get(key)
            if type(value) is int and value > 0:
                return value
    return None
