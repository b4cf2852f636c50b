"""mlx-lm's handler of OpenAI's protocol, its generator and its provider, over one loaded model.

They compute as in mlx-lm. The differences are around it: there is one model, which no request can
replace; a prompt has to fit the context; a client that goes away ends its answer; stop texts are
found in the text instead of in its tokens; bytes come from and go to an `Exchange` instead of a
socket. Source: mlx_lm/server.py at version 0.32.2.

Only `chat_service` imports this module, inside a function: mlx-lm is loaded with it.
"""

from __future__ import annotations

import argparse
import email.message
import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import APIHandler, ModelProvider, ResponseGenerator, get_system_fingerprint

from blobstore.errors import BlobStoreError, UsageError
from blobstore.mlx_lm.chat_requests import MODELS, ChatModel, check_model, error_document
from blobstore.mlx_lm.conversation import Talker
from blobstore.mlx_lm.prompts import Prompts, TemplateKind
from blobstore.mlx_lm.stop_texts import StopTexts
from blobstore.mlx_lm.template_process import reason_of

_log = logging.getLogger("blobstore.mlx_lm")
_SETTINGS: dict[str, Any] = {
    "adapter_path": None,
    "allowed_origins": [],
    "chat_template": "",
    "chat_template_args": {},
    "decode_concurrency": 32,
    "draft_model": None,
    "kv_bits": None,
    "kv_group_size": 64,
    "max_tokens": 512,
    "min_p": 0.0,
    "model": None,
    "num_draft_tokens": 3,
    "pipeline": False,
    "prefill_step_size": 2048,
    "prompt_cache_bytes": None,
    "prompt_cache_size": 10,
    "prompt_concurrency": 8,
    "quantized_kv_start": 5000,
    "temp": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "trust_remote_code": False,
    "use_default_chat_template": False,
}
"""The defaults of mlx_lm.server's command line, without a model: it is loaded already."""


class Exchange(Protocol):
    """Where an answer goes."""

    def start(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Send status and headers, once."""

    def write(self, data: bytes) -> int:
        """Send bytes of the body. Raises: ConnectionError once the client is gone."""

    def flush(self) -> None:
        """Do nothing: bytes are sent at once."""

    def check(self) -> None:
        """Raise ConnectionError once the client is gone."""


class _Refused(BaseException):  # passes mlx-lm's own handling, which answers 404 to every error
    """A request that can't be answered."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class OneModel(ModelProvider):  # type: ignore[misc]  # mlx-lm has no types
    """A provider of the model that was loaded, whatever a request's names are."""

    def __init__(self, talker: Talker) -> None:
        super().__init__(argparse.Namespace(**_SETTINGS))
        self._talker = talker
        self.load()

    def load(self, *_: object) -> tuple[Any, Any]:
        """Return the model and its tokenizer."""
        self.model_key = (self._talker.name, None, None)
        self.model, self.tokenizer = self._talker.network, self._talker.tokenizer
        self.is_batchable = all(hasattr(one, "merge") for one in make_prompt_cache(self.model))
        return self.model, self.tokenizer


class _Caches(LRUPromptCache):  # type: ignore[misc]
    """Caches that leave at least one token to compute, without which mlx-lm can't continue."""

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens)
        return (cache, rest) if rest else (None, tokens)


