"""OpenAI's documents of answers: text, reasoning, calls of tools, log probabilities, usage."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support.talking import CHAT_TEMPLATE, Letters, Parrot

from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.mlx_lm.chat_requests import CHAT, TEXT
from blobstore.mlx_lm.conversation import Conversation, StopTexts, processors
from blobstore.mlx_lm.prompts import ModelTexts, Prompts
from blobstore.mlx_lm.sampling_settings import Sampling

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

    from blobstore.mlx_lm.chat_service import ChatAnswer, Job

    document = {"model": "m", "stream": False, "stop": [], "count": 1, **given}
    sent: list[Any] = []
    answer = ChatAnswer(Job(path, document, sent.append), TOKENIZER, [1, 2, 3], 0, state, 2)
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


def test_reasoning_is_apart() -> None:
    said = {"role": "assistant", "content": "so", "reasoning": "why"}
    for state, texts in {
        "normal": ["<think>", "why", "</thi", "nk>", "so"],
        "reasoning": ["why</think>", "so"],
    }.items():
        assert choice(texts, state=state)["message"] == said
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


def conversation(parrot: Parrot, template: str = CHAT_TEMPLATE) -> Conversation:
    parrot.prompts = Prompts("m", Letters(template), ModelTexts(system="S"))
    return Conversation(parrot)  # type: ignore[arg-type]


def test_a_message_that_fails_is_forgotten() -> None:
    talk = conversation(Parrot())
    with pytest.raises(UsageError):
        talk.say("")
    assert [one["role"] for one in talk.messages] == ["system"]
    broken = conversation(Parrot(), "{{ 1 / 0 }}")
    with pytest.raises(UnsupportedSourceError):
        broken.say("a")


def test_the_oldest_messages_give_way_to_new_ones() -> None:
    parrot = Parrot(context=80)
    talk = conversation(parrot)
    list(talk.say("first"))
    list(talk.say("second"))
    list(talk.say("third"))
    assert talk.dropped == 2
    assert parrot.seen[-1].startswith("# system\nS\n# user\nsecond")
    with pytest.raises(UsageError, match="the context has 80"):
        talk.say("x" * 80)
    assert [one["content"] for one in talk.messages] == ["S", "second", "ok", "third", "ok"]


def test_penalties_of_the_last_0_tokens_are_none() -> None:
    """To mlx-lm, a context of 0 tokens is all of them."""
    assert processors(Sampling(repeat_last_n=0, presence_penalty=1).document()) == []


TEXTS = st.text("ab<", max_size=4)


def ended(pieces: list[str], stop: list[str]) -> tuple[str, bool]:
    stops = StopTexts(stop)
    passed = [stops.passed(one, is_last=False) for one in pieces]
    return "".join([*passed, stops.passed("", is_last=True)]), stops.is_found


@given(st.lists(TEXTS), st.lists(TEXTS.filter(bool), max_size=3))
def test_the_tokens_do_not_matter(pieces: list[str], stop: list[str]) -> None:
    text, is_found = ended(pieces, stop)
    assert (text, is_found) == ended(["".join(pieces)], stop) == ended(list("".join(pieces)), stop)
    assert "".join(pieces).startswith(text)
    assert is_found == any(one in "".join(pieces) for one in stop)
    assert not any(one in text for one in stop)
