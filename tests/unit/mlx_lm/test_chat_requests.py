"""Requests of OpenAI's protocol: what is completed, and what is refused."""

import json
import math
from typing import Any

import pytest

from blobstore.errors import DocumentError, ModelNotFoundError, UsageError
from blobstore.mlx_lm.chat_requests import CHAT, TEXT, complete_request, parse_request
from blobstore.mlx_lm.sampling_settings import MAX_COUNT, NO_LIMIT, Sampling, choose_sampling

SYSTEM = {"role": "system", "content": "S"}
EXAMPLE = {"role": "user", "content": "an example"}
USER = {"role": "user", "content": "hi"}
SAMPLING = Sampling(temperature=0.5, repeat_penalty=1.2, repeat_last_n=64, stop=("end",), seed=3)
NAMES = ["m:latest", "n:int4"]


def made(path: str = CHAT, sampling: Sampling = SAMPLING, /, **given: Any) -> dict[str, Any]:
    words = {"messages": [USER]} if path == CHAT else {"prompt": "hi"}
    raw = json.dumps(words | given).encode()
    parsed = parse_request(raw, path, NAMES)
    return complete_request(parsed, path, sampling, 100, (SYSTEM, EXAMPLE))


def test_the_models_own_parameters_are_the_defaults() -> None:
    document = made(TEXT)
    assert document == {
        "model": "m:latest",
        "prompt": "hi",
        "prompts": ["hi"],
        "tools": [],
        "count": 1,
        "answer_schema": None,
        "callable": [],
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 512,
        "stop": ["end"],
        "stream": False,
        "seed": 3,
        "repetition_penalty": 1.2,
        "repetition_context_size": 64,
        "presence_context_size": 64,
        "frequency_context_size": 64,
    }
    none = made(TEXT, Sampling(repeat_penalty=1.2, repeat_last_n=0))
    assert not any("penalty" in key or "context" in key for key in none)
    assert made(TEXT, Sampling(max_tokens=NO_LIMIT))["max_tokens"] == MAX_COUNT


def test_a_request_counts_before_them_and_null_does_not() -> None:
    document = made(TEXT, temperature=1, seed=None, stop="x", max_tokens=5)
    assert (document["temperature"], document["seed"], document["stop"]) == (1, 3, ["x"])
    assert document["max_tokens"] == 5


def test_values_that_mlx_lm_takes_otherwise() -> None:
    assert made(TEXT, top_k=100)["top_k"] == 0  # all tokens
    assert made(TEXT, top_k=99)["top_k"] == 99
    assert made(temperature=1e-39)["temperature"] == 0  # MLX would divide by it
    assert made(temperature=1e-20)["temperature"] == 1e-20
    made(TEXT, best_of=1, echo=False, suffix="")


def test_prompts_are_texts_or_tokens() -> None:
    for prompts in (["a", "b"], [[1], [2, 3]], ["a", [2]], ["a"], [[1, 99]]):
        for prompt in (prompts, prompts[0]) if len(prompts) == 1 else (prompts,):
            document = made(TEXT, prompt=prompt, n=2)
            assert (document["prompts"], document["count"]) == (prompts, 2 * len(prompts))


F, G = ({"name": name, "parameters": {"type": "object"}} for name in "fg")
TOOLS = [{"type": "function", "function": function} for function in (F, G)]
SCHEMA = {"type": "object", "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_what_an_answer_may_be() -> None:
    for given, schema, functions in (
        ({"response_format": {"type": "text"}}, None, []),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}, []),
        ({"response_format": FORMAT}, SCHEMA, []),
        ({"tools": TOOLS}, None, []),
        ({"tools": TOOLS, "response_format": FORMAT}, SCHEMA, [F, G]),
        ({"tools": TOOLS, "response_format": FORMAT, "tool_choice": "none"}, SCHEMA, []),
        ({"tools": TOOLS, "response_format": FORMAT, "tool_choice": "required"}, None, [F, G]),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": G}}, None, [G]),
    ):
        document = made(**given)
        assert (document["answer_schema"], document["callable"]) == (schema, functions)
        assert document["tools"] == ([] if "none" in given.values() else given.get("tools", []))


def test_the_model_has_several_names() -> None:
    names = ("m", "m:latest", "default_model", "N:int4")
    assert [made(model=name)["model"] for name in names] == [*["m:latest"] * 3, "n:int4"]
    for other in ("mlx-community/other", "/etc", ""):
        with pytest.raises(ModelNotFoundError, match="is not served, only m:latest, n:int4"):
            made(model=other)


def test_a_conversation_begins_with_the_models_messages() -> None:
    assert made()["messages"] == [SYSTEM, EXAMPLE, USER]
    other = {"role": "system", "content": "T"}
    assert made(messages=[other, USER])["messages"] == [EXAMPLE, other, USER]


