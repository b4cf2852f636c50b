"""Chat templates in a process of their own: equal to transformers', and ended at their limits."""

from collections.abc import Iterator
from typing import Any

import pytest
from support import PYCODE
from support.talking import CHAT_TEMPLATE

from blobstore.mlx_lm.template_process import TemplateError, TemplateProcess

MESSAGES = [{"role": "user", "content": "hi ü \u2028"}, {"role": "assistant", "content": "x"}]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(10_000, seconds=0)
    yield made
    made.close()


def test_a_prompt_is_that_of_transformers(process: TemplateProcess) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(PYCODE)
    for template in (CHAT_TEMPLATE, "{{ bos_token }}{{ tools }}{{ messages | tojson }}{{ flag }}"):
        options: dict[str, Any] = {
            "add_generation_prompt": True,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "flag": 1,
        }
        expected = own.apply_chat_template(
            MESSAGES, chat_template=template, tokenize=False, **options
        )
        assert process.render(template, own.special_tokens_map, MESSAGES, **options) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * 3000000000 }}", "memory"),
        pytest.param("{{ 9 ** (9 ** 9) }}", "exceeds 0 s of processor time", marks=pytest.mark.lab),
        ("{{ 'x' * 10001 }}", "the prompt has 10,001 characters, at most 10,000"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_does_not_end_the_next(
    template: str, reason: str, process: TemplateProcess
) -> None:
    with pytest.raises(TemplateError, match=reason):
        process.render(template, {}, MESSAGES)
    text = process.render("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "^"}, MESSAGES)
    assert text == "^hi ü \u2028"
