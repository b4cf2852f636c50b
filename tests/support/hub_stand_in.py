"""A stand-in for the Hugging Face Hub on loopback: its API, its redirects and signed addresses.

A large file's address redirects to one of another server. Sources of the
answers: huggingface_hub@2.4.0 file_download.py `get_hf_file_metadata`, utils/_http.py
`hf_raise_for_status` and `parse_ratelimit_headers`, hf_api.py `ModelInfo`, `RepoFile`;
huggingface.co/docs/hub/rate-limits; recorded heads in swift-transformers#209 (``resolve-cache``)
and Rapid-MLX#1122 (``RateLimit``). `tests/integration/test_hub_stand_in.py` shows that the real
client downloads from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from support.hub import git_name
from support.nginx import Nginx, nginx
from support.servers import KEEP_ALIVE, Asked, Script, part, reply, server

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
MAIN = "main"
REPOSITORY = "org/name"
_NAME = r"(?P<repository>[^/]+/[^/]+)"
_CACHED = re.compile(rf"/api/resolve-cache/models/{_NAME}/{COMMIT}/(?P<path>.+)")
_RESOLVED = re.compile(rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_OF_API = re.compile(rf"/api/models/{_NAME}(?:/(?P<kind>revision|tree)/(?P<revision>[^/]+))?")
_LARGE = 10_000_000
_WINDOW_S = 300
_JSON = "Content-Type: application/json; charset=utf-8"
_CODES = "X-Error-Code: {}", "X-Error-Message: {}"


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository: weights and files from 10 MB on are in its large file storage."""

    name: str
    path: Path
    size: int
    sha256: str | None
    oid: str

    def row(self) -> dict[str, Any]:
        """Return it as the listing has it."""
        row: dict[str, Any] = {"type": "file", "oid": self.oid, "size": self.size}
        if self.sha256 is not None:
            row["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
            row["xetHash"] = _xet_hash(self.sha256)
        return row | {"path": self.name}

    @property
    def etag(self) -> str:
        """What the Hub names its content."""
        return self.sha256 or self.oid


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which requests the Hub refuses.

    ``token``: it has to be sent, and the repository is private, or ``gated``. ``gated``: the
    repository is public, its files are for some users; other tokens than ``token`` are of a user
    who may not read them. ``quota``: requests of files in a window; for more it answers 429,
    which says to come again in a second; the quota is then as large again.
    """

    token: str | None = None
    gated: bool = False
    quota: int | None = None


Signer = Callable[[RepositoryFile], str]
Files = dict[str, RepositoryFile]


class HubStandIn:
    """The Hub's answers; ``signer`` gives the address of a large file.

    ``repositories`` are files by name, by the name of a repository. ``refused`` are the statuses of
    answers that were errors.
    """

    def __init__(self, repositories: Mapping[str, Files], signer: Signer, rules: Rules) -> None:
        self.repositories = repositories
        self.rules = rules
        self._routes: tuple[tuple[re.Pattern[str], Callable[..., list[bytes]]], ...] = (
            (_CACHED, self._of_cache),
            (_RESOLVED, self._resolved),
            (_OF_API, self._of_api),
        )
        self.signer = signer
        self._left = rules.quota if rules.quota is not None else 3000
        self.refused: list[int] = []

    def __call__(self, asked: Asked) -> list[bytes]:
        """Answer one request."""
        target = unquote(asked.target.partition("?")[0])
        for pattern, answer in self._routes:
            match = pattern.fullmatch(target)
            if match is not None and match["repository"] in self.repositories:
                return answer(asked, **match.groupdict())
        return self._error(asked, 404 if _token(asked) else 401, "RepoNotFound", "not found")

    def _of_api(
        self, asked: Asked, repository: str, kind: str | None, revision: str | None
    ) -> list[bytes]:
        if not self.rules.gated and not self._may(asked):
            return self._error(asked, 401, "RepoNotFound", "Invalid username or password.")
        if revision not in (None, MAIN, COMMIT):
            return self._error(asked, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = self.repositories[repository]
        if kind == "tree":
            rows = [file.row() for file in files.values()]
            return _answer(asked, 200, _JSON, body=json.dumps(rows).encode())
        names = [{"rfilename": name} for name in files]
        document: dict[str, Any] = {"_id": "0", "id": repository, "sha": COMMIT}
        document |= {
            "modelId": repository,
            "private": self.rules.token is not None,
            "siblings": names,
        }
        return _answer(asked, 200, _JSON, body=json.dumps(document).encode())

    def _resolved(self, asked: Asked, repository: str, revision: str, path: str) -> list[bytes]:
        if not self._may(asked):
            return self._forbidden(asked, repository)
        if revision not in (MAIN, COMMIT):
            return self._error(asked, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        file = self.repositories[repository].get(path)
        if file is None:
            return self._error(asked, 404, "EntryNotFound", "Entry not found")
        self._left -= self.rules.quota is not None
        if self._left < 0:
            return self._too_many(asked)
        lines = [f"X-Repo-Commit: {COMMIT}", "Accept-Ranges: bytes", *self._quota()]
        lines += [f"X-Linked-Size: {file.size}", f'X-Linked-ETag: "{file.etag}"']
        if file.sha256 is not None:
            lines += [f"X-Xet-Hash: {_xet_hash(file.sha256)}", f"Location: {self.signer(file)}"]
            return _answer(asked, 302, *lines, body=b"Found. Redirecting")
        cached = f"/api/resolve-cache/models/{repository}/{COMMIT}/{quote(path)}"
        lines.append(f"Location: {cached}?{quote(asked.target, safe='')}=&etag=%22{file.oid}%22")
        return _answer(asked, 307, *lines, body=b"Temporary Redirect")

    def _of_cache(self, asked: Asked, repository: str, path: str) -> list[bytes]:
        if not self._may(asked):
            return self._forbidden(asked, repository)
        file = self.repositories[repository].get(path)
        if file is None:
            return self._error(asked, 404, "EntryNotFound", "Entry not found")
        lines = [f'ETag: "{file.oid}"', f"X-Repo-Commit: {COMMIT}", "Accept-Ranges: bytes"]
        return _without_body(asked, part(asked, file.path.read_bytes(), *lines))

    def _may(self, asked: Asked) -> bool:
        return self.rules.token is None or _token(asked) == self.rules.token

    def _forbidden(self, asked: Asked, repository: str) -> list[bytes]:
        if not self.rules.gated:
            return self._error(asked, 401, "RepoNotFound", "Invalid username or password.")
        access = f"Access to model {repository} is restricted"
        if _token(asked) is None:
            return self._error(asked, 401, "GatedRepo", f"{access}. Please log in.")
        return self._error(
            asked, 403, "GatedRepo", f"{access} and you are not in the authorized list."
        )

    def _too_many(self, asked: Asked) -> list[bytes]:
        self._left = self.rules.quota or 0
        self.refused.append(429)
        lines = ['RateLimit: "resolvers";r=0;t=1', *self._quota()[1:]]
        return _answer(asked, 429, *lines, body=b"Too many requests")

    def _quota(self) -> list[str]:
        policy = f'RateLimit-Policy: "fixed window";"resolvers";q=3000;w={_WINDOW_S}'
        return [f'RateLimit: "resolvers";r={max(0, self._left)};t={_WINDOW_S}', policy]

    def _error(self, asked: Asked, status: int, code: str, said: str) -> list[bytes]:
        self.refused.append(status)
        lines = [line.format(text) for line, text in zip(_CODES, (code, said), strict=True)]
        return _answer(asked, status, *lines, _JSON, body=json.dumps({"error": said}).encode())


@dataclass(frozen=True, slots=True)
class RunningHub:
    """A running stand-in: its endpoint, its answers, the requests; ``store`` has large files."""

    url: str
    answers: HubStandIn
    script: Script
    store: Nginx


@contextmanager
def hub_stand_in(
    work: Path,
    repositories: Path | Mapping[str, Path],
    *,
    rules: Rules | None = None,
) -> Iterator[RunningHub]:
    """Run the Hub with these folders as repositories; it writes below ``work``.

    One folder is the repository `REPOSITORY`.
    """
    objects = work / "objects"
    objects.mkdir(parents=True)
    if isinstance(repositories, Path):
        repositories = {REPOSITORY: repositories}
    found = {name: repository_files(folder) for name, folder in repositories.items()}
    for file in chain.from_iterable(files.values() for files in found.values()):
        if file.sha256 is not None and not (objects / file.sha256).exists():
            (objects / file.sha256).symlink_to(file.path)
    with nginx(work / "nginx", work, gzip=False) as store, server() as running:

        def signer(file: RepositoryFile) -> str:
            return f"{store.url}/objects/{file.sha256}"

        answers = HubStandIn(found, signer, rules or Rules())
        yield RunningHub(running.at("").rstrip("/"), answers, running.play(answers), store)


@cache
def repository_files(folder: Path) -> Files:
    """Return the files below a folder, by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [_file(str(path.relative_to(folder)), path.resolve()) for path in paths]
    return {file.name: file for file in files}


def _file(name: str, path: Path) -> RepositoryFile:
    size = path.stat().st_size
    if not name.endswith(".safetensors") and size < _LARGE:
        return RepositoryFile(name, path, size, None, git_name(path.read_bytes()))
    with path.open("rb") as data:
        sha256 = hashlib.file_digest(data, "sha256").hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    return RepositoryFile(name, path, size, sha256, git_name(pointer.encode()))


def _token(asked: Asked) -> str | None:
    kind, _, token = asked.fields.get("authorization", "").partition(" ")
    return token if kind == "Bearer" else None


def _xet_hash(sha256: str) -> str:
    """Return another hash of a large file: the Hub has one, which says nothing to us."""
    return hashlib.sha256(sha256.encode()).hexdigest()


def _answer(asked: Asked, status: int, *lines: str, body: bytes = b"") -> list[bytes]:
    return _without_body(asked, reply(status, *lines, body=body))


def _without_body(asked: Asked, answer: list[bytes]) -> list[bytes]:
    """Return the answer to a HEAD request: its head."""
    if asked.method != "HEAD":
        return answer
    return [answer[0].partition(b"\r\n\r\n")[0] + b"\r\n\r\n", KEEP_ALIVE]