class Generator(ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's generator, with a limit of the context and Ollama's template."""

    def __init__(self, talker: Talker, prompts: Prompts) -> None:
        self._prompts = prompts
        self._limits = talker.sampling
        provider = OneModel(talker)
        super().__init__(provider, _Caches(provider.cli_args.prompt_cache_size))

    def end(self, seconds: float) -> bool:
        """End all answers and the thread; return False if it takes longer."""
        self._stop = True
        self._generation_thread.join(seconds)
        return not self._generation_thread.is_alive()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        request.check()  # its client may be gone since it waits
        is_chat = request.request_type == "chat"
        if is_chat and self._prompts.kind is TemplateKind.OLLAMA:
            if request.tools:
                raise UsageError("tools are not possible: the model's template is Ollama's")
            prompt = self._prompts.tokens(request.messages)
            found: Any = (prompt, [prompt], ["assistant"], "normal", None)
        else:
            try:
                found = super()._tokenize(tokenizer, request, args)
            except Exception as error:  # a template can raise anything
                message = f"these messages do not make a prompt: {reason_of(error)}"
                raise UsageError(message) from error
        if not found[0]:
            raise UsageError("the prompt is empty")
        args.max_tokens = self._limits.room(len(found[0]), args.max_tokens)
        return found


class _Watched:
    """The generator for one exchange: it ends an answer whose client is gone."""

    def __init__(self, generator: Generator, exchange: Exchange) -> None:
        self._generator = generator
        self._exchange = exchange
        self.cli_args = generator.cli_args
        self.stop: list[str] = []
        """Texts that end the answer."""

    def generate(
        self, request: Any, args: Any, progress_callback: Callable[[int, int], None]
    ) -> tuple[Any, Iterator[Any]]:
        def progress(done: int, total: int) -> None:
            self._exchange.check()
            progress_callback(done, total)

        request.check = self._exchange.check
        try:
            context, responses = self._generator.generate(request, args, progress)
        except ConnectionError:
            raise
        except Exception as error:
            raise _Refused(error) from error
        return context, self._watched(context, responses)

    def _watched(self, context: Any, responses: Iterator[Any]) -> Iterator[Any]:
        try:
            for response in stopped(responses, self.stop):
                self._exchange.check()
                yield response
        except ConnectionError:
            raise
        except Exception as error:
            raise _Refused(error) from error
        finally:
            context.stop()


def stopped(responses: Iterator[Any], stop: list[str]) -> Iterator[Any]:
    """Yield mlx-lm's responses, of which the last ends before the first stop text.

    Each is yielded when the next one is there. mlx-lm's handler drops the text of a response whose
    reason is "stop", and with it what might begin a tag; the reason "length" lets both through.
    """
    if not stop:
        yield from responses
        return
    stops = StopTexts(stop)
    before = None
    for response in responses:
        reason = response.finish_reason
        text = stops.passed(response.text, is_last=reason is not None)
        if stops.is_found or reason == "stop":
            yield from _ending(before, response, text, is_found=stops.is_found)
            return
        if before is not None:
            yield before
        before = replace(response, text=text)
    if before is not None:
        yield before


def _ending(before: Any, response: Any, text: str, *, is_found: bool) -> Iterator[Any]:
    """Yield the last two responses of an answer; the first of an answer has none before it."""
    if before is None:
        # Without a reason, mlx-lm's handler says "stop".
        yield replace(response, text=text, finish_reason=None if is_found else "stop")
        return
    yield replace(before, text=before.text + text, finish_reason="length" if is_found else None)
    yield replace(response, text="", finish_reason="stop")


class Handler(APIHandler):  # type: ignore[misc]
    """mlx-lm's handler for one request, which is in memory."""

    def __init__(
        self,
        generator: Generator,
        exchange: Exchange,
        served: ChatModel,
        request: tuple[str, str, bytes],
        fingerprint: str,
    ) -> None:
        self._exchange = exchange
        self._served = served
        self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._has_started = False
        self._watched = _Watched(generator, exchange)
        super().__init__(self._watched, request, None, None, system_fingerprint=fingerprint)

    def setup(self) -> None:
        """Take the request as mlx-lm's methods expect it."""
        self.command, self.path, body = self.request
        self.rfile, self.wfile = io.BytesIO(body), self._exchange
        self.headers = email.message.Message()
        self.headers["Content-Length"] = str(len(body))

    def handle(self) -> None:
        """Answer the request; an error is a document of OpenAI's form."""
        try:
            if self.command == "POST":
                self.do_POST()
            else:
                self.handle_models_request()
        except ConnectionError:
            _log.debug("a client went away")
        except _Refused as refused:
            self._fail(refused.error)
        except Exception as error:  # noqa: BLE001  # of mlx-lm's own code
            self._fail(error)

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Answer; mlx-lm would look for the tokens of a stop text, and drop them without ending."""
        self._watched.stop = stop_words
        super().handle_completion(request, [])

    def finish(self) -> None:
        """Do nothing: there is no file to close."""

    def _fail(self, error: Exception) -> None:
        if self._has_started:  # with 200, so that only the stream itself can say it
            self._exchange.write(b"data: %b\n\n" % error_document(error))
            return
        is_ours = isinstance(error, BlobStoreError | ValueError)
        if not is_ours:
            _log.error("an answer failed", exc_info=error)
        self._headers = [("Content-Type", "application/json")]
        self._status = 400 if is_ours else 500
        self.end_headers()
        self._exchange.write(error_document(error))

    def send_response(self, code: int, message: str | None = None) -> None:  # noqa: ARG002
        """Keep the status until the headers end."""
        self._status = code

    def send_header(self, keyword: str, value: str) -> None:
        """Keep a header; those of other origins are the server's."""
        if not keyword.lower().startswith("access-control-"):
            self._headers.append((keyword, value))

    def end_headers(self) -> None:
        """Send status and headers."""
        self._has_started = True
        self._exchange.start(self._status, self._headers)

    def handle_models_request(self) -> None:
        """List the served model, or show it; mlx-lm would list the models of the Hub's cache."""
        one = {"id": self._served.name, "object": "model", "created": self.created}
        one["owned_by"] = "blobstore"
        document: dict[str, Any] = {"object": "list", "data": [one]}
        if self.path != MODELS:
            try:
                check_model(self.path.removeprefix(f"{MODELS}/"), self._served)
            except BlobStoreError as error:
                self._set_completion_headers(404)
                self.end_headers()
                self._exchange.write(error_document(error))
                return
            document = one
        self._set_completion_headers(200)
        self.end_headers()
        self._exchange.write(json.dumps(document).encode())


def request_of(path: str, document: dict[str, Any]) -> tuple[str, str, bytes]:
    """Return a request with a completed document."""
    return ("POST", path, json.dumps(document).encode())


def fingerprint() -> str:
    """Return what answers say of the program and the machine, as mlx-lm's do."""
    return str(get_system_fingerprint())
