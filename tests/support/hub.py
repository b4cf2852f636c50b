"""A Hugging Face Hub on loopback: a repository's files at a commit, and the API that lists them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from support.servers import Answer, Asked, part, reply

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = 10_000
"""Bytes from which on files are large files, whose SHA-256 is listed."""


def hub(
    folder: Path, repository: str = "org/name", revision: str = "main", *, page: int = 1000
) -> Answer:
    """Answer as the Hub does for one repository; listings come in pages of ``page`` files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder)): path for path in paths}
    api = f"/api/models/{repository}"
    resolve = tuple(f"/{repository}/resolve/{at}/" for at in (COMMIT, revision))

    def answer(asked: Asked) -> list[bytes]:
        target, _, query = asked.target.partition("?")
        if target == f"{api}/revision/{revision}":
            return reply(200, body=json.dumps({"sha": COMMIT}).encode())
        if target == f"{api}/tree/{COMMIT}":
            return _page(names, query, page, f"http://{asked.fields['host']}{target}")
        for base in resolve:
            if (path := names.get(target.removeprefix(base))) and target.startswith(base):
                return part(asked, path.read_bytes())
        return reply(404)

    return answer


def _page(names: dict[str, Path], query: str, count: int, url: str) -> list[bytes]:
    fields = dict(field.split("=") for field in query.split("&"))
    start = int(fields.get("cursor", 0))
    rows = [_row(name, path) for name, path in [*names.items()][start : start + count]]
    more = start + count < len(names)
    link = f'Link: <{url}?recursive=true&cursor={start + count}>; rel="next"'
    return reply(200, *([link] if more else []), body=json.dumps(rows).encode())


def git_name(data: bytes) -> str:
    """Return the name of a blob in a git repository."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324  # as git does


def _row(name: str, path: Path) -> dict[str, object]:
    data = path.read_bytes()
    row = {"type": "file", "path": name, "size": len(data), "oid": git_name(data)}
    if len(data) >= _LARGE:
        oid = hashlib.sha256(data).hexdigest()
        row["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
    return row
