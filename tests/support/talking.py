"""Talking to models: a small tokenizer, and a parrot."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blobstore.mlx_lm.conversation import Generation
from blobstore.mlx_lm.sampling_settings import Sampling

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant") %}
{{- raise_exception("unknown role " + message.role) }}
{%- endif %}
{{- "# " + message.role + "\\n" + message.content + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "# assistant\\n" }}{% endif %}"""


def that_chats(folder: Path, source: Path, template: str = CHAT_TEMPLATE) -> Path:
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Letters:
    """A tokenizer whose tokens are characters; ``^`` begins a text. It has mlx-lm's methods."""

    bos_token = "^"  # noqa: S105

    def __init__(self, template: str | None = None) -> None:
        self.has_chat_template = template is not None
        self._template = template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        text.encode()  # as tokenizers, which refuse halves of characters
        return [ord(one) for one in ("^" if add_special_tokens else "") + text]

    @staticmethod
    def decode(tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, **options: Any
    ) -> str | list[int]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[messages], chat_template=self._template, **options
        )
        text = str(rendered[0][0])
        return self.encode(text, add_special_tokens=False) if tokenize else text


class Parrot:
    """A talker that says "ok" in two tokens, and keeps its prompts."""

    name = "m:latest"
    seed = 1
    prompts: Any = None

    def __init__(self, context: int | None = None) -> None:
        self.sampling = Sampling(context=context)
        self.seen: list[str] = []
        self._room = 0

    def answer(self, prompt: list[int]) -> Generation:
        self._room = self.sampling.room(len(prompt))
        self.seen.append(Letters.decode(prompt))
        answer = Generation(prompt_tokens=len(prompt))
        answer.pieces = self.pieces(answer)
        return answer

    def pieces(self, answer: Generation) -> Iterator[str]:
        for piece in ("o", "k")[: self._room]:
            if answer.is_stopped:
                answer.finish_reason = "interrupted"
                return
            answer.text += piece
            answer.tokens += 1
            yield piece
        answer.finish_reason = "stop" if answer.text == "ok" else "length"
