"""The pages and their files: a list of those in the package, made once, when the server starts.

A request only looks up its path in the list, so no path leads out of the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
PAGES: Mapping[str, str] = {
    "/": "index.html",
    "/model": "model.html",
    "/compare": "compare.html",
    "/usage": "usage.html",
}
"""The addresses of pages, and their files."""
CONTENT_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The content types of files that are served. A file of another kind is not."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the package, in memory."""

    content_type: str
    data: bytes

    @property
    def tag(self) -> str:
        """The digest of its bytes."""
        return hashlib.sha256(self.data).hexdigest()


def static_files(folder: Path = FOLDER) -> dict[str, StaticFile]:
    """Return the files of a folder by their addresses: pages, and all others below ``/static/``.

    Links are not followed. Raises: OSError.
    """
    pages = {file: address for address, file in PAGES.items()}
    found: dict[str, StaticFile] = {}
    for path in _files(folder):
        content_type = CONTENT_TYPES.get(path.suffix)
        name = path.relative_to(folder).as_posix()
        if content_type is not None and (path.suffix != ".html" or name in pages):
            address = pages.get(name, f"/static/{name}")
            found[address] = StaticFile(content_type, path.read_bytes())
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path
