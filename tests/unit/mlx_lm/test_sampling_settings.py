"""Which parameters of an answer count, and what is said about the others."""

import math
from typing import Any

import pytest

from blobstore.errors import DocumentError, UsageError
from blobstore.mlx_lm.sampling_settings import NO_LIMIT, Sampling, choose_sampling

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


@pytest.mark.parametrize("says", [{}, {"do_sample": "true"}])
def test_generation_config_without_sampling_takes_the_likeliest_token(says: dict[str, Any]) -> None:
    found = chosen(generation={**GENERATION, "do_sample": None, **says})
    assert (found.temperature, found.top_p, found.max_tokens) == (0, 1, 9)
    assert chosen(generation={"do_sample": True}).temperature == 1


LAYER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numbers": (
        {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 64},
        {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 64},
    ),
    "stop texts": ({"stop": ["a", "", "b"]}, {"stop": ("a", "b")}),
    "no limit": ({"num_predict": -1}, {"max_tokens": NO_LIMIT}),
    "unset": ({"num_predict": 0, "seed": -1}, {"max_tokens": 512, "seed": None}),
    "context": ({"num_ctx": 100, "repeat_last_n": -1}, {"context": 100, "repeat_last_n": 100}),
}


@pytest.mark.parametrize("case", LAYER)
def test_the_layer_has_ollamas_names(case: str) -> None:
    layer, fields = LAYER[case]
    assert chosen(parameters=layer) == Sampling(**fields)


def test_an_invalid_value_of_the_layer_is_named() -> None:
    for key, value in {
        "temperature": True,
        "min_p": 10**400,
        "top_k": 2.5,
        "stop": [1],
        "seed": 2**64,
    }.items():
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
