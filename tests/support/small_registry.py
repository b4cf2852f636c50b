"""A small correct registry in memory, on a `Server`, whose replies a test can change one by one."""

import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs, urlsplit

from support.servers import KEEP_ALIVE, Asked, part, reply

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_BLOB = re.compile(r"/v2/(.+)/blobs/(sha256:[0-9a-f]{64})")
_MANIFEST = re.compile(r"/v2/(.+)/manifests/([^/]+)")
_UPLOADS = re.compile(r"/v2/(.+)/blobs/uploads/")
_UPLOAD = re.compile(r"/v2/(.+)/blobs/uploads/(\d+)")
_TAGS = re.compile(r"/v2/(.+)/tags/list")

Change = Callable[[Asked], Iterable[bytes] | None]
"""Returns another reply than the registry's own, or None."""


def digest_of(data: bytes | bytearray) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class SmallRegistry:
    """The answers of a registry (OCI distribution specification). See `Server.play`.

    Each of ``changes`` may answer first, in their order. ``blobs`` and ``manifests`` are by
    repository, and by digest or tag.
    """

    def __init__(self, *changes: Change) -> None:
        self.changes = list(changes)
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.manifests: dict[tuple[str, str], bytes] = {}
        self.types: dict[str, str] = {}
        self.uploads: dict[str, bytearray] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def put(self, repository: str, tag: str, raw: bytes, blobs: Iterable[bytes]) -> None:
        self.blobs.update(((repository, digest_of(data)), data) for data in blobs)
        self._keep(repository, tag, raw, json.loads(raw).get("mediaType", MANIFEST))

    def __call__(self, asked: Asked) -> Iterable[bytes]:
        chunks = self._changed(asked)
        return chunks if asked.method != "HEAD" else [_head_of(next(iter(chunks))), KEEP_ALIVE]

    def _changed(self, asked: Asked) -> Iterable[bytes]:
        for change in self.changes:
            if (changed := change(asked)) is not None:
                return changed
        with self._lock:
            return self._answer(asked)

    def _answer(self, asked: Asked) -> Iterable[bytes]:
        path = urlsplit(asked.target).path
        if path == "/v2/":
            return reply(200, body=b"{}")
        if path == "/v2/_catalog":
            names = sorted({repository for repository, _ in self.manifests})
            return reply(200, body=json.dumps({"repositories": names}).encode())
        for pattern, answer in (
            (_TAGS, self._tags),
            (_MANIFEST, self._manifest),
            (_UPLOADS, self._begin),
            (_UPLOAD, self._upload),
            (_BLOB, self._blob),
        ):
            if match := pattern.fullmatch(path):
                return answer(asked, *match.groups())
        return reply(404)

    def _tags(self, _asked: Asked, repository: str) -> Iterable[bytes]:
        names = [ref for one, ref in self.manifests if one == repository and ":" not in ref]
        return reply(200, body=json.dumps({"name": repository, "tags": sorted(names)}).encode())

    def _manifest(self, asked: Asked, repository: str, reference: str) -> Iterable[bytes]:
        if asked.method == "PUT":
            document = json.loads(asked.body)
            entries = [*document["layers"], *filter(None, [document.get("config")])]
            if any((repository, entry["digest"]) not in self.blobs for entry in entries):
                return reply(404, body=b'{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN"}]}')
            self._keep(repository, reference, asked.body, asked.fields.get("content-type", ""))
            return reply(201, f"Docker-Content-Digest: {digest_of(asked.body)}")
        raw = self.manifests.get((repository, reference))
        if raw is None:
            return reply(404, body=b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
        if asked.method == "DELETE":
            return self._delete(repository, reference)
        digest = digest_of(raw)
        lines = (f"Docker-Content-Digest: {digest}", f"Content-Type: {self.types[digest]}")
        return reply(200, *lines, body=raw)

    def _blob(self, asked: Asked, repository: str, digest: str) -> Iterable[bytes]:
        data = self.blobs.get((repository, digest))
        if data is None:
            return reply(404, body=b'{"errors":[{"code":"BLOB_UNKNOWN"}]}')
        return part(asked, data, f'ETag: "{digest}"')

    def _begin(self, asked: Asked, repository: str) -> Iterable[bytes]:
        query = parse_qs(urlsplit(asked.target).query)
        if "mount" in query:
            digest = query["mount"][0]
            data = self.blobs.get((query["from"][0], digest))
            if data is not None:
                self.blobs[repository, digest] = data
                return reply(201, f"Location: /v2/{repository}/blobs/{digest}")
        number = str(next(self._numbers))
        self.uploads[number] = bytearray()
        return self._state(202, repository, number)

    def _upload(self, asked: Asked, repository: str, number: str) -> Iterable[bytes]:
        data = self.uploads.get(number)
        if data is None:
            return reply(404, body=b'{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN"}]}')
        data += asked.body
        digest = parse_qs(urlsplit(asked.target).query)["digest"][0]
        del self.uploads[number]
        if digest_of(data) != digest:
            return reply(400, body=b'{"errors":[{"code":"DIGEST_INVALID"}]}')
        self.blobs[repository, digest] = bytes(data)
        return reply(201, f"Location: /v2/{repository}/blobs/{digest}")

    def _delete(self, repository: str, digest: str) -> Iterable[bytes]:
        """Remove a manifest and its tags, as docker-registry does; not a tag alone."""
        if ":" not in digest:
            return reply(405, body=b'{"errors":[{"code":"UNSUPPORTED"}]}')
        raw = self.manifests[repository, digest]
        for place in [place for place in self.manifests if place[0] == repository]:
            if self.manifests[place] == raw:
                del self.manifests[place]
        return reply(202)

    def _state(self, status: int, repository: str, number: str) -> Iterable[bytes]:
        last = max(0, len(self.uploads[number]) - 1)
        where = f"Location: /v2/{repository}/blobs/uploads/{number}?state=a"
        return reply(status, where, f"Range: 0-{last}")

    def _keep(self, repository: str, reference: str, raw: bytes, media_type: str) -> None:
        digest = digest_of(raw)
        self.types[digest] = media_type
        self.manifests[repository, reference] = self.manifests[repository, digest] = raw


def _head_of(reply_bytes: bytes) -> bytes:
    return reply_bytes.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
