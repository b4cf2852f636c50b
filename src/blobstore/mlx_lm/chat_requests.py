"""Requests of OpenAI's protocol, checked and completed. Pure.

The parameters are those of mlx_lm/server.py `APIHandler` at version 0.32.2, but for adapters,
images and templates, which a request can't name here; and OpenAI's ``n``, lists of prompts,
``response_format`` and ``tool_choice``, which mlx-lm's server lacks.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from blobstore.errors import (
    AccessError,
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
# Characters of JSON that become a grammar. llguidance takes 2.5 s for 2**20, in the one thread.
_MAX_SCHEMAS = {"response_format": 64 * 2**10, "tools": 256 * 2**10}
# To one request, of all its prompts; the most that OpenAI's ``n`` can ask for.
_MAX_ANSWERS = 128
# mlx-lm's name for the first model that the server was started with.
_OWN_MODEL = "default_model"
# What a client may not set among a template's own values: another template, other messages.
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
# The type of each number, and from where to where. -1 of ``top_logprobs`` is mlx-lm's "none".
_NUMBERS: Mapping[str, tuple[type, float, float]] = {
    **NUMBERS,
    "repetition_penalty": (float, 0, PLENTY),
    "repetition_context_size": (int, 0, MAX_COUNT),
    "presence_context_size": (int, 0, MAX_COUNT),
    "frequency_context_size": (int, 0, MAX_COUNT),
    "max_tokens": (int, 1, MAX_COUNT),
    "max_completion_tokens": (int, 1, MAX_COUNT),
    "n": (int, 1, _MAX_ANSWERS),
    "top_logprobs": (int, -1, 11),
    "xtc_probability": (float, 0, 1),
    "xtc_threshold": (float, 0, 0.5),
}
# What mlx-lm's handler ignores, but another answer is expected of any other value; and what would
# be another model.
_ONLY_VALUES = {"best_of": 1, "echo": False, "suffix": "", "adapters": None, "draft_model": None}
_KINDS: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("stream", "logprobs"), (bool, "true or false")),
    **dict.fromkeys(
        ("stream_options", "logit_bias", "chat_template_kwargs", "role_mapping"),
        (dict, "an object"),
    ),
}
_ANY = (object, "any")


def parse_request(raw: bytes, path: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what a request to ``path`` gives, without nulls; ``names``: of the models offered.

    ``model`` is one of the names, the first by default. ``prompts``: of TEXT, each a text or its
    tokens. ``answer_schema``: JSON Schema of the answer, None for any text. ``callable``: the
    functions of which the answer may, or must be a call; empty: as the model likes.

    Raises: UsageError for a request that is not valid, or asks for what is not served;
    ModelNotFoundError for another model.
    """
    given = {key: value for key, value in _object(raw).items() if value is not None}
    given["model"] = find_model(given.get("model", _OWN_MODEL), names)
    _check_values(given)
    if "stop" in given:
        given["stop"] = list(read_field("stop", given["stop"]))
        checked_number("the number of stop texts", len(given["stop"]), int, 0, _MAX_STOPS)
    prompts: list[Any] = [None]
    if path == CHAT:
        given["messages"] = _messages(given.get("messages"))
        _check_functions("tools", given.get("tools", []))
        if found := sorted(_RESERVED & given.get("chat_template_kwargs", {}).keys()):
            raise UsageError(f"chat_template_kwargs must not contain {', '.join(found)}")
    else:
        prompts = given["prompts"] = _prompts(given.get("prompt"))
    count = len(prompts) * given.get("n", 1)
    checked_number("the number of answers", count, int, 1, _MAX_ANSWERS)
    schema, functions = _answer_schema(given), _functions(given)
    choice = given.get("tool_choice", "auto")
    schema = schema if choice in ("auto", "none") else None
    callable_ = functions if schema is not None or choice != "auto" else []
    for field, form in (("response_format", schema), ("tools", callable_)):
        what = f"the length of the JSON Schema of {field}"
        checked_number(what, len(json.dumps(form)), int, 0, _MAX_SCHEMAS[field])
    return {
        "stream": False,
        **given,
        "tools": [] if choice == "none" else given.get("tools", []),
        "count": count,
        "answer_schema": schema,
        "callable": callable_,
    }


