"""OpenAI's documents of answers: text, reasoning, calls of tools, log probabilities, usage."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from blobstore.mlx_lm.chat_requests import CHAT, TEXT

TOOLS = [{"type": "function", "function": {"name": "f"}}]
TOKENIZER = SimpleNamespace(
    has_thinking=True,
    think_start="<think>",
    think_end="</think>",
    has_tool_calling=True,
    tool_call_start="<call>",
    tool_call_end="</call>",
    tool_parser=lambda text, _: {"name": text, "arguments": {"a": "ü"}},
    structural_markers=(),
    response_transitions={},
    detokenizer=SimpleNamespace(add_token=lambda _: None, finalize=lambda: None, last_segment=""),
    convert_ids_to_tokens=lambda ids: ["ab"[one] for one in ids],
)


def answered(
    texts: list[str], reason: str = "stop", path: str = CHAT, state: str = "normal", **given: Any
) -> list[Any]:
    import mlx.core as mx

    from blobstore.mlx_lm.chat_service import ChatAnswer, Job, Prompt

    document = {"model": "m", "stream": False, "stop": [], "count": 1, **given}
    sent: list[Any] = []
    answer = ChatAnswer(Job(path, document, sent.append), TOKENIZER, Prompt([1, 2, 3], state, 0, 2))
    for number, text in enumerate(texts):
        is_last = number == len(texts) - 1
        TOKENIZER.detokenizer.last_segment = text
        answer.write(number, mx.array([-1.0, -2.0]), reason if is_last else None)
    assert sent.pop() is None
    return sent


def choice(*parts: Any, **given: Any) -> Any:
    (document,) = answered(*parts, **given)
    return document["choices"][0]


def test_a_text() -> None:
    (document,) = answered(["a", "b"], "length", TEXT)
    assert document["object"] == "text_completion"
    assert document["choices"] == [{"index": 0, "finish_reason": "length", "text": "ab"}]
    assert document["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("texts", "state"),
    [(["<think>", "why", "</thi", "nk>", "so"], "normal"), (["why</think>", "so"], "reasoning")],
)
def test_reasoning_is_apart(texts: list[str], state: str) -> None:
    assert choice(texts, state=state)["message"] == {
        "role": "assistant",
        "content": "so",
        "reasoning": "why",
    }
    chunks = answered(texts, state=state, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "why"
    assert "".join(delta.get("content", "") for delta in deltas) == "so"


def test_a_call_of_a_tool() -> None:
    for end in ("</call>", ""):
        found = choice(["<call>", "f", end], tools=TOOLS)
        assert (found["finish_reason"], found["message"]["content"]) == ("tool_calls", None)
        (call,) = found["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": "ü"}'}
    chunks = answered(["<call>", "f", "</call>", ""], tools=TOOLS, stream=True)
    calls = [one["choices"][0]["delta"].get("tool_calls", []) for one in chunks]
    assert [call["function"]["name"] for of in calls for call in of] == ["f"]


def test_log_probabilities() -> None:
    content = choice(["a"], logprobs=True)["logprobs"]["content"]
    assert content == [{"id": 0, "logprob": -1.0}]
    content = choice(["a"], logprobs=True, top_logprobs=1)["logprobs"]["content"]
    most = {"id": 0, "token": "a", "logprob": -1.0}
    assert json.loads(json.dumps(content)) == [most | {"top_logprobs": [most]}]


def test_the_usage_of_a_stream_is_for_those_that_ask() -> None:
    assert "usage" not in answered(["a"], stream=True)[-1]
    chunks = answered(["a"], stream=True, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 4
