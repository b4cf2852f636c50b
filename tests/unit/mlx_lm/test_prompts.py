"""Prompts of each kind of template, with a tokenizer whose tokens are characters."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.layouts import model, write
from support.stores import blob_path, manifest_path
from support.talking import CHAT_TEMPLATE, Letters

import blobstore
from blobstore import errors
from blobstore.formats.documents import MESSAGES_MEDIA_TYPE, PARAMS_MEDIA_TYPE, SYSTEM_MEDIA_TYPE
from blobstore.mlx_lm.prompts import ModelTexts, Prompts, texts_of
from blobstore.mlx_lm.template_process import TemplateError, TemplateProcess
from blobstore.store.local.store import Store

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
    message = "m:latest: its only chat template"
    with pytest.raises(errors.UnsupportedSourceError, match=message) as caught:
        text(made, SYSTEM, USER)
    assert "--raw" in str(caught.value.hint)
    assert text(prompts(template=OLLAMA, is_raw=True), USER) == "^hi"


def test_the_prompt_alone_is_the_text() -> None:
    for template in ("{{ .Prompt }}", " {{- .Prompt -}}\n"):
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
    with pytest.raises(errors.UsageError, match=r"can't make a prompt of the messages: .*narrator"):
        prompts(CHAT_TEMPLATE).chat_tokens({"messages": [{"role": "narrator", "content": "x"}]})
    whole = Letters.decode(prompts().chat_tokens({"messages": [USER]}))
    assert whole.endswith("USER: hi\nASSISTANT:")  # as mlx_lm.server has it without a template


def test_without_a_template_the_text_is_continued() -> None:
    said = {"role": "assistant", "content": " there"}
    for made in (prompts(), prompts(CHAT_TEMPLATE, is_raw=True)):
        assert made.continues
        assert text(made, USER) == "^hi"
        assert text(made, USER, said, USER) == "^hi there\nhi"
        assert text(made, {"role": "user", "content": "^hi"}) == "^hi"  # it begins as texts do


def test_a_broken_template_is_a_typed_error() -> None:
    for template, reason in {
        "{{ undefined_function() }}": "model m:latest: its chat template",
        "{{ raise_exception('unknown role') }}": "unknown role",
        '{{ "\\ud800" }}': "model m:latest: its chat template can't be",
    }.items():
        with pytest.raises(errors.UnsupportedSourceError, match=reason):
            text(prompts(template), USER)


SPECIAL: dict[str, Any] = {"bos_token": "^"}
MESSAGES = [{"role": "user", "content": "hi ü \u2028"}, {"role": "assistant", "content": "x"}]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(seconds=1)
    yield made
    made.close()


def test_a_prompt_is_that_of_transformers(process: TemplateProcess) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [{"type": "function", "function": {"name": "f"}}]
    options: dict[str, Any] = {"add_generation_prompt": True, "tools": tools, "flag": 1}
    for template in (CHAT_TEMPLATE, "{{ bos_token }}{{ tools }}{{ messages | tojson }}{{ flag }}"):
        made: Any = render_jinja_template([MESSAGES], chat_template=template, **options, **SPECIAL)
        assert [process.render(template, SPECIAL, MESSAGES, 10_000, **options)] == made[0]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * 3000000000 }}", "memory"),
        pytest.param("{{ 9 ** (9 ** 9) }}", "exceeds 1 s of processor time", marks=pytest.mark.lab),
        ("{{ 'x' * 10001 }}", "the prompt has 10,001 characters, at most 10,000"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "SecurityError"),
    ],
)
def test_a_failing_template_ends_alone(
    template: str, reason: str, process: TemplateProcess
) -> None:
    with pytest.raises(TemplateError, match=reason):
        process.render(template, {}, MESSAGES, 10_000)
    text = process.render("{{ bos_token }}{{ messages[0].content }}", SPECIAL, MESSAGES, 50)
    assert text == "^hi ü \u2028"


MODELFILE = """FROM .
TEMPLATE [{{ .Prompt }}]
SYSTEM Be short.
PARAMETER temperature 0.5
PARAMETER stop end
MESSAGE user a
MESSAGE assistant b
"""


def texts(store: Store) -> ModelTexts:
    with blobstore.open_model("m", store=store) as model:
        return texts_of(model)


@pytest.fixture
def stored(tmp_path: Path, store: Store) -> Store:
    """A store with a model that has each kind of text."""
    source = write(model(tmp_path / "m"), {"Modelfile": MODELFILE})
    config = json.loads((source / "config.json").read_text())
    write(source, {"config.json": config | {"max_position_embeddings": 99}})
    blobstore.import_model(source, "m", store=store, modelfile=source / "Modelfile")
    return store


def test_layers_and_documents(stored: Store) -> None:
    assert texts(stored) == ModelTexts(
        template="[{{ .Prompt }}]",
        system="Be short.",
        messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
        parameters={"temperature": 0.5, "stop": ["end"]},
        generation={"eos_token_id": [7, 9]},
        context=99,
    )


def replace_layer(store: Store, media_type: str, data: bytes) -> None:
    path = manifest_path(store, "m")
    manifest = json.loads(path.read_text())
    layer = next(one for one in manifest["layers"] if one["mediaType"] == media_type)
    layer |= {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
    blob_path(store, data).write_bytes(data)
    path.write_text(json.dumps(manifest))


DAMAGED: dict[str, tuple[str, bytes, type[errors.BlobStoreError]]] = {
    "system prompt is not UTF-8 at byte 1": (SYSTEM_MEDIA_TYPE, b"a\xff", errors.DocumentError),
    "parameters is not a JSON object": (PARAMS_MEDIA_TYPE, b"[]", errors.DocumentError),
    "expected a role and a text": (MESSAGES_MEDIA_TYPE, b'[{"role":"user"}]', errors.DocumentError),
    "limit exceeded": (PARAMS_MEDIA_TYPE, b" " * (17 * 2**20), errors.LimitExceededError),
}


def test_a_damaged_layer_is_told_with_its_model(stored: Store) -> None:
    whole = manifest_path(stored, "m").read_bytes()
    for message, (media_type, data, kind) in DAMAGED.items():
        manifest_path(stored, "m").write_bytes(whole)
        replace_layer(stored, media_type, data)
        with pytest.raises(kind, match=f"^model m:latest: .*{message}"):
            texts(stored)
