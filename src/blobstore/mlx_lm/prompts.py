"""Prompts: the tokens that a model is given for a conversation, or for a text to continue.

The model's own chat template counts (chat_template.jinja, or the one of tokenizer_config.json),
else Ollama's template layer. A model without either continues the text. Jinja templates are
untrusted programs: transformers runs them in Jinja's sandbox, without access to Python's objects,
in a process with limits (template_process.py).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError
from blobstore.mlx_lm.go_templates import render_ollama
from blobstore.mlx_lm.model_texts import Message, ModelTexts
from blobstore.mlx_lm.template_process import reason_of


class TemplateKind(enum.Enum):
    """Where a model's template is from."""

    CHAT = "chat template"
    OLLAMA = "Ollama's template"
    MISSING = "none"


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The prompts of one model. ``name`` is for messages of errors.

    ``tokenizer``: mlx-lm's. ``is_raw``: texts are continued, whatever the template.
    """

    name: str
    tokenizer: Any
    texts: ModelTexts
    is_raw: bool = False

    @property
    def kind(self) -> TemplateKind:
        """Where the template is from."""
        if self.is_raw:
            return TemplateKind.MISSING
        if self.tokenizer.has_chat_template:
            return TemplateKind.CHAT
        return TemplateKind.MISSING if self.texts.template is None else TemplateKind.OLLAMA

    @property
    def continues(self) -> bool:
        """Whether the model continues texts: there is no template, or it is not to be used."""
        return self.kind is TemplateKind.MISSING

    def beginning(self, system: str | None = None) -> list[Message]:
        """Return the messages before a conversation: a system text, and those of the model.

        ``system`` replaces the model's own; "" removes it. A text that is continued has none.
        Source: ollama/ollama@0097ef5f server/routes.go `ChatHandler`.
        """
        if self.continues:
            return []
        text = self.texts.system if system is None else system
        own = [one for one in self.texts.messages if system is None or one["role"] != "system"]
        return [{"role": "system", "content": text}, *own] if text else own

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt for the next answer to ``messages``, which may be one text.

        Raises: UsageError for an empty text, and for one that is not Unicode;
        UnsupportedSourceError when the template refuses the messages, or is broken.
        """
        check_prompt(messages[-1]["content"])
        if self.continues:
            return self._encoded(_joined(messages))
        if self.kind is TemplateKind.OLLAMA:
            return self._encoded(self._by_ollama(messages))
        # As mlx_lm.generate does: the template writes the special tokens.
        return self._encoded(self._by_jinja(messages), is_complete=True)

    def _encoded(self, text: str, *, is_complete: bool = False) -> list[int]:
        """Return a text's tokens, as mlx_lm's `stream_generate` makes them.

        ``is_complete``: it has its special tokens.
        """
        if not _is_unicode(text):
            message = f"model {self.name}: its template makes a text that is not Unicode"
            raise UnsupportedSourceError(message, model=self.name)
        bos = self.tokenizer.bos_token
        is_needed = not is_complete and (bos is None or not text.startswith(bos))
        return list(self.tokenizer.encode(text, add_special_tokens=is_needed))

    def _by_ollama(self, messages: Sequence[Message]) -> str:
        try:
            return render_ollama(self.texts.template or "", messages)
        except BlobStoreError as error:
            raise error.at(f"model {self.name}", model=self.name) from None

    def _by_jinja(self, messages: Sequence[Message]) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(one) for one in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # a template can raise anything
            raise UnsupportedSourceError(
                f"model {self.name}: its chat template can't be applied: {reason_of(error)}",
                model=self.name,
                hint="Use --raw to continue the text without a template.",
            ) from error


def check_prompt(text: str) -> None:
    """Raise UsageError for an empty prompt, and for one that is not Unicode text."""
    if not text:
        raise UsageError("the prompt is empty")
    if not _is_unicode(text):
        raise UsageError("the prompt is not valid text")


def _is_unicode(text: str) -> bool:
    """Return False for a text with half of a surrogate pair, which tokenizers do not take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _joined(messages: Sequence[Message]) -> str:
    """Return the text so far; what a person adds begins on a line of its own."""
    whole = ""
    for one in messages:
        is_added = whole and one["role"] != "assistant" and not whole.endswith("\n")
        whole += ("\n" if is_added else "") + one["content"]
    return whole
