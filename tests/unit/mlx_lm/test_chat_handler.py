"""Requests whose client is gone: nothing more is computed for them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.lab  # mlx-lm's server takes seconds to import

REQUEST: tuple[Any, ...] = ("text", "hi", [], None, None)


class Gone:
    """The exchange of a client that is gone."""

    def check(self) -> None:
        raise ConnectionAbortedError


def request() -> Any:
    from mlx_lm.server import CompletionRequest

    return CompletionRequest(*REQUEST)


def test_a_waiting_request_is_not_tokenized() -> None:
    from blobstore.mlx_lm.chat_handler import Generator, _Watched

    given = request()

    def generate(asked: Any, *_: Any) -> Any:
        Generator._tokenize(SimpleNamespace(), None, asked, None)  # type: ignore[arg-type]

    generator: Any = SimpleNamespace(cli_args=None, generate=generate)
    with pytest.raises(ConnectionAbortedError):
        _Watched(generator, Gone()).generate(given, None, print)  # type: ignore[arg-type]


def test_a_prompt_is_not_computed_to_its_end() -> None:
    from blobstore.mlx_lm.chat_handler import _Watched

    stopped = []
    context = SimpleNamespace(stop=lambda: stopped.append(True))

    def generate(_: Any, __: Any, progress: Any) -> Any:
        return context, (progress(1, 2) for _ in range(1))

    generator: Any = SimpleNamespace(cli_args=None, generate=generate)
    _, responses = _Watched(generator, Gone()).generate(request(), None, print)  # type: ignore[arg-type]
    with pytest.raises(ConnectionAbortedError):
        next(responses)
    assert stopped == [True]


@dataclass(frozen=True)
class Piece:
    text: str
    finish_reason: str | None = None


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["Return", " a", " file"], ["e"], "R"),  # in the first token
        (["a", "b", "c", "d"], ["cd"], "ab"),  # over two tokens
        (["a", "xx", "y"], ["y", "xy"], "ax"),
        (["ab <", "x", "EN", "D"], ["END"], "ab <x"),
        (["a", "b", ""], ["z"], "ab"),  # ends by itself
    ],
)
def test_an_answer_ends_before_its_stop_text(
    pieces: list[str], stop: list[str], expected: str
) -> None:
    from blobstore.mlx_lm.chat_handler import stopped

    texts = [Piece(text) for text in pieces[:-1]] + [Piece(pieces[-1], "stop")]
    assert "".join(one.text for one in stopped(iter(texts), stop)) == expected


def test_an_answer_that_is_cut_keeps_what_could_begin_a_stop_text() -> None:
    from blobstore.mlx_lm.chat_handler import stopped

    found = list(stopped(iter([Piece("a E"), Piece("N", "length")]), ["END"]))
    assert "".join(one.text for one in found) == "a EN"
    assert found[-1].finish_reason == "length"
