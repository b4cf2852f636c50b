"""The service of one model to clients of OpenAI's protocol, without a server.

Each request is handled in a thread of its own; mlx-lm's generator has one thread for all, in which
answers without a seed are computed together.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from blobstore.errors import BlobStoreError, InvalidNameError, NotFoundError, quoted
from blobstore.mlx_lm.chat_requests import (
    CHAT,
    MODELS,
    TEXT,
    ChatModel,
    completed,
    error_document,
)
from blobstore.mlx_lm.conversation import Talker, load_talker
from blobstore.mlx_lm.prompts import Prompts
from blobstore.model.network_plan import mlx_lm_errors
from blobstore.names import ModelName
from blobstore.store.ports import Readable

if TYPE_CHECKING:
    from blobstore.mlx_lm.chat_handler import Exchange, Generator

_log = logging.getLogger("blobstore.mlx_lm")
_PATIENCE_S = 5
_JSON = [("Content-Type", "application/json")]


class ChatService:
    """A model that is served. Use it as a context manager, or call `close`: it has a thread.

    ``served`` has the defaults of requests.
    """

    def __init__(self, talker: Talker, prompts: Prompts, served: ChatModel) -> None:
        with mlx_lm_errors("serve", talker.name):  # other versions may have other names
            from blobstore.mlx_lm import chat_handler

        self._handlers = chat_handler
        self._talker = talker
        self._prompts = prompts
        self.served = served
        self._lock = threading.Lock()
        self._fingerprint = chat_handler.fingerprint()
        self._generator = self._started()

    def answer(self, method: str, path: str, body: bytes, exchange: Exchange) -> None:
        """Answer a request, in the caller's thread; errors of ours are documents."""
        request = (method, path, body)
        try:
            _check_address(method, path)
            if method == "POST":
                request = self._handlers.request_of(path, completed(body, path, self.served))
        except BlobStoreError as error:
            status = 404 if isinstance(error, NotFoundError) else 400
            exchange.start(status, _JSON)
            exchange.write(error_document(error))
            return
        self._handlers.Handler(self._living(), exchange, self.served, request, self._fingerprint)

    def _living(self) -> Generator:
        """Return the generator, or a new one if an error ended its thread."""
        with self._lock:
            if not self._generator.generation_available():
                _log.error("the thread that generates ended with an error, and is started again")
                self._generator = self._started()
            return self._generator

    def _started(self) -> Generator:
        """Return a new generator. Its thread is a daemon, as the thread that starts it.

        A template may never end; then the process has to.
        """
        made: Future[Generator] = Future()

        def make() -> None:
            try:
                made.set_result(self._handlers.Generator(self._talker, self._prompts))
            except Exception as error:  # noqa: BLE001  # raised in the thread that waits
                made.set_exception(error)

        threading.Thread(target=make, daemon=True).start()
        with mlx_lm_errors("serve", self._talker.name):
            return made.result()

    def close(self) -> None:
        """End all answers, and the thread; after 5 seconds leave it."""
        with self._lock:
            if not self._generator.end(_PATIENCE_S):
                _log.warning("an answer did not end")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_address(method: str, path: str) -> None:
    posted = path in (CHAT, TEXT)
    listed = path == MODELS or path.startswith(f"{MODELS}/")
    if not (posted if method == "POST" else listed):
        message = f"there is nothing to {method} at {quoted(path)}"
        hint = f"POST {CHAT} or {TEXT}, or GET {MODELS}."
        raise NotFoundError(message, hint=hint)


def load_service(name: str, *, store: Readable) -> tuple[ChatService, tuple[str, ...]]:
    """Return the service of a stored model, and notes on parameters without effect.

    The model's own parameters, system text and messages are the defaults of requests; its seed too,
    but without one requests are not seeded. Raises: as `load_talker`.
    """
    talker, prompts, notes = load_talker(name, store=store, given={})
    parsed = ModelName.parse(talker.name)

    def is_named(text: str) -> bool:
        try:
            return ModelName.parse(text).folded == parsed.folded
        except InvalidNameError:
            return False

    seed = prompts.texts.parameters.get("seed", -1)  # valid, or below 0: not set
    served = ChatModel(
        name=talker.name,
        sampling=replace(talker.sampling, seed=seed if seed >= 0 else None),
        vocabulary=len(talker.tokenizer),
        beginning=prompts.beginning(),
        is_named=is_named,
    )
    return ChatService(talker, prompts, served), notes
