"""A conversation's messages and answers, with a model that repeats what it was given."""

import pytest
from hypothesis import given, strategies as st
from support.talking import CHAT_TEMPLATE, Letters, Parrot

from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.mlx_lm.conversation import Conversation, StopTexts, processors
from blobstore.mlx_lm.prompts import ModelTexts, Prompts
from blobstore.mlx_lm.sampling_settings import Sampling


def conversation(parrot: Parrot, template: str = CHAT_TEMPLATE) -> Conversation:
    texts = ModelTexts(system="S")
    return Conversation(parrot, Prompts("m", Letters(template), texts))  # type: ignore[arg-type]


def test_answers_are_part_of_the_next_prompt() -> None:
    parrot = Parrot()
    talk = conversation(parrot)
    assert "".join(talk.say("a")) == "ok"
    list(talk.say("b"))
    assert parrot.seen[1] == ("# system\nS\n# user\na\n# assistant\nok\n# user\nb\n# assistant\n")
    talk.clear()
    list(talk.say("a"))
    assert parrot.seen[2] == parrot.seen[0]
    answer = talk.say("c")
    for _ in answer:
        answer.stop()
    assert (answer.text, answer.finish_reason) == ("o", "interrupted")
    assert talk.messages[-1] == {"role": "assistant", "content": "o"}


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