def complete_request(
    given: Mapping[str, Any],
    path: str,
    sampling: Sampling,
    vocabulary: int,
    beginning: Sequence[Message] = (),
) -> dict[str, Any]:
    """Return a request of `parse_request` to ``path`` with the defaults of a model's ``sampling``.

    ``vocabulary``: tokens, for the ids in a request. ``beginning``: the model's messages before a
    conversation; a system text in the request replaces the model's.

    Raises: UsageError for a token that the model lacks, and a prompt that can't fit its context.
    """
    document = {**sampling.document(), **given}
    document["temperature"] = read_field("temperature", document["temperature"])
    if sampling.seed is not None:
        document.setdefault("seed", sampling.seed)
    if document["top_k"] >= vocabulary:
        document["top_k"] = 0  # all tokens; mlx-lm wants fewer than there are
    for key, value in document.get("logit_bias", {}).items():
        if not (key.isascii() and key.isdecimal() and int(key[:20]) < vocabulary):
            raise UsageError(f"logit_bias: {quoted(key)} is not a token of the model")
        checked_number("a value of logit_bias", value, float, -PLENTY, PLENTY)
    if path == CHAT:
        has_system = any(one["role"] == "system" for one in given["messages"])
        own = [dict(one) for one in beginning if not has_system or one["role"] != "system"]
        document["messages"] = own + given["messages"]
        texts = [one["content"] for one in document["messages"]]
    else:
        texts = document["prompts"]
        for token in (token for prompt in texts if isinstance(prompt, list) for token in prompt):
            checked_number("a token of prompt", token, int, 0, vocabulary - 1)
    sampling.check_characters(sum(map(len, texts)))
    return document


def _prompts(prompt: Any) -> list[Any]:
    """Return the prompts of a request, each a text or a list of what should be tokens."""
    are_several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    prompts = prompt if are_several else [prompt]
    if not all(isinstance(one, str | list) and one for one in prompts):
        raise UsageError("prompt is missing, or is not a text, tokens, or a list of these")
    return prompts


def _answer_schema(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the JSON Schema that ``response_format`` asks for, None for any text."""
    match given.get("response_format", {"type": "text"}):
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise UsageError(
        f"response_format is {quoted(given['response_format'])}, expected the type text,"
        " json_object, or json_schema with json_schema.schema"
    )


def _functions(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the functions that ``tool_choice`` allows."""
    functions = [tool.get("function") or {} for tool in given.get("tools", [])]
    match given.get("tool_choice", "auto"):
        case "auto":
            return functions
        case "none":
            return []
        case {"type": "function", "function": {"name": name}}:
            functions = [function for function in functions if function.get("name") == name]
        case choice if choice != "required":
            functions = []
    if not functions:
        raise UsageError(
            f"tool_choice is {quoted(given['tool_choice'])}, expected none, auto, required, or a"
            " function of tools"
        )
    return functions


def _check_values(given: Mapping[str, Any]) -> None:
    """Raise UsageError for values that mlx-lm can't take, or ignores."""
    for key, value in given.items():
        if key in _NUMBERS:
            checked_number(key, value, *_NUMBERS[key])
        if key in _ONLY_VALUES and value != _ONLY_VALUES[key]:
            raise UsageError(f"{key} {quoted(value)} is not supported")
        kind, wanted = _KINDS.get(key, _ANY)
        if not isinstance(value, kind):
            raise UsageError(f"{key} is {quoted(value)}, expected {wanted}")


def find_model(name: Any, names: Sequence[str]) -> str:
    """Return the one of ``names`` that is meant. Raises: ModelNotFoundError for another model."""
    if not isinstance(name, str):
        raise UsageError("model is not a string")
    if name == _OWN_MODEL:
        return names[0]
    with suppress(InvalidNameError, KeyError):
        return {ModelName.parse(one).folded: one for one in names}[ModelName.parse(name).folded]
    raise ModelNotFoundError(
        f"the model {quoted(name)} is not served, only {', '.join(names)}", model=name
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


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages is missing, or not a list with a message")
    given = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError("a message is not an object with a role")
        _check_functions("tool_calls", message.get("tool_calls") or [])
        given.append({**message, "content": _text(message.get("content"))})
    return given


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
        isinstance(value, dict)
        and isinstance(function := value.get("function") or {}, dict)
        and isinstance(function.get("parameters") or {}, dict)
        for value in values
    ):
        raise UsageError(f"{key} is not a list of objects with functions")


def error_document(error: Exception) -> bytes:
    """Return an error as OpenAI's clients read it. An error that is not ours is mlx-lm's."""
    text, kind = f"mlx-lm can't answer: {error}", "server_error"
    if isinstance(error, BlobStoreError):
        text = error.message if error.hint is None else f"{error.message}. {error.hint}"
        kind = kind if isinstance(error, BusyError) else "invalid_request_error"
    code = "invalid_api_key" if isinstance(error, AccessError) else None
    return json.dumps({"error": {"message": text, "type": kind, "code": code}}).encode()
