"""A stand-in for the Hugging Face Hub on loopback: its API, its redirects and signed addresses.

Sources of the answers: huggingface_hub@2.4.0 file_download.py `get_hf_file_metadata`, hf_api.py
`ModelInfo`, `RepoFile`; recorded heads in swift-transformers#209 (``resolve-cache``).
`tests/integration/test_hub_stand_in.py` shows that the real client downloads from it.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from support.servers import KEEP_ALIVE, Asked, part, reply

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
REPOSITORY = "org/name"
_CACHED = re.compile(rf"/api/resolve-cache/models/{REPOSITORY}/{COMMIT}/(?P<path>.+)")
_RESOLVED = re.compile(rf"/{REPOSITORY}/resolve/[^/]+/(?P<path>.+)")
_OF_API = re.compile(rf"/api/models/{REPOSITORY}(?:/(?P<kind>revision|tree)/[^/]+)?")
_LARGE = 10_000_000


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository: weights and files from 10 MB on are in its large file storage."""

    name: str
    path: Path
    size: int
    sha256: str | None
    oid: str

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid

    def row(self) -> dict[str, Any]:
        row = {"type": "file", "oid": self.oid, "size": self.size, "path": self.name}
        large = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        return row if self.sha256 is None else row | {"lfs": large}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which requests the Hub refuses.

    ``token``: it has to be sent, and the repository is private, or ``gated``. ``gated``: the
    repository is public, its files are for some users; other tokens than ``token`` are of a user
    who may not read them.
    """

    token: str | None = None
    gated: bool = False


Files = dict[str, RepositoryFile]
Signer = Callable[[RepositoryFile], str]


class HubStandIn:
    """The Hub's answers for `REPOSITORY`; ``signer``: addresses of large files."""

    def __init__(
        self, files: Files, signer: Signer | None = None, rules: Rules | None = None
    ) -> None:
        self.rules = rules or Rules()
        self.page = 1000
        self._files = files
        self._signer = signer

    def __call__(self, asked: Asked) -> list[bytes]:
        answer = self._answer(asked)
        if asked.method != "HEAD":
            return answer
        return [answer[0].partition(b"\r\n\r\n")[0] + b"\r\n\r\n", KEEP_ALIVE]

    def _answer(self, asked: Asked) -> list[bytes]:
        target = unquote(asked.target.partition("?")[0])
        for pattern in (_CACHED, _RESOLVED, _OF_API):
            match = pattern.fullmatch(target)
            if match is not None:
                status = self._refusal(asked, match.groupdict().get("path"))
                if status is not None:
                    return reply(status, body=b"no")
                if pattern is _OF_API:
                    return self._of_api(asked, match["kind"])
                is_redirected = pattern is _RESOLVED and self._signer is not None
                return (self._redirect if is_redirected else self._file)(asked, match["path"])
        return reply(404 if _token(asked) else 401, body=b"not found")

    def _refusal(self, asked: Asked, path: str | None) -> int | None:
        may = self.rules.token is None or _token(asked) == self.rules.token
        if not may and not self.rules.gated:
            return 401
        if not may and path is not None:
            return 401 if _token(asked) is None else 403
        return 404 if path is not None and path not in self._files else None

    def _file(self, asked: Asked, path: str) -> list[bytes]:
        file = self._files[path]
        lines = (f'ETag: "{file.etag}"', f"X-Repo-Commit: {COMMIT}")
        return part(asked, file.path.read_bytes(), *lines)

    def _of_api(self, asked: Asked, kind: str | None) -> list[bytes]:
        if kind != "tree":
            names = [{"rfilename": name} for name in self._files]
            document: dict[str, Any] = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT}
            document |= {"private": self.rules.token is not None, "siblings": names}
            return reply(200, body=json.dumps(document).encode())
        path, _, query = asked.target.partition("?")
        start = int(parse_qs(query).get("cursor", ["0"])[0])
        end = start + self.page
        rows = [file.row() for file in [*self._files.values()][start:end]]
        url = f"http://{asked.fields['host']}{path}?recursive=true&cursor={end}"
        link = [f'Link: <{url}>; rel="next"'] if end < len(self._files) else []
        return reply(200, *link, body=json.dumps(rows).encode())

    def _redirect(self, asked: Asked, path: str) -> list[bytes]:
        file = self._files[path]
        lines = [f"X-Repo-Commit: {COMMIT}", f"X-Linked-Size: {file.size}"]
        lines += [f'X-Linked-ETag: "{file.etag}"', "Accept-Ranges: bytes"]
        if file.sha256 is not None and self._signer is not None:
            return reply(302, *lines, f"Location: {self._signer(file)}", body=b"Found")
        cached = f"/api/resolve-cache/models/{REPOSITORY}/{COMMIT}/{quote(file.name)}"
        location = f"Location: {cached}?{quote(asked.target, safe='')}=&etag=%22{file.oid}%22"
        return reply(307, *lines, location, body=b"Temporary Redirect")


def hub(folder: Path) -> HubStandIn:
    """Return the answers of the Hub for `REPOSITORY`, without redirects."""
    return HubStandIn(repository_files(folder))


def repository_files(folder: Path) -> Files:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [_file(path.relative_to(folder).as_posix(), path.resolve()) for path in paths]
    return {file.name: file for file in files}


def _git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324  # as git does


def _file(name: str, path: Path) -> RepositoryFile:
    size = path.stat().st_size
    if not name.endswith(".safetensors") and size < _LARGE:
        return RepositoryFile(name, path, size, None, _git_name(path.read_bytes()))
    with path.open("rb") as data:
        sha256 = hashlib.file_digest(data, "sha256").hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    return RepositoryFile(name, path, size, sha256, _git_name(pointer.encode()))


def _token(asked: Asked) -> str | None:
    kind, _, token = asked.fields.get("authorization", "").partition(" ")
    return token if kind == "Bearer" else None
