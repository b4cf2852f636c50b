"""Stop texts are found wherever an answer is divided into tokens."""

from __future__ import annotations

from hypothesis import given, strategies as st

from blobstore.mlx_lm.conversation import StopTexts

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


def test_what_may_begin_a_stop_text_waits() -> None:
    stops = StopTexts(["END"])
    assert [stops.passed(one, is_last=False) for one in ("a E", "N", "x")] == ["a ", "", "ENx"]
