"""Prompts of each kind of template, with a tokenizer whose tokens are characters."""

from typing import Any

import pytest
from support.talking import CHAT_TEMPLATE, Letters

from blobstore.errors import UnsupportedSourceError, UsageError
from blobstore.mlx_lm.prompts import ModelTexts, Prompts

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "S"}
OLLAMA = "[{{ .System }}|{{ .Prompt }}]"


def prompts(jinja: str | None = None, *, is_raw: bool = False, **texts: Any) -> Prompts:
    return Prompts("m:latest", Letters(jinja), ModelTexts(**texts), is_raw)


def text(made: Prompts, *messages: dict[str, str]) -> str:
    return Letters.decode(made.tokens(messages))


def test_the_chat_template_counts_before_ollamas() -> None:
    made = prompts(CHAT_TEMPLATE, template=OLLAMA)
    assert text(made, SYSTEM, USER) == "# system\nS\n# user\nhi\n# assistant\n"


def test_ollamas_template_is_not_run() -> None:
    made = prompts(template=OLLAMA)
    assert not made.continues
    with pytest.raises(UnsupportedSourceError, match="m:latest: its only chat template") as caught:
        text(made, SYSTEM, USER)
    assert "--raw" in str(caught.value.hint)
    assert text(prompts(template=OLLAMA, is_raw=True), USER) == "^hi"


@pytest.mark.parametrize("template", ["{{ .Prompt }}", " {{- .Prompt -}}\n"])
def test_the_prompt_alone_is_the_text(template: str) -> None:
    made = prompts(template=template)
    assert made.continues
    assert text(made, USER) == "^hi"
    assert Letters.decode(made.chat_tokens({"messages": [USER]})) == "^hi"


def test_messages_of_openai() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    template = "{{ messages[0].tool_calls[0].function.arguments.a }}{{ tools }}{{ flag }}"
    document = {"messages": [said], "tools": [], "chat_template_kwargs": {"flag": "x"}}
    assert Letters.decode(prompts(template).chat_tokens(document)) == "1Nonex"
    with pytest.raises(UsageError, match=r"can't make a prompt of the messages: .*narrator"):
        prompts(CHAT_TEMPLATE).chat_tokens({"messages": [{"role": "narrator", "content": "x"}]})
    whole = Letters.decode(prompts().chat_tokens({"messages": [USER]}))
    assert whole.endswith("USER: hi\nASSISTANT:")  # as mlx_lm.server has it without a template


@pytest.mark.parametrize("is_raw", [False, True])
def test_without_a_template_the_text_is_continued(is_raw: bool) -> None:
    made = prompts(CHAT_TEMPLATE if is_raw else None, is_raw=is_raw)
    assert made.continues
    said = {"role": "assistant", "content": " there"}
    assert text(made, USER) == "^hi"
    assert text(made, USER, said, USER) == "^hi there\nhi"
    assert text(made, {"role": "user", "content": "^hi"}) == "^hi"  # it begins as texts do


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ undefined_function() }}", "model m:latest: its chat template"),
        ("{{ raise_exception('unknown role') }}", "unknown role"),
        ('{{ "\\ud800" }}', "model m:latest: its chat template can't be"),
    ],
)
def test_a_broken_template_is_a_typed_error(template: str, reason: str) -> None:
    with pytest.raises(UnsupportedSourceError, match=reason):
        text(prompts(template), USER)
