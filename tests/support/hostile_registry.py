"""A hostile registry: the scene of each case of the corpus, with two origins on loopback.

A case changes a scene of a small model before it is pulled or pushed. The registry is at 127.0.0.1,
the other origin at 127.0.0.2. Both count what they send, and see what they are sent.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blobstore import open_store, transfer
from blobstore.formats.documents import (
    CONFIG_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE as MANIFEST,
    TENSOR_MEDIA_TYPE,
)
from blobstore.io.budget import RetryPolicy
from blobstore.io.http.client import HttpClient
from blobstore.names import ModelName
from blobstore.store.local.store import Store
from blobstore.store.registry.logins import Login, Secret
from blobstore.store.registry.store import RegistryStore
from support import FIXTURES
from support.servers import Asked, Script, Server, server as run_server
from support.shared_models import tensor_blob
from support.small_registry import Change, SmallRegistry, digest_of

TLS = FIXTURES / "tls"
REPOSITORY, TAG, NAME = "library/tiny", "int4", "tiny:int4"
SECRET = "swordfish"  # noqa: S105  # of no account
TOKEN = "token-of-the-registry"  # noqa: S105
RETRIES = RetryPolicy(
    connect_s=100, silence_s=100, deadline_s=250, backoff_s=0.002, longest_wait_s=5
)
IMPATIENT = replace(RETRIES, silence_s=0.3)
"""For a registry that stops in the middle; with attempts for a machine that stops now and then."""
KIB = 2**10
SLACK = 64 * KIB
"""Bytes that may come beyond what a body declared, as the corpus says."""
_KERNEL = 192 * KIB
"""What the kernel may hold on both sides of a connection."""
_SIZES = (100, 20_000, 20_001, 300_000)
_SECOND = "127.0.0.2"


@dataclass
class Scene:
    """What a case changes, and what it did afterwards."""

    here: Server
    there: Server
    store: Store
    certificate: Path | None
    blobs: list[bytes] = field(default_factory=list)
    raw: bytes = b""
    registry: SmallRegistry = field(default_factory=SmallRegistry)
    policy: RetryPolicy = RETRIES
    is_public: Callable[[str], bool] = lambda _: False
    declared: dict[str, int] = field(default_factory=dict)
    """Bytes of bodies by digest, where a manifest lies."""
    manifest_limit: int = 0
    """Bytes that a manifest without a length may take."""
    changed: int = 0
    """Replies that were not the registry's own."""
    run: Callable[[], object] = lambda: None
    played: tuple[Script, Script] = field(init=False)

    @property
    def host(self) -> str:
        """The registry in the names of its models."""
        return f"{self.here.host}:{self.here.port}"

    @property
    def name(self) -> str:
        """The model's name in the registry."""
        return f"{self.host}/{REPOSITORY}:{TAG}"

    @property
    def big(self) -> str:
        """The digest of the largest blob."""
        return digest_of(max(self.blobs, key=len))

    def change(self, change: Change) -> None:
        """Put a change before those that there are."""

        def counted(asked: Asked) -> Iterable[bytes] | None:
            changed = change(asked)
            self.changed += changed is not None
            return changed

        self.registry.changes.insert(0, counted)

    def elsewhere(self, answer: Callable[[Asked], Iterable[bytes]]) -> None:
        """Say what the other origin answers."""
        self.there.play(answer)

    def home(self) -> RegistryStore:
        """Return the registry as the client sees it, with the login of a user."""
        client = HttpClient(
            connections=4,
            retry_policy=self.policy,
            ca_file=None if self.certificate is None else str(self.certificate),
            is_public=self.is_public,
        )
        login = Login("alice", Secret(SECRET))
        scheme = "http" if self.certificate is None else "https"
        return RegistryStore(self.host, client, address=f"{scheme}://{self.host}", login=login)

    def pull(self) -> object:
        """Pull the model."""
        return transfer({self.name: NAME}, self.home(), self.store)

    def push(self) -> object:
        """Push the model."""
        return transfer({NAME: self.name}, self.store, self.home())

    def names(self) -> object:
        """List the registry's models."""
        return self.home().manifests.names()

    def play(self) -> None:
        """Start both servers on what the case said."""
        self.played = (self.here.play(self.registry), self.there.play(self.there.answer))

    def excess(self) -> dict[str, int]:
        """Return the bytes that requests took beyond what was declared, where they are too many."""
        here, _ = self.played
        found = {}
        for asked in here.asked:
            beyond = here.sent_to[asked.number] - self._declared(asked)
            if beyond > SLACK + _KERNEL:
                found[f"{asked.method} {asked.target}"] = beyond
        return found

    def credentials_elsewhere(self) -> list[str]:
        """Return the targets of the other origin's requests that carry anything secret."""
        _, there = self.played
        return [
            asked.target
            for asked in there.asked
            if "authorization" in asked.fields
            or any(one in f"{asked.target} {asked.fields} {asked.body!r}" for one in _SECRETS)
        ]

    def put(self, document: dict[str, Any] | bytes) -> None:
        """Replace the manifest in the registry; its blobs stay."""
        raw = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.registry.put(REPOSITORY, TAG, raw, ())
        self.raw = raw

    @property
    def document(self) -> dict[str, Any]:
        """The manifest, as a dictionary of its own."""
        made: dict[str, Any] = json.loads(self.raw)
        return made

    def _declared(self, asked: Asked) -> int:
        if "/manifests/" in asked.target:
            return max(len(self.raw), self.manifest_limit)
        digest = re.search(r"sha256:[0-9a-f]{64}$", asked.target)
        return self.declared.get(digest[0], 0) if digest else 0


_SECRETS = (SECRET, TOKEN, "YWxpY2U6")  # the last: base64 of "alice:"


@contextmanager
def scene(folder: Path, *, is_push: bool, certificate: str | None = None) -> Iterator[Scene]:
    """Give a scene: the model is in the store to be pushed, or in the registry to be pulled.

    ``certificate``: of the registry, which has TLS then; the client trusts it as an authority.
    """
    path = None if certificate is None else TLS / f"{certificate}.pem"
    context = None
    if path is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path, TLS / "key.pem")
    with ExitStack() as stack:
        here = stack.enter_context(run_server("127.0.0.1", context, counting=True))
        there = stack.enter_context(run_server(_SECOND, counting=True))
        made = Scene(here, there, open_store(folder / "store"), path)
        made.blobs = [b"{}", *(tensor_blob(f"layer{at}", size) for at, size in enumerate(_SIZES))]
        made.raw = json.dumps(_document(made.blobs)).encode()
        made.declared = {digest_of(data): len(data) for data in made.blobs}
        if is_push:
            keep(made.store, made.raw, made.blobs)
        else:
            made.registry.put(REPOSITORY, TAG, made.raw, made.blobs)
        made.run = made.push if is_push else made.pull
        yield made


def keep(store: Store, raw: bytes, blobs: Iterable[bytes]) -> None:
    """Write a model into a store by hand."""
    folder = store.root / "blobs"
    folder.mkdir(parents=True, exist_ok=True)
    for data in blobs:
        (folder / digest_of(data).replace(":", "-")).write_bytes(data)
    path = store.root.joinpath("manifests", *ModelName.parse(NAME).path_parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


def _document(blobs: list[bytes]) -> dict[str, Any]:
    config, *layers = [{"digest": digest_of(data), "size": len(data)} for data in blobs]
    named = [
        {"mediaType": TENSOR_MEDIA_TYPE, **layer, "name": f"layer{number}"}
        for number, layer in enumerate(layers)
    ]
    config = {"mediaType": CONFIG_MEDIA_TYPE, **config}
    return {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": named}