IMAGE = {"type": "image_url", "text": "x", "image_url": {"url": "http://127.0.0.1:1/x"}}
LONG = {"enum": ["x" * 2**18]}
REFUSED: dict[str, dict[str, Any]] = {
    "model is not": {"model": 5},
    "adapters": {"adapters": "/etc"},
    "temperature is '-1'": {"temperature": -1},
    "top_k is '1.5'": {"top_k": 1.5},
    "n is '129', expected": {"n": 129},
    "response_format is .*, expected the type text": {"response_format": {"type": "x"}},
    "json_schema with json_schema.schema": {"response_format": {"type": "json_schema"}},
    "Schema of response_format is '262.*', expected a whole number from 0 to 65,536": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": LONG}}
    },
    "Schema of tools is '262": {
        "tools": [{"function": {"name": "f", "parameters": LONG}}],
        "tool_choice": "required",
    },
    "tool_choice is .*, expected none": {"tool_choice": "required"},
    "or a function of tools": {"tools": [], "tool_choice": {"type": "function"}},
    "stop is .*, expected a string": {"stop": [1]},
    "with a role": {"messages": [{"content": "hi"}]},
    "images and files": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "tool_calls is not": {"messages": [USER | {"tool_calls": [3]}]},
    "tools is not a list of obj": {"tools": [{"function": 5}]},
    "must not contain chat_template": {"chat_template_kwargs": {"chat_template": "x"}},
}
REFUSED_TEXTS: dict[str, dict[str, Any]] = {
    "best_of '3' is not supported": {"best_of": 3},
    "answers is '130', expected .* 1 to 128": {"prompt": ["a", "b"], "n": 65},
    "prompt is missing": {"prompt": ""},
    "prompt is missing, or": {"prompt": ["a", 1]},
    "a token of prompt is 'True'": {"prompt": [[True]]},
    "a token of prompt is '100', expected .* 0 to 99": {"prompt": [[5], [100]]},
    "a token of prompt is 'None'": {"prompt": [None]},
    "is not a text, tokens, or a list": {"prompt": [[]]},
    "text, tokens, or a list of these": {"prompt": {}},
}


@pytest.mark.parametrize(("path", "table"), [(CHAT, REFUSED), (TEXT, REFUSED_TEXTS)])
def test_what_mlx_lm_can_not_take_is_refused(path: str, table: dict[str, dict[str, Any]]) -> None:
    for message, given in table.items():
        with pytest.raises(UsageError, match=message):
            made(path, **given)


def test_what_is_not_a_document_is_refused() -> None:
    for raw, message in {
        b"": "not valid JSON",
        b"\xff{}": "not UTF-8 at byte 0",
        b"[]": "not a JSON object",
        b"[" * 5000 + b"]" * 5000: "deeper",
    }.items():
        with pytest.raises(UsageError, match=message):
            parse_request(raw, CHAT, NAMES)


def test_a_prompt_that_can_not_fit_is_refused_before_it_becomes_tokens() -> None:
    long = "x" * 1601
    requests: Any = {TEXT: {"prompt": long}, CHAT: {"messages": [USER | {"content": long}]}}
    for path, given in requests.items():
        with pytest.raises(UsageError, match=r"1,6\d\d characters, at most 1,600"):
            made(path, Sampling(context=100), **given)


GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 9}


def chosen(
    given: dict[str, Any] | None = None,
    parameters: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    context: int | None = None,
) -> Sampling:
    return choose_sampling(given or {}, parameters or {}, generation or {}, context)[0]


def test_the_command_line_counts_before_the_layer_before_generation_config() -> None:
    layer = {"temperature": 0.5, "num_predict": 7}
    found = chosen({"temperature": 0.25, "top_k": None}, layer, GENERATION)
    assert (found.temperature, found.max_tokens, found.top_p) == (0.25, 7, 0.9)
    assert chosen({}, layer, GENERATION).temperature == 0.5
    assert chosen({}, {}, GENERATION).temperature == 0.6
    assert chosen({"temperature": 0.0}, {"temperature": 0.5}).temperature == 0
    assert chosen() == Sampling(temperature=0, top_p=1, max_tokens=512)
    assert [chosen({"context": n}, context=100).context for n in (50, 500)] == [50, 100]


def test_generation_config_without_sampling_takes_the_likeliest_token() -> None:
    for says in (None, "true"):
        found = chosen(generation={**GENERATION, "do_sample": says})
        assert (found.temperature, found.top_p, found.max_tokens) == (0, 1, 9)
    assert chosen(generation={"do_sample": True}).temperature == 1


def test_the_layer_has_ollamas_names() -> None:
    same = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 64}
    layers: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (same, same),
        ({"stop": ["a", "", "b"]}, {"stop": ("a", "b")}),
        ({"num_predict": -1}, {"max_tokens": NO_LIMIT}),
        ({"num_predict": 0, "seed": -1}, {"max_tokens": 512, "seed": None}),
        ({"num_ctx": 100, "repeat_last_n": -1}, {"context": 100, "repeat_last_n": 100}),
    ]
    for layer, fields in layers:
        assert chosen(parameters=layer) == Sampling(**fields)


def test_an_invalid_value_of_the_layer_is_named() -> None:
    values = {"temperature": True, "min_p": 10**400, "top_k": 2.5, "stop": [1], "seed": 2**64}
    for key, value in values.items():
        with pytest.raises(DocumentError, match=rf"^the parameters: {key} is .*, expected .*T1"):
            chosen(parameters={key: value})


def test_an_invalid_value_of_the_command_line_is_wrong_use() -> None:
    for name, value in {"temperature": math.nan, "max_tokens": 0, "seed": -1}.items():
        with pytest.raises(UsageError, match=f"^{name} is .*, expected "):
            chosen({name: value})


def test_an_answer_ends_with_the_context() -> None:
    assert Sampling(max_tokens=10, context=100).room(90) == 10
    assert Sampling(max_tokens=10, context=100).room(95) == 5
    assert Sampling(max_tokens=NO_LIMIT, context=100).room(90) == 10
    with pytest.raises(UsageError, match="the prompt has 100 tokens, and the context has 100"):
        Sampling(context=100).room(100)
    assert Sampling(max_tokens=NO_LIMIT).room(10**9) == NO_LIMIT
