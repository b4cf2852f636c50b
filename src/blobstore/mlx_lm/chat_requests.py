"""Requests of OpenAI's protocol, checked and completed. Pure.

The parameters are those of mlx_lm/server.py `APIHandler` at version 0.32.2, but for other models,
images and templates, which a request can't name here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    BusyError,
    InvalidNameError,
    ModelNotFoundError,
    UsageError,
    quoted,
)
from blobstore.formats import strictjson
from blobstore.formats.strictjson import StrictJsonError
from blobstore.mlx_lm.prompts import Message
from blobstore.mlx_lm.sampling_settings import (
    MAX_COUNT,
    NUMBERS,
    PLENTY,
    Sampling,
    checked_number,
    read_field,
)
from blobstore.names import ModelName

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MODELS = "/v1/models"
MAX_BODY = 8 * 2**20
"""Bytes of a request."""
_MAX_STOPS = 16
_OWN_MODEL = "default_model"
"""mlx-lm's name for the model that the server was started with."""
_OTHER_MODELS = ("adapters", "draft_model")
_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""What a client may not set among a template's own values: another template, other messages."""
_NUMBERS: Mapping[str, tuple[type, float, float]] = {
    **NUMBERS,
    "repetition_penalty": (float, 0, PLENTY),
    "repetition_context_size": (int, 0, MAX_COUNT),
    "presence_context_size": (int, 0, MAX_COUNT),
    "frequency_context_size": (int, 0, MAX_COUNT),
    "max_tokens": (int, 1, MAX_COUNT),
    "max_completion_tokens": (int, 1, MAX_COUNT),
    "n": (int, 1, 1),
    "top_logprobs": (int, -1, 11),
    "xtc_probability": (float, 0, 1),
    "xtc_threshold": (float, 0, 0.5),
}
"""The type of each number, and from where to where. -1 of ``top_logprobs`` is mlx-lm's "none"."""
_ONLY_VALUES = {
    "best_of": 1,
    "echo": False,
    "response_format": {"type": "text"},
    "suffix": "",
}
"""What mlx-lm's handler ignores, but another answer is expected of any other value."""
_KINDS = (
    (bool, "true or false", ("stream", "logprobs")),
    (dict, "an object", ("stream_options", "logit_bias", "chat_template_kwargs", "role_mapping")),
)


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What is served: a model's name, its parameters, and the messages before a conversation.

    ``vocabulary``: tokens, for the ids in a request.
    """

    name: str
    sampling: Sampling
    vocabulary: int
    beginning: Sequence[Message] = ()


def complete_request(raw: bytes, path: str, served: ChatModel) -> dict[str, Any]:
    """Return the document of a request to ``path``: what is given, and the model's defaults.

    Raises: UsageError for a request that is not valid, or asks for what is not served;
    ModelNotFoundError for another model.
    """
    given = {key: value for key, value in _object(raw).items() if value is not None}
    check_model(given.get("model", served.name), served)
    _check_values(given)
    document = {**served.sampling.document(), "stream": False, **given, "model": served.name}
    document["temperature"] = read_field("temperature", document["temperature"])
    if served.sampling.seed is not None:
        document.setdefault("seed", served.sampling.seed)
    if "stop" in given:
        document["stop"] = list(read_field("stop", given["stop"]))
        if len(document["stop"]) > _MAX_STOPS:
            raise UsageError(f"stop has {len(document['stop'])} texts, at most {_MAX_STOPS}")
    if document["top_k"] >= served.vocabulary:
        document["top_k"] = 0  # all tokens; mlx-lm wants fewer than there are
    for key, value in document.get("logit_bias", {}).items():
        if not (key.isascii() and key.isdecimal() and int(key[:20]) < served.vocabulary):
            raise UsageError(f"logit_bias: {quoted(key)} is not a token of the model")
        checked_number("a value of logit_bias", value, float, -PLENTY, PLENTY)
    if path == CHAT:
        document["messages"] = _messages(given.get("messages"), served.beginning)
        _check_functions("tools", document.get("tools", []))
        if found := sorted(_RESERVED & document.get("chat_template_kwargs", {}).keys()):
            raise UsageError(f"chat_template_kwargs must not contain {', '.join(found)}")
        texts = [one["content"] for one in document["messages"]]
    else:
        texts = [given.get("prompt")]
        if not isinstance(texts[0], str) or not texts[0]:
            raise UsageError("prompt is missing, or not a single string")
    served.sampling.check_characters(sum(map(len, texts)))
    return document


def _check_values(given: Mapping[str, Any]) -> None:
    """Raise UsageError for values that mlx-lm can't take, or ignores."""
    for key in _OTHER_MODELS:
        if key in given:
            raise UsageError(f"{key} is not supported: one model is served")
    for key, limits in _NUMBERS.items():
        if key in given:
            checked_number(key, given[key], *limits)
    for key, value in _ONLY_VALUES.items():
        if given.get(key, value) != value:
            raise UsageError(f"{key} {quoted(given[key])} is not supported by mlx-lm")
    for kind, wanted, keys in _KINDS:
        for key in keys:
            if key in given and not isinstance(given[key], kind):
                raise UsageError(f"{key} is {quoted(given[key])}, expected {wanted}")


def check_model(name: Any, served: ChatModel) -> None:
    """Raise ModelNotFoundError for the name of another model than the one that is served."""
    if not isinstance(name, str):
        raise UsageError("model is not a string")
    with suppress(InvalidNameError):
        is_ours = ModelName.parse(name).folded == ModelName.parse(served.name).folded
        if is_ours or name == _OWN_MODEL:
            return
    raise ModelNotFoundError(
        f"the model {quoted(name)} is not served, only {served.name}", model=name
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        document = strictjson.parse(raw)
        strictjson.check_depth(document)
    except StrictJsonError as error:
        raise UsageError(f"the request: {error}") from None
    if not isinstance(document, dict):
        raise UsageError("the request is not a JSON object")
    return document


def _messages(messages: Any, beginning: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages after those of the model, whose system text gives way to another."""
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages is missing, or not a list with a message")
    given = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError("a message is not an object with a role")
        _check_functions("tool_calls", message.get("tool_calls") or [])
        given.append({**message, "content": _text(message.get("content"))})
    has_system = any(one["role"] == "system" for one in given)
    own = [dict(one) for one in beginning if not (has_system and one["role"] == "system")]
    return own + given


def _text(content: Any) -> str:
    """Return the text of a message, whose parts are joined as mlx-lm joins them.

    Raises: UsageError for other content: mlx-lm would fetch images by their addresses.
    """
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not (is_text and isinstance(part.get("text"), str)):
            raise UsageError(
                "the content of a message is not text: images and files are not supported"
            )
    return "".join(part["text"] for part in parts)


def _check_functions(key: str, values: Any) -> None:
    """Raise UsageError for what is not a list of objects; their functions are objects too."""
    if not isinstance(values, list) or not all(
        isinstance(value, dict) and isinstance(value.get("function") or {}, dict)
        for value in values
    ):
        raise UsageError(f"{key} is not a list of objects with functions")


def error_document(error: Exception) -> bytes:
    """Return an error as OpenAI's clients read it. An error that is not ours is mlx-lm's."""
    text, kind = f"mlx-lm can't answer: {error}", "server_error"
    if isinstance(error, BlobStoreError):
        text = error.message if error.hint is None else f"{error.message}. {error.hint}"
        kind = kind if isinstance(error, BusyError) else "invalid_request_error"
    return json.dumps({"error": {"message": text, "type": kind, "code": None}}).encode()
