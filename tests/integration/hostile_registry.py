"""A hostile registry: the corpus's cases, pulled from (`PULLS`) and pushed to (`PUSHES`), by id.

A case changes a scene of a small model before it is pulled or pushed. The registry is at 127.0.0.1,
the other origin at 127.0.0.2. Both count what they send, and see what they are sent.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

from integration.shared_models import commit_tensors, manifest_of, tensor_blob
from support.servers import (
    Answer,
    Asked,
    Script,
    Server,
    head,
    redirect,
    reply,
    server as run_server,
)
from support.small_registry import SmallRegistry, digest_of

from blobstore import open_store, transfer
from blobstore.io.budget import RetryPolicy
from blobstore.io.http.client import HttpClient
from blobstore.store.local.store import Store
from blobstore.store.registry.logins import Login, Secret
from blobstore.store.registry.store import RegistryStore

REPOSITORY, TAG, NAME = "library/tiny", "int4", "tiny:int4"
RETRIES = RetryPolicy(
    connect_s=100, silence_s=100, deadline_s=250, backoff_s=0.002, longest_wait_s=5
)
SLACK = 64 * 2**10
"""Bytes that may come beyond what a body declared, as the corpus says."""
_KERNEL = 192 * 2**10
"""What the kernel may hold on both sides of a connection."""
_WINDOW = 8 * 2**20
"""What it may take besides of a stream that was read fast: the largest `tcp_rmem`, rounded up."""
_SECRETS = ("swordfish", "YWxpY2U6")  # a password of no account; base64 of "alice:"
_SIZES = (100, 20_000, 300_000)
_ZEROS = bytes(64 * 2**10)
_UNSIZED = head(200, "Connection: close")
_WRONG_DIGEST = f"Docker-Content-Digest: {digest_of(b'another')}"


@dataclass
class Scene:
    here: Server
    there: Server
    store: Store
    blobs: list[bytes]
    """The config, and layers of which the last is the largest."""
    raw: bytes
    registry: SmallRegistry = field(default_factory=SmallRegistry)
    manifest_limit: int = 0
    """Bytes that a manifest without a length may take."""
    changed: int = 0
    """Replies that were not the registry's own."""
    run: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.seen = self.here.play(self.registry)
        self.seen_there = self.answer_there(reply(404))
        self.declared = {digest_of(data): len(data) for data in self.blobs}

    @property
    def host(self) -> str:
        return f"{self.here.host}:{self.here.port}"

    @property
    def name(self) -> str:
        return f"{self.host}/{REPOSITORY}:{TAG}"

    @property
    def big(self) -> bytes:
        return self.blobs[-1]

    def answer_there(self, answer: list[bytes] | Answer) -> Script:
        """Let the other origin give this answer to all requests."""
        self.seen_there = self.there.play(answer if callable(answer) else lambda _: answer)
        return self.seen_there

    def change(
        self, when: Callable[[Asked], bool], answer: list[bytes] | Answer, most: int = 10**9
    ) -> None:
        """Give these requests another answer, ``most`` times at most; before earlier changes."""
        count = 0

        def change(asked: Asked) -> Iterable[bytes] | None:
            nonlocal count
            if count == most or not when(asked):
                return None
            count += 1
            self.changed += 1
            return answer(asked) if callable(answer) else answer

        self.registry.changes.insert(0, change)

    def change_big(self, answer: list[bytes] | Answer, most: int = 10**9) -> None:
        end = f"/blobs/{digest_of(self.big)}"
        self.change(lambda one: one.method == "GET" and one.target.endswith(end), answer, most)

    def break_off(self, answer: list[bytes], *lines: str) -> None:
        """End the first reply for the largest blob in its middle; ``answer`` the next ones."""
        self.change_big(answer)
        top = head(200, f"Content-Length: {len(self.big)}", *lines)
        self.change_big([top + self.big[: len(self.big) // 2]], most=1)

    def lie(self, size: int, answer: list[bytes] | Answer) -> None:
        """Change the size of the last layer in the manifest, and what is sent for it."""
        self.change_big(answer)
        document = json.loads(self.raw)
        document["layers"][-1]["size"] = self.declared[digest_of(self.big)] = size
        self.raw = json.dumps(document).encode()
        self.registry.put(REPOSITORY, TAG, self.raw, ())

    def home(self) -> RegistryStore:
        client = HttpClient(connections=4, retry_policy=RETRIES, is_public=lambda _: False)
        login = Login("alice", Secret(_SECRETS[0]))
        return RegistryStore(self.host, client, address=self.here.at("").rstrip("/"), login=login)

    def pull(self) -> object:
        return transfer({self.name: NAME}, self.home(), self.store)

    def push(self) -> object:
        return transfer({NAME: self.name}, self.store, self.home())

    def names(self) -> object:
        return self.home().manifests.names()

    def excess(self) -> dict[str, int]:
        """Return the bytes that requests took beyond what was declared, where they are too many."""
        found = {}
        for asked in self.seen.asked:
            beyond = self.seen.sent_to[asked.number] - self._declared(asked)
            if beyond > SLACK + _KERNEL:
                found[f"{asked.method} {asked.target}"] = beyond
        return found

    def _declared(self, asked: Asked) -> int:
        if is_manifest(asked):
            return max(len(self.raw), self.manifest_limit)
        digest = re.search(r"sha256:[0-9a-f]{64}$", asked.target)
        return self.declared.get(digest[0], 0) if digest else 0

    def credentials_elsewhere(self) -> list[str]:
        """Return the targets of the other origin's requests that carry anything secret."""
        return [
            asked.target
            for asked in self.seen_there.asked
            if "authorization" in asked.fields
            or any(one in f"{asked.target} {asked.fields} {asked.body!r}" for one in _SECRETS)
        ]


@contextmanager
def scene(folder: Path, *, is_push: bool) -> Iterator[Scene]:
    """Give a scene: the model is in the store to be pushed, or in the registry to be pulled."""
    blobs = [b"{}", *(tensor_blob(f"layer{at}", size) for at, size in enumerate(_SIZES))]
    raw = manifest_of(b"{}", blobs[1:])
    with run_server("127.0.0.1", counting=True) as here, run_server("127.0.0.2") as there:
        made = Scene(here, there, open_store(folder / "store"), blobs, raw)
        if is_push:
            commit_tensors(made.store, NAME, _SIZES)
        else:
            made.registry.put(REPOSITORY, TAG, raw, blobs)
        made.run = made.push if is_push else made.pull
        yield made


# Pulls


def is_manifest(asked: Asked) -> bool:
    return "/manifests/" in asked.target


def is_catalog(asked: Asked) -> bool:
    return asked.target.startswith("/v2/_catalog")


def _manifest_5mib(scene: Scene) -> None:
    scene.manifest_limit = 4 * 2**20 + _WINDOW
    long = [scene.raw.ljust(len(_ZEROS)), *[b" " * len(_ZEROS)] * 500]
    scene.change(is_manifest, [_UNSIZED, *long])


def _redirect_cdn_401(scene: Scene) -> None:
    realm = f'WWW-Authenticate: Bearer realm="{scene.there.at("token")}",service="cdn"'
    token, refused = reply(200, body=b'{"token":"x"}'), reply(401, realm)
    scene.answer_there(lambda asked: token if asked.target.startswith("/token") else refused)
    scene.change_big(redirect(scene.there.at("blob"), 307))


def _catalog_endless_link(scene: Scene) -> None:
    link = 'Link: </v2/_catalog?n=1000&last=a>; rel="next"'
    scene.change(is_catalog, reply(200, link, body=b'{"repositories":["library/tiny"]}'))
    scene.run = scene.names


PULLS: dict[str, Callable[[Scene], None]] = {
    "registry-manifest-digest-header-wrong": lambda scene: scene.change(
        is_manifest, reply(200, _WRONG_DIGEST, body=scene.raw)
    ),
    "registry-manifest-5MiB": _manifest_5mib,
    "registry-manifest-layer-size-lie-small": lambda scene: scene.lie(
        10, lambda _: chain([_UNSIZED], repeat(_ZEROS, 10_000))
    ),
    "registry-manifest-layer-size-lie-big": lambda scene: scene.lie(
        10**9, reply(200, body=b"0123456789")
    ),
    "registry-blob-wrong-but-same-size": lambda scene: scene.change_big(
        reply(200, body=bytes(len(scene.big)))
    ),
    "registry-blob-resume-200": lambda scene: scene.break_off(reply(200, body=scene.big)),
    "registry-blob-resume-etag-changed": lambda scene: scene.break_off(
        reply(200, 'ETag: "b"', body=scene.big), 'ETag: "a"'
    ),
    "registry-blob-flaky-50pct": lambda scene: scene.change(
        lambda asked: asked.number % 2 == 1, reply(503)
    ),
    "registry-redirect-cdn-401": _redirect_cdn_401,
    "registry-catalog-endless-link": _catalog_endless_link,
}


# Pushes


def _is_end(asked: Asked) -> bool:
    return asked.method == "PUT" and "/uploads/" in asked.target


def _upload_elsewhere(scene: Scene) -> None:
    scene.answer_there(reply(201))
    location = scene.there.at(f"v2/{REPOSITORY}/blobs/uploads/1")
    answer = reply(202, f"Location: {location}", "Range: 0-0")
    scene.change(lambda asked: asked.method == "POST", answer)


def _lost_session(scene: Scene) -> None:
    def lose(_: Asked) -> list[bytes]:
        scene.registry.uploads.clear()
        return reply(404, body=b'{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN"}]}')

    scene.change(_is_end, lose, most=1)


def _source_changes(scene: Scene) -> None:
    path = scene.store.root / "blobs" / digest_of(scene.big).replace(":", "-")

    def alter(asked: Asked) -> None:
        if asked.method == "POST":
            path.chmod(0o644)
            with path.open("r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(bytes(100))

    scene.registry.changes.append(alter)


PUSHES: dict[str, Callable[[Scene], None]] = {
    "registry-upload-location-other-host": _upload_elsewhere,
    "registry-upload-201-wrong-digest": lambda scene: scene.change(
        _is_end, reply(201, _WRONG_DIGEST)
    ),
    "registry-upload-lost-session": _lost_session,
    "registry-upload-source-changes": _source_changes,
}
