"""The service of real models: answers alone and together, stop texts, clients that are gone."""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support import PYCODE
from support.talking import CHAT_TEMPLATE, that_chats

import blobstore
from blobstore.errors import UsageError
from blobstore.mlx_lm.chat_requests import CHAT, TEXT

PROMPT = "def read_file(path):"
ANSWER = '\n        """Return a file-'
TOOLS = CHAT_TEMPLATE + "{# <tool_call> tool_call.name #}"
"""By these words mlx-lm knows the form of calls."""


ALONE = pytest.mark.parametrize("alone", [{}, {"seed": 1}], ids=["in a batch", "alone"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from blobstore.mlx_lm.chat_service import load_service

    folder = tmp_path_factory.mktemp("served")
    store = blobstore.open_store(folder / "store")
    blobstore.import_model(that_chats(folder / "source", PYCODE), "m", store=store)
    source = that_chats(folder / "tools", PYCODE, TOOLS)
    (source / "generation_config.json").write_text('{"num_beams": 2}')
    blobstore.import_model(source, "n", store=store)
    notes: list[str] = []
    with pytest.raises(UsageError, match=r"n:latest has 10,529,080 bytes of weights"):
        load_service(["n", "m"], store=store, note=notes.append, memory=9)
    made: Any = load_service(["m", "n"], store=store, note=notes.append, memory=15_000_000)
    with closing(made):
        made.notes = notes
        yield made


class Client:
    """A request, and the events of its answer. ``holds``: the service, until it is set."""

    def __init__(
        self, service: Any, path: str = TEXT, holds: threading.Event | None = None, **given: Any
    ) -> None:
        words = {"prompt": PROMPT} if path == TEXT else {"messages": [{"role": "user", **given}]}
        document = {"model": "m", "temperature": 0, "max_tokens": 6, **words, **given}
        self.events: queue.Queue[Any] = queue.Queue()

        def put(event: Any) -> None:
            self.events.put(event)
            if holds is not None and isinstance(event, dict):
                holds.wait()

        self.job = service.submit(path, json.dumps(document).encode(), put)

    def event(self) -> Any:
        event = self.events.get(timeout=300)
        if isinstance(event, Exception):
            raise event
        return event

    def whole(self) -> Any:
        while isinstance(event := self.event(), tuple):
            pass
        assert self.event() is None
        return event

    def text(self) -> str:
        return str(self.whole()["choices"][0]["text"])


@ALONE
def test_an_answer_ends_before_its_stop_text(service: Any, alone: dict[str, Any]) -> None:
    found = Client(service, stop=["e"], **alone).whole()
    text = ANSWER[: ANSWER.index("e")]
    assert found["choices"] == [{"index": 0, "finish_reason": "stop", "text": text}]
    again = Client(service, **alone).whole()
    assert again["choices"][0]["text"] == ANSWER
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    # mlx_lm.server finds such a prompt whole in its cache, and fails.
    assert Client(service, prompt=PROMPT + ANSWER, **alone).text()


def test_answers_together_are_those_alone(service: Any) -> None:
    prompts = [f"def f{number}(" for number in range(3)]
    together = [Client(service, prompt=prompt) for prompt in prompts]
    seeded = Client(service, prompt=prompts[0], seed=3)
    texts = [client.text() for client in together]
    assert texts == [Client(service, prompt=prompt).text() for prompt in prompts]
    assert seeded.text() == texts[0]


@ALONE
def test_the_answer_of_a_client_that_is_gone_ends(service: Any, alone: dict[str, Any]) -> None:
    is_gone = threading.Event()
    gone = Client(service, holds=is_gone, max_tokens=900, stream=True, **alone)
    waits = Client(service, max_tokens=900, seed=1)
    while isinstance(gone.event(), tuple):
        pass
    for client in (waits, gone):
        client.job.stop()
    is_gone.set()
    assert Client(service, seed=2).text() == ANSWER
    assert gone.events.empty()
    assert waits.events.empty()


def test_a_prompt_that_can_not_be_made_is_an_error(service: Any) -> None:
    with pytest.raises(UsageError, match="context"):
        Client(service, prompt="a " * 3000).whole()
    with pytest.raises(UsageError, match="unknown role narrator"):
        Client(service, CHAT, messages=[{"role": "narrator", "content": "x"}]).whole()
    assert Client(service, CHAT, content="hi").whole()["choices"][0]["message"]["content"]


def test_an_error_of_mlx_ends_the_answers(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.generate import BatchGenerator

    def fail(*_: object) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as context:
        context.setattr(BatchGenerator, "next", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            Client(service).whole()
    assert Client(service).text() == ANSWER


def test_several_answers_to_several_prompts(service: Any) -> None:
    prompts = [PROMPT, "import", [5, 6]]
    document = Client(service, prompt=prompts, n=2).whole()
    alone = [Client(service, prompt=prompt).whole() for prompt in prompts]
    texts = [one["choices"][0]["text"] for one in alone for _ in range(2)]
    assert [one["text"] for one in document["choices"]] == texts
    assert [one["index"] for one in document["choices"]] == [0, 1, 2, 3, 4, 5]
    tokens = sum(one["usage"]["prompt_tokens"] for one in alone)
    assert document["usage"]["prompt_tokens"] == tokens
    seeded = Client(service, n=2, temperature=1.5, seed=1).whole()["choices"]
    assert seeded[0]["text"] != seeded[1]["text"]


def test_a_model_is_loaded_when_it_is_asked_for(service: Any) -> None:
    for _ in range(2):  # there is memory for one
        service.notes.clear()
        clients = [Client(service, model=name) for name in ("m", "n", "n")]
        assert [client.text() for client in clients] == [ANSWER] * 3
        (note,) = service.notes
        assert note.startswith("n:latest: generation_config.json: mlx-lm does not support num_b")


CITY = {
    "type": "object",
    "required": ["city"],
    "additionalProperties": False,
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}
F: Any = {"type": "function", "function": {"name": "f", "parameters": CITY}}


@ALONE
def test_an_answer_follows_a_schema(service: Any, alone: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    given = {"content": "hi", "model": "n", "temperature": 1.0, "max_tokens": 60, **alone}
    form = {"type": "json_schema", "json_schema": {"schema": CITY}}
    other = Client(service, CHAT, **(given | {"max_tokens": 9}))  # it follows none
    document = Client(service, CHAT, response_format=form, top_logprobs=9, **given).whole()
    (choice,) = document["choices"]
    assert json.loads(choice["message"]["content"])["city"] in ("Oslo", "Rome")
    assert choice["finish_reason"] == "stop"
    json.dumps(document, allow_nan=False)
    (choice,) = Client(service, CHAT, tool_choice="required", tools=[F], **given).whole()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    assert choice["finish_reason"] == "tool_calls"
    assert other.whole()


def test_a_grammar_that_can_not_be_made_is_an_error(service: Any) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}
    with pytest.raises(UsageError, match=r"is not supported by llguidance: Unimplemented keys"):
        Client(service, CHAT, content="hi", response_format=form).whole()
    with pytest.raises(UsageError, match="the model has no calls of tools in JSON"):
        Client(service, CHAT, content="hi", tool_choice="required", tools=[F]).whole()
