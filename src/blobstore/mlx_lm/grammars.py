"""Grammars: answers that follow a JSON Schema, or are a call of a function.

llguidance says which tokens may come next; the others are taken from the logits. JSON is written
as Python's `json.dumps` writes it: with other white space allowed, small models may write nothing
else.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from blobstore.errors import UsageError, install_hint

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The form of calls that a grammar is made for: an object with a name and arguments.
_CALLS = "mlx_lm.tool_parsers.json_tools"


def grammar_processors(
    document: Mapping[str, Any], tokenizer: Any, *, is_reasoning: bool
) -> list[Callable[[Any, Any], Any]]:
    """Return processors of logits for mlx-lm, none if an answer may be any text.

    ``document``: as `chat_requests.parse_request`. ``tokenizer``: mlx-lm's. ``is_reasoning``: the
    answer begins with reasoning, after which the grammar begins.

    Raises: UsageError without llguidance; for a schema that it does not support; and for calls that
    the model writes in a form of its own.
    """
    forms = [_call(function, tokenizer) for function in document["callable"]]
    if document["answer_schema"] is not None:
        forms.append(_json(document["answer_schema"]))
    if not forms:
        return []
    tokens = _tokens(tokenizer)
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, f"start: {' | '.join(forms)}", log_level=0)
    if matcher.is_error():
        reason = matcher.get_error().splitlines()[0].rpartition("schema: ")[2]
        raise UsageError(f"the JSON Schema is not supported by llguidance: {reason}")
    return [_processor(matcher, list(tokenizer.think_end_tokens) if is_reasoning else [])]


@lru_cache(1)
def _tokens(tokenizer: Any) -> Any:
    """Return llguidance's tokens; 150,000 take it a second."""
    try:
        from llguidance import LLTokenizer

        text = tokenizer.backend_tokenizer.to_str()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "response_format and tool_choice need llguidance and a fast tokenizer",
            hint=install_hint("lm"),
        ) from error
    return LLTokenizer(text, eos_token=list(tokenizer.eos_token_ids))


def _call(function: Mapping[str, Any], tokenizer: Any) -> str:
    if getattr(tokenizer.tool_parser, "__module__", None) != _CALLS:
        raise UsageError(
            "tool_choice and response_format can't be followed:"
            " the model has no calls of tools in JSON",
            hint="Use tool_choice auto or none, and no response_format with tools.",
        )
    begin, end = (
        mark if mark in tokenizer.all_special_tokens else json.dumps(mark)
        for mark in (tokenizer.tool_call_start, tokenizer.tool_call_end)
    )
    head = json.dumps(f'\n{{"name": {json.dumps(function.get("name"))}, "arguments": ')
    arguments = _json(function.get("parameters") or {"type": "object"})
    return f'{begin} {head} {arguments} "}}\\n" {end}'


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _STYLE})}"


def _processor(matcher: Any, end: Sequence[int]) -> Callable[[Any, Any], Any]:
    """Return a processor of logits ``[1, vocabulary]``, which begins after the tokens ``end``."""
    import mlx.core as mx

    has_started = False

    def process(tokens: Any, logits: Any) -> Any:
        nonlocal has_started
        if has_started:
            matcher.consume_token(tokens[-1].item())
        elif end and tokens[-len(end) :].tolist() != end:
            return logits
        has_started = True
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=logits.shape[-1], bitorder="little")
        return mx.where(mx.array(allowed, mx.bool_), logits, -mx.inf)

    return process
